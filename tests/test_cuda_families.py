"""Every family on a GPU: float32 says what the CPU says, bfloat16 is near, and modes keep what they promise."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from octavo import LLM, RequestOutput, SamplingParams
from test_cuda_engine import engine, greedy, prompts, texts
from test_greedy import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MOE = ("mixtral", "qwen3_moe")
OTHERWISE: dict[str, dict[str, Any]] = {  # than one engine with defaults runs them
    "chunks, depth": {"max_num_batched_tokens": 23, "depth": 3, "enforce_eager": True},
    "preemption, repeat": {"num_gpu_blocks_override": 17, "max_num_seqs": 8, "num_scheduler_steps": 4},
    "no cache": {"enable_prefix_caching": False, "max_num_seqs": 16, "max_num_batched_tokens": 256, "depth": 0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for family, config in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family.replace(" ", "_"))
        found[family] = tiny_models.save(tiny_models.oracle(scale=0.1, **config), folder)
    return found


@pytest.mark.case("MOD-01", "MOD-02")
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_whatever_the_engine_does(family: str, folders: dict[str, Path]) -> None:
    """Batch, chunks, preemption, cache, depth, repeated steps and capture: not one token changes.

    One way of running for each family, so that the file stays quick; all of them for Llama.
    """
    params = greedy(24)
    with engine(folders[family], "cpu") as llm:
        expected = texts(llm.generate(prompts(), params, use_tqdm=False))
    names = list(OTHERWISE)
    chosen = names if family == "llama" else [names[list(FAMILIES).index(family) % len(names)]]
    for options in ({}, *(OTHERWISE[name] for name in chosen)):
        with engine(folders[family], **options) as llm:
            for _ in range(2):  # the second time out of the prefix cache
                assert texts(llm.generate(prompts(), params, use_tqdm=False)) == expected


def logits(output: RequestOutput) -> torch.Tensor:
    """[tokens, vocabulary], of an engine whose logprobs are the whole vocabulary's raw logits."""
    rows = output.outputs[0].logprobs or []
    return torch.tensor([[row[token].logprob for token in range(600)] for row in rows])


def forced(folder: Path, device: str, **options: Any) -> torch.Tensor:
    """Logits of tokens that are forced one by one, after prompts with and without a cached beginning."""
    text = prompts()[-1]
    params = [greedy(1, logprobs=-1)] * 30
    asked = [text[: 20 + i] for i in range(30)]
    with engine(folder, device, logprobs_mode="raw_logits", max_logprobs=-1, **options) as llm:
        decoded = llm.generate([text[:3]], greedy(12, logprobs=-1, logit_bias={7: 1e4}), use_tqdm=False)
        return torch.cat([logits(output) for output in [*llm.generate(asked, params, use_tqdm=False), *decoded]])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_within_2_percent(family: str, folders: dict[str, Path]) -> None:
    expected = forced(folders[family], "cpu")
    found = forced(folders[family], "cuda", dtype="bfloat16")
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    print(f"{family}: relative error of logits {error.mean():.4f}, at most {error.max():.4f}")
    assert error.mean() < 2e-2


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_deterministic_bfloat16_is_equal_bit_for_bit(family: str, folders: dict[str, Path]) -> None:
    params = [greedy(40, logprobs=3), greedy(40), SamplingParams(temperature=0.8, seed=3, max_tokens=30)] * 3
    found = []
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 19, "depth": 3},
        {"num_gpu_blocks_override": 17, "max_num_seqs": 32, "num_scheduler_steps": 4, "block_size": 16},
    ]
    for options in ways:
        with engine(folders[family], dtype="bfloat16", deterministic=True, **options) as llm:
            outputs = llm.generate(prompts(), params, use_tqdm=False)
        numbers = [entry.logprob for o in outputs for at in o.outputs[0].logprobs or [] for entry in at.values()]
        found.append((texts(outputs), numbers))
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_8_bit_cache_is_near(family: str, folders: dict[str, Path]) -> None:
    expected = forced(folders[family], "cuda", dtype="bfloat16")
    found = forced(folders[family], "cuda", dtype="bfloat16", kv_cache_dtype="fp8")
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    print(f"{family}: relative error of an 8-bit cache {error.mean():.4f}, at most {error.max():.4f}")
    assert 0 < error.mean() < 8e-2
    with engine(folders[family], dtype="bfloat16") as llm:
        blocks = llm.engine.cache_size.num_blocks
    with engine(folders[family], dtype="bfloat16", kv_cache_dtype="fp8") as llm:
        assert llm.engine.cache_size.num_blocks == pytest.approx(2 * blocks, abs=2)


def test_an_illegal_access_ends_the_process_with_the_cause(folders: dict[str, Path]) -> None:
    """A real one, in a process of its own: afterwards the device is lost to it."""
    program = textwrap.dedent("""
        import sys, torch
        from octavo import LLM, SamplingParams
        from octavo.errors import EngineDead
        llm = LLM(sys.argv[1], device="cuda", dtype="float32", skip_tokenizer_init=True, max_model_len=64,
                  kv_cache_memory_bytes="16M", max_num_seqs=2, max_num_batched_tokens=32, enforce_eager=True)
        runner = llm.engine.loop.executor.runner
        runner.slots["tokens"].fill_(2**30)  # ids that no embedding has, written where no check is
        launch = runner.slots.apply
        def poison(step):
            launch(step)
            runner.slots.send()
            runner.slots["tokens"].fill_(2**30)
        runner.slots.apply = poison
        for _ in range(2):
            try:
                llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=5), use_tqdm=False)
            except EngineDead as error:
                print("DEAD", error)
        llm.close()
        print("CLOSED", flush=True)
        sys.exit(3)
    """)
    command = [sys.executable, "-c", program, str(folders["llama"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.count("DEAD The device failed: CUDA error") == 2, result.stdout + result.stderr[-3000:]
    assert "CLOSED" in result.stdout
    assert result.returncode != 0


@pytest.mark.case("MEM-01")
def test_three_engines_share_a_gpu(tiny_folder: Path) -> None:
    """Each keeps to its own share, whatever the others hold; one made in place of a dropped one gets the same."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    options: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "enforce_eager": True, "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    neighbours = [torch.empty(2 << 30, dtype=torch.uint8, device="cuda")]  # not ours, and gone before the second
    engines: list[LLM] = []
    sizes = []
    for _ in range(3):
        before = torch.cuda.mem_get_info()[0]
        engines.append(LLM(str(tiny_folder), device="cuda", **options))
        taken = before - torch.cuda.mem_get_info()[0]
        assert 0.2 * total < taken < 0.3 * total
        sizes.append(engines[-1].engine.cache_size.num_blocks)
        neighbours.clear()
        torch.cuda.empty_cache()
    expected = texts(engines[0].generate(prompts(), greedy(10), use_tqdm=False))
    for llm in engines:
        for _ in range(8):
            assert texts(llm.generate(prompts(), greedy(10), use_tqdm=False)) == expected
    engines.pop().close()
    gc.collect()
    torch.cuda.empty_cache()
    engines.append(LLM(str(tiny_folder), device="cuda", **options))
    assert engines[-1].engine.cache_size.num_blocks == pytest.approx(sizes[-1], rel=0.05)
    for llm in engines:
        llm.close()
    engines.clear()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 0.02 * total


@pytest.mark.case("MEM-02")
@pytest.mark.parametrize(
    "options",
    [{"gpu_memory_utilization": 0.004, "kv_cache_memory_bytes": None}, {"kv_cache_memory_bytes": 1}],
    ids=str,
)
def test_too_little_memory_names_numbers_and_options(options: dict[str, Any], tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"needs .* of KV cache.*available") as raised, engine(tiny_folder, **options):
        pass
    assert "gpu_memory_utilization" in str(raised.value) or "kv_cache_memory_bytes" in str(raised.value)


@pytest.mark.case("MEM-04")
def test_closed_engines_give_their_memory_back(tiny_folder: Path) -> None:
    left = []
    for _ in range(4):
        with engine(tiny_folder, enforce_eager=True) as llm:
            llm.generate(prompts()[:2], greedy(4), use_tqdm=False)
        left.append(torch.cuda.mem_get_info()[0])
    assert left[0] - left[-1] < 32 << 20


@pytest.mark.case("MOD-05")
@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_scaled_positions(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
    oracle = tiny_models.oracle(scale=0.1, rope_parameters=rope, max_position_embeddings=256)
    folder = tiny_models.save(oracle, tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        with engine(folder, device, max_model_len=230) as llm:
            asked = [prompt[:180] for prompt in prompts(longest=180)]
            found.append(texts(llm.generate(asked, greedy(20), use_tqdm=False)))
    assert found[0] == found[1]
