"""Calls that have to be made: decoding is constrained, so that even a random model makes valid ones."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

import tiny_models
import tiny_tokenizers
from octavo.server.tool_choice import ToolChoice, constrained
from octavo.text.tools.formats import tool_format
from octavo.types import SamplingParams
from server_process import TINY_FLAGS, ServerProcess, running_server
from test_http_tools import added_up

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
    "{% if opens is defined %}<think>\n{% endif %}{# tools <tool_call> <think> #}"
)
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "none"]}, "deep": {"type": "boolean"}},
    "required": ["colour", "deep"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "paint", "strict": True, "parameters": COLOURS}},
    {"type": "function", "function": {"name": "stop", "parameters": EMPTY}},
]
SCHEMAS = {"paint": COLOURS, "stop": EMPTY}
PAINT = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.oracle(vocab_size=600), folder)
    tiny_tokenizers.f_bpe(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    with running_server(folder, *TINY_FLAGS, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


def ask(server: ServerProcess, **body: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Paint it."}], "tools": TOOLS, "max_tokens": 300, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def check(choice: dict[str, Any], names: set[str]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = choice["message"]["tool_calls"] or []
    if choice["finish_reason"] == "tool_calls":
        assert calls
        assert not choice["message"]["content"]
        for call in calls:
            assert call["function"]["name"] in names
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    else:
        assert choice["finish_reason"] == "length"
    return calls


def choices(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    whole = ask(server, **body)
    assert whole.status_code == 200, whole.text
    found: list[dict[str, Any]] = whole.json()["choices"]
    events = ask(server, **body, stream=True).text.split("\n\n")[:-2]
    chunks = [one for event in events for one in json.loads(event[6:])["choices"]]
    for choice in found:
        streamed = added_up([one for one in chunks if one["index"] == choice["index"]])
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert [call["function"] for call in streamed["message"]["tool_calls"]] == [
            call["function"] for call in choice["message"]["tool_calls"] or []
        ]
    return found


@pytest.mark.case("TOOL-04")
def test_a_wanted_call_is_made_and_follows_its_schema(server: ServerProcess) -> None:
    finished = 0
    for seed in range(4):
        for choice in choices(server, tool_choice="required", n=2, seed=seed, parallel_tool_calls=False):
            assert len(check(choice, {"paint", "stop"})) == 1
            finished += choice["finish_reason"] == "tool_calls"
        (choice,) = choices(server, tool_choice=PAINT, seed=seed)
        assert [call["function"]["name"] for call in check(choice, {"paint"})] == ["paint"]
        finished += choice["finish_reason"] == "tool_calls"
        (choice,) = choices(server, tool_choice="required", seed=seed)
        check(choice, {"paint", "stop"})
    assert finished > 6


@pytest.mark.case("TOOL-04")
def test_a_limit_cuts_a_wanted_call(server: ServerProcess) -> None:
    for limit in (1, 3, 8):
        for choice in (*choices(server, tool_choice=PAINT, max_tokens=limit, seed=1),):
            assert choice["finish_reason"] == "length"
            assert len(choice["message"]["tool_calls"]) == 1
        assert choices(server, tool_choice="required", max_tokens=limit, seed=1)[0]["finish_reason"] == "length"


def test_a_wanted_call_comes_after_the_thought(server: ServerProcess) -> None:
    more = {"chat_template_kwargs": {"opens": True}, "thinking_token_budget": 6}
    for choice in ("required", PAINT):
        answer = ask(server, tool_choice=choice, parallel_tool_calls=False, seed=3, **more).json()
        (found,) = answer["choices"]
        assert check(found, {"paint", "stop"})
        assert found["message"]["reasoning"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


@pytest.mark.case("TOOL-08")
def test_a_schema_that_cannot_be_obeyed_is_refused(server: ServerProcess) -> None:
    for parameters in (
        {"properties": {"a": {"type": "foo", "pattern": "["}}},
        {"properties": {"a": {"type": "string", "pattern": "["}}},
        {"$ref": "#/$defs/nowhere"},
    ):
        tools = [{"type": "function", "function": {"name": "paint", "parameters": parameters}}]
        answer = ask(server, tools=tools, tool_choice="required", max_tokens=5)
        assert answer.status_code == 400, answer.text
    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


def test_strict_tools_are_obeyed_where_the_model_decides_to_call(server: ServerProcess) -> None:
    assert choices(server, seed=2, max_tokens=40)[0]["finish_reason"] in ("length", "stop", "tool_calls")
    params = constrained(SamplingParams(), TOOLS, ToolChoice("auto"), tool_format("hermes"), True)
    assert params.structured_outputs is not None
    tag = json.loads(str(params.structured_outputs.structural_tag))
    assert tag["triggers"] == ["<tool_call>"]
    paint, stop = tag["structures"]
    assert paint == {
        "begin": '<tool_call>\n{"name": "paint", "arguments": ',
        "schema": {"type": "object", **COLOURS},
        "end": "}\n</tool_call>",
    }
    assert stop["schema"] == {"type": "object"}
    lax = [TOOLS[1]]
    assert constrained(SamplingParams(), lax, ToolChoice("auto"), tool_format("hermes"), True) == SamplingParams()
    assert constrained(SamplingParams(), TOOLS, ToolChoice("none"), tool_format("hermes"), True) == SamplingParams()
    assert constrained(SamplingParams(), TOOLS, ToolChoice("auto"), None, True) == SamplingParams()
