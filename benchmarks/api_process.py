"""CPU time an API process spends on a token in engine/client and engine/outputs, against a stub engine; no HTTP.

The stub, a process of its own, emits --rate tokens a second over --streams streams: one message a step, as the
engine does. Every stream is read as fast as it comes, in deltas, with text.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import zmq

from octavo.engine import protocol
from octavo.engine.client import EngineClient
from octavo.hub import find_model
from octavo.types import Delta, RequestOutputKind, SamplingParams


def stub(folder: Path, rate: float, streams: int) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{folder / protocol.ENGINE_SOCKET}")
    files = find_model("smollm2")
    info = protocol.EngineInfo(
        model="smollm2", served_names=("smollm2",), vocab_size=49152, max_model_len=8192, block_size=16,
        num_blocks=9999, max_num_seqs=streams, max_num_batched_tokens=4096, prefix_caching=True, max_logprobs=20,
        seed=0, eos_token_ids=[2], default_params=SamplingParams(), options={}, phases={},
        tokenizer=protocol.TokenizerFiles(str(files.folder), str(files.gguf or "")),
    )  # fmt: skip
    keys: list[int] = []
    peer = b""
    while len(keys) < streams:
        peer, frame = socket.recv_multipart()
        message = protocol.decode_from_client(frame)
        if isinstance(message, protocol.Join):
            socket.send_multipart((peer, protocol.encode(protocol.Hello(info))))
        elif isinstance(message, protocol.Add):
            keys += message.keys
    first = protocol.Step(b"", b"", [(key, Delta("", [500])) for key in keys])
    socket.send_multipart((peer, protocol.encode(first)))
    step, packed = 0, array(protocol.TOKEN, keys).tobytes()
    begin = time.perf_counter()
    while True:
        step += 1
        tokens = array(protocol.TOKEN, [1000 + (step * 7 + key * 31) % 40_000 for key in keys]).tobytes()
        time.sleep(max(0.0, begin + step * streams / rate - time.perf_counter()))
        socket.send_multipart((peer, protocol.encode(protocol.Step(packed, tokens))))


async def measure(folder: Path, streams: int, seconds: float) -> None:
    client = await EngineClient(folder).start()
    await client.ready()
    params = SamplingParams(max_tokens=8000, output_kind=RequestOutputKind.DELTA)
    count = outputs = 0

    async def read() -> None:
        nonlocal count, outputs
        async for output in client.generate(await client.check("Hello there", params)):
            count += len(output.outputs[0].token_ids)
            outputs += 1

    readers = [asyncio.create_task(read()) for _ in range(streams)]
    await asyncio.sleep(1.0)
    count = outputs = 0
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{count / wall:,.0f} tokens/s in {outputs / wall:,.0f} outputs/s over {streams} streams: "
        f"{cpu / count * 1e6:.1f} us of CPU a token, {cpu / wall:.0%} of a core"
    )
    for reader in readers:
        reader.cancel()
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--stub", type=Path)
    given = parser.parse_args()
    if given.stub:
        stub(given.stub, given.rate, given.streams)
    with tempfile.TemporaryDirectory() as folder:
        engine = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--stub", folder], env=os.environ)
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(Path(folder), given.streams, given.seconds))
        finally:
            engine.kill()
            engine.wait()


if __name__ == "__main__":
    main()
