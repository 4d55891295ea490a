"""`octavo generate`: one prompt, streamed to the terminal."""

import sys
from typing import Annotated

from cyclopts import Parameter

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.inputs import Prompt
from octavo.errors import InvalidRequest, OctavoError
from octavo.flags import ENGINE, with_options
from octavo.text import chat
from octavo.types import FinishReason, RequestOutput, RequestOutputKind, SamplingParams


@with_options(config=ENGINE)
def generate(
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    *,
    chat_message: Annotated[bool, Parameter(name=["--chat", "-c"])] = False,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sampling_seed: int | None = None,
    stop: tuple[str, ...] = (),
    config: EngineConfig,
) -> None:
    """Complete a prompt, or answer it as a chat message.

    Parameters
    ----------
    prompt
        Text to complete, or the message with --chat; "-" reads it from standard input.
    chat_message
        Put the prompt into the model's chat template and let it answer.
    max_tokens
        Most tokens to generate.
    temperature
        0 takes the most likely token; higher is more varied, up to 2.
    top_p
        Sample from the most likely tokens that together have this probability.
    sampling_seed
        Makes sampling repeatable.
    stop
        Strings that end the text.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=sampling_seed,
        stop=stop,
        output_kind=RequestOutputKind.DELTA,
    )
    text = _standard_input() if prompt == "-" else prompt
    with Engine(config) as engine:
        stream(engine, chat_prompt(engine, text) if chat_message else text, params)


def _standard_input() -> str:
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"Standard input is not text: {error}.") from None


def chat_prompt(engine: Engine, message: str) -> Prompt:
    """One user message in the model's chat template."""
    if engine.tokenizer is None:
        raise InvalidRequest("A chat message needs a tokenizer, and this engine runs without one.")
    text = chat.render(engine.tokenizer, [{"role": "user", "content": message}])
    return {"prompt": text, "prompt_token_ids": engine.tokenizer.encode(text, add_special_tokens=False)}


def stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Write the answer to standard output as it comes; returns the last output. `params` must ask for deltas.

    Raises:
        InvalidRequest: it can never run.
        OctavoError: it ended with a fault, after what is shown.
    """
    engine.add(engine.check(prompt, params))
    last: RequestOutput | None = None
    while engine.has_unfinished:
        for last in engine.step():
            print("".join(sample.text for sample in last.outputs), end="", flush=True)
    print()
    assert last is not None, "a checked request always ends with an output"
    for sample in last.outputs:
        if sample.finish_reason == FinishReason.ERROR:
            raise OctavoError(str(sample.stop_reason))
    return last
