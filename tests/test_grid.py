"""Every chunk budget with every block size, with and without a sliding window; and thousands of requests in a row."""

import gc
import random
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import tiny_models
from conftest import Make
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from octavo.types import Request
from octavo.worker.machine import resident_memory
from test_engine import GREEDY, ids, run
from test_invariance import assert_idle, texts

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 130)


@pytest.fixture(scope="module", params=["full", "window"])
def checkpoint(request: pytest.FixtureRequest, tiny: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny if request.param == "full" else tiny_models.oracle(model_type="mistral", sliding_window=20)
    return tiny_models.save(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.case("KV-04")
def test_chunks_and_blocks_change_nothing(checkpoint: Path, make_llm: Make) -> None:
    """Prompts run beside decoding neighbours; half of them share beginnings, so that chunks start at prefix hits."""
    base = ids(130)
    prompts = [base[:length] if length % 2 else ids(length, length) for length in LENGTHS]
    params = SamplingParams(max_tokens=5, **GREEDY)
    with make_llm(checkpoint, max_num_seqs=1, enable_prefix_caching=False, depth=0) as llm:
        expected = texts(run(llm, prompts, params))
    for budget in (1, 2, 7, 16, 17, 64, 4096):
        few = [i for i, prompt in enumerate(prompts) if budget > 2 or len(prompt) <= 33]
        for block_size in (1, 4, 16, 32):
            with make_llm(checkpoint, max_num_batched_tokens=budget, block_size=block_size, max_num_seqs=6) as llm:
                found = texts(run(llm, [prompts[i] for i in few], params))
                assert found == [expected[i] for i in few], (budget, block_size)


@pytest.mark.case("KV-03")
def test_thousands_of_requests_leave_nothing_behind(make_llm: Make) -> None:
    llm = make_llm(max_num_seqs=16, num_gpu_blocks_override=200)
    before = num_requests()  # other tests of this process may have left some on purpose
    rng = random.Random(0)
    sizes = []
    for _ in range(5):
        churn(llm, rng, 1000)
        assert_idle(llm)
        gc.collect()
        assert num_requests() <= before
        sizes.append(resident_memory())
    assert sizes[-1] < 1.05 * sizes[0], sizes


def num_requests() -> int:
    return sum(type(x) is Request for x in gc.get_objects())


def churn(llm: LLM, rng: random.Random, count: int) -> None:
    """Requests that finish, stop, are aborted or refused, alone and in threes, with shared beginnings."""
    engine = llm.engine
    stems = [ids(40, seed) for seed in range(3)]
    started = 0
    while started < count or engine.has_unfinished:
        while started < count and engine.num_unfinished < 16:
            started += 1
            prompt = rng.choice(stems)[: rng.randint(1, 40)]
            kind = rng.randrange(5)
            if kind == 0:
                with pytest.raises(InvalidRequest):
                    engine.check([*prompt, 600])
                continue
            params = SamplingParams(
                n=3 if kind == 1 else 1, max_tokens=rng.randint(1, 4), seed=started, stop_token_ids=range(0, 600, 7)
            )
            group = engine.check(prompt, params)
            engine.add(group)
            if kind == 2:
                engine.step()
                engine.abort(group.id)
        engine.step()
