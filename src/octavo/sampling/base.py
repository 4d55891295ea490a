"""What a sampling feature is: an object that edits the logits of the rows whose sequence asks for it."""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from octavo.core.step import Admit

NEVER = float("-inf")


class Rows:
    """Which slot each of the R rows of a logits tensor belongs to. The list decides on the host, the tensor indexes."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self.slots = slots
        self.device = device

    @cached_property
    def index(self) -> Tensor:
        """[R] int64: the slots."""
        return self.indices(self.slots)

    def having(self, active: Container[int]) -> list[int]:
        """The rows whose slot is in `active`, in order."""
        return [row for row, slot in enumerate(self.slots) if slot in active]

    def slots_of(self, rows: Sequence[int]) -> Tensor:
        """[len(rows)] int64: the slots of these rows."""
        return self.index if len(rows) == len(self.slots) else self.indices([self.slots[row] for row in rows])

    def indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def flatten(self, rows: Sequence[int], parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Ragged values of some rows, end to end: (row of each value [N], values [N, ...]); parts[i] is of rows[i]."""
        lengths = self.indices([len(part) for part in parts])
        return self.indices(rows).repeat_interleave(lengths), torch.cat(list(parts))


class LogitsProcessor(Protocol):
    """One sampling feature with its own state of every slot, kept on the device.

    Each is constructed once. A slot is taken over by `add`; there is no removal, as a slot that is not
    among the rows of a step is not looked at.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None: ...

    def add(self, admit: Admit) -> None:
        """Forget the slot's former sequence and read this one.

        `admit.tokens` past the prompt are what was generated before a preemption.
        """

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Edit `logits` [R, V] float32 in place, only in rows whose slot uses the feature; cheap when none does."""

    def accept(self, rows: Rows, tokens: Tensor) -> None:
        """Learn what was sampled: `tokens` [R] int64."""
        return None


def generated(admit: Admit) -> tuple[int, ...]:
    """The tokens after the prompt, which a preempted sequence brings along."""
    return admit.tokens[len(admit.request.prompt_token_ids) :]


def in_vocabulary(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Without the ids that have no logit; requests are checked before, but an end-of-sequence id of a config may be."""
    return [token for token in token_ids if 0 <= token < vocab_size]


@contextmanager
def editing(logits: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
    """The given rows of `logits` [R, V] as a tensor [len(rows), V] to edit in place: all of it, or a copy put back."""
    if len(rows) == len(logits):
        yield logits
        return
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    part = logits.index_select(0, index)
    yield part
    logits.index_copy_(0, index, part)
