"""A tiny model that says scripts, each begun by a message that is its name, behind a chat template."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import tiny_models
import tiny_tokenizers

UNUSED = ("<|1|>", "<|2|>")  # ids that config.json takes for ends of text


def start(name: str) -> str:
    """The message that makes the model say this script: a token of its own."""
    return f"<|say {name}|>"


def write(folder: Path, scripts: Mapping[str, list[str]], marks: tuple[str, ...], template: str) -> Path:
    """`scripts` are parts of text; a part that is one of `marks` is one special token, which only one script may say.

    Other parts are cut into pieces at random, each a token of its own.
    """
    random_ = random.Random(5)
    special = ["</s>", *UNUSED, *marks, *map(start, scripts)]
    pieces: list[str] = []
    chain: dict[int, int] = {}
    for name, parts in scripts.items():
        at = special.index(start(name))
        for part in parts:
            if part in marks:
                tokens = [special.index(part)]
            else:
                cut = _cut(part, {*special, *pieces}, random_)
                tokens = [len(special) + len(pieces) + i for i in range(len(cut))]
                pieces += cut
            for token in tokens:
                assert at not in chain, f"{name}: a mark is said twice"
                chain[at] = at = token
        chain.setdefault(at, 0)
    tiny_models.save(tiny_models.chain_model(chain, len(special) + len(pieces)), folder)
    tiny_tokenizers.f_script(folder, pieces, special)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    return folder


def _cut(text: str, taken: set[str], random_: random.Random) -> list[str]:
    """Pieces that no other script has."""
    cut: list[str] = []
    while text:
        size = random_.randint(3, 9)
        while (text[:size] in taken or text[:size] in cut) and size < len(text):
            size += 1
        cut.append(text[:size])
        text = text[size:]
    if cut[-1] in taken or cut[-1] in cut[:-1]:  # nothing is left to make it longer with
        last = cut.pop()
        cut[-1] += last
    return cut
