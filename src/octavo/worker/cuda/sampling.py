"""Sampling on the device: what a request asks as rows of tables, and the kernels that obey them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.step import Admit
from octavo.kernels.cut_tail import CutWorkspace, cut_tail
from octavo.kernels.edit_logits import count_tokens, edit_logits
from octavo.kernels.logit_rows import BIAS, BITMASK, CUT, MIN_TOKENS, PENALTIES, sampling_rows
from octavo.kernels.logprobs import MAX_LOGPROBS, LogprobsWorkspace, token_logprobs
from octavo.kernels.sample import Samples, advance, sample
from octavo.layers.decoder import CausalLM
from octavo.sampling.base import in_vocabulary
from octavo.sampling.bitmask import Bitmasks, Words, bitmask
from octavo.types import Request, TokenLogprobs
from octavo.worker.cuda.slots import DeviceSlots


@dataclass(frozen=True, slots=True)
class Reading:
    """What sampling brought, on the host once the copies are done; rows past those of the step are stale."""

    tokens_faults: Tensor  # [2, rows] int32: tokens, and why there is none (see `kernels.sample`)
    values: Tensor | None = None  # [rows, 1 + MAX_LOGPROBS] float32, where logprobs are asked
    ids: Tensor | None = None  # the same, int32
    ranks: Tensor | None = None  # [rows] int32

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        assert self.values is not None
        assert self.ids is not None
        assert self.ranks is not None
        end = 1 + min(count, MAX_LOGPROBS)
        return TokenLogprobs(
            tuple(self.ids[row, :end].tolist()), tuple(self.values[row, :end].tolist()), int(self.ranks[row])
        )


class DeviceSampler:
    """Samples up to `max_rows` rows whose requests it `serves`; their state is in the slots' tables."""

    def __init__(
        self, model: CausalLM, slots: DeviceSlots, max_rows: int, logprobs_mode: str, device: torch.device
    ) -> None:
        self.model, self.slots, self.logprobs_mode = model, slots, logprobs_mode
        vocab_size = self.vocab_size = model.spec.vocab_size
        self.rows = sampling_rows(slots.tables, vocab_size)
        self.samples = Samples(max_rows, vocab_size, device)
        # Side by side, to be read in one copy; each begins at a multiple of 16 bytes.
        self.tokens_faults = torch.zeros(2, -(-max_rows // 16) * 16, dtype=torch.int32, device=device)
        self.samples.tokens, self.samples.faults = self.tokens_faults[:, :max_rows]
        self.cut = CutWorkspace(max_rows, vocab_size, device)
        self.logprobs = LogprobsWorkspace(max_rows, vocab_size, device)
        self.edited = torch.empty(max_rows, vocab_size, device=device)
        self.featured: set[int] = set()  # slots that need more than the largest logit or a draw
        self.num_logprobs: dict[int, int] = {}  # by slot, of those that ask
        self.counted: list[Admit] = []  # admitted with penalties, not counted yet
        self.features: dict[int, int] = {}  # by slot, without masks
        self.allowed: dict[int, Words] = {}  # by slot, of those with allowed_token_ids
        self.masked: set[int] = set()  # slots whose tables hold a mask

    def serves(self, request: Request) -> bool:
        """Whether the kernels can do what the request asks; torch's sampler does everything."""
        params = request.params
        logprobs = params.logprobs
        return not (
            request.bad_words
            or params.thinking_token_budget is not None
            or (logprobs is not None and (self.logprobs_mode != "raw_logprobs" or not 0 <= logprobs <= MAX_LOGPROBS))
            or (params.logit_bias and len(params.logit_bias) > self.rows.bias_ids.shape[1])
            or (params.min_tokens and len(request.stop_token_ids) > self.rows.stop_ids.shape[1])
        )

    def admit(self, admit: Admit) -> None:
        """Gather the slot's changes: of what its features read, and no more."""
        slot, request, params = admit.slot, admit.request, admit.request.params
        write, put = self.slots.changes.write, self.slots.changes.set
        self.featured.discard(slot)
        self.num_logprobs.pop(slot, None)
        features = 0
        put("temperature", slot, params.temperature)
        if not params.greedy:
            put("seed", slot, request.seed)
            if params.top_k or params.top_p < 1 or params.min_p:
                features |= CUT
                put("top_k", slot, params.top_k)
                put("top_p", slot, params.top_p)
                put("min_p", slot, params.min_p)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            features |= PENALTIES
            put("repetition_penalty", slot, params.repetition_penalty)
            put("presence_penalty", slot, params.presence_penalty)
            put("frequency_penalty", slot, params.frequency_penalty)
            self.counted.append(admit)
        stops = in_vocabulary(request.stop_token_ids, self.vocab_size)
        if params.min_tokens and stops:
            features |= MIN_TOKENS
            put("min_length", slot, len(request.prompt_token_ids) + params.min_tokens)
            put("num_stop", slot, len(stops))
            write("stop_ids", slot, stops)
        bias = params.logit_bias or {}
        if biased := in_vocabulary(bias, self.vocab_size):
            features |= BIAS
            put("num_bias", slot, len(biased))
            write("bias_ids", slot, biased)
            write("bias_values", slot, [bias[token] for token in biased])
        self.allowed.pop(slot, None)
        self.masked.discard(slot)
        if params.allowed_token_ids is not None:
            features |= BITMASK
            self.allowed[slot] = bitmask(params.allowed_token_ids, self.vocab_size)
            write("bitmask", slot, self.allowed[slot])
        self.features[slot] = features
        put("features", slot, features)
        put("num_logprobs", slot, -1 if params.logprobs is None else params.logprobs)
        if params.logprobs is not None:
            self.num_logprobs[slot] = params.logprobs
        if features or params.logprobs is not None:
            self.featured.add(slot)

    def mask(self, masks: Bitmasks) -> None:
        """Let these masks rule the next sampling of their slots, and none that of other slots."""
        write, put = self.slots.changes.write, self.slots.changes.set
        for slot in self.masked.difference(masks):
            features = self.features[slot]
            put("features", slot, features)
            if slot in self.allowed:
                write("bitmask", slot, self.allowed[slot])
            if not features and slot not in self.num_logprobs:
                self.featured.discard(slot)
        for slot, words in masks.items():
            write("bitmask", slot, words & self.allowed[slot] if slot in self.allowed else words)
            put("features", slot, self.features.get(slot, 0) | BITMASK)
            self.featured.add(slot)
        self.masked = set(masks)

    def count(self) -> None:
        """Count the tokens of newly admitted sequences with penalties; their changes have been sent."""
        if self.counted:
            latest = {admit.slot: admit for admit in self.counted}
            self.counted = []
            admits = list(latest.values())
            slots, prompts = (
                torch.tensor(values, dtype=torch.int32, device=self.rows.length.device)
                for values in ([a.slot for a in admits], [len(a.request.prompt_token_ids) for a in admits])
            )
            longest = max(len(admit.tokens) for admit in admits)
            count_tokens(self.rows, self.slots["tokens"], slots, prompts, longest)

    def run(self, hidden: Tensor, slots: Tensor, *, featured: bool, dependent: bool = False) -> None:
        """From hidden states [R, hidden_size] to each slot's next token; only launches. `slots` [R], -1: padding."""
        cap = self.model.spec.final_softcap
        logits = self.model.lm_head(hidden) if cap is None else self.model.logits(hidden)
        edited = cut = None
        if featured:
            edited = self.edited
            edit_logits(logits, edited, slots, self.rows, dependent=dependent)
            cut = cut_tail(logits, slots, self.rows, self.cut, edited=edited, dependent=dependent)
        sample(logits, slots, self.rows, self.samples, edited=edited, cut=cut, dependent=dependent)
        capacity = self.slots.max_model_len
        advance(self.samples, slots, self.rows, self.slots["tokens"], capacity, dependent=dependent)
        if featured:
            token_logprobs(
                logits, self.samples.tokens, slots, self.rows.num_logprobs, self.logprobs, dependent=dependent
            )

    def read(self, num_rows: int, with_logprobs: bool) -> Reading:
        """Start copying the results to the host."""
        tokens_faults = to_host(self.tokens_faults)
        if not with_logprobs:
            return Reading(tokens_faults)
        more = self.logprobs
        return Reading(tokens_faults, *(to_host(source[:num_rows]) for source in (more.values, more.ids, more.ranks)))


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is complete once the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
