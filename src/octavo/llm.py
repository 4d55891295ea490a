"""The offline API: `LLM(model).generate(prompts, sampling_params)` and `.chat(messages, ...)`."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from tqdm import tqdm

from octavo import log
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.inputs import Group, Prompt, as_list
from octavo.errors import EngineDead, InvalidRequest, shown
from octavo.known import Elsewhere, drop_known
from octavo.text import chat
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.answer import Answer, read_answer
from octavo.text.tools.thinking import shown_ids
from octavo.types import RequestOutput, SamplingParams

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Progress = bool | Callable[..., Any]


CALL_ELSEWHERE = {
    "lora_request": Elsewhere("there are no adapters yet"),
    "prompt_token_ids": Elsewhere("give token ids as the prompts"),
    "guided_options_request": Elsewhere("it is called structured_outputs, in SamplingParams"),
    "mm_processor_kwargs": Elsewhere("models are text only", (None, {})),
    "tokenization_kwargs": Elsewhere("tokenize the prompts yourself", (None, {})),
    "chat_template_content_format": Elsewhere("it is found by trying the template", (None, "auto")),
}


class LLM:
    """A model loaded in this process.

    Keywords are the engine's options (docs/options.md); what users of vLLM type is known. Use it as a
    context manager, or drop the last reference, to give all memory back. Threads take turns: a call waits
    for the one before (`AsyncLLM` runs them together). A forked child must make its own.

    Raises:
        ModelNotFound, InvalidConfig, InvalidWeights: the message says what to do.
        TypeError: an unknown keyword.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        log.set_up()
        self._turn = threading.RLock()
        self._generating = False
        self._process = os.getpid()
        self._engine: Engine | None = Engine(EngineConfig.from_keywords("LLM", model=model, **options))

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDead("This LLM was closed.")
        if os.getpid() != self._process:  # without the threads that compute, and with shared pages of the KV cache
            raise EngineDead("This LLM belongs to the process that this one was forked from.", "Make one here.")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        *,
        priority: Sequence[int] | None = None,
        **elsewhere: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts.

        A prompt is a string, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids` (and
        `cache_salt`). One `SamplingParams` serves all prompts, a list has one for each; without any, the
        model's own defaults apply. `priority` has a number for each prompt, smaller ones first
        (scheduling_policy="priority").

        Raises:
            InvalidRequest: names the prompt that can never run; nothing is left queued.

        After any other exception (Ctrl-C, one of the progress bar, a fault in the model) the engine is idle and
        its prefix cache empty.
        """
        drop_known("LLM.generate", set(), CALL_ELSEWHERE, elsewhere)
        return self._run(as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **elsewhere: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}.

        With `tools` the text has the marks that calls stand between, and `read_answer` finds the calls in it.

        Raises:
            InvalidRequest: names the conversation that can never run.
        """
        drop_known("LLM.chat", set(), CALL_ELSEWHERE, elsewhere)
        several = isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        variables = chat_template_kwargs or {}
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequest(
                "chat_template_kwargs must be a dictionary with names as keys.", param="chat_template_kwargs"
            )
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            "documents": documents,
            **variables,
        }
        prompts: list[Prompt] = []
        for place, conversation in enumerate(conversations):
            with _naming("Conversation", place, len(conversations)):
                text = chat.render(self.get_tokenizer(), conversation, **options)
                # The template writes the special tokens itself.
                ids = self.get_tokenizer().encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self._run(prompts, self._showing_calls(sampling_params) if tools else sampling_params, use_tqdm, None)

    def read_answer(self, output: RequestOutput, tools: list[dict[str, Any]] | None = None) -> list[Answer]:
        """The thought, the text and the calls in each text of an output of `chat`; `tools` are those given there."""
        formats, prompt = self.engine.formats, output.prompt or ""
        return [
            read_answer(sample.text, formats, tools, prompt=prompt, cut=sample.finish_reason == "length")
            for sample in output.outputs
        ]

    def _showing_calls(self, params: Params) -> Params:
        """The same parameters, with special tokens in the text where they mark calls."""
        shown = shown_ids(self.get_tokenizer(), self.engine.formats)
        if not shown:
            return params
        if isinstance(params, Sequence):
            return [replace(one, shown_token_ids=shown) for one in params]
        return replace(self.get_default_sampling_params() if params is None else params, shown_token_ids=shown)

    def _run(
        self, prompts: list[Prompt], params: Params, use_tqdm: Progress, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        with self._turn:
            if self._generating:
                raise InvalidRequest("This LLM is generating already, in a call that has to end first.")
            self._generating = True
            try:
                return self._generate(prompts, params, use_tqdm, priority)
            finally:
                self._generating = False

    def _generate(
        self, prompts: list[Prompt], params: Params, use_tqdm: Progress, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        engine = self.engine
        if isinstance(priority, str) or not isinstance(priority, Sequence | None):
            raise InvalidRequest(f"priority={shown(priority)} is not allowed: it must be a list.", param="priority")
        given = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        for name, values in (("sampling_params", given), ("priority", priorities)):
            if len(values) != len(prompts):
                raise InvalidRequest(f"{name} has {len(values)} items for {len(prompts)} prompts.", param=name)
        # Everything is checked before anything runs, so that one bad prompt leaves nothing behind.
        groups: list[Group] = []
        for place, prompt in enumerate(prompts):
            with _naming("Prompt", place, len(prompts)):
                groups.append(engine.check(prompt, given[place], priority=priorities[place]))
        try:
            for group in groups:
                engine.add(group, final_only=True)  # nobody sees what comes before the end
            finished = self._finish(len(groups), use_tqdm)
        except BaseException:  # also Ctrl-C, at any moment: the next call must find an idle engine
            engine.clear()
            raise
        return [finished[group.id] for group in groups]

    def _finish(self, count: int, use_tqdm: Progress) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        make = use_tqdm if callable(use_tqdm) else tqdm
        bar = make(total=count, desc="Processed prompts", unit="prompt", dynamic_ncols=True) if use_tqdm else None
        begin, tokens_in, tokens_out = time.perf_counter(), 0, 0
        try:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if not output.finished:
                        continue
                    finished[output.request_id] = output
                    if bar is not None:
                        tokens_in += len(output.prompt_token_ids)
                        tokens_out += sum(len(sample.token_ids) for sample in output.outputs)
                        seconds = time.perf_counter() - begin
                        bar.set_postfix_str(
                            f"input {tokens_in / seconds:.1f} tok/s, output {tokens_out / seconds:.1f} tok/s",
                            refresh=False,
                        )
                        bar.update(1)
        finally:
            if bar is not None:
                bar.close()
        return finished

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: the engine runs without one (`skip_tokenizer_init`).
        """
        if self.engine.tokenizer is None:
            raise InvalidRequest("This engine runs without a tokenizer (skip_tokenizer_init=True).")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies to a request without parameters: the model's generation_config.json."""
        return self.engine.inputs.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on."""
        with self._turn:
            self.engine.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Give the memory of weights and KV cache back; a second call does nothing."""
        with self._turn:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _naming:  # noqa: N801 - reads as a word in a with statement
    """Says which of several items an `InvalidRequest` is about."""

    def __init__(self, what: str, place: int, count: int) -> None:
        self.prefix = f"{what} {place}: " if count > 1 else ""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, InvalidRequest) and self.prefix:
            raise InvalidRequest(self.prefix + error.message, error.hint, error.param) from error
