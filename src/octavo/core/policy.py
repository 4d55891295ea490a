"""The scheduler's choices that could be others: order, fair shares, who is overtaken how often, who gives blocks up."""

from collections.abc import Iterable, Mapping
from typing import Literal

from octavo.core.sequence import Sequence
from octavo.types import Request

Policy = Literal["fcfs", "priority"]

MAX_BYPASS = 32
"""How often a sequence that lacks blocks is overtaken in the queue; then nobody behind it is admitted."""

LOOK_AHEAD = 16
"""How many sequences that lack blocks are looked past in one plan; it bounds the time a plan takes."""


BACKGROUND = 1_000_000
"""Requests of this priority or more (lines of batches, say) wait for all others, whatever the policy."""

SMALL_SHARE = 8
"""One part in so many of a step's positions goes to the prompts of a tenant that had more than the average."""

ABSENT_STEPS = 256
"""For so many steps after its last request a tenant still counts as there: steps stay short for its next one."""


def rank(request: Request, arrival: int, policy: Policy) -> tuple[int, int]:
    """Smaller runs first. Unique, since `arrival` numbers the requests."""
    background = BACKGROUND if request.priority >= BACKGROUND else 0
    return (request.priority if policy == "priority" else background, arrival)


class Fairness:
    """How tenants share the engine: who had the least is served first (Sheng et al. 2024, virtual token counters).

    In each step a tenant that had more positions than the average may compute an eighth of a step of its
    prompts: so a long prompt goes on, and a step stays short for whoever comes next. The others compute as much
    as fits, those that had the least first. A tenant that comes back counts as having had no less than the
    one with the least.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.served: dict[str, int] = {}  # positions of each tenant that is there
        self._num_live: dict[str, int] = {}
        self._left_at: dict[str, int] = {}  # tenants without a request, and the step at which they had the last one
        self._num_steps = 0

    @property
    def has_several(self) -> bool:
        return len(self.served) > 1

    def join(self, tenant: str) -> None:
        """One more request of it."""
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        self._left_at.pop(tenant, None)
        if tenant not in self.served:
            self.served[tenant] = min(self.served.values(), default=0)

    def leave(self, tenant: str) -> None:
        """One request of it less."""
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            self._left_at[tenant] = self._num_steps
            if not self._num_live:  # nobody is there to be fair to, and the core must not grow with the keys it saw
                self._forget(self._num_steps - ABSENT_STEPS)

    def charge(self, tenant: str, num_positions: int) -> None:
        self.served[tenant] += num_positions

    def shares(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Prefill positions that each tenant may have in the next step, of those it wants."""
        self._num_steps += 1
        self._forget(self._num_steps - ABSENT_STEPS)
        small = max(1, self.budget // SMALL_SHARE)
        mean = sum(self.served.values()) / len(self.served)
        shares = {tenant: min(small, n) for tenant, n in wanted.items() if self.served[tenant] > mean}
        # They never get more than half of a step together, so that something is left for the others.
        left = self.budget - min(sum(shares.values()), self.budget // 2)
        for tenant in sorted(wanted.keys() - shares.keys(), key=lambda tenant: (self.served[tenant], tenant)):
            shares[tenant] = min(wanted[tenant], max(left, 1))
            left -= shares[tenant]
        return shares

    def _forget(self, before: int) -> None:
        for tenant in [tenant for tenant, step in self._left_at.items() if step <= before]:
            del self._left_at[tenant], self.served[tenant]


def headroom(num_running: int) -> int:
    """Blocks that an admission leaves free, for those that run to grow into.

    Without it a full pool preempts all the time: half a block a sequence saved 10 to 27 % of the
    computed positions in simulated overload, for 2 % more steps.
    """
    return num_running // 2


def loss(seq: Sequence) -> int:
    """Positions this sequence computed itself since it was admitted.

    What it found in the prefix cache is likely to be found again. In simulated overload this choice
    computed 1 to 2 % fewer positions than giving up the latest.
    """
    return seq.scheduled - seq.num_cached


def victim(candidates: Iterable[Sequence]) -> Sequence:
    """Who gives its blocks up: of the least important, the one that loses least; of equals the latest."""
    return min(candidates, key=lambda seq: (-seq.rank[0], loss(seq), -seq.rank[1]))
