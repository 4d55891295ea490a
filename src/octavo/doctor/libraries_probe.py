"""`python -m octavo.doctor.libraries_probe`: imports PyTorch and its neighbours and prints as JSON how that went."""

import contextlib
import importlib
import importlib.util
import io
import json
import warnings
from typing import Any

from octavo.findings.software import DISTRIBUTIONS

COMPILED = ("sklearn", "scipy", "pandas")
"""Packages that are compiled against NumPy and come to a process by way of others."""


def load(name: str) -> tuple[Any, str]:
    """The module, and what went wrong: an exception, or a complaint about NumPy that is only printed."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = importlib.import_module(name)
    except BaseException as error:
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
    told = [line for line in said.getvalue().splitlines() if "NumPy 1" in line or "dtype size changed" in line]
    told += [str(one.message) for one in caught if "dtype size changed" in str(one.message)]
    return module, told[0].strip() if told else ""


def look() -> dict[str, Any]:
    """The fields of `facts.Libraries`."""
    numpy, numpy_fault = load("numpy")
    found: dict[str, Any] = {"numpy": getattr(numpy, "__version__", ""), "numpy_fault": numpy_fault}
    torch, fault = load("torch")
    found |= {"torch": str(getattr(torch, "__version__", "")), "torch_fault": fault if torch is None else ""}
    if torch is not None:
        found |= {
            "torch_cuda": torch.version.cuda or "",
            "torch_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "arches": torch.cuda.get_arch_list(),
            "nccl": ".".join(map(str, _nccl(torch))),
            "bfloat16": bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()),
        }
    triton, triton_fault = load("triton")
    found |= {"triton": getattr(triton, "__version__", ""), "triton_fault": triton_fault if triton is None else ""}
    present = [name for name in COMPILED if importlib.util.find_spec(name) is not None]
    return found | {"neighbours": {DISTRIBUTIONS.get(name, name): load(name)[1] for name in present}}


def _nccl(torch: Any) -> tuple[int, ...]:
    with contextlib.suppress(Exception):  # a build without it has no such function, or one that raises
        version = importlib.import_module("torch.cuda.nccl").version()
        return tuple(version)
    return ()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = look()
    print(json.dumps(answer))
