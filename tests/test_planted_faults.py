"""The tests of the core can fail: every fault planted here, one at a time, is found by them."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import test_scheduler as cases
from fake_device import Core, run_workload

MODULES = ("blocks", "sequence", "policy", "scheduler")
NUM_WORKLOADS = 80


class Fault(NamedTuple):
    name: str
    module: str
    right: str
    wrong: str


FAULTS = [
    Fault("a hash ignores what came before", "blocks", "blake2b(parent, digest_size", "blake2b(digest_size"),
    Fault("a hash ignores the namespace", "blocks", 'namespace.encode("utf-8", "surrogatepass")', 'b""'),
    Fault("a reset leaves the seeds as they were", "blocks", "[self._num_resets]", "[0]"),
    Fault("a reset leaves content findable", "blocks", "self._hash_of, self._block_of, self._prom", "self._prom"),
    Fault("an evicted block stays findable", "blocks", "del self._block_of[self._hash_of.pop(block)]", "pass"),
    Fault("a hit leaves the block free", "blocks", "if not self._refs[block]:\n                del",
          "if False:\n                del"),
    Fault("a hit takes no reference", "blocks", "self._refs[block] += 1", "self._refs[block] = 1"),
    Fault("block 0 is handed out", "blocks", "range(num_blocks - 1, 0, -1)", "range(num_blocks - 1, -1, -1)"),
    Fault("a promise outlives its block", "blocks", "del self._hash_of[block], self._promised[content_hash]", "pass"),
    Fault("a promise can be hit", "blocks", "self._promised[content_hash] = block",
          "self._promised[content_hash] = self._block_of[content_hash] = block"),
    Fault("hits that are free count twice", "blocks",
          "self.num_free - sum(not self._refs[block] for block in blocks)", "self.num_free"),
    Fault("more is allocated than there is", "blocks", "if count > len(self._empty) + len(self._cached)", "if False"),
    Fault("a chain starts anew with each block", "sequence", "self.hashes[-1] if self.hashes else self.seed",
          "self.seed"),
    Fault("hashes survive a reset", "sequence", "if seed != self.seed", "if not self.seed"),
    Fault("tokens are taken after a stop", "sequence", "else None\n                return count", "else None"),
    Fault("a text stops before min_tokens", "sequence", " and len(known) >= self._min_length", ""),
    Fault("an end of sequence is told as a stop token", "sequence",
          "token if token in self.request.params.stop_token_ids else None", "token"),
    Fault("a text is one token too long", "sequence", "if len(known) >= self.max_length",
          "if len(known) > self.max_length"),
    Fault("pending tokens are left out of the room", "sequence", "len(self.tokens) - self.pending",
          "len(self.tokens)"),
    Fault("priorities are ignored", "policy", 'request.priority if policy == "priority" else background', "0"),
    Fault("the most important gives up", "policy", "(-seq.rank[0], ", "(seq.rank[0], "),
    Fault("the head is overtaken for ever", "policy", "MAX_BYPASS = 32", "MAX_BYPASS = 10**9"),
    Fault("nobody is overtaken", "policy", "MAX_BYPASS = 32", "MAX_BYPASS = 0"),
    Fault("an admission leaves no headroom", "policy", "num_running // 2", "0"),
    Fault("a full prompt may be hit", "scheduler", "(len(seq.tokens) - 1) // pool.block_size",
          "len(seq.tokens) // pool.block_size"),
    Fault("one comes back with results in flight", "scheduler", "if seq.in_flight or ", "if "),
    Fault("the less important overtake", "scheduler", " or seq.rank[0] > self._waiting[0].rank[0]", ""),
    Fault("the preempted are overtaken", "scheduler", "seq.was_preempted or ", ""),
    Fault("overtaking is not counted", "scheduler", "overtaken.num_bypasses += 1", "pass"),
    Fault("slots are not counted", "scheduler", "not budget or not self._free_slots or", "not budget or"),
    Fault("late results of an ended sequence count", "scheduler",
          "if ended_before", "if False"),
    Fault("late results of a preempted sequence are dropped", "scheduler",
          "if ended_before", "if seq.slot < 0"),
    Fault("late results of a preempted sequence are sealed", "scheduler",
          " and seq.slot >= 0:\n                # What", ":\n                # What"),
    Fault("pending tokens are not counted", "scheduler", "seq.pending += samples", "pass"),
    Fault("every chunk samples", "scheduler", "samples = end == len(seq.tokens) + seq.pending", "samples = True"),
    Fault("an ended sequence keeps its blocks", "scheduler", "self.pool.release(seq.blocks)", "pass"),
    Fault("a preempted sequence remembers its blocks", "scheduler", "seq.blocks, seq.slot = [], -1", "seq.slot = -1"),
    Fault("an ended sequence keeps its slot", "scheduler", "self._free_slots.append(seq.slot)", "pass"),
    Fault("an ended sequence is still known", "scheduler", "del self._live[seq.request.id]", "pass"),
    Fault("more is planned than may be generated", "scheduler", "num_known >= seq.max_length or", ""),
    Fault("a token without KV is sealed", "scheduler", "min(end, len(seq.tokens)))", "len(seq.tokens))"),
    Fault("what follows a stop is sealed", "scheduler", "min(end, len(seq.tokens)))", "end)"),
    Fault("repeats are not sealed", "scheduler", "flight.ends[i] += more[i]", "pass"),
    Fault("the first in rank gives up", "scheduler", "max(first, 1)", "first"),
    Fault("one that has its chunk gives up", "scheduler", "max(first, 1)", "1"),
    Fault("a loser goes on", "scheduler", "if loser is seq:\n                return None", ""),
    Fault("growth is one block short", "scheduler", "needed = self._blocks_for(seq.scheduled + length) -",
          "needed = -1 + self._blocks_for(seq.scheduled + length) -"),
    Fault("the budget is not kept", "scheduler", "budget -= length\n        return", "pass\n        return"),
    Fault("decoding waits for a prefill", "scheduler", "max(1, budget - num_behind)", "budget"),
    Fault("repeats are not pending", "scheduler", "seq.pending += more[i]", "pass"),
    Fault("repeats go past the end", "scheduler", "min(repeat - 1, seq.room) for", "repeat - 1 for"),
    Fault("a repeat is longer than anybody needs", "scheduler",
          "min(self.num_scheduler_steps, 1 + max(seq.room for seq in flight.seqs))", "self.num_scheduler_steps"),
    Fault("a prefill is repeated", "scheduler", "chunk.samples and chunk.length == 1", "chunk.samples"),
    Fault("blocks for a repeat are not there", "scheduler", "or sum(needed) > self.pool.num_free", ""),
    Fault("blocks of a repeat are not sent", "scheduler", "new_blocks=chunk.new_blocks + tuple(blocks)",
          "new_blocks=chunk.new_blocks"),
    Fault("what another computes is computed too", "scheduler",
          "if pool.is_promised(seq.awaits):\n            return None\n        return cached", "return cached"),
    Fault("a prompt's end is not copied", "scheduler", "flight.step.copies.append((copied, reserved[0]))", "pass"),
    Fault("a prompt's end is copied the wrong way", "scheduler", "(copied, reserved[0])", "(reserved[0], copied)"),
    Fault("a prompt's end is hit before its blocks", "scheduler", "if len(cached) == len(wanted) else None", ""),
    Fault("a prompt's end is published too early", "scheduler", "seq.seals_at <= seq.num_known <= num_final", "True"),
    Fault("a prompt's end is not published", "scheduler",
          "self.pool.seal(seq.blocks[(seq.num_known - 1) // block_size], seq.tail)", "pass"),
    Fault("a prompt's end is findable in a block that went on", "blocks", "del self._block_of[before]", "pass"),
    Fault("a prompt's end stands for any other", "sequence", "chain_hash(parent, self.tokens[begin:])",
          "chain_hash(parent, self.tokens[begin : begin + 1])"),
    Fault("a sequence waits though it reads no cache", "scheduler", "if not seq.request.reads_prefix_cache",
          "if False"),
    Fault("faulty content can be hit", "scheduler", "self.pool.forget([*seq.hashes, seq.tail])", "pass"),
    Fault("a fault is passed over", "scheduler", "if i in faults", "if False"),
    Fault("hits are those of the last admission", "scheduler", "if seq.num_cached_tokens is None", "if True"),
    Fault("logprobs of dropped tokens are told", "scheduler", "logprobs[i][:num_accepted]", "logprobs[i]"),
    Fault("dropped tokens are told", "scheduler", "tokens[:num_accepted]", "tokens"),
    Fault("prompt logprobs are one off", "scheduler", "step.chunks[i].start + 1", "step.chunks[i].start"),
    Fault("an abort is told as well", "scheduler", "seq.finish_reason = reason", "pass"),
]  # fmt: skip

CASES: list[Callable[[Core], None]] = [
    *(partial(cases.test_abort_at_awkward_moments, depth) for depth in (0, 1)),
    *(partial(cases.test_a_big_head_is_overtaken_but_never_starved, policy) for policy in ("fcfs", "priority")),
    *(partial(cases.test_priorities_hold_under_preemption, depth) for depth in (0, 2)),
    *(partial(cases.test_nothing_old_is_hit_after_new_weights, number) for number in (10, 31)),
    *(partial(cases.test_a_promise_ends_with_a_reset, committed) for committed in (False, True)),
    partial(cases.test_an_admission_leaves_room_to_grow, 2, 4),
    partial(cases.test_samples_share_full_blocks_only, 1),
    partial(cases.test_many_turns, 1, 4),
    partial(cases.test_who_does_not_read_the_prefix_cache_waits_for_nobody, {"prompt_logprobs": 0}),
    cases.test_nothing_is_planned_beyond_what_may_be_generated,
    cases.test_a_repeat_is_no_longer_than_the_longest_needs,
    cases.test_without_blocks_for_a_repeat_nobody_is_preempted_for_it,
    cases.test_a_long_prefill_does_not_make_decoding_wait,
    cases.test_stop_reasons,
    cases.test_a_fault_ends_its_request_alone_and_is_not_cached,
    cases.test_the_preempted_return_before_newer_ones,
    cases.test_the_less_important_gives_up_though_it_loses_more,
    cases.test_results_in_flight_of_a_preempted_sequence_count,
    cases.test_prompts_that_part_inside_a_block,
    cases.test_hits_stay_inside_a_namespace,
    cases.test_equal_prompts_in_one_step_are_computed_once,
    cases.test_a_prompts_end_is_copied_only_with_all_before_it,
    cases.test_a_promise_is_waited_for_and_shared,
    cases.test_a_promise_ends_with_the_abort_of_the_promiser,
]


def plant(fault: Fault | None) -> Core:
    """The core from its own source text, with one passage changed."""
    planted: dict[str, ModuleType] = {}
    for name in MODULES:
        spec = find_spec(f"octavo.core.{name}")
        assert spec and spec.origin
        text = Path(spec.origin).read_text(encoding="utf-8")
        if fault and fault.module == name:
            assert fault.right in text, f"nowhere in {name}.py: {fault.right}"
            text = text.replace(fault.right, fault.wrong, 1)
        for other in MODULES:
            text = text.replace(f"from octavo.core.{other} import", f"from planted_{other} import")
        module = sys.modules[f"planted_{name}"] = ModuleType(f"planted_{name}")
        exec(compile(text, f"planted_{name}", "exec"), module.__dict__)
        planted[name] = module
    return Core(planted["blocks"].BlockPool, planted["scheduler"].Scheduler)


@pytest.fixture(autouse=True)
def _uproot() -> Iterator[None]:
    yield
    for name in MODULES:
        sys.modules.pop(f"planted_{name}", None)


def find(core: Core) -> str:
    """How the core fails: the first workload or case that does, or nothing."""
    checks = [partial(run_workload, seed, core) for seed in range(NUM_WORKLOADS)]
    for check in [*checks, *(partial(case, core=core) for case in CASES)]:
        try:
            check()
        except Exception as error:  # a fault may show as anything
            return f"{check.func.__name__}{check.args[:1]}: {type(error).__name__} {error}"
    return ""


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert find(plant(None)) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_found(fault: Fault) -> None:
    assert find(plant(fault)), f"not found: {fault.name}"
