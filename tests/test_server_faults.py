"""The tests of the HTTP API can fail: every fault planted here, one at a time, is found by one of them."""

import asyncio
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest

import test_http_app as cases
from test_http_app import folder  # noqa: F401  (the fixture)

Case = Callable[..., Coroutine[Any, Any, None]]


class Fault(NamedTuple):
    name: str
    function: str  # module:name of the function, below octavo
    right: str
    wrong: str
    found_by: Case


FAULTS = [
    Fault("a stream without an end", "server.sse:EventStream.__call__", '"body": DONE', '"body": b""',
          cases.test_shapes_and_counts),
    Fault("an error is no event", "server.sse:EventStream._send_all", "event(content)", 'b""',
          cases.test_an_error_in_the_middle),
    Fault("who leaves is not noticed", "server.sse:while_connected", "task.cancel()", "pass",
          cases.test_who_leaves_is_aborted_at_once),
    Fault("an abort is not sent to the engine", "engine.client:EngineClient._abort", "self._send", "id",
          cases.test_who_leaves_is_aborted_at_once),
    Fault("usage of a stream is one off", "server.completions:_Answer.chunks",
          "self.usage.completion_tokens += len(sample.token_ids)",
          "self.usage.completion_tokens += len(sample.token_ids) + 1", cases.test_shapes_and_counts),
    Fault("usage counts no prompt", "server.generation:Usage.shape", '"prompt_tokens": self.prompt_tokens',
          '"prompt_tokens": 0', cases.test_shapes_and_counts),
    Fault("usage comes unasked", "server.completions:_Answer.chunks", "if self.usage_at_end:\n        yield",
          "if True:\n        yield", cases.test_shapes_and_counts),
    Fault("samples are numbered within their prompt", "server.completions:_Answer._choice",
          "place * self.call.n + sample.index", "sample.index", cases.test_shapes_and_counts),
    Fault("a failed sample looks whole", "server.generation:refuse_failed", 'finish_reason == "error"',
          'finish_reason == "never"', cases.test_an_error_in_the_middle),
    Fault("a full queue is the client's fault", "engine.client:_refusal",
          "Overloaded(refused.why, retry_after_s=refused.retry_after_s)", "InvalidRequest(refused.why)",
          cases.test_a_full_queue),
    Fault("nobody is told when to come again", "server.errors:response",
          'headers["retry-after"] = str(error.retry_after_s)', "pass", cases.test_a_full_queue),
    Fault("errors have another shape", "server.errors:body", '"param": param or None', '"parameter": param or None',
          cases.test_states_of_the_engine),
    Fault("health is green while it starts", "server.health:health", 'engine.state == "ready"',
          'engine.state in ("ready", "starting")', cases.test_states_of_the_engine),
    Fault("health is green while it drains", "server.health:health", 'engine.state == "ready"',
          'engine.state in ("ready", "draining")', cases.test_states_of_the_engine),
    Fault("a dead engine leaves streams open", "engine.client:EngineClient.end", "feed.fail(EngineDead(why))", "pass",
          cases.test_the_engine_dies_in_the_middle),
    Fault("every key opens", "server.auth:Keys.tenant", "if not (user or admin or self._is_open(path))", "if False",
          cases.test_keys),
    Fault("users are administrators", "server.auth:Keys.tenant", 'else "", admin', 'else "", user or admin',
          cases.test_keys),
    Fault("tenants share cached prefixes", "engine.client:EngineClient.generate", "if tenant:", "if False:",
          cases.test_keys),
    Fault("a body without end is read", "server.gate:_limited", "if taken > limit", "if False",
          cases.test_large_bodies),
    Fault("answers are not counted", "server.serving:Serving.check_choices", "count > self.options.max_choices",
          "False", cases.test_many_answers_are_counted_before_anything_is_made),
    Fault("unknown fields are not told", "server.serving:Serving.headers", "{**told, IGNORED:", "told and {IGNORED:",
          cases.test_unknown_fields),
    Fault("ids of requests are not kept", "server.gate:Gate.__call__", "given if _ACCEPTABLE_ID.fullmatch(given) else",
          "given if False else", cases.test_the_id_of_a_request),
    Fault("any id is taken over", "server.gate:Gate.__call__", "given if _ACCEPTABLE_ID.fullmatch(given) else",
          "given if given else", cases.test_the_id_of_a_request),
    Fault("a long text is read before it is refused", "server.serving:Serving.encode", "len(text) > LONG_TEXT and",
          "False and", cases.test_long_texts_are_refused_before_they_are_read),
]  # fmt: skip


def function_at(place: str) -> FunctionType:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(f"octavo.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the function the code of its own source text with one passage changed, wherever it is referred to."""
    function = function_at(fault.function)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(fault.right) == 1, f"not once in {fault.function}: {fault.right}"
    text = re.sub(r"\A(@.*\n)+", "", text)  # decorators did their work when the module was imported
    names: dict[str, Any] = {}
    exec(compile(text.replace(fault.right, fault.wrong), fault.name, "exec"), dict(function.__globals__), names)
    (changed,) = names.values()
    assert changed.__code__.co_freevars == function.__code__.co_freevars
    monkeypatch.setattr(function, "__code__", changed.__code__)


def run(case: Case, tokenizer: Path) -> None:
    """Raises what the test raises; one that hangs fails too."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        extra = [monkeypatch] if "monkeypatch" in inspect.signature(case).parameters else []
        asyncio.run(asyncio.wait_for(case(tokenizer, *extra), 20))


@pytest.mark.parametrize("case", sorted({fault.found_by for fault in FAULTS}, key=lambda case: case.__name__))
def test_without_a_fault_they_pass(case: Case, folder: Path) -> None:  # noqa: F811
    run(case, folder)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    plant(fault, monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        run(fault.found_by, folder)
