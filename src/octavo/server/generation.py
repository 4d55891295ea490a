"""Requests at work: prompts and parameters to checked groups, groups to merged outputs, outputs to counts."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fastapi import Request

from octavo.engine.client import EngineClient, Stream
from octavo.engine.inputs import Group
from octavo.errors import InvalidRequest
from octavo.server.errors import HTTPError
from octavo.server.gate import REQUEST_ID
from octavo.server.protocol import GenerationBody
from octavo.server.serving import Serving, tenant_of
from octavo.server.sse import while_connected
from octavo.types import CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams

_numbers = itertools.count()


@dataclass(slots=True)
class Prompt:
    """One prompt: its text where there is one, and its token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(slots=True)
class Call:
    """A request that was checked: what completions and chat need to run and to answer it."""

    engine: EngineClient
    id: str
    created: int
    model: str
    fingerprint: str
    groups: list[Group]
    tenant: str
    timeout_ms: int | None
    traceparent: str

    @classmethod
    async def of(
        cls,
        serving: Serving,
        request: Request,
        body: GenerationBody,
        kind: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> Self:
        """Check every prompt before any of them runs.

        Raises:
            InvalidRequest: names the prompt that can never run, or more answers than allowed.
        """
        call_id = f"{kind}-{body.request_id or request.scope[REQUEST_ID]}"
        params = dataclasses.replace(
            params, output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        )
        # Two users may send the same id, and each must be able to go without the other.
        inner = f"{call_id}.{next(_numbers)}"
        groups = []
        for place, prompt in enumerate(prompts):
            mapping = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids, "cache_salt": body.cache_salt}
            try:
                group = await serving.engine.check(
                    mapping, params, request_id=f"{inner}.{place}", priority=body.priority
                )
            except InvalidRequest as error:
                where = f"Prompt {place}: " if len(prompts) > 1 else ""
                param = "prompt" if error.param == "prompt_token_ids" else error.param  # the field's name in HTTP
                raise InvalidRequest(where + error.message, error.hint, param) from None
            groups.append(group)
        if serving.request_log is not None:
            for group in groups:
                num_tokens = len(group.requests[0].prompt_token_ids)
                serving.request_log.received(group.id, params, num_tokens, group.text)
        return cls(
            engine=serving.engine,
            id=call_id,
            created=int(time.time()),
            model=serving.model(body.model),
            fingerprint=serving.fingerprint,
            groups=groups,
            tenant=tenant_of(request),
            timeout_ms=body.timeout_ms,
            traceparent=request.headers.get("traceparent", ""),
        )

    @property
    def n(self) -> int:
        return self.groups[0].params.n

    async def start(self) -> "Work":
        """Queue all of it, or nothing.

        Raises:
            Overloaded, ShuttingDown, EngineDead, TimedOut: the engine does not take it.
        """
        streams: list[Stream] = []
        try:
            for group in self.groups:
                streams.append(
                    self.engine.generate(
                        group, tenant=self.tenant, timeout_ms=self.timeout_ms, traceparent=self.traceparent
                    )
                )
            for stream in streams:
                await stream.admitted()
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return Work(streams)

    async def finish(self, request: Request) -> list[RequestOutput] | None:
        """The whole answers, in the order of the prompts; None when the client went away, which aborts them.

        Raises:
            HTTPError: one of them failed; and what `start` raises.
        """
        answers: list[RequestOutput | None] = [None] * len(self.groups)
        async with while_connected(request.receive), contextlib.aclosing(await self.start()) as work:
            async for place, output in work.outputs():
                for sample in output.outputs:
                    refuse_failed(sample)
                answers[place] = output
        found = [answer for answer in answers if answer is not None]
        return found if len(found) == len(self.groups) else None


class Work:
    """Streams that are answered together. Closing it early aborts what is not finished."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs as they come, each with the number of its prompt."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(len(self.streams))

        async def pump(place: int, stream: Stream) -> None:
            try:
                async for output in stream:
                    await queue.put((place, output))
            except Exception as error:
                await queue.put((place, error))
            else:
                await queue.put((place, None))

        pumps = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(self.streams)]
        try:
            running = len(pumps)
            while running:
                place, item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield place, item
        finally:
            for task in pumps:
                task.cancel()

    async def aclose(self) -> None:
        for stream in self.streams:
            stream.close()


def refuse_failed(sample: CompletionOutput) -> None:
    """A truncated answer must not look like a whole one.

    Raises:
        HTTPError: the engine ended this sample by itself.
    """
    if sample.finish_reason == "error":
        raise HTTPError(500, f"The engine could not finish this request: {sample.stop_reason or 'unknown cause'}.")
    if sample.finish_reason == "abort" and sample.stop_reason != "timeout":
        raise HTTPError(503, "The request was aborted by the server.")


class Usage:
    """Token counts of one request."""

    def __init__(self, call: Call) -> None:
        self.prompt_tokens = sum(len(group.requests[0].prompt_token_ids) for group in call.groups)
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None  # of completion_tokens, where thoughts are told apart
        self._cached: dict[int, int] = {}  # by prompt

    def add(self, place: int, output: RequestOutput) -> None:
        if output.num_cached_tokens is not None:
            self._cached.setdefault(place, output.num_cached_tokens)

    def shape(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": None
            if self.reasoning_tokens is None
            else {"reasoning_tokens": self.reasoning_tokens},
        }


def truncated(body: GenerationBody, token_ids: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
    """The part of a prompt that `truncate_prompt_tokens` leaves; -1 leaves room for `max_tokens`."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        keep = max(0, max_model_len - (max_tokens or 1))
    if keep is None or len(token_ids) <= keep:
        return token_ids
    return token_ids[len(token_ids) - keep :] if body.truncation_side == "left" else token_ids[:keep]
