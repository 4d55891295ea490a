"""The weights that a configuration asks for, brought to a device."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.config import EngineConfig
from octavo.core.memory import num_parameters
from octavo.errors import InvalidConfig
from octavo.findings.machine import weights_too_large
from octavo.formats.gguf import GGUFFile
from octavo.formats.gguf_blocks import WHOLE_NUMBERS
from octavo.hub import ModelFiles
from octavo.kernels.cpu.library import library
from octavo.layers.decoder import CausalLM
from octavo.model_spec import ModelSpec
from octavo.quant.choice import Choice
from octavo.weights.dummy import dummy_tensors
from octavo.weights.gguf import block_types, gguf_tensors
from octavo.weights.safetensors import safetensors_tensors
from octavo.worker import machine
from octavo.worker.build import build_model

logger = logging.getLogger("octavo")


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a phase of the start."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def load_model(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    gguf: GGUFFile | None,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Build and fill the model.

    Raises:
        InvalidConfig: a `load_format` that the checkpoint is not, or weights above the memory of the CPU's machine.
        InvalidWeights: a damaged or incomplete checkpoint.
    """
    if device.type == "cpu":
        _check_fits(spec, dtype)
    wanted = config.model.load_format
    if wanted == "dummy":
        choice = _choice("int8" if config.model.quantization == "int8" else "none", None, device)
        return build_model(spec, dtype, device, dummy_tensors(spec, dtype, config.model.seed, device), choice)
    if wanted != "auto" and (wanted == "gguf") != (gguf is not None):
        found = files.gguf.name if files.gguf else files.folder.name
        raise InvalidConfig(f"load_format={wanted} does not fit {found}.", "Leave load_format at auto.")
    choice = _choice(config.model.quantization, gguf, device)
    tensors = gguf_tensors(gguf, dtype, choice.kept) if gguf is not None else safetensors_tensors(files.folder)
    return build_model(spec, dtype, device, tensors, choice)


def _choice(quantization: str, gguf: GGUFFile | None, device: torch.device) -> Choice:
    """How linear layers keep their weights.

    Raises:
        InvalidConfig: a quantization that this device, or this checkpoint, does not have.
    """
    if quantization == "gguf" and gguf is None:
        raise InvalidConfig("quantization=gguf needs a GGUF file.", "Use quantization=int8, or leave it at auto.")
    if device.type != "cpu":
        if quantization == "int8":
            raise InvalidConfig(
                "quantization=int8 runs on CPUs only.", "Leave quantization at auto, or set device=cpu."
            )
        return Choice()
    if quantization not in ("auto", "none") and library() is None:
        logger.warning("quantization=%s: the CPU kernels are missing, so weights are widened.", quantization)
    types = block_types(gguf) if gguf is not None and quantization == "gguf" else {}
    return Choice(
        int8=quantization == "int8", bits={name: WHOLE_NUMBERS[type_name] for name, type_name in types.items()}
    )


def _check_fits(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Refuse before anything is allocated: a system that lends memory freely would end the process instead."""
    needed, free = num_parameters(spec) * dtype.itemsize, machine.available_memory()
    if needed > free:
        shape = (
            f"{spec.num_layers} layers of hidden_size={spec.hidden_size}, intermediate_size={spec.intermediate_size}, "
            f"vocab_size={spec.vocab_size}"
        )
        raise weights_too_large(needed, free, shape).as_error()
