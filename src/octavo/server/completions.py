"""POST /v1/completions: prompts to texts, whole or streamed, with logprobs and echo."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from octavo.engine.inputs import as_list, parse
from octavo.errors import InvalidRequest, shown
from octavo.server.generation import Call, Prompt, Usage, refuse_failed, truncated
from octavo.server.json_body import Router
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.protocol import CompletionBody
from octavo.server.serving import Serving, serving_of
from octavo.server.sse import EventStream, encode, event
from octavo.types import CompletionOutput, RequestOutput, SamplingParams

router = Router(tags=["OpenAI"])


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue a prompt, or several."""
    serving = serving_of(request)
    serving.refuse_unless_open()
    serving.model(body.model)
    headers = serving.headers(body)
    params, only_prompt = _params(serving, body)
    prompts = await _prompts(serving, body, params)
    call = await Call.of(serving, request, body, "cmpl", prompts, params)
    answer = _Answer(serving, body, call, prompts, only_prompt)
    if body.stream:
        return EventStream(answer.chunks(await call.start()), headers, serving.options.sse_keep_alive_interval)
    outputs = await call.finish(request)
    if outputs is None:
        return Response(status_code=499)
    return Response(encode(answer.whole(outputs)), headers=headers, media_type="application/json")


def _params(serving: Serving, body: CompletionBody) -> tuple[SamplingParams, bool]:
    """Sampling parameters, and whether only the prompt is asked for (`max_tokens=0` with echo)."""
    given = {"max_tokens": 16, **body.given_sampling()}
    only_prompt = body.echo and type(given["max_tokens"]) is int and given["max_tokens"] == 0
    if only_prompt:
        given |= {"max_tokens": 1, "min_tokens": 0}
    if body.echo and given.get("prompt_logprobs") is None:
        given["prompt_logprobs"] = given.get("logprobs")
    return serving.sampling(given), only_prompt


async def _prompts(serving: Serving, body: CompletionBody, params: SamplingParams) -> list[Prompt]:
    if isinstance(body.prompt, dict):
        raise InvalidRequest("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    many = isinstance(body.prompt, list) and bool(body.prompt) and not isinstance(body.prompt[0], int)
    serving.check_choices((len(body.prompt) if many else 1) * params.n)
    items = as_list(body.prompt)
    if not items:
        raise InvalidRequest("prompt is an empty list: there is nothing to compute.", param="prompt")
    prompts = []
    for place, item in enumerate(items):
        if isinstance(item, dict):
            raise InvalidRequest(f"prompt[{place}]={shown(item)} is neither a string nor token ids.", param="prompt")
        parsed = parse(item)
        if parsed.text is not None:
            cut = body.truncate_prompt_tokens is not None
            ids = await serving.encode(parsed.text, body.add_special_tokens, may_be_longer=cut)
        else:
            ids = list(parsed.token_ids or ())
        ids = truncated(body, ids, serving.engine.info.max_model_len, params.max_tokens)
        prompts.append(Prompt(parsed.text, ids))
    return prompts


class _Answer:
    """The answer to one request, in either form."""

    def __init__(
        self, serving: Serving, body: CompletionBody, call: Call, prompts: Sequence[Prompt], only_prompt: bool
    ) -> None:
        self.body, self.call, self.prompts, self.only_prompt = body, call, prompts, only_prompt
        self.tokenizer = serving.tokenizer
        self.usage_at_end = body.usage_at_end or serving.options.enable_force_include_usage
        self.usage = Usage(call)
        self.params = call.groups[0].params
        self.wants_logprobs = self.params.logprobs is not None
        choices = len(prompts) * call.n
        self.logprobs = [CompletionLogprobs(self.tokenizer, body.return_tokens_as_token_ids) for _ in range(choices)]
        self.head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.fingerprint,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for place, output in enumerate(outputs):
            self.usage.add(place, output)
            for sample in output.outputs:
                choices.append(self._choice(place, output, sample, first=True) | self._about_prompt(place, output))
        return {
            **self.head,
            "choices": choices,
            "usage": self.usage.shape(),
            "kv_transfer_params": None,
        }

    async def chunks(self, work: Any) -> AsyncGenerator[bytes, None]:
        """One event for each output of the engine; the plain ones are put together from ready-made bytes."""
        always = self.body.usage_always
        plain = not (self.wants_logprobs or self.body.return_token_ids or self.only_prompt or always)
        start = event(self.head).removesuffix(b"}\n\n") + b',"choices":[{"index":'
        heads = [start + b"%d" % index + b',"text":' for index in range(len(self.logprobs))]
        usage = b',"usage":null' if self.usage_at_end else b""
        tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + usage + b"}\n\n"
        begun = [False] * len(self.logprobs)
        n = self.call.n
        outputs = work.outputs()
        try:
            async for place, output in outputs:
                events = []
                self.usage.add(place, output)
                for sample in output.outputs:
                    index = place * n + sample.index
                    if plain and sample.finish_reason is None and (begun[index] or not self.body.echo):
                        self.usage.completion_tokens += len(sample.token_ids)
                        events.append(heads[index] + encode(sample.text) + tail)
                        continue
                    refuse_failed(sample)
                    choice = self._choice(place, output, sample, first=not begun[index])
                    if not begun[index] and self.body.return_token_ids:
                        choice["prompt_token_ids"] = output.prompt_token_ids
                    begun[index] = True
                    chunk: dict[str, Any] = {**self.head, "choices": [choice]}
                    if always:
                        chunk["usage"] = self.usage.shape()
                    elif self.usage_at_end:
                        chunk["usage"] = None
                    events.append(event(chunk))
                yield events[0] if len(events) == 1 else b"".join(events)
        finally:
            await outputs.aclose()
            await work.aclose()
        if self.usage_at_end:
            yield event({**self.head, "choices": [], "usage": self.usage.shape()})

    def _choice(self, place: int, output: RequestOutput, sample: CompletionOutput, first: bool) -> dict[str, Any]:
        text, token_ids, rows = sample.text, sample.token_ids, [*(sample.logprobs or ())]
        finish_reason = sample.finish_reason
        if self.only_prompt:
            text, token_ids, rows = "", [], []
            finish_reason = finish_reason and "length"
        self.usage.completion_tokens += len(token_ids)
        index = place * self.call.n + sample.index
        logprob_ids = token_ids
        if self.body.echo and first:
            text = self._prompt_text(place) + text
            logprob_ids = [*output.prompt_token_ids, *token_ids]
            rows = [*(output.prompt_logprobs or ()), *rows]
        return {
            "index": index,
            "text": text,
            "logprobs": self.logprobs[index].part(logprob_ids, rows) if self.wants_logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": None if self.only_prompt else sample.stop_reason,
            "token_ids": token_ids if self.body.return_token_ids else None,
        }

    def _about_prompt(self, place: int, output: RequestOutput) -> dict[str, Any]:
        asked = self.body.extra.get("prompt_logprobs") is not None
        return {
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
        }

    def _prompt_text(self, place: int) -> str:
        prompt = self.prompts[place]
        if prompt.text is not None and self.body.truncate_prompt_tokens is None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self.params.skip_special_tokens)
