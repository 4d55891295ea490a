"""The host's view of one request: its tokens, its blocks, and how far the device was told to compute."""

from dataclasses import dataclass, field

from octavo.core.blocks import BlockPool, chain_hash
from octavo.types import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts instead of phases: `remaining` positions are to be computed, a step computes some of them.

    `pending` tokens were sampled on the device, or will be by the steps in flight, and the host has not
    seen them yet; that is all that running ahead needs. `max_length` is the number of tokens, prompt
    included, at which the text ends. Sequences run and are admitted in the order of `rank`.
    """

    request: Request
    rank: tuple[int, int]
    max_length: int
    tokens: list[int] = field(init=False)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    slot: int = -1  # of the device; -1 while waiting and after the end
    blocks: list[int] = field(default_factory=list)
    scheduled: int = 0
    pending: int = 0
    in_flight: int = 0  # steps launched with this sequence and not committed
    seed: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks, each chained to the one before
    tail: bytes = b""  # hash of the tokens known at admission, the last block's as far as they fill it
    num_sealed: int = 0  # blocks of this admission whose content is final
    num_known: int = 0  # tokens at this admission
    seals_at: int = 0  # positions that must be computed before there is something to seal
    num_cached: int = 0  # positions that this admission found computed
    num_cached_tokens: int | None = None  # the same of the first admission: what a user is told
    awaits: bytes = b""  # the block that another sequence was computing when this one was last looked at
    num_bypasses: int = 0
    was_preempted: bool = False
    constrained: bool = field(init=False)  # its tokens are chosen under masks
    num_prompt_tokens: int = field(init=False)
    _min_length: int = field(init=False)
    _stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self._min_length = self.num_prompt_tokens + self.request.params.min_tokens
        self._stop_token_ids = self.request.stop_token_ids
        self.constrained = self.request.params.structured_outputs is not None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def room(self) -> int:
        """Tokens that may still be asked of the device; 0 when all it may generate is in flight."""
        return self.max_length - len(self.tokens) - self.pending

    def hash_blocks(self, block_size: int) -> None:
        """Extend `hashes` to every block that the known tokens fill."""
        for end in range((len(self.hashes) + 1) * block_size, len(self.tokens) + 1, block_size):
            parent = self.hashes[-1] if self.hashes else self.seed
            self.hashes.append(chain_hash(parent, self.tokens[end - block_size : end]))

    def renew_hashes(self, pool: BlockPool) -> None:
        """Hash the known tokens as the pool wants them now; only for a sequence without blocks."""
        seed = pool.seed(self.request.namespace)
        if seed != self.seed:
            self.seed, self.hashes = seed, []
        self.hash_blocks(pool.block_size)
        # The last position is always computed: its logits are wanted. With nothing before it there is nothing to copy.
        begin = (len(self.tokens) - 1) // pool.block_size * pool.block_size
        parent = self.hashes[begin // pool.block_size - 1] if begin else self.seed
        self.tail = chain_hash(parent, self.tokens[begin:]) if len(self.tokens) - begin > 1 else b""

    def accept(self, tokens: list[int]) -> int:
        """Append sampled tokens up to the one that ends the text. Returns how many were taken."""
        known = self.tokens
        for count, token in enumerate(tokens, 1):
            known.append(token)
            if token in self._stop_token_ids and len(known) >= self._min_length:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token if token in self.request.params.stop_token_ids else None
                return count
            if len(known) >= self.max_length:
                self.finish_reason = FinishReason.LENGTH
                return count
        return len(tokens)
