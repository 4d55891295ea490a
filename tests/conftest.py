"""Shared by all tests: one thread a test process, no network, small models made once."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):  # before transformers, which loads Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import tiny_models
from octavo import LLM

Make = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """F_BPE's weights: a float32 Llama whose greedy text is varied; the oracle."""
    return tiny_models.oracle()


@pytest.fixture(scope="session")
def tiny_folder(tiny: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a checkpoint, without a tokenizer."""
    return tiny_models.save(tiny, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_llm(tiny_folder: Path) -> Iterator[Make]:
    """`make_llm(**options)`: an LLM on the tiny model in float32, token ids in and out; closed after the test."""
    with ExitStack() as stack:

        def make(model: Path = tiny_folder, **options: Any) -> LLM:
            small = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": "64M", "num_threads": 1}
            if Path(model).is_dir() and not (Path(model) / "tokenizer.json").exists():
                small["skip_tokenizer_init"] = True
            return stack.enter_context(LLM(str(model), **{**small, **options}))

        yield make
