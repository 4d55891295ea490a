"""`octavo plan`: its predictions beside what was measured on an H200 (docs/performance.md), and what it says."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import itertools

import shapes

from octavo.core.cost import parameters, step_time, step_work
from octavo.core.gpus import GPUS, machine
from octavo.core.memory import GIB, num_parameters
from octavo.core.plan import Serving, Wanted, memory, points
from octavo.errors import InvalidConfig
from octavo.model_spec import ModelSpec
from octavo.tools import plan as command

SPECS = {name: ModelSpec.from_config(shapes._COMMON | config) for name, config in shapes.SHAPES.items()}
H200 = machine("H200", GPUS["H200"])

# docs/performance.md: output tokens/s of batches of 32 tokens in and 128 out; milliseconds of a prompt and one token.
DECODE = {
    "qwen2.5-1.5b": {1: 798, 32: 18_671, 256: 90_561},
    "qwen3-0.6b": {1: 1_288, 32: 25_227, 256: 98_550},
    "llama-3.1-8b": {1: 244, 32: 6_307, 256: 24_402},
}
FIRST_TOKEN = {
    "qwen2.5-1.5b": {128: 2.55, 512: 3.97, 2048: 10.84, 8192: 50.3},
    "llama-3.1-8b": {512: 12.3, 2048: 48.0, 8192: 217.8},
}
CACHE_GIB = {"qwen2.5-1.5b": 120.75, "qwen3-0.6b": 123.48, "llama-3.1-8b": 108.0}


def seconds(name: str, chunks: list[tuple[int, int]], sampled: int) -> float:
    spec = SPECS[name]
    work = step_work(spec, chunks, sampled=sampled, weight_element_bytes=2, cache_element_bytes=2)
    return step_time(H200, spec, work).seconds


@pytest.mark.parametrize(("name", "batch"), [(name, batch) for name, row in DECODE.items() for batch in row])
def test_decode_steps_as_measured(name: str, batch: int) -> None:
    prompts = seconds(name, [(32, 32)] * batch, batch) + H200.first_seconds
    measured = batch * 128 / DECODE[name][batch]
    tpot = (measured - prompts) / 127
    assert seconds(name, [(1, 96)] * batch, batch) == pytest.approx(tpot, rel=0.15)


@pytest.mark.parametrize(("name", "length"), [(name, n) for name, row in FIRST_TOKEN.items() for n in row])
def test_prompts_as_measured(name: str, length: int) -> None:
    predicted = 1e3 * (seconds(name, [(length, length)], 1) + H200.first_seconds)
    assert predicted == pytest.approx(FIRST_TOKEN[name][length], rel=0.2)


@pytest.mark.parametrize("name", CACHE_GIB)
def test_memory_as_measured(name: str) -> None:
    room = memory(SPECS[name], serving(), H200.memory_bytes)
    assert room.kv_tokens * room.kv_bytes_per_token / GIB == pytest.approx(CACHE_GIB[name], rel=0.03)


def serving(**changed: Any) -> Serving:
    given: dict[str, Any] = {
        "weight_element_bytes": 2, "cache_element_bytes": 2, "max_model_len": 16384, "max_num_seqs": 1024,
        "max_num_batched_tokens": 16384,
    }  # fmt: skip
    return Serving(**(given | changed))


def test_bulk_work_as_measured() -> None:
    """512 requests at once of the 8B: 4,060 and 19,814 output tokens/s, start and end included."""
    for lengths, measured in (((1024, 128), 4_060), ((128, 1024), 19_814)):
        found = points(SPECS["llama-3.1-8b"], H200, serving(), Wanted(*lengths, concurrency=512))
        at = next(point for point in found if point.concurrency == 512)
        assert at.output_tokens_per_second == pytest.approx(measured, rel=0.15)


def test_parameters_are_counted_as_by_the_memory() -> None:
    for spec in SPECS.values():
        assert parameters(spec).total == num_parameters(spec)


def test_windows_bound_what_is_read() -> None:
    config = shapes._COMMON | shapes.SHAPES["llama-3.1-8b"]
    full = SPECS["llama-3.1-8b"]
    windowed = ModelSpec.from_config(
        {**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    )
    long, short = (
        step_work(spec, [(1, 8192)], sampled=1, weight_element_bytes=2, cache_element_bytes=2)
        for spec in (full, windowed)
    )
    assert long.cache_bytes == pytest.approx(8 * short.cache_bytes, rel=0.01)
    assert long.attention_flops == pytest.approx(8 * short.attention_flops, rel=0.01)


def test_attention_of_a_prompt_is_half_of_a_square() -> None:
    spec = SPECS["llama-3.1-8b"]
    work = step_work(spec, [(4096, 4096)], sampled=1, weight_element_bytes=2, cache_element_bytes=2)
    pairs = sum(range(1, 4097))
    assert work.attention_flops == pytest.approx(4 * 32 * 32 * 128 * pairs, rel=1e-6)
    chunked = sum(
        step_work(spec, [(1024, end)], sampled=0, weight_element_bytes=2, cache_element_bytes=2).attention_flops
        for end in (1024, 2048, 3072, 4096)
    )
    assert chunked == pytest.approx(work.attention_flops, rel=1e-6)


def test_more_at_once_is_slower_and_more(tmp_path: Path) -> None:
    found = points(SPECS["qwen2.5-1.5b"], H200, serving(), Wanted(512, 128))
    assert all(a.tpot <= b.tpot and a.ttft <= b.ttft for a, b in itertools.pairwise(found))
    assert all(a.output_tokens_per_second < b.output_tokens_per_second for a, b in itertools.pairwise(found))


def run(capsys: pytest.CaptureFixture[str], *model: Any, **options: Any) -> str:
    command.plan(*map(str, model), **options)
    return capsys.readouterr().out


@pytest.fixture
def thirteen(tmp_path: Path) -> Path:
    config = shapes._COMMON | shapes.SHAPES["llama-3.1-8b"] | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_scaling": None,
    }  # fmt: skip
    path = tmp_path / "13b.json"
    path.write_text(json.dumps(config))
    return path


def test_thirteen_billion_weights_on_24_gb(thirteen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, thirteen, gpu="rtx 4090")
    assert "It does not fit" in text
    assert "bf16 weights: does not fit" in text
    assert "int8 weights: fits" in text
    assert "octavo serve" not in text
    found = json.loads(run(capsys, thirteen, gpu="4090", quantization="int8", as_json=True))
    assert found["memory"]["fits"]
    assert found["memory"]["lines"]["weights"] == num_parameters(command.read(str(thirteen))[0])
    assert math.isclose(found["memory"]["kv_bytes_per_token"], 2 * 40 * 5120 * 2)


def test_headers_of_the_files_are_read(tmp_path: Path) -> None:
    import tiny_models

    folder = tiny_models.save(tiny_models.oracle(model_type="llama"), tmp_path)
    spec, size = command.read(str(folder))
    assert size is not None
    assert size == pytest.approx(2 * num_parameters(spec), rel=0.05)  # and norms, which count in so small a model


def test_everything_is_in_the_json_and_the_plot(
    thirteen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plan.svg"
    found = json.loads(run(capsys, thirteen, ttft_ms=500, tpot_ms=40, as_json=True, plot=plot))
    assert found["figures"] == "measured"
    assert found["choice"]["ttft"] <= 0.5
    assert found["choice"]["tpot"] <= 0.04
    assert found["command"] == f"octavo serve {thirteen}"
    assert {row["gpu"] for row in found["gpus"]} == set(GPUS)
    assert {"concurrency", "ttft", "tpot", "output_tokens_per_second", "limit"} <= set(found["predictions"][0])
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": "RTX 9999"}, "RTX 9999 is not in the table"),
        ({"gpu_memory": 24.0}, "--bandwidth and --flops"),
        ({"gpu": "H200", "gpu_memory": 24.0, "bandwidth": 1.0, "flops": 1.0}, "either"),
        ({"gpu_memory": 24.0, "bandwidth": -1.0, "flops": 1.0}, "--bandwidth"),
        ({"quantization": "int3"}, "int3"),
        ({"kv_cache_dtype": "int2"}, "int2"),
        ({"input_len": 0}, "input_len=0"),
        ({"concurrency": -3}, "concurrency=-3"),
        ({"tp": 3}, "tp=3"),
        ({"input_len": 5000}, "4096"),
        ({"max_model_len": "9k"}, "9000"),
        ({"ttft_ms": 0.0}, "0.0 ms"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
    ],
)
def test_bad_input_is_named(thirteen: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        command.plan(str(thirteen), **options)
