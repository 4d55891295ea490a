"""Runs steps on one device: slots, forward pass, sampling, and the tokens written back into the slots."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from octavo.attention.base import Backend
from octavo.batch import Batch
from octavo.core.memory import CacheSize
from octavo.core.step import Chunk, Step, StepResult
from octavo.layers.decoder import CausalLM
from octavo.sampling.bitmask import Bitmasks
from octavo.sampling.sampler import Sampler
from octavo.types import Request, TokenLogprobs
from octavo.worker import kv_cache
from octavo.worker.base import Span
from octavo.worker.native import NativeNetwork, refuses
from octavo.worker.slots import Slots

PROMPT_LOGPROB_ROWS = 128  # rows of logits at a time: 128 * 150k * 4 bytes = 77 MB


class CPURunner:
    """`launch` computes hidden states, `sample` turns them into tokens; always called in turn."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        size: CacheSize,
        dtype: torch.dtype,
        *,
        max_num_seqs: int,
        logprobs_mode: str,
    ) -> None:
        self.model, self.backend = model, backend
        self.windows = set(model.spec.layer_windows)
        self.caches = kv_cache.allocate(model, backend, size, dtype)
        self.slots = Slots(max_num_seqs, size.max_model_len, size.block_size)
        self.sampler = Sampler(max_num_seqs, model.spec.vocab_size, torch.device("cpu"), logprobs_mode)
        self.scored: dict[int, Request] = {}  # by slot: requests whose prompt wants logprobs
        self.step = Step()
        self.network: Callable[[Batch], Tensor] | None = None  # in place of the model's own forward pass
        if refuses(model) is None:
            self.network = NativeNetwork(model, size.block_size)
        self.batch: Batch
        self.hidden: Tensor

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        for admit in step.admits:
            self.scored.pop(admit.slot, None)
            if admit.request.params.prompt_logprobs is not None:
                self.scored[admit.slot] = admit.request
            self.sampler.add(admit)
        self.slots.apply(step)
        if step.copies:
            kv_cache.copy(chain.from_iterable(self.caches), step.copies, torch.device("cpu"))
        self.step = step
        self._forward(ahead=0)

    def _forward(self, ahead: int) -> None:
        self.batch = self.slots.batch(self.step.chunks, ahead)
        if self.network is not None:
            self.hidden = self.network(self.batch)
            return
        for window in self.windows:
            self.batch.plans[window] = self.backend.plan(self.batch, window)
        self.hidden = self.model(self.batch)

    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]:
        result = self._result(masks or {})
        return lambda: result

    def spans(self) -> list[Span]:
        return [
            Span("forward", self, "_forward"),
            Span("forward", self.model, "logits"),
            Span("prepare", self.slots, "batch"),
            Span("prepare", self.backend, "plan"),
        ]

    def close(self) -> None:
        self.caches.clear()

    @torch.inference_mode()
    def _result(self, masks: Bitmasks) -> StepResult:
        chunks = self.step.chunks
        result = StepResult(tokens=[[] for _ in chunks], logprobs=[[] for _ in chunks])
        self._prompt_logprobs(result)
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        if sampling:
            self._sample(sampling, 0, result, masks)
            for ahead in range(1, self.step.repeat):
                self._forward(ahead)
                self._sample(sampling, ahead, result, {})
        return result

    def _sample(self, sampling: list[int], ahead: int, result: StepResult, masks: Bitmasks) -> None:
        chunks = [self.step.chunks[i] for i in sampling]
        slots = [chunk.slot for chunk in chunks]
        positions = torch.tensor([chunk.start + chunk.length + ahead for chunk in chunks])
        hidden = self.hidden
        if len(sampling) < hidden.shape[0]:
            hidden = hidden[torch.tensor([self.batch.query_starts[i + 1] - 1 for i in sampling])]
        sampled = self.sampler.sample(self.model.logits(hidden), slots, positions, masks)
        self.slots.put(torch.tensor(slots), positions, sampled.tokens)
        for row, (i, token) in enumerate(zip(sampling, sampled.tokens.tolist(), strict=True)):
            result.tokens[i].append(token)
            if sampled.logprobs and (logprobs := sampled.logprobs[row]):
                result.logprobs[i].append(logprobs)
        for row, why in sampled.faults.items():
            result.faults.setdefault(sampling[row], why)
            kv_cache.clear(self.caches, self.slots.blocks(chunks[row].slot))

    def _prompt_logprobs(self, result: StepResult) -> None:
        if not self.scored:
            return
        for i, chunk in enumerate(self.step.chunks):
            if (request := self.scored.get(chunk.slot)) is None:
                continue
            last = len(request.prompt_token_ids) - 1  # the last prompt position predicts the first output token
            num_rows = min(chunk.start + chunk.length, last) - chunk.start
            if num_rows > 0:
                count = request.params.prompt_logprobs or 0
                result.prompt_logprobs[i] = self._logprobs_of_chunk(chunk, self.batch.query_starts[i], num_rows, count)

    def _logprobs_of_chunk(self, chunk: Chunk, first_row: int, num_rows: int, count: int) -> list[TokenLogprobs]:
        rows: list[TokenLogprobs] = []
        for done in range(0, num_rows, PROMPT_LOGPROB_ROWS):
            size = min(PROMPT_LOGPROB_ROWS, num_rows - done)
            begin = chunk.start + done
            targets = self.slots.token_ids[chunk.slot, begin + 1 : begin + 1 + size]
            logits = self.model.logits(self.hidden[first_row + done : first_row + done + size])
            rows += self.sampler.prompt_logprobs(logits, targets, count)
        return rows
