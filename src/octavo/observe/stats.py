"""Counts folded from the scheduler's events: tokens and KV blocks."""

from dataclasses import dataclass, field

from octavo.core.events import Admitted, Committed, Event, Finished, Freed, Planned


@dataclass(slots=True)
class Stats:
    """Subscribe an instance: `scheduler.subscribers.append(stats)`.

    Blocks are counted each time they are taken: `blocks_used` newly filled ones, `blocks_hit` found by
    content instead of computed, `blocks_freed` given back. `peak_blocks` is the most held at one time.
    """

    block_size: int
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    most_running: int = 0
    blocks_used: int = 0
    blocks_hit: int = 0
    blocks_freed: int = 0
    peak_blocks: int = 0
    held: dict[int, int] = field(default_factory=dict)  # references by block

    def __call__(self, event: Event) -> None:
        match event:
            case Admitted():
                hit = event.num_cached_tokens // self.block_size
                self.blocks_hit += hit
                self.blocks_used += len(event.blocks) - hit
                self._hold(event.blocks)
            case Planned():
                self.most_running = max(self.most_running, len(event.step.chunks))
                for chunk in event.step.chunks:
                    self.blocks_used += len(chunk.new_blocks)
                    self._hold(chunk.new_blocks)
            case Committed():
                self.num_generated_tokens += sum(len(delta.token_ids) for delta in event.deltas)
            case Freed():
                self.blocks_freed += len(event.blocks)
                self._drop(event.blocks)
            case Finished():
                self.num_prompt_tokens += event.num_prompt_tokens
            case _:
                pass

    def _hold(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.held[block] = self.held.get(block, 0) + 1
        self.peak_blocks = max(self.peak_blocks, len(self.held))

    def _drop(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
