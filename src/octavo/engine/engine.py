"""One engine in this process: prompts in, `RequestOutput`s out. `LLM` and `AsyncLLM` drive it."""

import logging
from functools import partial
from typing import Self

from octavo.config import EngineConfig
from octavo.engine import start
from octavo.engine.inputs import Group, Inputs, Prompt
from octavo.engine.outputs import Outputs
from octavo.errors import InvalidRequest, OctavoError
from octavo.text.tokenizer import Tokenizer
from octavo.types import Delta, FinishReason, RequestOutput, SamplingParams

logger = logging.getLogger("octavo")


class Engine:
    """Not thread-safe: one thread calls `add`, `step` and `abort`. An exception out of `step` asks for `clear`."""

    def __init__(self, config: EngineConfig) -> None:
        self.closed = False
        parts = start.start(config)
        self.config = config
        self.spec = parts.spec
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.formats = parts.formats
        self.cache_size = parts.cache_size
        self.max_model_len = parts.cache_size.max_model_len
        self.start_phases = parts.phases
        self.loop = start.make_loop(config, parts)
        self.scheduler = self.loop.scheduler
        self.inputs = Inputs(
            parts.tokenizer,
            vocab_size=parts.spec.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=parts.eos_token_ids,
            default_params=parts.default_params,
            prefix_caching=config.cache.enable_prefix_caching,
            max_logprobs=config.model.max_logprobs,
            seed=config.model.seed,
            reasoning=parts.formats.reasoning,
        )
        self.outputs = Outputs(parts.tokenizer)
        self.refused: list[Delta] = []

    @property
    def has_unfinished(self) -> bool:
        return self.outputs.num_unfinished > 0 or self.loop.has_work

    @property
    def num_unfinished(self) -> int:
        return self.outputs.num_unfinished

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> Group:
        """Tokenize and validate, without running anything.

        Raises:
            InvalidRequest: it can never run.
            EngineDead: nothing ever runs here again.
        """
        self.loop.check_alive()
        group = self.inputs.group(prompt, params, request_id=request_id, priority=priority)
        if group.params.structured_outputs is not None and self.loop.constraints is not None:
            self.loop.constraints.grammars.compile(group.params.structured_outputs)
        return group

    def add(self, group: Group, *, final_only: bool = False) -> None:
        """Queue a checked request; `final_only` overrides its `output_kind`.

        Raises:
            InvalidRequest: another live request has the same id.
            EngineDead: nothing ever runs here again.
        """
        self.loop.check_alive()
        if self.outputs.is_live(group.id):
            raise InvalidRequest(
                f"request_id={group.id!r} belongs to a request that is still running.", param="request_id"
            )
        self.outputs.add(group, final_only)
        self.loop.add(list(group.requests), partial(self._settled, group))

    def _settled(self, group: Group, error: OctavoError | None) -> None:
        if error is not None:  # of a grammar that was compiled by `check`, forgotten, and failed this time
            self.refused += [
                Delta(request.id, [], finish_reason=FinishReason.ERROR, error=str(error)) for request in group.requests
            ]

    def step(self) -> list[RequestOutput]:
        """One turn of the loop; returns what changed for the user."""
        deltas = self.loop.step()
        if self.refused:
            deltas, self.refused = [*self.refused, *deltas], []
        outputs, stopped = self.outputs.process(deltas)
        for request_id in stopped:
            self.loop.abort(request_id)
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; an unknown or finished id is ignored. Returns its last output."""
        output, ended = self.outputs.abort(request_id)
        for sequence_id in ended:
            self.loop.abort(sequence_id)
        return output

    def drain(self) -> None:
        """Commit what is in flight after everything was aborted, so that the pool is whole again."""
        while self.loop.has_work:
            self.step()

    def clear(self) -> None:
        """Drop every request and all cached blocks; afterwards the engine is as it was after its start."""
        self.outputs.clear()
        self.loop.clear()

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.reset_cache()

    def close(self) -> None:
        """Give the device's memory back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            if self.loop.recording is not None:
                self.loop.recording.close()
            if self.loop.constraints is not None:
                self.loop.constraints.grammars.close()
            try:
                self.loop.executor.close()
            except RuntimeError as error:
                if self.loop.dead is None:
                    raise
                logger.warning("The failed device's memory is given back when this process ends: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
