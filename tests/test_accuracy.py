"""Every way of keeping weights on a CPU stays near float32 on real text."""

import sys
from pathlib import Path

import pytest

import real_models
from conftest import Make

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from accuracy import WAYS, Prediction, accuracy, predicted, reference, texts

TOKENS = 96


@pytest.mark.real_model
@pytest.mark.parametrize("name", [real_models.SMOLLM2])
def test_all_ways_are_near_float32(name: str, make_llm: Make) -> None:
    model = str(real_models.real_gguf(name))
    wanted: list[Prediction] = []
    for way, options in WAYS.items():
        llm = make_llm(model, max_model_len=256, **options)
        prompts = texts(llm, TOKENS)
        wanted = wanted or reference(model, prompts)
        found = accuracy(predicted(llm, prompts), wanted)
        agreement, mean, largest = (1.0, 1e-4, 1e-2) if way == "float32" else (0.94, 0.06, 1.0)
        assert found.agreement >= agreement and found.mean <= mean and found.largest <= largest, (way, found)


def test_the_arithmetic() -> None:
    wanted = [Prediction([1, 2, 3], [-1.0, -2.0, -3.0]), Prediction([4], [-4.0])]
    found = [Prediction([1, 9, 3], [-1.5, -2.0, -3.0]), Prediction([4], [-3.5])]
    assert accuracy(found, wanted) == (0.75, 0.25, 0.5)
