"""Who may join the queue: bounds on how much waits."""

import math

from octavo.core.scheduler import Scheduler
from octavo.errors import Overloaded

LONGEST_WAIT = 60  # seconds that a refused client is told to wait at most


class Admission:
    """Refuses a request when too many requests, or too many prompt tokens, wait already.

    What waits only because the next step has not been planned yet is not counted: places that are free
    count as taken by the first in the queue. A queue that is empty takes any request.
    """

    def __init__(self, max_num_reqs: int | None = None, max_num_tokens: int | None = None) -> None:
        self.max_num_reqs, self.max_num_tokens = max_num_reqs, max_num_tokens

    @property
    def has_limits(self) -> bool:
        return self.max_num_reqs is not None or self.max_num_tokens is not None

    def check(
        self,
        scheduler: Scheduler,
        num_prompt_tokens: int,
        finished_per_second: float = 0.0,
        num_compiling: int = 0,
    ) -> None:
        """`num_compiling` sequences are about to join the queue.

        Raises:
            Overloaded: with the seconds after which a place is likely, from the rate at which requests finish.
        """
        if not self.has_limits:
            return
        num_free = scheduler.max_num_seqs - scheduler.num_running
        num_queued = scheduler.num_waiting + num_compiling - num_free
        if num_queued < 0:
            return
        wait = LONGEST_WAIT if not finished_per_second else math.ceil((num_queued + 1) / finished_per_second)
        wait = max(1, min(LONGEST_WAIT, wait))
        if self.max_num_reqs is not None and num_queued >= self.max_num_reqs:
            raise Overloaded(
                f"The queue is full: {num_queued} requests wait (max_num_queued_reqs={self.max_num_reqs}).",
                f"Try again in {wait} s.",
                wait,
                "num_reqs",
            )
        if self.max_num_tokens is not None and num_queued:
            queued = scheduler.num_waiting_tokens
            if queued + num_prompt_tokens > self.max_num_tokens:
                raise Overloaded(
                    f"The queue is full: {queued} prompt tokens wait, and this prompt has {num_prompt_tokens} "
                    f"(max_num_queued_tokens={self.max_num_tokens}).",
                    f"Try again in {wait} s.",
                    wait,
                    "num_tokens",
                )
