"""The engine process and its client: answers, aborts, limits, time limits, several clients, and the engine's death."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import tiny_models
from engine_process import EngineProcess, running_engine
from octavo.engine import protocol
from octavo.engine.client import EngineClient
from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, ShuttingDown, TimedOut
from octavo.types import RequestOutput, RequestOutputKind, SamplingParams

PROMPT = [5, 6, 7, 8, 9]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": "32M",
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[EngineProcess]:
    with running_engine(tiny_folder, **SMALL) as process:
        yield process


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


async def outputs(client: EngineClient, prompt: Any, sampling: SamplingParams, **options: Any) -> list[RequestOutput]:
    group = await client.check(prompt, sampling)
    return [output async for output in client.generate(group, **options)]


async def until(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "did not come about in time"
        await asyncio.sleep(0.02)


async def is_idle(client: EngineClient) -> bool:
    state = await client.snapshot()
    return state["running"] == 0 and state["waiting"] == 0


def test_greedy_tokens_are_the_oracles(engine: EngineProcess, tiny: PreTrainedModel) -> None:
    async def run() -> None:
        async with engine.client() as client:
            assert client.info.vocab_size == 600
            for kind in RequestOutputKind:
                got = await outputs(client, PROMPT, params(12, output_kind=kind))
                tokens = [t for o in got for t in o.outputs[0].token_ids] if kind is RequestOutputKind.DELTA else []
                assert (tokens or got[-1].outputs[0].token_ids) == tiny_models.greedy(tiny, PROMPT, 12)
                assert [o.finished for o in got] == [False] * (len(got) - 1) + [True]
                assert got[-1].outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_two_clients_do_not_hear_each_other(engine: EngineProcess, tiny: PreTrainedModel) -> None:
    async def run() -> None:
        async with engine.client("0") as first, engine.client("1") as second:
            answers = await asyncio.gather(
                *(outputs(client, [n, n + 1], params(9)) for n in range(3, 23) for client in (first, second))
            )
            for place, got in enumerate(answers):
                n = 3 + place // 2
                assert got[-1].outputs[0].token_ids == tiny_models.greedy(tiny, [n, n + 1], 9)

    asyncio.run(run())


@pytest.mark.case("ABT-01")
def test_who_leaves_frees_everything(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            before = (await client.snapshot())["kv_blocks"]["used"]

            async def short_of_patience(number: int) -> None:
                stream = client.generate(await client.check([number % 500 + 3, 4, 5], params(400)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        async for _ in stream:
                            pass
                if number % 2:  # others are simply dropped
                    await stream.aclose()

            await asyncio.gather(*map(short_of_patience, range(60)))
            begin = time.monotonic()
            got = await outputs(client, PROMPT, params(10))
            assert len(got[-1].outputs[0].token_ids) == 10 and time.monotonic() - begin < 5
            await until(lambda: is_idle(client))
            assert (await client.snapshot())["kv_blocks"]["used"] == before
            assert client.num_live == 0

    asyncio.run(run())


@pytest.mark.case("ABT-05")
def test_equal_ids_are_requests_of_their_own(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            groups = [await client.check([7, 8, n + 3], params(20 + n), request_id="same") for n in range(10)]
            streams = [client.generate(group) for group in groups]
            await streams[3].__anext__()
            streams[3].close()
            for n, stream in enumerate(streams):
                got = [output async for output in stream]
                assert n == 3 or len(got[-1].outputs[0].token_ids) == 20 + n

    asyncio.run(run())


def test_abort_says_abort(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            stream = client.generate(await client.check(PROMPT, params(400), request_id="mine"))
            first = await anext(stream)
            await client.abort("mine")
            await client.abort("nobody's")
            last = [output async for output in stream][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
            assert len(first.outputs[0].token_ids) <= len(last.outputs[0].token_ids) < 400

    asyncio.run(run())


def test_time_limits(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            got = await outputs(client, PROMPT, params(500), timeout_ms=60)
            assert (got[-1].outputs[0].finish_reason, got[-1].outputs[0].stop_reason) == ("abort", "timeout")
            with pytest.raises(TimedOut, match="timeout_ms"):
                await outputs(client, PROMPT, params(500), timeout_ms=0.01)
            for bad in (0, -1, float("nan"), 1e300):
                with pytest.raises(InvalidRequest, match="timeout_ms"):
                    await outputs(client, PROMPT, params(), timeout_ms=bad)
            got = await outputs(client, PROMPT, params(4), timeout_ms=60_000)
            assert got[-1].outputs[0].finish_reason == "length"
            await until(lambda: is_idle(client))

    asyncio.run(run())


def test_control_calls(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            await client.reset_prefix_cache()
            prompt = list(range(5, 60))
            first, second = [await outputs(client, prompt, params()) for _ in range(2)]
            other = await outputs(client, prompt, params(), tenant="another")
            assert [got[-1].num_cached_tokens for got in (first, second, other)] == [0, 48, 0]
            assert b"octavo:" in await client.metrics()
            with pytest.raises(OctavoError, match="No profile"):
                await client.stop_profile()
            await client.start_profile()
            with pytest.raises(OctavoError, match="already"):
                await client.start_profile()
            await outputs(client, PROMPT, params())
            trace = Path(await client.stop_profile())
            assert "traceEvents" in trace.read_text()
            trace.unlink()

    asyncio.run(run())


def test_a_slow_reader_gets_more_at_once(engine: EngineProcess, tiny: PreTrainedModel) -> None:
    async def run() -> None:
        async with engine.client() as client:
            sampling = params(60, output_kind=RequestOutputKind.DELTA)
            stream = client.generate(await client.check(PROMPT, sampling))
            await until(lambda: is_idle(client))
            got = [output async for output in stream]
            assert len(got) == 1 and got[0].outputs[0].token_ids == tiny_models.greedy(tiny, PROMPT, 60)

    asyncio.run(run())


def test_draining_takes_nothing_new_and_finishes_the_old(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            stream = client.generate(await client.check(PROMPT, params(30)))
            client.drain()
            with pytest.raises(ShuttingDown):
                await client.check(PROMPT, params())
            reading = asyncio.ensure_future(client.idle())
            got = [output async for output in stream]
            assert len(got[-1].outputs[0].token_ids) == 30
            await asyncio.wait_for(reading, 1)

    asyncio.run(run())


@pytest.mark.case("OPS-06")
def test_limits_of_the_queue(tiny_folder: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        async with engine.client() as client:

            async def one() -> bool:
                stream = client.generate(await client.check(PROMPT, params(60)))
                try:
                    await stream.admitted()
                except Overloaded as error:
                    assert error.retry_after_s >= 1 and "max_num_queued_reqs=1" in error.message
                    return False
                assert [output async for output in stream][-1].finished
                return True

            assert sum(await asyncio.gather(*(one() for _ in range(10)))) == 2
            for _ in range(3):
                assert await one(), "nobody else is there"

    with running_engine(tiny_folder, begin={"max_num_queued_reqs": 1}, max_num_seqs=1, **SMALL) as process:
        asyncio.run(run(process))


@pytest.mark.case("OPS-03")
def test_a_killed_engine_ends_every_stream_within_a_second(tiny_folder: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        async with engine.client() as client:
            streams = [client.generate(await client.check([n + 3], params(450))) for n in range(8)]
            await anext(streams[0])
            begin = time.monotonic()
            engine.process.kill()
            for stream in streams:
                with pytest.raises(EngineDead):
                    async for _ in stream:
                        pass
            assert time.monotonic() - begin < 1
            assert client.state == "dead"
            with pytest.raises(EngineDead):
                await client.check(PROMPT, params())
            with pytest.raises(EngineDead):
                await client.metrics()

    with running_engine(tiny_folder, **SMALL) as process:
        asyncio.run(run(process))


@pytest.mark.case("OPS-03")
def test_a_hanging_engine_is_not_ready_until_it_moves_again(tiny_folder: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        async with engine.client(stall_timeout=1.0) as client:

            async def state_is(state: str) -> bool:
                return client.state == state

            engine.process.send_signal(signal.SIGSTOP)
            await until(lambda: state_is("stuck"))
            assert "said nothing" in client.why
            engine.process.send_signal(signal.SIGCONT)
            await until(lambda: state_is("ready"))
            assert await outputs(client, PROMPT, params())

    with running_engine(tiny_folder, **SMALL) as process:
        asyncio.run(run(process))


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def run(engine: EngineProcess) -> None:
        with pytest.raises(EngineDead, match="nothing at"):
            async with engine.client():
                pass

    with running_engine(tmp_path / "none" / "here") as process:
        asyncio.run(run(process))
        assert process.process.wait(10) == 1
        assert "nothing at" in (process.folder / "cause").read_text()


def test_garbage_on_the_socket_harms_nobody(engine: EngineProcess) -> None:
    async def run() -> None:
        async with engine.client() as client:
            for frame in (b"", b"\x00", b"\xff" * 100, b"\x80\x04\x95", protocol.encode({"type": "Nothing"})):
                client._socket.send(frame)
            assert await outputs(client, PROMPT, params())

    asyncio.run(run())
