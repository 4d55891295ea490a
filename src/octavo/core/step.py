"""The message from the scheduler to the device, and the answer."""

from dataclasses import dataclass, field

from octavo.types import Request, TokenLogprobs

PARTS = ("plan", "prepare", "forward", "sample", "wait", "commit", "outputs")
"""What a step's time goes to, as timers and profiles name it: scheduling; rows and tensors; the model, head included;
tokens from logits; waiting for the device; the scheduler taking in the tokens; their text."""


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence enters a device slot; sent once, afterwards only changes follow.

    `tokens` are all that the host knows (prompt and, after a preemption, what was generated);
    `blocks` are those already filled (prefix hits) followed by those reserved for the rest.
    """

    slot: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    request: Request


@dataclass(slots=True)  # not frozen: one is made for every sequence and step, and frozen ones cost twice as much
class Chunk:
    """One sequence's share of a step: compute positions [start, start + length).

    `new_blocks` are appended to the slot's block table first. `samples` is false while prompt
    positions remain after this chunk: then no token comes back.
    """

    slot: int
    start: int
    length: int
    new_blocks: tuple[int, ...] = ()
    samples: bool = True


@dataclass(slots=True)
class Step:
    """What the device does next, in one message.

    `repeat` > 1 only when every chunk has length 1 and samples: the device runs the step that many
    times, feeding each sampled token to the next run, and returns that many tokens a chunk. Positions
    past the reserved blocks fall into block 0, which belongs to nobody, and their tokens are dropped.

    `masked`: some sequence may take only the tokens of a mask, which the host gives between the forward pass and
    sampling; such a step is not repeated.

    `copies`: pairs of blocks (from, to). Before anything else the K and V of each first one, as they were before the
    step, are written into the second one.
    """

    admits: list[Admit] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    repeat: int = 1
    masked: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(slots=True)
class StepResult:
    """What came back, by chunk of the step (same order and number).

    `tokens[i]` is empty when chunk i does not sample, else it has `repeat` tokens. `logprobs[i]` is
    parallel to `tokens[i]`, or empty when the request asked for none. `prompt_logprobs[i]` has one
    entry for each position p of chunk i with p + 1 < prompt length (the logprobs of token p + 1), or is
    missing. `faults[i]` names why chunk i's request must end with an error (NaN logits, say). A chunk in
    `completed` has its sequence's last token: what it was to say is said.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    completed: set[int] = field(default_factory=set)
