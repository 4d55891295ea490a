"""Modes of the CUDA engine in Triton's interpreter: deterministic, 8-bit KV cache, masked steps, the longest length."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import tiny_models
from interpreted import on_interpreter
from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.step import Step
from octavo.errors import InvalidConfig
from octavo.sampling.bitmask import Bitmasks, bitmask
from octavo.worker.cuda.runner import Runner
from octavo.worker.runner import CPURunner

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here, not interpreted"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2, "block_size": 8,
    "max_num_batched_tokens": 24, "device": "cpu", "max_logprobs": 30,
}  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 600) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, **given: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **given)


@pytest.fixture
def one_layer(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.oracle(num_hidden_layers=1), tmp_path)


@contextmanager
def interpreted(folder: Path, fused_rows: int = 0, **options: Any) -> Iterator[LLM]:
    with on_interpreter(fused_rows), LLM(str(folder), **{**OPTIONS, **options}) as llm:
        yield llm


def numbers(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Token ids, and their logprobs to the last bit."""
    return [
        (
            list(output.outputs[0].token_ids),
            [entry.logprob for at in output.outputs[0].logprobs or [] for entry in at.values()],
        )
        for output in outputs
    ]


DETERMINISTIC = {
    "llama": {"num_hidden_layers": 1},
    "windows, soft caps": {
        "model_type": "gemma2", "sliding_window": 8, "num_hidden_layers": 1, "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False, "layer_types": ["sliding_attention"],
    },
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", DETERMINISTIC)
def test_deterministic_numbers_are_equal_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Alone, with others, in chunks of other sizes, and computed again after a preemption."""
    folder = tiny_models.save(tiny_models.oracle(**DETERMINISTIC[family]), tmp_path)
    longer = family == "llama"
    asked = prompts(32, 12)
    params = greedy(5 if longer else 2, logprobs=25)  # by torch: the kernel is slow in the interpreter
    with interpreted(folder, deterministic=True) as llm:
        alone = [numbers(llm.generate([prompt], params, use_tqdm=False))[0] for prompt in asked]
        together = numbers(llm.generate(asked, params, use_tqdm=False))
    assert together == alone
    options = {"max_num_batched_tokens": 11, "max_num_seqs": 10, "block_size": 4, "num_gpu_blocks_override": 12}
    with interpreted(folder, deterministic=True, max_model_len=40, num_scheduler_steps=2, **options) as llm:
        assert numbers(llm.generate(asked, params, use_tqdm=False)) == alone
        assert llm.engine.scheduler.num_preemptions or not longer


def test_deterministic_needs_a_gpu(tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="deterministic=True needs a GPU"):
        LLM(str(tiny_folder), deterministic=True, **OPTIONS)


def test_an_8_bit_cache_is_near_and_half_as_large(one_layer: Path) -> None:
    """Loosely: the interpreter rounds to 8 bits badly. A GPU test is tight."""
    found, blocks = {}, {}
    for cache in ("auto", "fp8"):
        with interpreted(one_layer, kv_cache_dtype=cache) as llm:
            outputs = llm.generate(prompts(20, 9), greedy(2, logprobs=25), use_tqdm=False)
            found[cache] = [output.outputs[0].cumulative_logprob for output in outputs]
            blocks[cache] = llm.engine.cache_size.num_blocks
            layer = llm.engine.loop.executor.runner.network.layers[0]  # type: ignore[attr-defined]
            assert layer.attention.cache.key.dtype == (torch.float8_e4m3fn if cache == "fp8" else torch.float32)
    assert blocks["fp8"] == 4 * blocks["auto"]
    assert found["fp8"] == pytest.approx(found["auto"], abs=3.0)


def test_an_8_bit_cache_needs_a_gpu(tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="kv_cache_dtype=fp8 needs a GPU"):
        LLM(str(tiny_folder), kv_cache_dtype="fp8", **OPTIONS)


@contextmanager
def masking(kind: type[Runner] | type[CPURunner], allowed: dict[int, list[int]]) -> Iterator[None]:
    """Engines mark every step as masked, and give a mask by the prompt length of a slot's request."""
    launch, sample = kind.launch, kind.sample
    lengths: dict[int, int] = {}
    masks: dict[int, Bitmasks] = {}

    def launch_masked(self: Any, step: Step) -> None:
        lengths.update({admit.slot: len(admit.request.prompt_token_ids) for admit in step.admits})
        slots = [chunk.slot for chunk in step.chunks if chunk.samples]
        masks[0] = {slot: bitmask(allowed[lengths[slot]], 600) for slot in slots if lengths[slot] in allowed}
        step.masked = bool(masks[0])
        launch(self, step)

    def sample_masked(self: Any, _: object = None) -> Any:
        return sample(self, masks[0])

    with mock.patch.object(kind, "launch", launch_masked), mock.patch.object(kind, "sample", sample_masked):
        yield


def test_masks_come_between_forward_and_sampling(one_layer: Path) -> None:
    """On both devices; beside allowed_token_ids, features, and a row that torch samples; logprobs stay raw."""
    asked = prompts(9, 5, 7, 4, 6)
    params = [
        greedy(2),
        greedy(2, allowed_token_ids=[40, 41, 42]),
        greedy(2, repetition_penalty=1.3),
        greedy(2, logprobs=25),
        greedy(3),
    ]
    allowed = {9: [50, 51, 599], 5: [41, 42, 43], 4: [7, 8]}
    options = {"max_num_seqs": 5}
    with LLM(str(one_layer), **{**OPTIONS, **options}) as llm:
        free = numbers(llm.generate(asked, greedy(1), use_tqdm=False))
        with masking(CPURunner, allowed):
            expected = llm.generate(asked, params, use_tqdm=False)
        assert numbers(llm.generate(asked, greedy(1), use_tqdm=False)) == free
    with interpreted(one_layer, **options) as llm:
        with masking(Runner, allowed):
            found = llm.generate(asked, params, use_tqdm=False)
        again = llm.generate(asked, greedy(1), use_tqdm=False)  # no mask stays behind
    assert [ids for ids, _ in numbers(found)] == [ids for ids, _ in numbers(expected)]
    assert [ids for ids, _ in numbers(again)] == [ids for ids, _ in free]
    for output, prompt in zip(found, asked, strict=True):
        ids = set(output.outputs[0].token_ids)
        assert ids <= set(allowed.get(len(prompt), range(600)))
    assert set(found[1].outputs[0].token_ids) <= {41, 42}
    (first, *_) = found[3].outputs[0].logprobs
    (raw, *_) = expected[3].outputs[0].logprobs
    assert not {token for token, entry in first.items() if entry.rank == 1} & {7, 8}  # the best of all tokens is shown
    assert {token: entry.rank for token, entry in first.items()} == {t: e.rank for t, e in raw.items()}


def test_nothing_reads_past_the_longest_length(one_layer: Path) -> None:
    """Sequences that end at max_model_len, with repeated steps and steps ahead: positions stay in every table."""
    longest: list[int] = []
    launches = Runner._decode_launches
    mixed = Runner._mixed_launches

    def watch(self: Runner, count: int) -> None:
        rows, table = self._rows(count), self.slots["block_table"]
        longest.append(int(rows.positions.max()))
        assert longest[-1] < self.slots.max_model_len
        assert int(self.slots["length"].max()) <= self.slots.max_model_len
        assert self.network.layers[0].attention.heads.cos.shape[0] >= self.slots.max_model_len
        assert longest[-1] // self.block_size < table.shape[1]
        assert int(rows.cache_slots.min()) >= 0
        assert int(rows.cache_slots.max()) < self.network.layers[0].attention.cache.key.shape[0] * self.block_size

    def decode(self: Runner, rows: int, *more: Any) -> None:
        launches(self, rows, *more)
        watch(self, rows)

    def forward(self: Runner, tokens: int, *more: Any) -> torch.Tensor:
        hidden = mixed(self, tokens, *more)
        watch(self, tokens)
        return hidden

    asked, params = prompts(20, 24, 3), [greedy(12), greedy(8), greedy(29, logprobs=25)]  # the last is sampled by torch
    limits: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 3}
    with LLM(str(one_layer), depth=0, **{**OPTIONS, **limits}) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
    with (
        mock.patch.object(Runner, "_decode_launches", decode),
        mock.patch.object(Runner, "_mixed_launches", forward),
        interpreted(one_layer, depth=3, num_scheduler_steps=5, **limits) as llm,
    ):
        for part in (slice(0, 2), slice(0, 3)):  # only decoding rows of our own; and some that torch samples
            outputs = llm.generate(asked[part], params[part], use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected[part]
    assert max(longest) == 31
