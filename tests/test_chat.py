"""Chat templates: the same text as transformers, clear refusals, and no way out of the sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from octavo.errors import InvalidConfig, InvalidRequest
from octavo.text import chat
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import CHATML, LLAMA2_CHAT, f_bpe, f_spm

LLAMA3 = """{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {{- '<|start|>tools ' + (tools | tojson(indent=2)) }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- else %}
        {{- '<|start|>' + message.role + '\n\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% set role = 'model' if message['role'] == 'assistant' "
    "else message['role'] %}{{ '<start>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start>model\n'}}{% endif %}"
)
PARTS = """{% for message in messages %}
{{ message['role'] }}:
{% if message['content'] is string %}
{{ message['content'] }}
{% else %}
{% for part in message['content'] %}
{% if part['type'] == 'text' %}
{{ part['text'] }}
{% endif %}
{% endfor %}
{% endif %}
{% endfor %}
"""
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
MISC = """{% set ns = namespace(n=0) %}
{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}
{% generation %}{{ ns.n }}. {{ message.content }}{% endgeneration %}

{% if ns.n == 2 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') }} {{ {'a': '<b>&é', 'z': [1, 2.5, none, true]} | tojson }} {{ thinking | default('no') }}
"""
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2_CHAT, "llama3": LLAMA3, "gemma": GEMMA, "parts": PARTS, "misc": MISC}
USER = {"role": "user", "content": "  Hi <there> & 日本 \n"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}],
    [USER, {"role": "assistant", "content": " An answer that "}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return f_spm(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def refusal(tokenizer: Tokenizer, messages: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat.render(tokenizer, messages, **options)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_text_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: Any, name: str, messages: Any, generate: bool
) -> None:
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=generate
    )
    assert chat.render(tokenizer, messages, chat_template=TEMPLATES[name], add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "parts"])
def test_the_last_message_can_be_left_open(tokenizer: Tokenizer, oracle: Any, name: str) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = oracle.apply_chat_template(CHATS[2], chat_template=TEMPLATES[name], tokenize=False, **options)
    assert chat.render(tokenizer, CHATS[2], chat_template=TEMPLATES[name], **options) == expected
    assert expected.rstrip().endswith("An answer that")


def test_leaving_open_is_refused_where_it_cannot_be(tokenizer: Tokenizer) -> None:
    assert "contradict" in refusal(tokenizer, CHATS[2], continue_final_message=True).message
    first_only = "{{ messages[0].content }}"
    options = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": first_only}
    assert "leaves out" in refusal(tokenizer, CHATS[2], **options).message


def test_tools_reach_the_template_as_objects(tokenizer: Tokenizer, oracle: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "é": [2]}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = chat.render(tokenizer, messages, chat_template=LLAMA3, tools=tools)
    parsed = {**call, "function": {**call["function"], "arguments": {"a": 1, "é": [2]}}}  # type: ignore[dict-item]
    expected = oracle.apply_chat_template(
        [USER, {"role": "assistant", "content": "", "tool_calls": [parsed]}],
        chat_template=LLAMA3,
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == expected
    assert '<call>add {"a": 1, "é": [2]}' in text
    assert call["function"]["arguments"] == '{"a": 1, "é": [2]}', "the caller's message is not touched"  # type: ignore[index]


def test_variables_of_the_template_can_be_set(tokenizer: Tokenizer) -> None:
    assert chat.render(tokenizer, [USER], chat_template=MISC, thinking="yes").rstrip().endswith("yes")
    assert chat.render(tokenizer, [USER], chat_template="{{ messages[0].role }}", **{"messages": []}) == "user"


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_parts_are_joined_for_templates_that_want_strings(tokenizer: Tokenizer, kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, "text": "one"}, {"type": kind, "text": "two"}]}
    assert "user\none\ntwo<|im_end|>" in chat.render(tokenizer, [message], chat_template=CHATML)
    assert chat.render(tokenizer, [message], chat_template=PARTS) == "user:\none\ntwo\n"
    assert chat.render(tokenizer, [message], chat_template=PARTS_ONLY) == "[one][two]"
    assert chat.render(tokenizer, [USER], chat_template=PARTS_ONLY) == f"[{USER['content']}]"


def test_parts_are_joined_where_the_template_cannot_be_tried_out(tokenizer: Tokenizer) -> None:
    system_first = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    message = {"role": "system", "content": [{"type": "text", "text": "one"}]}
    assert chat.render(tokenizer, [message], chat_template=system_first) == "one"


def test_named_templates(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "{{ documents[0].text }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert chat.render(tokenizer, [USER]) == "plain"
    assert chat.render(tokenizer, [USER], tools=[{"type": "function"}]) == "tools"
    assert chat.render(tokenizer, [USER], tools=[]) == "plain"
    assert chat.render(tokenizer, [USER], chat_template="rag", documents=[{"text": "doc"}]) == "doc"
    del tokenizer.chat_templates["default"]
    assert "rag, tool_use" in refusal(tokenizer, [USER]).message


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    error = refusal(Tokenizer.from_folder(f_spm(tmp_path, chat_template=None)), [USER])
    assert "--chat-template" in str(error)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_place(tokenizer: Tokenizer, messages: Any, where: str) -> None:
    error = refusal(tokenizer, messages)
    assert error.param == where
    assert error.message.startswith(where)


def test_an_assistant_may_have_no_content(tokenizer: Tokenizer) -> None:
    assert chat.render(tokenizer, [USER, {"role": "assistant", "content": None}], chat_template=CHATML)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (GEMMA, "No system role"),
        ("{% if %}", "not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ undefined_name.field }}", "undefined"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe."),
        ("{% for i in range(100000) %}{% for j in range(1000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}", "more than"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_templates_that_fail_or_attack_are_a_clear_refusal(tokenizer: Tokenizer, template: str, words: str) -> None:
    system = {"role": "system", "content": "be brief"}
    assert words in refusal(tokenizer, [system, USER], chat_template=template).message


def test_a_template_may_be_a_file_or_a_source(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("é{{ messages }}", encoding="utf-8")
    assert chat.read_template(str(tmp_path / "mine.jinja")) == "é{{ messages }}"
    assert chat.read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(InvalidConfig, match=r"no\.jinja"):
        chat.read_template(str(tmp_path / "no.jinja"))


@pytest.mark.case("TOK-07")
@pytest.mark.parametrize("template", [CHATML, LLAMA2_CHAT])
def test_a_chat_has_the_start_token_once_or_as_often_as_its_template_says(
    tokenizer: Tokenizer, oracle: Any, template: str
) -> None:
    text = chat.render(tokenizer, [USER], chat_template=template)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = oracle.apply_chat_template(
        [USER], chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == expected
    assert ids.count(1) == text.count("<s>")
    assert tokenizer.encode(text).count(1) == 1, "nor does a second one come in when the text is taken for a prompt"
