"""POST /v1/chat/completions: messages to an answer, whole or streamed, with logprobs."""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.generation import Call, Prompt, Usage, Work, refuse_failed, truncated
from octavo.server.json_body import Router
from octavo.server.logprobs import ChatLogprobs, prompt_logprobs
from octavo.server.protocol import ChatBody
from octavo.server.reading import Reader, Reading, delta
from octavo.server.serving import Serving, serving_of
from octavo.server.sse import EventStream, encode, event
from octavo.server.tool_choice import constrained
from octavo.types import CompletionOutput, RequestOutput, SamplingParams

router = Router(tags=["OpenAI"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    serving.refuse_unless_open()
    serving.model(body.model)
    with _named_as_given(body):
        params = _params(serving, body)
    serving.check_choices(params.n)
    text, unread = await serving.chat_prompt(body)
    headers = serving.headers(body, unread)
    cut = body.truncate_prompt_tokens is not None
    ids = await serving.encode(text, body.add_special_tokens, may_be_longer=cut)
    ids = truncated(body, ids, serving.engine.info.max_model_len, params.max_tokens)
    params = constrained(params, body.tools or (), body.choice, serving.formats(body).tools, body.parallel_tool_calls)
    reading = Reading.of(serving, body, text, ids)
    if reading is not None and reading.shown_token_ids:
        params = dataclasses.replace(params, shown_token_ids=reading.shown_token_ids)
    with _named_as_given(body):
        call = await Call.of(serving, request, body, "chatcmpl", [Prompt(text, ids)], params)
    answer = _Answer(serving, body, call, reading)
    if body.stream:
        return EventStream(answer.chunks(await call.start()), headers, serving.options.sse_keep_alive_interval)
    outputs = await call.finish(request)
    if outputs is None:
        return Response(status_code=499)
    return Response(encode(answer.whole(outputs[0])), headers=headers, media_type="application/json")


def _params(serving: Serving, body: ChatBody) -> SamplingParams:
    """Sampling parameters; an answer may fill the context where no limit is given."""
    given = {"max_tokens": None, **body.given_sampling()}
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return serving.sampling(given)


@contextlib.contextmanager
def _named_as_given(body: ChatBody) -> Iterator[None]:
    """Chat has other names for two sampling fields: errors tell of those that the request has."""
    try:
        yield
    except InvalidRequest as error:
        names = {"logprobs": "top_logprobs"} if body.top_logprobs is not None else {}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if (new := names.get(error.param)) is None:
            raise
        message, hint = (text.replace(f"{error.param}=", f"{new}=") for text in (error.message, error.hint))
        raise InvalidRequest(message, hint, new) from None


class _Answer:
    """The answer to one request, in either form."""

    def __init__(self, serving: Serving, body: ChatBody, call: Call, reading: Reading | None) -> None:
        self.body, self.call = body, call
        self.tokenizer = serving.tokenizer
        self.usage_at_end = body.usage_at_end or serving.options.enable_force_include_usage
        self.usage = Usage(call)
        params = call.groups[0].params
        top = body.top_logprobs or 0
        as_ids = body.return_tokens_as_token_ids
        self.logprobs = ChatLogprobs(self.tokenizer, top, as_ids, params.skip_special_tokens) if body.logprobs else None
        self.readers = [Reader(reading) for _ in range(call.n)] if reading else []
        last = body.messages[-1]
        self.role = serving.options.response_role if body.add_generation_prompt else last["role"]
        self.echoed = _text_of(last.get("content")) if body.echo and last["role"] == self.role else ""

    def head(self, kind: str) -> dict[str, Any]:
        call = self.call
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.fingerprint,
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self.usage.add(0, output)
        asked = self.body.extra.get("prompt_logprobs") is not None
        return {
            **self.head("chat.completion"),
            "choices": [self._choice(sample) for sample in output.outputs],
            "usage": self.usage.shape(),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, sample: CompletionOutput) -> dict[str, Any]:
        self.usage.completion_tokens += len(sample.token_ids)
        message = {
            "role": self.role,
            "content": sample.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "reasoning": None,
        }
        finish_reason = sample.finish_reason
        if self.readers:
            reader = self.readers[sample.index]
            message |= reader.message(sample)
            finish_reason = reader.finish_reason(sample)
            self._count_thoughts()
        if self.echoed:
            message["content"] = self.echoed + (message["content"] or "")
        return {
            "index": sample.index,
            "message": message,
            "logprobs": self.logprobs.part(sample.logprobs or ()) if self.logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": sample.stop_reason,
            "token_ids": sample.token_ids if self.body.return_token_ids else None,
        }

    def _count_thoughts(self) -> None:
        self.usage.reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self.readers)

    async def chunks(self, work: Work) -> AsyncGenerator[bytes, None]:
        """Events for each output of the engine; the plain ones are put together from ready-made bytes."""
        body, usage = self.body, self.usage
        always = body.usage_always
        plain = not (self.logprobs or body.return_token_ids or always)
        head = self.head("chat.completion.chunk")
        start = event(head).removesuffix(b"}\n\n") + b',"choices":[{"index":'
        heads = [start + b"%d" % index + b',"delta":{"content":' for index in range(self.call.n)]
        tail = b'},"logprobs":null,"finish_reason":null}]' + (b',"usage":null' if self.usage_at_end else b"") + b"}\n\n"
        begun = [False] * self.call.n
        outputs = work.outputs()

        def chunk(choice: dict[str, Any]) -> bytes:
            counts: dict[str, Any] = {}
            if always:
                counts["usage"] = usage.shape()
            elif self.usage_at_end:
                counts["usage"] = None
            return event({**head, "choices": [choice], **counts})

        try:
            async for _, output in outputs:
                events = []
                usage.add(0, output)
                for sample in output.outputs:
                    index = sample.index
                    if not begun[index]:
                        begun[index] = True
                        events.append(chunk(self._opening(index, output)))
                        if self.echoed:
                            events.append(heads[index] + encode(self.echoed) + tail)
                    usage.completion_tokens += len(sample.token_ids)
                    if self.readers:
                        refuse_failed(sample)
                        for choice in self._read(sample):
                            text = choice["delta"].get("content")
                            short = plain and choice["finish_reason"] is None and text is not None
                            events.append(heads[index] + encode(text) + tail if short else chunk(choice))
                    elif plain and sample.finish_reason is None:
                        events.append(heads[index] + encode(sample.text) + tail)
                    else:
                        refuse_failed(sample)
                        events.append(chunk(self._delta(sample)))
                if events:  # text may be held back that could begin a mark
                    yield events[0] if len(events) == 1 else b"".join(events)
        finally:
            await outputs.aclose()
            await work.aclose()
        if self.usage_at_end:
            yield event({**head, "choices": [], "usage": usage.shape()})

    def _opening(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": self.role, "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _read(self, sample: CompletionOutput) -> list[dict[str, Any]]:
        """A choice for each part of the answer that is new; what else there is to tell stands in the last one."""
        reader = self.readers[sample.index]
        deltas = [delta(part) for part in reader.parts(sample)]
        if self.usage_at_end:
            self._count_thoughts()
        if not deltas and (sample.finish_reason or self.logprobs or self.body.return_token_ids):
            deltas = [{}]
        choices = [
            {"index": sample.index, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas[:-1]
        ]
        if deltas:
            choices.append(self._delta(sample, deltas[-1], reader.finish_reason(sample)))
        return choices

    def _delta(
        self, sample: CompletionOutput, delta: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sample.index,
            "delta": {"content": sample.text} if delta is None else delta,
            "logprobs": self.logprobs.part(sample.logprobs or ()) if self.logprobs else None,
            "finish_reason": finish_reason or sample.finish_reason,
        }
        if sample.finish_reason is not None:
            choice["stop_reason"] = sample.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice


def _text_of(content: object) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
