"""`octavo chat`: a conversation with the model of a running server."""

import sys
from contextlib import closing, suppress
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.errors import OctavoError
from octavo.tools.complete import standard_input
from octavo.tools.server_client import DEFAULT_URL, Server, sampling

with suppress(ImportError):  # the arrow keys of `input`
    import readline  # noqa: F401

HELP = "Commands: /new forgets the conversation, /undo the last exchange, /system TEXT sets the system prompt, /exit."


class Conversation:
    """The messages so far, and who answers them."""

    def __init__(self, server: Server, model: str, system: str | None, fields: dict[str, Any]) -> None:
        self.server, self.model, self.system, self.fields = server, model, system, fields
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> None:
        """Print the answer as it comes; what fails or is broken off leaves the conversation as it was."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": [*system, *messages], **self.fields}
        parts = []
        with closing(self.server.stream("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    if new := choice.get("delta", {}).get("content"):
                        parts.append(new)
                        print(new, end="", flush=True)
        print()
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def command(self, line: str) -> bool:
        """False ends the conversation."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/new":
            self.messages = []
        elif word == "/undo":
            self.messages = self.messages[:-2]
        elif word == "/system":
            self.system = rest.strip() or None
        else:
            print(HELP, file=sys.stderr)
        return True


def chat(
    message: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *,
    url: str = DEFAULT_URL,
    api_key: str | None = None,
    model: Annotated[str | None, Parameter(name=["--model", "--model-name"])] = None,
    quick: Annotated[str | None, Parameter(name=["--quick", "-q"], allow_leading_hyphen=True)] = None,
    system_prompt: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> None:
    """Talk with the model of a running server.

    With a message, or with one piped in, only the answer is printed; otherwise the conversation goes on until
    Ctrl-D. Ctrl-C breaks an answer off. /help lists what else can be typed.

    Parameters
    ----------
    message
        What to say; "-" reads it from standard input.
    url
        Where the server is, or unix:PATH.
    api_key
        The server's key; OCTAVO_API_KEY or OPENAI_API_KEY when not given.
    model
        Name of the model; the server's first one when not given.
    quick
        The same as a message.
    system_prompt
        Put before the conversation.
    max_tokens
        Most tokens of an answer; as many as there is room for when not given.
    temperature
        0 takes the most likely token; higher is more varied, up to 2. The server's default when not given.
    top_p
        Sample from the most likely tokens that together have this probability.
    seed
        Makes sampling repeatable.
    """
    server = Server(url, api_key)
    fields = sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    talk = Conversation(server, model or server.model(), system_prompt, fields)
    given = message if message is not None else quick
    if given is not None or sys.stdin is None or not sys.stdin.isatty():
        talk.answer(standard_input() if given in (None, "-") else str(given))
        return
    print(f"{talk.model} at {server.url}. Ctrl-D ends, /help lists commands.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if text.startswith("/"):
            if not talk.command(text):
                return
        elif text.strip():
            try:
                talk.answer(text)
            except KeyboardInterrupt:
                print()
            except OctavoError as error:  # the conversation may go on
                print(f"\n{error}", file=sys.stderr)
