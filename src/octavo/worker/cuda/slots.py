"""The device's rows of the running sequences and of the step at hand, sent as changes only."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.step import Step
from octavo.kernels.logit_rows import sampling_fields
from octavo.kernels.slot_update import Changes, Field, SlotTables
from octavo.worker.slots import appended

# One value a row or sequence of the step, and what stands where a step has none.
STEP_FIELDS = {
    "decode_slots": -1,
    "prefill_slots": -1,
    "step_slots": -1,
    "sample_slots": -1,
    "query_starts": 0,
    "context_lens": 0,
    "sample_rows": 0,
}


class DeviceSlots:
    """A slot holds a sequence: `tokens` [slots, max_model_len], `block_table` [slots, blocks] and how it samples.

    `length` counts all tokens, those that the device has sampled included. Behind a sequence's blocks the table
    points at block 0 for as many blocks as repeated steps may run over.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, vocab_size: int, repeat: int, device: torch.device
    ) -> None:
        self.max_model_len = max_model_len
        margin = -(-repeat // block_size)
        self.blanks = (0,) * margin
        fields = sampling_fields(vocab_size) | {
            "tokens": Field(torch.int32, max_model_len),
            "block_table": Field(torch.int32, -(-max_model_len // block_size) + margin),
        }
        fields |= dict.fromkeys(STEP_FIELDS, Field(torch.int32))
        self.tables = SlotTables(num_slots + 1, fields, device)  # query_starts has one more than there are sequences
        self.changes = Changes(self.tables)
        self.sent = {name: np.full(num_slots + 1, rest, dtype=np.int32) for name, rest in STEP_FIELDS.items()}
        for name, rest in STEP_FIELDS.items():
            self.tables[name].fill_(rest)
        self._num_blocks = [0] * num_slots

    def apply(self, step: Step) -> None:
        """Gather what admissions and new blocks change."""
        write = self.changes.write
        for admit in step.admits:
            write("tokens", admit.slot, admit.tokens)
            self.changes.set("length", admit.slot, len(admit.tokens))
        for slot, begin, blocks in appended(step, self._num_blocks):
            write("block_table", slot, blocks + self.blanks, begin)

    def set_rows(self, name: str, values: Sequence[int], rest: int | None = None) -> None:
        """Let a field of the step hold `values`, and `rest` behind them; nothing is sent if it does already."""
        sent = self.sent[name]
        wanted = np.full_like(sent, STEP_FIELDS[name] if rest is None else rest)
        wanted[: len(values)] = values
        different = np.flatnonzero(wanted != sent)
        if len(different):
            begin, end = int(different[0]), int(different[-1]) + 1
            self.changes.write(name, begin, wanted[begin:end])
            self.sent[name] = wanted

    def send(self) -> None:
        self.changes.apply()

    def __getitem__(self, name: str) -> Tensor:
        return self.tables[name]
