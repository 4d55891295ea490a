"""Tools and thoughts over HTTP: a real server whose tiny model says what a script tells it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import scripted_model
from scripted_model import start
from server_process import TINY_FLAGS, ServerProcess, running_server

TEMPLATE = (
    "{# tools <tool_call> <think> #}{% set last = messages[-1] %}"
    f"{{% if last.role == 'tool' %}}{start('after the tool')}{{% else %}}{{{{ last.content }}}}{{% endif %}}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris } 東京 😀", "days": 3}}\n</tool_call>'
SCRIPTS = {
    "plain": ["Nothing to call here, <b>friend</b>."],
    "call": [
        "Let me look. \n",
        "<tool_call>",
        '\n{"name": "weather", "arguments": {"city": "Paris"}}\n',
        "</tool_call>",
    ],
    "three": [
        "Three:\n" + CALL + '\n<tool_call>\n{"name": "now"}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 1e0}}\n</tool_call>'
    ],
    "bad": ['Well. <tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>'],
    "think": ["<think>", "\nIt asks for one thing. I know it.\n", "</think>", "\n\nForty-two."],
    "after the tool": ["It is sunny in Paris."],
}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Look out.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": None}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = scripted_model.write(tmp_path_factory.mktemp("model"), SCRIPTS, MARKS, TEMPLATE)
    flags = (*TINY_FLAGS, "--served-model-name=script", "--enable-auto-tool-choice")
    with running_server(folder, *flags, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


def ask(server: ServerProcess, script: str, **body: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": start(script)}], "temperature": 0, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)


def facts(choice: dict[str, Any]) -> tuple[Any, ...]:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or []]
    errors = [error["reason"] for error in message.get("tool_call_errors", [])]
    return message["content"] or "", message["reasoning"] or "", calls, errors, choice["finish_reason"]


def both(server: ServerProcess, script: str, **body: Any) -> dict[str, Any]:
    """The whole answer, which its stream must add up to."""
    whole = ask(server, script, **body)
    assert whole.status_code == 200, whole.text
    answer: dict[str, Any] = whole.json()
    streamed = ask(server, script, **body, stream=True, stream_options={"include_usage": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event[6:]) for event in streamed.split("\n\n")[:-2]]
    assert chunks[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        assert facts(added_up(mine)) == facts(choice)
    return answer


def added_up(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client of OpenAI's makes of the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "tool_call_errors": []}
    calls: dict[int, dict[str, Any]] = {}
    for choice in choices:
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        message["tool_call_errors"] += delta.get("tool_call_errors", [])
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls), "the name comes first, once, in order"
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                calls[call["index"]] = {"id": call["id"], "function": dict(call["function"])}
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for error in message["tool_call_errors"]:
        calls.pop(error["index"], None)
    message["tool_calls"] = [*calls.values()]
    return {"message": message, "finish_reason": choices[-1]["finish_reason"]}


@pytest.mark.case("TOOL-01", "TOOL-02")
def test_calls_come_whole_and_streamed(server: ServerProcess) -> None:
    (choice,) = both(server, "call", tools=TOOLS)["choices"]
    assert facts(choice) == ("Let me look.", "", [("weather", '{"city": "Paris"}')], [], "tool_calls")
    (choice,) = both(server, "three", tools=TOOLS)["choices"]
    content, _, calls, _, finish = facts(choice)
    assert (content, finish) == ("Three:", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "Paris } 東京 😀", "days": 3}),
        ("now", {}),
        ("weather", {"city": "Rom", "days": 1.0}),
    ]
    assert calls[1][1] == "{}"
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 3


@pytest.mark.case("TOOL-02", "SMP-01")
def test_each_of_several_answers_has_its_own_calls(server: ServerProcess) -> None:
    answer = both(server, "three", tools=TOOLS, n=3, temperature=0.01, seed=42)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 9
    for parallel, count in ((True, 3), (None, 3), (False, 1)):
        (choice,) = both(server, "three", tools=TOOLS, parallel_tool_calls=parallel)["choices"]
        assert len(choice["message"]["tool_calls"]) == count
        assert choice["message"]["content"] == "Three:"


@pytest.mark.case("TOOL-04")
def test_without_tools_or_with_none_a_call_is_text(server: ServerProcess) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = both(server, "three", **more)["choices"]
        content, _, calls, _, finish = facts(choice)
        assert (calls, finish) == ([], "stop")
        assert CALL in content
    (choice,) = both(server, "plain", tools=TOOLS)["choices"]
    assert facts(choice) == (SCRIPTS["plain"][0], "", [], [], "stop")


@pytest.mark.case("TOOL-04")
def test_a_limit_cuts_a_call_where_it_is(server: ServerProcess) -> None:
    for limit in range(1, 9):
        (choice,) = both(server, "call", tools=TOOLS, max_tokens=limit)["choices"]
        _, _, calls, _, finish = facts(choice)
        assert finish == "length"
        for name, arguments in calls:
            assert name == "weather"
            assert '{"city": "Paris"}'.startswith(arguments)


def test_a_malformed_call_is_text_with_a_reason(server: ServerProcess) -> None:
    (choice,) = both(server, "bad", tools=TOOLS)["choices"]
    content, _, calls, errors, finish = facts(choice)
    assert content == 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": Paris}}'
    assert (calls, finish) == ([], "stop")
    assert errors == ["'Paris' is no value of JSON"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "weather"}}, "tool_choice"),
]


@pytest.mark.case("TOOL-04", "TOOL-08")
@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_misshapen_tool_or_choice_is_refused(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    answer = ask(server, "plain", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.case("TOOL-08")
def test_odd_schemas_are_served(server: ServerProcess) -> None:
    circular = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    for parameters in (
        {"properties": {"a": {"type": "foo", "pattern": "["}}},
        None,
        {},
        circular,
        {"type": "object", "properties": {"a": circular, "b": True, "c": None, "d": []}},
        {"properties": []},
    ):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        assert facts(both(server, "call", tools=tools)["choices"][0])[4] == "tool_calls"
    many = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(2000)]
    assert ask(server, "plain", tools=many).status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


def test_thoughts_are_told_apart_and_counted(server: ServerProcess) -> None:
    answer = both(server, "think")
    (choice,) = answer["choices"]
    assert facts(choice) == ("Forty-two.", "It asks for one thing. I know it.", [], [], "stop")
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"]
    reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < answer["usage"]["completion_tokens"] - 2
    without = both(server, "think", include_reasoning=False)
    assert facts(without["choices"][0])[:2] == ("Forty-two.", "")
    assert without["usage"] == answer["usage"]


def test_a_thinking_budget_ends_the_thought(server: ServerProcess) -> None:
    for budget in (0, 1, 3):
        answer = both(server, "think", thinking_token_budget=budget)
        content, thought, _, _, finish = facts(answer["choices"][0])
        assert (content, finish) == ("Forty-two.", "stop")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        assert "It asks for one thing. I know it.".startswith(thought)
    refused = ask(server, "think", thinking_token_budget=-3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_thinking_is_switched_off_through_the_template(server: ServerProcess) -> None:
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        (choice,) = both(server, "think", **more)["choices"]
        assert facts(choice)[:2] == ("Forty-two.", "")


class Weather:
    """A tool, and how often it was called."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, city: str) -> str:
        self.asked.append(city)
        return f"Sunny in {city}."


def test_openais_client_runs_a_tool(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    weather = Weather()
    messages: list[Any] = [{"role": "user", "content": start("call")}]
    completion = client.chat.completions.create(model="script", messages=messages, tools=TOOLS, temperature=0)  # type: ignore[arg-type]
    message = completion.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    result = weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = client.chat.completions.create(model="script", messages=messages, tools=TOOLS, temperature=0)  # type: ignore[arg-type]
    assert (last.choices[0].message.content, weather.asked) == ("It is sunny in Paris.", ["Paris"])


def test_openais_stream_helper_and_parsed_arguments(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
    messages: Any = [{"role": "user", "content": start("call")}]
    done, fragments = [], 0
    with client.chat.completions.stream(model="script", messages=messages, tools=strict, temperature=0) as stream:
        for event in stream:
            fragments += event.type == "tool_calls.function.arguments.delta"
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, json.loads(event.arguments)))
        final = stream.get_final_completion()
    assert done == [("weather", {"city": "Paris"})]
    assert fragments > 1
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'


def test_langchain_runs_a_tool(server: ServerProcess) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    asked = Weather()

    @tool
    def weather(city: str) -> str:
        """Look out."""
        return asked(city)

    chat = langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="script", temperature=0)
    bound = chat.bind_tools([weather])
    messages: list[Any] = [HumanMessage(start("call"))]
    while (answer := bound.invoke(messages)).tool_calls:
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        messages.append(answer)
        messages += [weather.invoke(call) for call in answer.tool_calls]
        assert isinstance(messages[-1], ToolMessage)
    assert (answer.content, asked.asked) == ("It is sunny in Paris.", ["Paris"])
    total: Any = AIMessageChunk(content="")
    for chunk in bound.stream([HumanMessage(start("three"))]):
        total += chunk
    assert [call["name"] for call in total.tool_calls] == ["weather", "now", "weather"]
    assert total.tool_calls[0]["args"] == {"city": "Paris } 東京 😀", "days": 3}
    bad = bound.invoke([HumanMessage(start("bad"))])
    assert not bad.tool_calls
    assert "<tool_call>" in bad.content


def test_logprobs_and_token_ids_come_with_calls(server: ServerProcess) -> None:
    body = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    answer = both(server, "call", **body)
    (choice,) = answer["choices"]
    streamed = ask(server, "call", **body, stream=True).text.split("\n\n")[:-2]
    chunks = [one for event in streamed for one in json.loads(event[6:])["choices"]]
    ids = [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])]
    logprobs = [one["token"] for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert ids == choice["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"]
    assert logprobs == [one["token"] for one in choice["logprobs"]["content"]]
