"""An engine for tests of the HTTP API: the real client without a process behind it, whose answers are scripted."""

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.engine import protocol
from octavo.engine.client import EngineClient
from octavo.engine.protocol import EngineInfo
from octavo.types import Delta, FinishReason, Request, SamplingParams, TokenLogprobs

TEXT = "Fair is foul, and foul is fair: hover through the fog and filthy air."


class StandIn(EngineClient):
    """Says `TEXT` over and over, one token a step, to every request.

    `seconds` is the time of a step. `fail_at` makes the engine's answer number `fail_at` of each sequence an
    error. `refuse` answers every request with that `Refused`. `received` and `aborted` are what came.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        *,
        seconds: float = 0.0,
        fail_at: int | None = None,
        refuse: str = "",
        begin: bool = True,
        script: Callable[[Request], Sequence[int]] | None = None,
        max_model_len: int = 256,
    ) -> None:
        super().__init__(Path("/nowhere"))
        self.folder, self.seconds, self.fail_at, self.refuse, self.begin = (
            tokenizer_folder,
            seconds,
            fail_at,
            refuse,
            begin,
        )
        self.script, self.max_len = script, max_model_len
        self.received: list[Request] = []
        self.aborted: list[int] = []
        self.http: list[tuple[str, str, int, float]] = []
        self.running: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> "StandIn":
        self._loop = asyncio.get_running_loop()
        if self.begin:
            await self.get_ready()
        return self

    async def get_ready(self) -> None:
        await self._prepare(
            EngineInfo(
                model="stand-in",
                served_names=("stand-in", "alias/of it"),
                vocab_size=600,
                max_model_len=self.max_len,
                block_size=16,
                num_blocks=100,
                max_num_seqs=256,
                max_num_batched_tokens=4096,
                prefix_caching=True,
                max_logprobs=20,
                seed=0,
                eos_token_ids=[],
                default_params=SamplingParams(),
                options={},
                phases={},
                tokenizer=protocol.TokenizerFiles(str(self.folder)),
                has_limits=bool(self.refuse),
            )
        )

    async def close(self) -> None:
        self.end("The server was closed.")

    def _send(self, message: protocol.FromClient) -> None:
        match message:
            case protocol.Add(keys=keys):
                if self.refuse:
                    refused = protocol.Refused(keys[0], self.refuse, retry_after_s=7)
                    self._loop.call_soon(self._take, refused, time.monotonic())
                    return
                for key, request in zip(keys, message.whole(), strict=True):
                    self.received.append(request)
                    self.running[key] = self._loop.create_task(self._say(key, request))
            case protocol.Abort(keys=keys):
                self.aborted += keys
                for key in keys:
                    if task := self.running.pop(key, None):
                        task.cancel()
            case protocol.Http(rows=rows):
                self.http += rows
            case protocol.Ask(number=number, name=name):
                values: dict[str, Any] = {"snapshot": {"server_load": 0}, "metrics": b"octavo:x 1\n"}
                value = values.get(name)
                self._loop.call_soon(self._take, protocol.Reply(number, value), time.monotonic())

    async def _say(self, key: int, request: Request) -> None:
        tokenizer = self.tokenizer
        ids = self.script(request) if self.script else tokenizer.encode(TEXT)
        limit = request.params.max_tokens or 0
        length = limit if self.script is None else min(limit, len(ids))
        rows: list[TokenLogprobs] = []
        if request.params.prompt_logprobs is not None:
            rows = [self._row(t, request.params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
        for number, token in enumerate(itertools.islice(itertools.cycle(ids), length)):
            await asyncio.sleep(self.seconds)
            last = number == length - 1
            failed = number == self.fail_at
            finish = FinishReason.ERROR if failed else FinishReason.LENGTH if last else None
            if number and finish is None and request.params.logprobs is None:
                step = protocol.Step(array("I", [key]).tobytes(), array("I", [token]).tobytes())
            else:
                delta = Delta("", [] if failed else [token], finish_reason=finish, error="a fault" if failed else "")
                if not number:
                    delta.prompt_logprobs = rows
                if request.params.logprobs is not None:
                    delta.logprobs = [self._row(token, request.params.logprobs)]
                step = protocol.Step(b"", b"", [(key, delta)])
            self._take(step, time.monotonic())
            if finish:
                break

    def _row(self, token: int, count: int) -> TokenLogprobs:
        """The token, then the first ids of the vocabulary as the most likely ones."""
        others = [other for other in range(3, 4 + count) if other != token][:count]
        return TokenLogprobs((token, *others), tuple(-0.5 - i for i in range(len(others) + 1)), 1)
