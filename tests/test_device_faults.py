"""A device that fails for good: every request ends with the cause, new work is refused with it, nothing hangs."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tiny_models
import tiny_tokenizers
from conftest import Make
from octavo import AsyncLLM, SamplingParams
from octavo.core.step import Step, StepResult
from octavo.engine.loop import is_device_failure
from octavo.errors import EngineDead
from octavo.worker.runner import CPURunner

CAUSE = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later."
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@contextmanager
def failing(where: str, after: int = 3, message: str = CAUSE) -> Iterator[None]:
    """Runners whose `launch`, result or `close` fails from the given step on, as PyTorch reports it."""
    launch, sample = CPURunner.launch, CPURunner.sample
    count = 0

    def fail() -> None:
        if count > after:
            raise RuntimeError(message)

    def failing_launch(self: CPURunner, step: Step) -> None:
        nonlocal count
        count += 1
        if where == "launch":
            fail()
        launch(self, step)

    def failing_sample(self: CPURunner, *masks: Any) -> Callable[[], StepResult]:
        read = sample(self, *masks)

        def result() -> StepResult:
            if where == "result":
                fail()
            return read()

        return result

    def failing_close(self: CPURunner) -> None:
        fail()

    with (
        mock.patch.object(CPURunner, "launch", failing_launch),
        mock.patch.object(CPURunner, "sample", failing_sample),
        mock.patch.object(CPURunner, "close", failing_close),
    ):
        yield


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_llm_ends_with_the_cause_and_stays_ended(where: str, depth: int, make_llm: Make) -> None:
    with failing(where):
        llm = make_llm(depth=depth, max_num_seqs=2)
        with pytest.raises(EngineDead, match="illegal memory access.*Start a new process") as raised:
            llm.generate([[5, 6, 7], [8, 9], [4]], PARAMS, use_tqdm=False)
        assert isinstance(raised.value.__cause__, RuntimeError)
        for _ in range(2):
            with pytest.raises(EngineDead, match="illegal memory access"):
                llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
        assert not llm.engine.has_unfinished
        llm.close()  # closing a failed device fails, too


@pytest.mark.parametrize("where", ["launch", "result"])
def test_every_stream_ends_with_the_cause(where: str, tiny_folder: Path) -> None:
    async def read(engine: AsyncLLM, prompt: list[int]) -> int:
        count = 0
        with pytest.raises(EngineDead, match="illegal memory access"):
            async for _ in engine.generate({"prompt_token_ids": prompt}, PARAMS):
                count += 1
        return count

    async def run() -> None:
        options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "num_threads": 1}
        async with AsyncLLM(str(tiny_folder), device="cpu", **options) as engine:
            counts = await asyncio.gather(*(read(engine, [5, 6, token]) for token in range(7, 12)))
            assert max(counts) < 20
            assert await read(engine, [5]) == 0  # refused

    with failing(where):
        asyncio.run(asyncio.wait_for(run(), 60))


def test_a_lack_of_memory_is_no_failed_device(make_llm: Make) -> None:
    """The call ends with what was raised, and the engine goes on."""
    llm = make_llm()
    with failing("launch", message="CUDA out of memory. Tried to allocate 2.00 GiB."), pytest.raises(RuntimeError):
        llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    (output,) = llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize(
    "message",
    [
        CAUSE,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error",
    ],
)
def test_messages_of_failed_devices(message: str) -> None:
    assert is_device_failure(RuntimeError(message))
    assert not is_device_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_command_exits_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("octavo.cli")
    folder = tiny_tokenizers.f_bpe(tiny_models.save(tiny_models.oracle(), tmp_path))
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", "hello", "--model", str(folder), "--device", "cpu"])
    with (
        failing("result"),
        pytest.warns(UserWarning, match="invoked without tokens"),  # cyclopts', inside of pytest
        pytest.raises(SystemExit, match="octavo: The device failed: CUDA error") as raised,
    ):
        cli.main()
    assert raised.value.code not in (0, None)
