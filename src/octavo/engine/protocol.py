"""What the API processes and the engine process say to each other: msgpack structs over ZMQ.

The engine has one ROUTER socket, each API process a DEALER; a message is one frame. Nothing is unpickled: a
frame that is not one of these structs is refused by the decoder. The most frequent message, one `Step` for each
step and API process, is columns of integers as bytes, so that neither side makes an object for each token.
"""

from array import array
from dataclasses import replace
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.log import LogFormat
from octavo.types import Delta, FinishReason, Request, SamplingParams

ENGINE_SOCKET = "engine.sock"  # in the private folder of one server
ENGINE_FILE = "engine.json"  # an EngineStart
CAUSE_FILE = "cause"  # why the engine ended, where it could still say so
TOKEN = "I"  # array type of token ids and keys


class EngineStart(msgspec.Struct, frozen=True):
    """What the supervisor hands to the engine process, as JSON in the private folder."""

    config: EngineConfig
    served_names: tuple[str, ...] = ()  # the model's own name when empty
    metrics_prefixes: tuple[str, ...] = ("octavo",)
    log_stats: bool = True
    log_requests: bool = False
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str = ""
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    stall_timeout: float = 60.0  # seconds
    profile_dir: str = ""


class TokenizerFiles(msgspec.Struct, frozen=True):
    """Where the tokenizer lies; both are empty when the engine runs without one, or has not found it yet."""

    folder: str = ""
    gguf: str = ""


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine found and decided at its start.

    `options` are the resolved engine options by group. `phases` are the seconds of each phase of the start.
    """

    model: str
    served_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    max_logprobs: int
    seed: int
    eos_token_ids: list[int]
    default_params: SamplingParams
    options: dict[str, dict[str, Any]]
    phases: dict[str, float]
    tokenizer: TokenizerFiles = TokenizerFiles()
    has_limits: bool = False  # of the queue: then a request waits for the engine's word whether it is taken


# From an API process


class Join(msgspec.Struct, tag=True):
    """The first message; the engine answers with `Starting` or `Hello`."""


class Add(msgspec.Struct, tag=True):
    """Queue a request. Its sequences travel without their prompt, which all of them share: `prompt`.

    `keys` number the sequences within the API process. `arrival` is of the host's monotonic clock.
    """

    keys: list[int]
    requests: list[Request]
    prompt: bytes
    arrival: float
    traceparent: str = ""

    @classmethod
    def of(cls, keys: list[int], requests: tuple[Request, ...], arrival: float, traceparent: str = "") -> "Add":
        prompt = array(TOKEN, requests[0].prompt_token_ids).tobytes()
        bare = [replace(request, prompt_token_ids=()) for request in requests]
        return cls(keys, bare, prompt, arrival, traceparent)

    def whole(self) -> list[Request]:
        prompt = tuple(array(TOKEN, self.prompt))
        return [replace(request, prompt_token_ids=prompt) for request in self.requests]


class Abort(msgspec.Struct, tag=True):
    """End sequences: `reason` is stop where a stop string was found, else abort. Unknown keys are ignored."""

    keys: list[int]
    reason: FinishReason = FinishReason.ABORT


class Ask(msgspec.Struct, tag=True):
    """A control call; `Reply` comes back with the same `number`."""

    number: int
    name: str


class Http(msgspec.Struct, tag=True):
    """HTTP requests answered since the last time, as (method, route, status, seconds), and this process's memory."""

    process: str
    rows: list[tuple[str, str, int, float]]
    memory: int = 0  # bytes


# From the engine


class Starting(msgspec.Struct, tag=True):
    """The phase that the start is in. API processes read the tokenizer as soon as they know where it is."""

    phase: str
    tokenizer: TokenizerFiles = TokenizerFiles()


class Hello(msgspec.Struct, tag=True):
    """The engine is warm."""

    info: EngineInfo


class Step(msgspec.Struct, tag=True):
    """What a step changed for the sequences of one API process.

    `keys[i]` got the token `tokens[i]`, and nothing else. Whatever has more to say is in `others`.
    """

    keys: bytes
    tokens: bytes
    others: list[tuple[int, Delta]] = []


class Taken(msgspec.Struct, tag=True):
    """The request with this first key is queued; sent where the queue has limits, or it had to be compiled."""

    key: int


class Refused(msgspec.Struct, tag=True):
    """The request with this first key was not queued. `status` 503 means overloaded, 400 invalid."""

    key: int
    why: str
    status: int = 503
    retry_after_s: int = 1
    param: str = ""


class Reply(msgspec.Struct, tag=True):
    """`value` is what the call returned; `error` is set instead when it failed."""

    number: int
    value: Any = None
    error: str = ""


class Beat(msgspec.Struct, tag=True):
    """Sent about twice a second; `stuck` says that a step does not end."""

    stuck: str = ""


class Dead(msgspec.Struct, tag=True):
    """The last message: the engine cannot go on."""

    cause: str


FromClient = Join | Add | Abort | Ask | Http
FromEngine = Starting | Hello | Step | Taken | Refused | Reply | Beat | Dead

encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
