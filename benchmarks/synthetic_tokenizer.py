"""A byte-level BPE tokenizer of any vocabulary size, for models with random weights: text comes back as it went in."""

import json
from itertools import count, islice, product
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")  # ids 0, 1, 2


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and its configuration: special tokens, single bytes, then words of letters after a space.

    A word of the vocabulary is one token wherever it stands after a space, so the text of any sequence of such
    tokens is encoded to the same sequence.
    """
    space = byte_characters()[ord(" ")]
    words = (space + "".join(word) for length in count(3) for word in product(LETTERS, repeat=length))
    pieces = [*SPECIAL, *byte_characters()]
    pieces += islice(words, max(0, vocab_size - len(pieces)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [
        {"id": i, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, piece in enumerate(SPECIAL)
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
        "vocab": {piece: i for i, piece in enumerate(pieces[:vocab_size])}, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "add_bos_token": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
