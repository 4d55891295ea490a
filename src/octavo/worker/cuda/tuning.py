"""Which matrix products of few rows our own kernel computes, and how: choices measured on one H200."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.kernels.skinny_matmul import MAX_ROWS, SkinnyMatmulConfig, num_parts
from octavo.model_spec import ModelSpec

DEFAULT_ROWS = 16  # up to here the kernel beat cuBLAS on every shape that was measured


@dataclass(frozen=True, slots=True)
class Products:
    """The configurations of a layer's four products for one number of rows.

    `early`: o, gate-up and down let their successor start ahead of their own wait.
    """

    qkv: SkinnyMatmulConfig
    o: SkinnyMatmulConfig
    gate_up: SkinnyMatmulConfig
    down: SkinnyMatmulConfig
    early: bool = False

    @staticmethod
    def parts(config: SkinnyMatmulConfig, num_columns: int) -> int:
        return num_parts(num_columns, config)


def choose_products(spec: ModelSpec, rows: int, element_bytes: int) -> Products | None:
    """None where cuBLAS is better, or sizes do not fit.

    Beyond DEFAULT_ROWS only shapes take the kernel for which all four products were measured there.
    """
    padded = next((size for size in (8, 16, 32, MAX_ROWS) if rows <= size), 0)
    if not padded:
        return None
    heads = spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    sizes = {
        "qkv": (spec.hidden_size, qkv),
        "o": (heads, spec.hidden_size),
        "gate_up": (spec.hidden_size, spec.intermediate_size),
        "down": (spec.intermediate_size, spec.hidden_size),
    }
    found = {role: _measured().get((role, *size, padded)) for role, size in sizes.items()}
    if rows > DEFAULT_ROWS and not all(found.values()):
        return None
    chosen = {role: _default(role, element_bytes) if entry is None else _config(entry) for role, entry in found.items()}
    if any(size[1] % chosen[role].columns for role, size in sizes.items()):
        return None
    early = any(entry.get("early", False) for entry in found.values() if entry)
    return Products(**chosen, early=early)


def _default(role: str, element_bytes: int) -> SkinnyMatmulConfig:
    if element_bytes == 4:
        return SkinnyMatmulConfig(columns=16, depth=32, warps=4, stages=2)
    depth = 64 if role == "gate_up" else 128
    return SkinnyMatmulConfig(columns=16, depth=depth, prefetch=-1 if role in ("qkv", "o") else 0)


def _config(entry: dict[str, Any]) -> SkinnyMatmulConfig:
    columns, depth, warps, stages, bulk_copies, prefetch = entry["config"]
    return SkinnyMatmulConfig(columns, depth, warps, stages, bool(bulk_copies), prefetch)


@cache
def _measured() -> dict[tuple[str, int, int, int], dict[str, Any]]:
    entries = json.loads(Path(__file__).with_name("tuned.json").read_text())
    return {(entry["role"], entry["size"], entry["columns"], entry["rows"]): entry for entry in entries}
