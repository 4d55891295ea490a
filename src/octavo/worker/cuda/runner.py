"""Runs steps on a CUDA device: the host sends changes and replays graphs, and reads tokens when they are there."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.attention.triton import LayerAttention, Sequences, TritonAttention
from octavo.core.step import Chunk, Step, StepResult
from octavo.kernels.batch_rows import batch_rows
from octavo.kernels.decode_attention import SHORT_CONTEXT
from octavo.kernels.decode_plan import DecodeRows
from octavo.kernels.edit_logits import count_tokens
from octavo.layers.decoder import CausalLM
from octavo.sampling.bitmask import Bitmasks
from octavo.sampling.sampler import Sampler, describe_fault
from octavo.types import Request, TokenLogprobs
from octavo.worker import kv_cache
from octavo.worker.base import Span
from octavo.worker.cuda.fixed import fix_products
from octavo.worker.cuda.graphs import (
    FEW_SEQUENCES,
    Graphs,
    Launches,
    batch_sizes,
    coarse_sizes,
    round_up,
    sequence_counts,
    token_counts,
)
from octavo.worker.cuda.network import Network
from octavo.worker.cuda.sampling import DeviceSampler, Reading
from octavo.worker.cuda.slots import DeviceSlots
from octavo.worker.cuda.tuning import Products, choose_products

MANY_ROWS = 64  # beyond which the length of contexts decides how attention is best done
PROMPT_LOGPROB_ROWS = 128
FAULTS = (0.0, float("nan"), float("inf"), 0.0)  # what the largest logit was, by code of `kernels.sample`

Part = Callable[[StepResult], None]  # of the answer


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a mixed step knows between its forward pass and its sampling; chunks with their places in the step."""

    hidden: Tensor  # of all rows, if `scored` needs them
    ours: list[tuple[int, Chunk]]  # sampled by our kernels, from the first gathered rows
    others: list[tuple[int, Chunk]]  # sampled by torch, from the rows behind them
    scored: list[tuple[int, Chunk, int]]  # prompts that want logprobs, and their first rows
    ahead: int


class Runner:
    """`launch` enqueues a whole step; what `sample` returns waits for it and reads what came back.

    A step in which every sequence decodes is one graph. Any other is mixed: a graph (or launches) up to the hidden
    states of the rows that sample, and another that samples. Requests that the sampling kernels do not serve are
    sampled by torch, which waits for the device.

    A `masked` step is mixed, too, and sampled when `sample` brings the masks.

    `captured`: replay graphs once `graph_keys` are captured. `fused_rows`: batches up to this use fused products where
    they are known; None: as measured. `deterministic`: every step is mixed and without decoding rows, so that there is
    one kernel for everything whose arithmetic could differ. `cache_dtype`: of K and V; None: as the activations.
    """

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_scheduler_steps: int,
        logprobs_mode: str,
        capability: tuple[int, int],
        captured: bool,
        fused_rows: int | None = None,
        deterministic: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        spec = model.spec
        self.deterministic = deterministic
        if deterministic:
            fix_products(model)
        self.model, self.device, self.block_size = model, device, block_size
        self.max_rows, self.max_tokens = max_num_seqs, max_num_batched_tokens
        self.dependent = capability >= (9, 0)
        self.attention = TritonAttention(
            spec,
            block_size,
            max_num_seqs,
            dtype,
            device,
            capability,
            cache_dtype=cache_dtype,
            deterministic=deterministic,
        )
        self.network = Network(model, self.attention, device, fixed=deterministic)
        self.captured = captured
        self.slots = DeviceSlots(
            max_num_seqs, spec.max_model_len, block_size, spec.vocab_size, num_scheduler_steps, device
        )
        self.sampler = DeviceSampler(model, self.slots, max_num_seqs, logprobs_mode, device)
        self.torch_sampler = Sampler(max_num_seqs, spec.vocab_size, device, logprobs_mode)
        self.torch_slots: set[int] = set()
        self.scored: dict[int, Request] = {}  # by slot: requests whose prompt wants logprobs
        self.rows = DecodeRows(*(torch.zeros(3, self._padded(), dtype=torch.int32, device=device)))
        self.gathered = torch.zeros(max_num_seqs, spec.hidden_size, dtype=dtype, device=device)
        self.graphs = Graphs()
        self.sizes, self.rare_sizes = batch_sizes(max_num_seqs), coarse_sizes(max_num_seqs)
        self.token_counts = token_counts(max_num_batched_tokens)
        self.seq_counts = sequence_counts(max_num_seqs)
        self.products: dict[int, Products | None] = {
            rows: self._products(rows, dtype, fused_rows) for rows in {*self.sizes, *self.rare_sizes}
        }
        self.answer: Callable[[], StepResult]
        self.waiting: tuple[Step, Forwarded] | None = None  # for masks

    def _padded(self) -> int:
        """Columns of the rows' tensors: their addresses are to be multiples of 16 bytes."""
        return -(-max(self.max_tokens, self.max_rows) // 16) * 16

    def _products(self, rows: int, dtype: torch.dtype, fused_rows: int | None) -> Products | None:
        if not self.network.fusible or (fused_rows is not None and rows > fused_rows):
            return None
        if dtype.itemsize == 4 and fused_rows is None:
            return None  # made for 16-bit types
        return choose_products(self.model.spec, rows, dtype.itemsize)

    # -- the host's side of a step

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        if step.copies:
            caches = [layer.attention.cache for layer in self.network.layers]
            kv_cache.copy((part for cache in caches for part in (cache.key, cache.value)), step.copies, self.device)
        self.slots.apply(step)
        for admit in step.admits:
            slot, request = admit.slot, admit.request
            self.scored.pop(slot, None)
            self.torch_slots.discard(slot)
            if request.params.prompt_logprobs is not None:
                self.scored[slot] = request
            if self.sampler.serves(request):
                self.sampler.admit(admit)
            else:
                self.torch_slots.add(slot)
                self.sampler.masked.discard(slot)
                self.torch_sampler.add(admit)
        if step.masked:
            self.waiting = step, self._forward_mixed(step.chunks, 0)
            return
        self.sampler.mask({})
        parts: list[Part] = []
        if self._only_decodes(step) and not self.deterministic:
            self._decode(step, parts)
        else:
            for ahead in range(step.repeat):
                self._sample_mixed(self._forward_mixed(step.chunks, ahead), {}, parts)
        self.answer = self._answer(step, parts)

    @torch.inference_mode()
    def sample(self, masks: Bitmasks | None = None) -> Callable[[], StepResult]:
        if self.waiting is not None:
            step, forwarded = self.waiting
            self.waiting = None
            masks = masks or {}
            self.sampler.mask({slot: words for slot, words in masks.items() if slot not in self.torch_slots})
            self._send()
            parts: list[Part] = []
            self._sample_mixed(forwarded, masks, parts)
            self.answer = self._answer(step, parts)
        return self.answer

    def spans(self) -> list[Span]:
        return [
            Span("forward", self, "_decode"),  # sampling included: it is one graph
            Span("forward", self, "_forward_mixed"),
            Span("sample", self, "_sample_mixed"),
            Span("prepare", self, "_send"),
        ]

    def close(self) -> None:
        self.graphs.graphs.clear()
        self.network.layers.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _only_decodes(self, step: Step) -> bool:
        torch_slots = self.torch_slots
        return all(c.samples and c.length == 1 and c.slot not in torch_slots for c in step.chunks)

    def _answer(self, step: Step, parts: list[Part]) -> Callable[[], StepResult]:
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def read() -> StepResult:
            if done is not None:
                done.synchronize()
            result = StepResult(tokens=[[] for _ in step.chunks])
            for part in parts:
                part(result)
            return result

        return read

    def _decode(self, step: Step, parts: list[Part]) -> None:
        slots = [chunk.slot for chunk in step.chunks]
        featured = not self.sampler.featured.isdisjoint(slots)
        rows = round_up(len(slots), self.rare_sizes if featured else self.sizes) or self.max_rows
        self.slots.set_rows("decode_slots", slots)
        self._send()
        chunks = list(enumerate(step.chunks))
        short = rows > MANY_ROWS and sum(c.start for c in step.chunks) <= SHORT_CONTEXT * len(chunks)
        for _ in range(step.repeat):
            self.graphs.run(("decode", rows, featured, short), partial(self._decode_launches, rows, featured, short))
            parts.append(self._reading(chunks))

    def _forward_mixed(self, chunks: list[Chunk], ahead: int) -> Forwarded:
        """Decoding rows first, then prompts; sampled rows in the same order, those for torch behind the others."""
        decoding = [c.length == 1 and c.samples for c in chunks]
        order = sorted(range(len(chunks)), key=lambda i: not decoding[i])
        num_decoding = sum(decoding) if len(chunks) > FEW_SEQUENCES and not self.deterministic else 0
        starts, ends, end = [], [], 0
        for i in order:
            starts.append(end)
            end += chunks[i].length
            ends.append(end)
        sampled = [(i, last - 1) for i, last in zip(order, ends, strict=True) if chunks[i].samples]
        ours = [(i, row) for i, row in sampled if chunks[i].slot not in self.torch_slots]
        others = [(i, row) for i, row in sampled if chunks[i].slot in self.torch_slots]
        step_slots = [chunks[i].slot for i in order]
        set_rows = self.slots.set_rows
        set_rows("step_slots", step_slots)
        set_rows("prefill_slots", [-1] * num_decoding + step_slots[num_decoding:])
        if num_decoding:
            set_rows("decode_slots", step_slots[:num_decoding])
        set_rows("query_starts", [*starts, end], rest=end)
        limit = self.slots.max_model_len
        set_rows("context_lens", [min(chunks[i].start + ahead, limit - 1) + chunks[i].length for i in order])
        set_rows("sample_rows", [row for _, row in ours + others])
        set_rows("sample_slots", [chunks[i].slot for i, _ in ours])
        self._send()
        scored = [
            (i, chunks[i], start) for i, start in zip(order, starts, strict=True) if chunks[i].slot in self.scored
        ]
        whole = all(chunks[i].start + ahead == 0 for i in order[num_decoding:])
        hidden = self._forward(end, len(chunks), num_decoding > 0, whole, keep=bool(scored))
        return Forwarded(hidden, [(i, chunks[i]) for i, _ in ours], [(i, chunks[i]) for i, _ in others], scored, ahead)

    def _sample_mixed(self, forwarded: Forwarded, masks: Bitmasks, parts: list[Part]) -> None:
        ours = forwarded.ours
        if ours:
            featured = not self.sampler.featured.isdisjoint(chunk.slot for _, chunk in ours)
            rows = round_up(len(ours), self.rare_sizes) or self.max_rows
            self.graphs.run(("sample", rows, featured), partial(self._sample_launches, rows, featured))
            parts.append(self._reading(ours))
        if forwarded.others:
            parts.append(self._sample_with_torch(forwarded.others, len(ours), forwarded.ahead, masks))
        for i, chunk, first_row in forwarded.scored:
            if found := self._prompt_logprobs(chunk, forwarded.hidden, first_row):
                parts.append(partial(_put_prompt_logprobs, i, found))

    def _send(self) -> None:
        self.slots.send()
        self.sampler.count()

    # -- the device's side: launches only, from and to tensors that stay

    def _forward(self, tokens: int, num_seqs: int, decoding: bool, whole: bool, keep: bool) -> Tensor:
        """Hidden states of the sampled rows to `gathered`; of all rows, for the caller, if it keeps them."""
        captured = round_up(tokens, self.token_counts) if self.captured and not keep else None
        if captured is None:
            return self._mixed_launches(tokens, num_seqs, decoding, whole)
        seqs = self._captured_seqs(num_seqs)
        whole = whole and self.attention.serves_whole(captured)
        key = ("mixed", captured, seqs, decoding, whole)
        self.graphs.run(key, partial(_drop, partial(self._mixed_launches, captured, seqs, decoding, whole)))
        return self.gathered

    def _captured_seqs(self, num_seqs: int) -> int:
        return round_up(num_seqs, self.seq_counts) or self.max_rows

    def _mixed_launches(self, tokens: int, num_seqs: int, decoding: bool, whole: bool = False) -> Tensor:
        slots, table = self.slots, self.slots["block_table"]
        rows = self._rows(tokens)
        sequences = Sequences(
            slots["query_starts"][: num_seqs + 1],
            slots["context_lens"][:num_seqs],
            slots["prefill_slots"][:num_seqs],
            slots["decode_slots"][: self._captured_seqs(num_seqs)] if decoding else None,
            whole,
        )
        batch_rows(
            sequences.query_starts,
            sequences.context_lens,
            slots["step_slots"],
            slots["tokens"],
            table,
            rows,
            block_size=self.block_size,
        )
        if sequences.decode_slots is not None:
            self.attention.plan(
                sequences.decode_slots, slots["length"], slots["tokens"], table, rows=None, new_in_cache=True
            )

        def attend(layer: LayerAttention, qkv: Tensor, out: Tensor) -> Tensor:
            return self.attention.mixed(layer, qkv, rows, sequences, table, out)

        hidden = self.network.run(rows.token_ids, attend)
        torch.index_select(hidden, 0, slots["sample_rows"][: self.max_rows], out=self.gathered)
        return hidden

    def _decode_launches(self, rows: int, featured: bool, short: bool) -> None:
        slots, table = self.slots, self.slots["block_table"]
        fed, active = self._rows(rows), slots["decode_slots"][:rows]
        products = self.products[rows]
        dependent = self.dependent and products is not None
        self.attention.plan(
            active,
            slots["length"],
            slots["tokens"],
            table,
            rows=fed,
            new_in_cache=False,
            short=short,
            dependent=dependent,
        )

        def attend(layer: LayerAttention, qkv: Tensor, out: Tensor) -> Tensor:
            self.attention.decode(layer, qkv, table, out, rows=rows, fused=True, short=short, dependent=dependent)
            return out

        if products is None:
            hidden = self.network.run(fed.token_ids, attend)
        else:
            hidden = self.network.run_fused(fed.token_ids, products, attend, dependent=dependent)
        self.sampler.run(hidden, active, featured=featured, dependent=dependent)

    def _sample_launches(self, rows: int, featured: bool) -> None:
        self.sampler.run(self.gathered[:rows], self.slots["sample_slots"][:rows], featured=featured)

    def _rows(self, count: int) -> DecodeRows:
        rows = self.rows
        return DecodeRows(rows.token_ids[:count], rows.positions[:count], rows.cache_slots[:count])

    def graph_keys(self) -> Iterator[tuple[Hashable, Launches]]:
        """Everything that steps may replay, large ones first so that small ones reuse their memory."""
        for tokens in reversed(self.token_counts):
            # Every sequence has a row: no step has more sequences than tokens.
            for seqs in self.seq_counts[: bisect_left(self.seq_counts, min(tokens, self.max_rows)) + 1]:
                for decoding in (False, True) if seqs > FEW_SEQUENCES and not self.deterministic else (False,):
                    for whole in (False, True) if self.attention.serves_whole(tokens) else (False,):
                        launches = partial(_drop, partial(self._mixed_launches, tokens, seqs, decoding, whole))
                        yield ("mixed", tokens, seqs, decoding, whole), launches
        decodes = () if self.deterministic else ((self.sizes, False), (self.rare_sizes, True))
        for sizes, featured in decodes:
            for rows in reversed(sizes):
                for short in (False, True) if rows > MANY_ROWS else (False,):
                    yield ("decode", rows, featured, short), partial(self._decode_launches, rows, featured, short)
        for rows in reversed(self.rare_sizes):
            for featured in (False, True):
                yield ("sample", rows, featured), partial(self._sample_launches, rows, featured)

    def allocate(self, num_blocks: int) -> None:
        """Give the layers their caches; block 0 is a dump that belongs to nobody."""
        self.network.allocate(self.attention, num_blocks, self.device)

    def extras(self) -> None:
        """What runs between graphs."""
        none = torch.full((1,), self.max_rows, dtype=torch.int32, device=self.device)  # the slot behind the last
        count_tokens(self.sampler.rows, self.slots["tokens"], none, torch.zeros_like(none), 1)
        self.slots.changes.write("length", self.max_rows, 0)
        self._send()

    def largest(self) -> None:
        """The step that takes the most memory, without any sequence in it."""
        for whole in {False, self.attention.serves_whole(self.max_tokens)}:
            self._mixed_launches(self.max_tokens, self.max_rows, True, whole)
        for count in self.seq_counts:  # what steps too long to be captured need
            self._mixed_launches(min(self.max_tokens, FEW_SEQUENCES), count, count > FEW_SEQUENCES)
        self._sample_launches(self.max_rows, True)

    # -- answers

    def _reading(self, chunks: list[tuple[int, Chunk]]) -> Part:
        num_logprobs = self.sampler.num_logprobs
        asked = {row: num_logprobs[c.slot] for row, (_, c) in enumerate(chunks) if c.slot in num_logprobs}
        reading = self.sampler.read(len(chunks), bool(asked))
        places = [i for i, _ in chunks]
        lengths = [chunk.start + chunk.length for _, chunk in chunks]
        return partial(_put_tokens, places, lengths, reading, asked)

    def _sample_with_torch(self, chunks: list[tuple[int, Chunk]], first: int, ahead: int, masks: Bitmasks) -> Part:
        slots = [chunk.slot for _, chunk in chunks]
        positions = [chunk.start + chunk.length + ahead for _, chunk in chunks]
        hidden = self.gathered[first : first + len(chunks)]
        sampled = self.torch_sampler.sample(self.model.logits(hidden), slots, positions, masks)
        at = torch.tensor([slots, positions], device=self.device)
        limit = self.slots.max_model_len
        fits = at[1] < limit
        self.slots["tokens"][at[0][fits], at[1][fits]] = sampled.tokens[fits].int()
        self.slots["length"][at[0]] = (at[1] + 1).clamp(max=limit).int()
        tokens = sampled.tokens.tolist()

        def put(result: StepResult) -> None:
            result.logprobs = result.logprobs or [[] for _ in result.tokens]
            for row, (i, _) in enumerate(chunks):
                result.tokens[i].append(tokens[row])
                if sampled.logprobs and (logprobs := sampled.logprobs[row]):
                    result.logprobs[i].append(logprobs)
                if row in sampled.faults:
                    result.faults.setdefault(i, sampled.faults[row])

        return put

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor, first_row: int) -> list[TokenLogprobs]:
        request = self.scored[chunk.slot]
        prompt = request.prompt_token_ids
        count = min(chunk.start + chunk.length, len(prompt) - 1) - chunk.start
        found: list[TokenLogprobs] = []
        for done in range(0, max(count, 0), PROMPT_LOGPROB_ROWS):
            size = min(PROMPT_LOGPROB_ROWS, count - done)
            begin = chunk.start + done + 1
            targets = torch.tensor(prompt[begin : begin + size], device=self.device)
            logits = self.model.logits(hidden[first_row + done : first_row + done + size])
            found += self.torch_sampler.prompt_logprobs(logits, targets, request.params.prompt_logprobs or 0)
        return found


def _drop(launches: Callable[[], Tensor]) -> None:
    launches()


def _put_prompt_logprobs(i: int, found: list[TokenLogprobs], result: StepResult) -> None:
    result.prompt_logprobs[i] = found


def _put_tokens(
    places: list[int], lengths: list[int], reading: Reading, asked: dict[int, int], result: StepResult
) -> None:
    # What a fault leaves in the cache needs no clearing: the kernels read only what a sequence wrote itself.
    tokens, faults = reading.tokens_faults[:, : len(places)].tolist()
    for i, token in zip(places, tokens, strict=True):
        result.tokens[i].append(token)
    if any(faults):
        for row, fault in enumerate(faults):
            if fault:
                position = lengths[row] + len(result.tokens[places[row]]) - 1
                result.faults.setdefault(places[row], describe_fault(FAULTS[fault], position))
    if asked:
        result.logprobs = result.logprobs or [[] for _ in result.tokens]
        for row, count in asked.items():
            result.logprobs[places[row]].append(reading.logprobs(row, count))
