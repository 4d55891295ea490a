"""The seam of structured output: what a library of grammars has to do for an engine, in four methods."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.structured_outputs import FIELD, StructuredOutputsParams

Masks = NDArray[np.int32]  # [rows, ceil(vocabulary / 32)]: bit id % 32 of word id // 32 is set if the id is allowed


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    error: str  # why it cannot go on; empty while it can

    def accept(self, token_id: int) -> None:
        """Take in a sampled token that the last mask allowed."""

    def is_finished(self) -> tuple[bool, bool]:
        """Whether the answer may end here, and whether it has to because nothing can follow."""


class Backend(Protocol):
    """Compiles, and fills masks. Every method may be called from any thread."""

    def compile(self, params: StructuredOutputsParams) -> Any:
        """A grammar, of which `matcher` makes the state of an answer.

        Raises:
            InvalidRequest: it says nothing that can be followed; the message says why.
        """

    def matcher(self, grammar: Any) -> Matcher: ...

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        """Write row i of `masks` for matchers[i]: what may follow, without the tokens that end a text."""


def name_of(params: StructuredOutputsParams) -> str:
    """How messages call what a request gave."""
    return f"{FIELD}.{params.kind}"
