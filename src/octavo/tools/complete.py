"""`octavo complete`: a running server continues a text, streamed to the terminal."""

import sys
import time
from contextlib import closing
from typing import Annotated

from cyclopts import Parameter

from octavo.errors import InvalidRequest, OctavoError
from octavo.tools.server_client import DEFAULT_URL, Server, sampling


def complete(
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *,
    url: str = DEFAULT_URL,
    api_key: str | None = None,
    model: Annotated[str | None, Parameter(name=["--model", "--model-name"])] = None,
    quick: Annotated[str | None, Parameter(name=["--quick", "-q"], allow_leading_hyphen=True)] = None,
    max_tokens: int | None = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    stats: bool = False,
) -> None:
    """Continue a text on a running server. Without a prompt each line typed is one; a pipe is one prompt as a whole.

    Parameters
    ----------
    prompt
        Text to continue; "-" reads it from standard input.
    url
        Where the server is, or unix:PATH.
    api_key
        The server's key; OCTAVO_API_KEY or OPENAI_API_KEY when not given.
    model
        Name of the model; the server's first one when not given.
    quick
        The same as a prompt.
    max_tokens
        Most tokens to generate.
    temperature
        0 takes the most likely token; higher is more varied, up to 2. The server's default when not given.
    top_p
        Sample from the most likely tokens that together have this probability.
    seed
        Makes sampling repeatable.
    stop
        Strings that end the text.
    stats
        Say afterwards, on standard error, how long it took.
    """
    server = Server(url, api_key)
    fields = sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    given = prompt if prompt is not None else quick
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        name = model or server.model()
        print(f"{name} at {server.url}. Ctrl-D ends.", file=sys.stderr)
        while True:
            try:
                text = input("> ")
            except EOFError:
                print(file=sys.stderr)
                return
            if text:
                try:
                    _stream(server, {"model": name, "prompt": text, **fields}, stats)
                except KeyboardInterrupt:
                    print()
                except OctavoError as error:
                    print(f"\n{error}", file=sys.stderr)
    text = standard_input() if given in (None, "-") else str(given)
    _stream(server, {"model": model or server.model(), "prompt": text, **fields}, stats)


def standard_input() -> str:
    """
    Raises:
        InvalidRequest: it is no text, or empty.
    """
    try:
        text = "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"Standard input is not text: {error}.") from None
    if not text:
        raise InvalidRequest("Standard input is empty.", "Give a text, or pipe one in.")
    return text


def _stream(server: Server, body: dict[str, object], stats: bool) -> None:
    begin, first, tokens = time.perf_counter(), None, 0
    body = {**body, "stream_options": {"include_usage": True}}
    with closing(server.stream("/v1/completions", body)) as chunks:
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                if choice.get("text"):
                    first = first or time.perf_counter()
                    print(choice["text"], end="", flush=True)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    print()
    if stats:
        end = time.perf_counter()
        seconds = end - (first or end)
        speed = f"{(tokens - 1) / seconds:.1f} tok/s" if seconds > 0 and tokens > 1 else "-"
        print(f"first token after {1e3 * ((first or end) - begin):.0f} ms, {tokens} tokens, {speed}", file=sys.stderr)
