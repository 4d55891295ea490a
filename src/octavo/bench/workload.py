"""What is asked of a model: random token ids, shared prefixes, conversations of a file, prompts of a file."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import InvalidConfig

Prompt = list[int] | str
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Item:
    """One request: token ids or a text, and how many tokens to answer with."""

    prompt: Prompt
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Which requests; the same seed makes the same ones."""

    dataset_name: Literal["random", "sharegpt", "custom", "prefix_repetition"] = "random"
    """random token ids; sharegpt: the first turns of a file of conversations; custom: JSON lines with prompt (and output_tokens); prefix_repetition: random prompts that share a few beginnings."""  # noqa: E501
    dataset_path: str | None = None
    """File of sharegpt or custom."""
    num_prompts: int = 1000
    """Number of requests."""
    seed: int = 0
    """The same number makes the same prompts, lengths and arrivals."""
    input_len: int | None = None
    """Tokens of a prompt, in place of --random-input-len."""
    output_len: int | None = None
    """Tokens of an answer, in place of the dataset's own option."""
    random_input_len: int = 1024
    """Tokens of a random prompt."""
    random_output_len: int = 128
    """Tokens of an answer to a random prompt."""
    random_range_ratio: float = 0.0
    """Lengths are drawn from length * (1 - ratio) to length * (1 + ratio)."""
    random_prefix_len: int = 0
    """Tokens that all random prompts begin with, beside their own."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of a shared beginning."""
    prefix_repetition_suffix_len: int = 256
    """Tokens of a prompt after its shared beginning."""
    prefix_repetition_num_prefixes: int = 10
    """Number of shared beginnings."""
    prefix_repetition_output_len: int = 128
    """Tokens of an answer."""
    sharegpt_output_len: int | None = None
    """Tokens of an answer; those of the file's own answer when not given."""
    custom_output_len: int = 256
    """Tokens of an answer; -1 takes output_tokens of each line."""
    no_oversample: bool = False
    """Ask the lines of a file once, and not again until there are --num-prompts."""
    disable_shuffle: bool = False
    """Take the lines of a file in their order."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prompts", 1),
            ("random_input_len", 1),
            ("random_output_len", 1),
            ("random_prefix_len", 0),
            ("prefix_repetition_prefix_len", 0),
            ("prefix_repetition_suffix_len", 1),
            ("prefix_repetition_num_prefixes", 1),
            ("prefix_repetition_output_len", 1),
            ("input_len", 1),
            ("output_len", 1),
            ("sharegpt_output_len", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidConfig(f"{name}={value} is not allowed: it must be from {least}.")
        if not 0 <= self.random_range_ratio < 1:
            raise InvalidConfig(
                f"random_range_ratio={self.random_range_ratio} is not allowed: it must be from 0 to below 1."
            )
        if self.custom_output_len != -1 and self.custom_output_len < 1:
            raise InvalidConfig(
                f"custom_output_len={self.custom_output_len} is not allowed: it must be above 0, or -1."
            )
        if self.dataset_name in ("sharegpt", "custom") and not self.dataset_path:
            raise InvalidConfig(f"--dataset-name {self.dataset_name} needs --dataset-path FILE.")


def items(work: Workload, lowest_id: int, highest_id: int, count: Count) -> list[Item]:
    """The requests of a workload.

    Args:
        lowest_id, highest_id: random prompts are of these token ids and those between.
        count: tokens of a text.

    Raises:
        InvalidConfig: a file that cannot be read, or ids that leave no choice.
    """
    rng = random.Random(work.seed)
    if highest_id < lowest_id:
        raise InvalidConfig(f"Token ids from {lowest_id} to {highest_id} are none.", "Lower --lowest-id.")
    if work.dataset_name in ("random", "prefix_repetition"):
        return _made(work, rng, lambda length: [rng.randint(lowest_id, highest_id) for _ in range(length)])
    found = _conversations(work, count) if work.dataset_name == "sharegpt" else _lines(work)
    if not work.disable_shuffle:
        rng.shuffle(found)
    if not found:
        raise InvalidConfig(f"{work.dataset_path} has no request.")
    if work.no_oversample:
        return found[: work.num_prompts]
    return [found[number % len(found)] for number in range(work.num_prompts)]


def _made(work: Workload, rng: random.Random, ids: Callable[[int], list[int]]) -> list[Item]:
    if work.dataset_name == "prefix_repetition":
        prefixes = [ids(work.prefix_repetition_prefix_len) for _ in range(work.prefix_repetition_num_prefixes)]
        output = work.output_len or work.prefix_repetition_output_len
        found = [
            Item(prefixes[number % len(prefixes)] + ids(work.prefix_repetition_suffix_len), output)
            for number in range(work.num_prompts)
        ]
        rng.shuffle(found)
        return found
    prefix = ids(work.random_prefix_len)

    def length(middle: int) -> int:
        low, high = middle * (1 - work.random_range_ratio), middle * (1 + work.random_range_ratio)
        return max(1, rng.randint(int(low), int(high)))

    long, short = work.input_len or work.random_input_len, work.output_len or work.random_output_len
    return [Item(prefix + ids(length(long)), length(short)) for _ in range(work.num_prompts)]


def _conversations(work: Workload, count: Count) -> list[Item]:
    content = _read(work.dataset_path)
    try:
        talks = json.loads(content)
        turns = [talk["conversations"] for talk in talks if len(talk.get("conversations") or ()) >= 2]
        pairs = [(str(a["value"]), str(b["value"])) for a, b, *_ in turns]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidConfig(
            f"{work.dataset_path} is no list of conversations.",
            'It must be [{"conversations": [{"value": ...}, ...]}].',
        ) from None
    wanted = work.output_len or work.sharegpt_output_len
    return [Item(prompt, wanted or max(1, count(answer))) for prompt, answer in pairs if prompt]


def _lines(work: Workload) -> list[Item]:
    found = []
    for number, line in enumerate(_read(work.dataset_path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item: dict[str, Any] = json.loads(line)
            prompt = item["prompt"]
            own = int(item["output_tokens"]) if work.custom_output_len == -1 and not work.output_len else 0
        except (ValueError, KeyError, TypeError):
            field = ", output_tokens" if work.custom_output_len == -1 else ""
            raise InvalidConfig(
                f"{work.dataset_path}, line {number}: it must be a JSON object with prompt{field}."
            ) from None
        if not isinstance(prompt, str) or not prompt:
            raise InvalidConfig(f"{work.dataset_path}, line {number}: prompt must be a text.")
        found.append(Item(prompt, work.output_len or own or work.custom_output_len))
    return found


def _read(path: str | None) -> str:
    try:
        return Path(path or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--dataset-path {path} cannot be read: {error}.") from None
