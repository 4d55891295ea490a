"""AsyncLLM: many streams on one event loop, aborts, faults, and its end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.errors import EngineDead, InvalidRequest
from test_engine import GREEDY, ids

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": "64M",
    "num_threads": 1,
}  # fmt: skip


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_streams_together_say_what_each_says_alone(tiny_folder: Path) -> None:
    prompts = [ids(5 + i, i) for i in range(12)]
    params = SamplingParams(max_tokens=20, **GREEDY)
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    async def main() -> list[list[int]]:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as llm:
            outputs = await asyncio.gather(*[last(llm.generate(p, params)) for p in prompts])
            return [output.outputs[0].token_ids for output in outputs]

    assert asyncio.run(main()) == expected


def test_a_prompt_that_takes_long_to_tokenize_stalls_nobody(tiny_folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as llm:
            check = llm.engine.check
            go_on = threading.Event()

            def slow(prompt: Any, *rest: Any, **options: Any) -> Any:
                if prompt == [7]:
                    assert go_on.wait(20)
                return check(prompt, *rest, **options)

            llm.engine.check = slow  # type: ignore[method-assign]
            waiting = asyncio.create_task(last(llm.generate([7], SamplingParams(max_tokens=2, **GREEDY))))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                assert (await last(llm.generate([5, 6], SamplingParams(max_tokens=9, **GREEDY)))).finished
            assert not waiting.done()
            go_on.set()
            assert (await waiting).finished

    asyncio.run(main())


@pytest.mark.case("ABT-01", "ABT-05")
def test_leaving_a_stream_frees_its_blocks(tiny_folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS, max_num_seqs=4) as llm:
            endless = SamplingParams(max_tokens=None, **GREEDY)

            async def impatient(i: int) -> None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        while True:
                            await last(llm.generate(ids(9, i), endless))

            await asyncio.gather(*[impatient(i) for i in range(60)])
            async with asyncio.timeout(20):
                output = await last(llm.generate([5, 6], SamplingParams(max_tokens=10, **GREEDY)))
            assert len(output.outputs[0].token_ids) == 10
            scheduler = llm.engine.scheduler
            assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
            assert scheduler.pool.num_free == scheduler.pool.num_usable
            stream = llm.generate([5, 6], endless, request_id="same")
            await anext(stream)
            with pytest.raises(InvalidRequest, match="still running"):
                await last(llm.generate([7], endless, request_id="same"))
            await llm.abort("same")
            assert (await last(stream)).outputs[0].finish_reason == "abort"
            await llm.abort("never seen")

    asyncio.run(main())


def test_bad_requests_are_refused_and_others_go_on(tiny_folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as llm:
            params = SamplingParams(max_tokens=30, output_kind=RequestOutputKind.DELTA, **GREEDY)
            good = llm.generate([5, 6], params)
            count = len((await anext(good)).outputs[0].token_ids)
            for prompt in ([], [600], "text", None, 7):
                with pytest.raises(InvalidRequest):
                    await last(llm.generate(prompt, params))  # type: ignore[arg-type]
            async for output in good:
                count += len(output.outputs[0].token_ids)
            assert count == 30
            await llm.reset_prefix_cache()

    asyncio.run(main())


def test_a_dying_engine_ends_every_stream(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **OPTIONS)
        step, count = llm.engine.step, 0

        def failing() -> list[RequestOutput]:
            nonlocal count
            count += 1
            if count > 5:
                raise RuntimeError("the device is gone")
            return step()

        llm.engine.step = failing  # type: ignore[method-assign]
        streams = [last(llm.generate(ids(4, i), SamplingParams(max_tokens=50, **GREEDY))) for i in range(3)]
        async with asyncio.timeout(20):
            results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(r, EngineDead) and "the device is gone" in str(r) for r in results)
        with pytest.raises(EngineDead):
            await last(llm.generate([5], SamplingParams()))
        llm.close()

    asyncio.run(main())


def test_closing_ends_live_streams(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **OPTIONS)
        stream = llm.generate([5], SamplingParams(max_tokens=None, **GREEDY))
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead):
            await last(stream)

    asyncio.run(main())
