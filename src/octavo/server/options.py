"""Options of the server, beside those of the engine; flags and the docs table are read off this dataclass."""

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from octavo.config import Option, options_of
from octavo.errors import InvalidConfig, shown
from octavo.known import Elsewhere, drop_known
from octavo.types import MAX_N

MAX_SECONDS = 24 * 3600
OPTIONS_FILE = "server.json"  # in the private folder of one server


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How `octavo serve` listens, admits, guards and ends.

    Raises:
        InvalidConfig: a value outside its range; the message names option, value and range.
    """

    host: str = "0.0.0.0"
    """Address to listen on; 127.0.0.1 for this machine only, :: for IPv6."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    ssl_certfile: str | None = None
    """Certificate (PEM) to serve HTTPS with."""
    ssl_keyfile: str | None = None
    """Key (PEM) of the certificate."""
    api_server_count: int = 1
    """Processes that speak HTTP; more of them for more than about 20,000 streamed tokens a second."""
    shutdown_timeout: float = 30.0
    """Seconds that requests at work may take to finish after SIGTERM or SIGINT; a second signal ends them at once."""
    stall_timeout: float = 60.0
    """Seconds that a step may run, or the engine be silent, before /health says 503."""
    exit_on_stall: bool = False
    """End with the cause, and a status that is not 0, when that time is over; else wait for the engine to move on."""
    timeout_keep_alive: int = 75
    """Seconds that an idle connection is kept; more than the clients and proxies in front keep theirs (mostly 60)."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait for a place; further ones are refused with 503 and Retry-After."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait for a place; further ones are refused with 503 and Retry-After."""
    profile_dir: str | None = None
    """Folder for the traces of /start_profile; one of its own in the system's temporary folder when not given."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must send; several share the engine fairly. OCTAVO_API_KEY when not given."""
    admin_api_key: str | None = None
    """Key of the control routes (cache reset, profile), which do not exist without it."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use for the model; the first one is reported. The model's own when not given."""
    metrics_key: str | None = None
    """Key that opens /metrics, and nothing else, for a scraper."""
    metrics_open: bool = False
    """Let everybody read /metrics without a key."""
    max_body_bytes: int = 32 << 20
    """Largest request body; a larger one is refused with 413."""
    max_choices: int = 1024
    """Most answers one request may ask for: prompts times n."""
    data_dir: str | None = None
    """Folder of uploaded files and batches; several servers may share it. `data` in Octavo's cache when not given."""
    max_file_bytes: int = 512 << 20
    """Largest file that may be uploaded for a batch."""
    max_batch_requests: int = 50_000
    """Most lines of a batch."""
    batch_concurrency: int | None = None
    """Most lines of batches at work at once; three quarters of max_num_seqs when not given."""
    reject_unknown_fields: bool = False
    """Refuse requests with fields nobody knows, instead of listing them in the header x-octavo-ignored."""
    chat_template: str | None = None
    """Jinja file, or the template itself, in place of the model's chat template."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own. A template is a program, sandboxed but able to use up time."""
    response_role: str = "assistant"
    """Role of the answers to chats."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of which origins may call from a browser (CORS); * is all of them, without credentials."""
    root_path: str = ""
    """Path under which a proxy in front shows this server."""
    disable_fastapi_docs: bool = False
    """Leave out /docs and /openapi.json."""
    enable_force_include_usage: bool = False
    """Send token counts at the end of every stream, asked for or not."""
    sse_keep_alive_interval: float = 0.0
    """Seconds of silence after which a stream gets a comment, for proxies that cut silent ones; 0 never."""
    metrics_prefix: str = "octavo"
    """Prefix of the metrics' names, or several: octavo,vllm serves each under both, for dashboards that read vllm."""
    disable_log_stats: bool = False
    """Leave out the line of throughput, queue and cache every 10 seconds."""
    log_format: Literal["text", "json"] = "text"
    """Lines of text, or one JSON object a line."""
    enable_log_requests: bool = False
    """Log each request's id, parameters and end; the text of prompts only at OCTAVO_LOGGING_LEVEL=DEBUG."""
    max_log_len: int | None = None
    """Most characters of a prompt in the log."""
    otlp_traces_endpoint: str | None = None
    """Collector of OpenTelemetry traces, such as http://localhost:4317; needs the extra otel."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    """Least level of messages of the HTTP server."""

    def __post_init__(self) -> None:
        _check_integer("port", self.port, 0, 65535)
        _check_integer("api_server_count", self.api_server_count, 1, 256)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, 2**31)
        _check_seconds("shutdown_timeout", self.shutdown_timeout, 0)
        _check_seconds("stall_timeout", self.stall_timeout, 1)
        _check_integer("timeout_keep_alive", self.timeout_keep_alive, 0, MAX_SECONDS)
        _check_seconds("sse_keep_alive_interval", self.sse_keep_alive_interval, 0)
        _check_integer("max_body_bytes", self.max_body_bytes, 1024, 2**40)
        _check_integer("max_file_bytes", self.max_file_bytes, 1024, 2**40)
        _check_integer("max_batch_requests", self.max_batch_requests, 1, 10**7)
        if self.batch_concurrency is not None:
            _check_integer("batch_concurrency", self.batch_concurrency, 1, 2**16)
        _check_integer("max_choices", self.max_choices, 1, MAX_N)
        if self.max_log_len is not None:
            _check_integer("max_log_len", self.max_log_len, 0, 2**31)
        _check_prefixes(self.metrics_prefixes)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise InvalidConfig("ssl_keyfile is given without ssl_certfile.", "Give the certificate as well.")

    @property
    def metrics_prefixes(self) -> tuple[str, ...]:
        return tuple(prefix.strip() for prefix in self.metrics_prefix.split(","))

    @classmethod
    def from_keywords(cls, owner: str, **keywords: Any) -> Self:
        """The options of flat keywords, as flags give them."""
        return cls(**drop_known(owner, {option.name for option in server_options()}, SERVER_ELSEWHERE, keywords))


@functools.cache
def server_options() -> tuple[Option, ...]:
    """Every server option with its default and the sentence written under it."""
    return tuple(options_of(ServerOptions, "Server"))


SERVER_ELSEWHERE: dict[str, Elsewhere] = {
    "ssl_ca_certs": Elsewhere("clients show no certificates; a proxy in front can ask for them", (None,)),
    "ssl_cert_reqs": Elsewhere("clients show no certificates; a proxy in front can ask for them", (None, 0)),
    "enable_ssl_refresh": Elsewhere("start the server again to read a new certificate", (None, False)),
    "headless": Elsewhere("this server runs on one host", (None, False)),
    "middleware": Elsewhere("put a proxy in front", (None, [])),
    "enable_server_load_tracking": Elsewhere("/load always answers", (None, False, True)),
    "enable_request_id_headers": Elsewhere("x-request-id is always sent", (None, False, True)),
    "disable_uvicorn_access_log": Elsewhere("there is no access log", (None, False, True)),
    "tool_parser_plugin": Elsewhere("no code is loaded from files", (None, "")),
    "log_config_file": Elsewhere("use log_format", (None,)),
}
"""Flags of other servers."""


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(f"{name}={shown(value)} is not allowed: it must be an integer from {low} to {high}.")


def _check_prefixes(prefixes: tuple[str, ...]) -> None:
    wrong = [prefix for prefix in prefixes if not re.fullmatch("[a-z_][a-z0-9_]*", prefix)]
    if wrong or len(set(prefixes)) < len(prefixes):
        raise InvalidConfig(
            f"metrics_prefix={shown(','.join(prefixes))} is not allowed: it must be lower-case letters, digits and "
            "underscores, and several of them different, with commas between."
        )


def _check_seconds(name: str, value: object, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_SECONDS:
        raise InvalidConfig(f"{name}={shown(value)} is not allowed: it must be {low:g} to {MAX_SECONDS} seconds.")
