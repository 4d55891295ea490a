"""What the routes of one server share: its engine, its options, the model's names, and how requests become prompts."""

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

from fastapi import Request

from octavo.engine.client import EngineClient
from octavo.engine.protocol import EngineInfo
from octavo.errors import EngineDead, InvalidRequest, ShuttingDown, shown
from octavo.observe.http_counts import HttpCounts
from octavo.observe.request_log import RequestLog
from octavo.server.auth import TENANT
from octavo.server.errors import HTTPError
from octavo.server.options import ServerOptions
from octavo.server.protocol import Body, ChatBody, GenerationBody, TokenizeBody
from octavo.text import chat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.formats import Formats
from octavo.types import INT64_MAX, SamplingParams
from octavo.version import __version__

logger = logging.getLogger("octavo")

IGNORED = "x-octavo-ignored"
MAX_IGNORED_SHOWN = 20
LONG_TEXT = 20_000  # characters; above it a text is read in a thread, so that streams go on
HUGE_TEXT = 500_000  # characters; above it texts take turns in one thread, so that they hold up only each other
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "conversation", "tokenize", "return_dict", "tokenizer"}
)

P = ParamSpec("P")
T = TypeVar("T")


class Serving:
    """One server's state, the same for all requests.

    Raises:
        InvalidConfig: the chat template of the options cannot be read or is not valid Jinja.
    """

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.started = int(time.time())
        self.counts = HttpCounts()
        self.request_log = RequestLog(options.max_log_len) if options.enable_log_requests else None
        self._begun = time.monotonic()
        given = options.chat_template
        self.chat_template = None if given is None else chat.read_template(given)
        engine.chat_template = self.chat_template
        self._told: set[str] = set()

    def info(self) -> EngineInfo:
        """What the engine is, once it has started.

        Raises:
            EngineDead, HTTPError: it has not, or is gone.
        """
        engine = self.engine
        if engine.state == "starting":
            raise HTTPError(503, engine.why, "Wait until /ready says 200.", headers={"retry-after": "1"})
        if engine.state == "dead":
            raise EngineDead(engine.why)
        return engine.info

    def refuse_unless_open(self) -> None:
        """
        Raises:
            EngineDead, ShuttingDown, HTTPError: no request is taken now.
        """
        self.info()
        if self.engine.state == "draining":
            raise ShuttingDown(self.engine.why)

    def age(self) -> float:
        """Seconds since this process began."""
        return round(time.monotonic() - self._begun, 1)

    def send_counts(self) -> None:
        """Tell the engine's metrics of the HTTP requests since the last time."""
        self.engine.count_http(self.counts.take(), _resident_bytes())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; the first one is reported."""
        return self.engine.info.served_names

    def model(self, given: str | None) -> str:
        """The name to answer with.

        Raises:
            HTTPError: there is no such model here.
        """
        names = self.names
        if given is None:
            return names[0]
        if given not in names:
            raise HTTPError(
                404,
                f"The model {shown(given)} does not exist.",
                f"Served are: {', '.join(names)}.",
                param="model",
                code="model_not_found",
            )
        return given

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the engine runs without one."""
        return self.engine.tokenizer if self.engine.info.tokenizer.folder else None

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters of a request, completed by the model's own.

        Raises:
            InvalidRequest: a value outside its range.
        """
        defaults = self.engine.info.default_params
        if self.tokenizer is None:
            given = {**given, "detokenize": False}
        return dataclasses.replace(defaults, **given)

    def check_choices(self, count: int) -> None:
        """
        Raises:
            InvalidRequest: a request asks for more answers than allowed.
        """
        if count > self.options.max_choices:
            raise InvalidRequest(
                f"This request asks for {count} answers (prompts times n); at most {self.options.max_choices} "
                "are allowed.",
                "Send several requests, or raise --max-choices when the server starts.",
                param="n",
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes whenever the version, the model or an engine option does."""
        facts = json.dumps([self.engine.info.model, self.engine.info.options], sort_keys=True, default=str)
        return f"octavo-{__version__}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"

    def headers(self, body: Body, also: tuple[str, ...] = ()) -> dict[str, str]:
        """Headers of the answer, which tell what of the request had no effect.

        Raises:
            InvalidRequest: a field that is known and not available, or unknown where those are refused.
        """
        names = [*body.unread(), *also]
        told = body.notices() if isinstance(body, GenerationBody) else {}
        if not names:
            return told
        if self.options.reject_unknown_fields:
            raise InvalidRequest(
                f"Unknown fields: {shown(names)}.",
                "This server runs with --reject-unknown-fields.",
                param=names[0][:80],
            )
        plain = [quote(name[:64], safe=".[]_-", errors="replace") for name in names[:MAX_IGNORED_SHOWN]]
        for name in plain:
            if name not in self._told and len(self._told) < 1000:
                self._told.add(name)
                logger.info("The request field %s is unknown and has no effect.", name)
        more = ["..."] if len(names) > MAX_IGNORED_SHOWN else []
        return {**told, IGNORED: ", ".join([*plain, *more])}

    async def chat_prompt(self, body: ChatBody | TokenizeBody) -> tuple[str, tuple[str, ...]]:
        """The text that the chat template makes of messages, and the given variables that it does not read.

        Raises:
            InvalidRequest: a message or variable at fault, or a template that may not be used.
        """
        if body.chat_template is not None and not self.options.trust_request_chat_template:
            raise InvalidRequest(
                "A chat_template in a request is not allowed.",
                "Start the server with --trust-request-chat-template to allow it.",
                param="chat_template",
            )
        variables = dict(body.chat_template_kwargs)
        for name in variables:
            if name in RESERVED_VARIABLES:
                raise InvalidRequest(
                    f"chat_template_kwargs must not have {name}: it is not a variable of its own.",
                    param=f"chat_template_kwargs.{name}",
                )
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        template = body.chat_template if body.chat_template is not None else self.chat_template
        render = functools.partial(
            chat.render,
            self.engine.tokenizer,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=template,
            tools=body.tools,
            documents=body.documents,
            **variables,
        )
        # A request's own template may take any time.
        text = await off_loop(_size(body) if body.chat_template is None else LONG_TEXT + 1, render)
        read = chat.variables(self.engine.tokenizer, template, body.tools) if variables else frozenset()
        return text, tuple(f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs if name not in read)

    def formats(self, body: ChatBody) -> Formats:
        """How the model writes calls and thoughts, with the template that this request uses."""
        if body.chat_template is None:
            return self.engine.formats
        return self.engine.formats_of(chat.source(self.engine.tokenizer, body.chat_template, body.tools))

    async def encode(self, text: str, add_special_tokens: bool, *, may_be_longer: bool = False) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: it is no text, or has so many characters that it could never fit the context; then it
                is not tokenized at all, unless it may be longer.
        """
        tokenizer, max_model_len = self.engine.tokenizer, self.engine.info.max_model_len
        if not may_be_longer and len(text) > LONG_TEXT and len(text) > max_model_len * longest_token(tokenizer):
            raise InvalidRequest(
                f"This model's maximum context length is {max_model_len} tokens. The prompt has {len(text)} "
                "characters, which are more tokens than that however they are read.",
                "Shorten the prompt.",
                param="prompt",
            )
        return await off_loop(len(text), tokenizer.encode, text, add_special_tokens)


def serving_of(request: Request) -> Serving:
    """The `Serving` of the app that got this request."""
    serving: Serving = request.app.state.serving
    return serving


def tenant_of(request: Request) -> str:
    return str(request.scope.get(TENANT, ""))


_huge_texts = ThreadPoolExecutor(1, "huge-texts")


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a text of `size` characters, in a thread if that is long."""
    if size <= LONG_TEXT:
        return work(*args, **kwargs)
    threads = _huge_texts if size > HUGE_TEXT else None
    return await asyncio.get_running_loop().run_in_executor(threads, functools.partial(work, *args, **kwargs))


@functools.lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Most characters of a text that one token may stand for; without end where unknown ones become one token."""
    if not (tokenizer.is_byte_level or tokenizer.byte_tokens):
        return INT64_MAX
    return max(map(len, tokenizer.raw.get_vocab()), default=1)


def _size(body: ChatBody | TokenizeBody) -> int:
    """Characters of the messages, roughly: what is nested deeper is small or refused."""
    messages: Any = body.messages
    if not isinstance(messages, list):
        return 0
    return sum(_text_size(message.get("content")) for message in messages if isinstance(message, Mapping)) + sum(
        len(value) for value in body.chat_template_kwargs.values() if isinstance(value, str)
    )


def _text_size(content: object) -> int:
    if isinstance(content, list):
        return sum(len(str(part.get("text", ""))) for part in content if isinstance(part, Mapping))
    return len(content) if isinstance(content, str) else 0


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
