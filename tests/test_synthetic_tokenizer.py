"""The tokenizer that load benchmarks of random weights use: text and ids go both ways unchanged."""

import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import synthetic_tokenizer


@pytest.mark.parametrize("size", [300, 5000, 49152])
def test_text_of_the_synthetic_tokenizer_comes_back(tmp_path: Path, size: int) -> None:
    synthetic_tokenizer.write(tmp_path, size)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.get_vocab_size() == size
    rng = random.Random(0)
    ids = [rng.randrange(size - 40, size) for _ in range(256)]
    assert raw.encode(raw.decode(ids)).ids == ids
    assert raw.decode(raw.encode("Grüße, 世界! 12").ids) == "Grüße, 世界! 12"
