"""What happens inside the scheduler, as told to its subscribers (metrics, the block-table tracer)."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.step import Step, StepResult
from octavo.types import Delta, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Added:
    request_id: str
    num_prompt_tokens: int
    request: Request


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence entered a slot. The first `num_cached_tokens // block_size` of `blocks` are prefix hits.

    `num_tokens` are those known to the host: more than the prompt's after a preemption.
    """

    request_id: str
    slot: int
    blocks: tuple[int, ...]
    num_cached_tokens: int
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """`step.chunks[i]` belongs to `request_ids[i]`; blocks handed out while running are its `new_blocks`."""

    step: Step
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """`plan` found nothing to launch."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """`request_id` gave its blocks up so that `by` can grow (itself, when it was the cheapest).

    `num_lost_tokens` are positions that it had computed itself since it was admitted.
    """

    request_id: str
    by: str
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    step: Step
    result: StepResult
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks that became full, or hold a prompt's end: others with the same beginning can find them from now on.

    They hold `tokens`, the first of which has position `start`.
    """

    request_id: str
    blocks: tuple[int, ...]
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """One reference to each block was dropped; a sealed one stays findable until it is evicted."""

    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Findable blocks that nobody used were taken for new content."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Nothing sealed before this will be found again."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """All requests, steps in flight and cached blocks are dropped; what ends with them is told after this."""


Event = (
    Added | Admitted | Planned | Stalled | Preempted | Committed | Finished | Sealed | Freed | Evicted
    | CacheReset | Cleared
)  # fmt: skip
Subscriber = Callable[[Event], None]
