"""Calls and thoughts in what models write: however it is cut, malformed or hostile."""

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import scripted_model
from conftest import Make
from octavo import SamplingParams
from octavo.text.tools.answer import Answer, AnswerParser, Part, whole
from octavo.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS, Formats, reasoning_format, tool_format

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "level": {"type": "number"},
        "mode": {"type": ["string", "null"], "enum": ["none", "all"]},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
    "now": {},
    "get-time.v2": {},
}
VALUES: list[dict[str, Any]] = [
    {"city": "Paris", "days": 3, "exact": True, "level": -0.5},
    {"map": {"a": {"b": [1, {"c": "d"}]}, "e": {}}, "list": [{"x": 1}, {"y": []}]},
    {"city": 'a } in ] braces {"and": "quotes"} \\ and \n breaks'},
    {"city": "東京 😀 é"},
    {"city": " padded ", "mode": "none"},
    {"city": "007", "level": 1e5},
    {},
]


def written(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as a model of this format writes them."""

    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def objects(key: str) -> list[str]:
        return [f'{{"name": {dump(name)}, "{key}": {dump(arguments)}}}' for name, arguments in calls]

    if form == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments"))
    if form == "llama3_json":
        return "<|python_tag|>" + "; ".join(objects("parameters"))
    if form == "mistral":
        return "[TOOL_CALLS] [" + ", ".join(objects("arguments")) + "]"
    if form == "phi4_mini_json":
        return "functools[" + ",".join(objects("arguments")) + "]"
    if form == "deepseek_v3":
        inner = "".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if form == "kimi_k2":
        inner = "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dump(arguments)}<|tool_call_end|>"
            for i, (name, arguments) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    if form == "qwen3_xml":
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else dump(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            + "</function>\n</tool_call>"
            for name, arguments in calls
        )
    if form in ("gemma4", "functiongemma"):
        quote = '<|"|>' if form == "gemma4" else "<escape>"
        begin, end = TOOL_FORMATS_BY_NAME[form].begin[0], TOOL_FORMATS_BY_NAME[form].end[0]

        def gemma(value: Any) -> str:
            if isinstance(value, str):
                return quote + value + quote
            if isinstance(value, dict):
                return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
            return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else dump(value)

        return "".join(f"{begin}call:{name}{gemma(arguments)}{end}" for name, arguments in calls)
    if form == "pythonic":
        inner = ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        return f"<|python_start|>[{inner}]<|python_end|>"
    assert form == "openai"
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )


TOOL_FORMATS_BY_NAME = {form.name: form for form in TOOL_FORMATS}
NAMES = sorted(TOOL_FORMATS_BY_NAME)


def parser(form: str | None, reasoning: str | None = None, **more: Any) -> AnswerParser:
    return AnswerParser(
        None if form is None else tool_format(form),
        None if reasoning is None else reasoning_format(reasoning),
        SCHEMAS,
        **more,
    )


def parse(pieces: list[str], form: str | None, reasoning: str | None = None, cut: bool = False, **more: Any) -> Answer:
    one = parser(form, reasoning, **more)
    parts: list[Part] = [part for piece in pieces for part in one.feed(piece)]
    return whole([*parts, *one.finish(cut)])


def facts(answer: Answer) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.content, answer.reasoning, calls, answer.problems


def corpus(form: str) -> list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]:
    """(text, content, calls)"""
    items: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = []
    for value in VALUES:
        calls = [("weather", value)]
        items.append((written(form, calls), "", calls))
    three = [("weather", VALUES[0]), ("now", {}), ("weather", VALUES[3])]
    items.append((written(form, three), "", three))
    if form != "openai":
        items.append(("Let me look {x} [1] <b>.\n" + written(form, three[:2]), "Let me look {x} [1] <b>.", three[:2]))
    else:
        before = "<|channel|>final<|message|>Let me look.<|end|>"
        items.append((before + written(form, three[:2]), "Let me look.", three[:2]))
    return items


@pytest.mark.case("TOOL-01", "TOOL-05")
@pytest.mark.parametrize("form", NAMES)
def test_calls_are_read_the_same_however_they_are_cut(form: str) -> None:
    for text, content, calls in corpus(form):
        at_once = parse([text], form)
        assert at_once.content == content
        assert not at_once.problems
        assert [(call.name, json.loads(call.arguments)) for call in at_once.calls] == calls
        assert len({call.id for call in at_once.calls}) == len(calls)
        expected = facts(at_once)
        for at in range(len(text) + 1):
            assert facts(parse([text[:at], text[at:]], form)) == expected, (at, text)
        for size in (1, 2, 3, 7):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert facts(parse(pieces, form)) == expected
    text = corpus(form)[2][0]
    expected = facts(parse([text], form))
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert facts(parse([text[:first], text[first:second], text[second:]], form)) == expected


@pytest.mark.case("TOOL-05")
def test_json_arguments_are_passed_on_as_written() -> None:
    written_so = '{"level": 1e5, "days": 108.0, "city": "\\u6771\\u4eac \\n\\ud83d\\ude00", "exact" : true }'
    text = f'<tool_call>{{"name": "weather", "arguments": {written_so}}}</tool_call>'
    assert parse(list(text), "hermes").calls[0].arguments == written_so
    xml = "<tool_call><function=weather><parameter=level>108.</parameter><parameter=days>007</parameter></function>"
    assert json.loads(parse(list(xml), "qwen3_xml").calls[0].arguments) == {"level": "108.", "days": "007"}
    xml = "<tool_call><function=weather><parameter=exact>True</parameter><parameter=mode>none</parameter></function>"
    assert json.loads(parse(list(xml), "qwen3_xml").calls[0].arguments) == {"exact": True, "mode": "none"}
    xml = "<tool_call><function=weather><parameter=level>NaN</parameter><parameter=city> a\n\n</parameter></function>"
    assert json.loads(parse(list(xml), "qwen3_xml").calls[0].arguments) == {"level": "NaN", "city": " a\n"}


@pytest.mark.case("TOOL-01")
def test_the_name_comes_first_and_arguments_while_they_are_written() -> None:
    one = parser("hermes")
    assert one.feed('Hm. <tool_call>{"name": "wea') == [Part("content", "Hm.")]
    (name,) = one.feed('ther", "argum')
    assert (name.kind, name.text, name.index) == ("name", "weather", 0)
    assert one.feed('ents": {"city": "Par') == [Part("arguments", '{"city": "Par', 0)]
    assert one.feed('is</tool_call>"') == [Part("arguments", 'is</tool_call>"', 0)]
    assert one.feed("}}</tool_call>") == [Part("arguments", "}", 0)]
    assert one.finish() == []


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now"}', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', [("now", {"a": "x\ny"})]),
        ("llama3_json", '{"name": "now", "parameters": {}}', [("now", {})]),
        ("llama3_json", '{"function": {"name": "now", "parameters": {"a": 1}}, "id": 7}', [("now", {"a": 1})]),
        ("llama3_json", '{"type": "function", "function": "now", "parameters": {"a": 1}}', [("now", {"a": 1})]),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now"}', [("now", {}), ("now", {})]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}[TOOL_CALLS]now{}', [("now", {"a": 1}), ("now", {})]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc[ARGS]{"a": 1}', [("now", {"a": 1})]),
        ("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', [("now", {})]),
        ("deepseek_v3", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [("now", {"a": 1})]),
        ("pythonic", "[now(), weather(city='it\\'s', list=(1, 2,), level=.5)]", [
            ("now", {}), ("weather", {"city": "it's", "list": [1, 2], "level": 0.5})]),
        ("pythonic", '[weather(map={1: None, "b": """q"q"""})]', [("weather", {"map": {"1": None, "b": 'q"q'}})]),
        ("qwen3_xml", "<function=now>\n</function>", [("now", {})]),
        ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>", [("now", {})]),
    ],
)  # fmt: skip
def test_other_ways_to_write_calls(form: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        answer = parse(pieces, form)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
        assert (answer.content, answer.problems) == ("", [])


MALFORMED = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {bad}}</tool_call>', "key"),
    ("hermes", "<tool_call>now()</tool_call>", "stands where a call begins"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no function"),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "no object"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', "no number"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', "no value"),
    ("hermes", '<tool_call>{"name": "now", "argum', "ends"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "ends"),
    ("mistral", "[TOOL_CALLS]", "name"),
    ("llama3_json", '<|python_tag|>print("x")', "stands where a call begins"),
    ("pythonic", "<|python_start|>[now(1)]<|python_end|>", "argument"),
    ("qwen3_xml", "<tool_call><function=now>text</function></tool_call>", "parameter"),
    ("gemma4", "<|tool_call>now{}<tool_call|>", "call:"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>nothing", "arguments"),
    ("openai", "<|channel|>commentary to=functions.now<|message|>{x<|call|>", "key"),
]


@pytest.mark.parametrize(("form", "text", "why"), MALFORMED)
def test_a_malformed_call_is_text_with_a_reason(form: str, text: str, why: str) -> None:
    for pieces in ([text], list(text)):
        answer = parse(["Well. ", *pieces] if form not in ("openai",) else pieces, form)
        assert answer.calls == []
        assert len(answer.problems) == 1
        assert why in answer.problems[0]
        inner = text if form != "openai" else "{x"
        for mark in (*tool_format(form).end, *tool_format(form).ignored):
            inner = inner.replace(mark, "")
        assert answer.content == ("Well. " if form != "openai" else "") + inner.rstrip()


def test_good_calls_before_a_malformed_one_stay() -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
    bad = '<tool_call>{"name": "now", "arguments": {"a" 1}}</tool_call>'
    for pieces in ([good + bad + good], list(good + bad + good)):
        answer = parse(pieces, "hermes")
        assert [call.name for call in answer.calls] == ["now", "now"]
        assert answer.content == '<tool_call>{"name": "now", "arguments": {"a" 1}}'
        assert len(answer.problems) == 1


def test_a_call_cut_at_the_limit_stays_as_far_as_it_is_known() -> None:
    answer = parse(['<tool_call>{"name": "now", "arguments": {"a": "b'], "hermes", cut=True)
    assert [(call.name, call.arguments) for call in answer.calls] == [("now", '{"a": "b')]
    answer = parse(['<tool_call>{"na'], "hermes", cut=True)
    assert (answer.calls, answer.content) == ([], '<tool_call>{"na')


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "{not JSON}"),
        ("pythonic", "[1] says so, [2] does not."),
        ("pythonic", "[unknown(a=1)]"),
        ("hermes", "a < b <tool and <tool_cal"),
    ],
)
def test_text_that_only_begins_like_a_call_is_text(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        answer = parse(pieces, form)
        assert facts(answer) == (text, "", [], [])


@pytest.mark.case("TOOL-02")
def test_without_parallel_calls_only_the_first_is_told_of() -> None:
    for form in NAMES:
        text = written(form, [("now", {}), ("weather", {"days": 1}), ("now", {})])
        for pieces in ([text], list(text)):
            answer = parse(pieces, form, parallel=False)
            assert [call.name for call in answer.calls] == ["now"], form
            assert answer.content == ""


THOUGHTS = [
    ("qwen3", "<think>\nLet me see.\n\nYes <b>.\n</think>\n\nIt is 4.\n", "Let me see.\n\nYes <b>.", "It is 4.\n"),
    ("qwen3", "No thought  here.", "", "No thought  here."),
    ("qwen3", "<think></think>x", "", "x"),
    ("qwen3", "<think>never ends ", "never ends ", ""),
    ("mistral", "[THINK]hm[/THINK]ok", "hm", "ok"),
    ("gemma4", "<|channel>thought\nhm\n<channel|>ok", "hm", "ok"),
    ("seed_oss", "<seed:think>hm</seed:think>ok", "hm", "ok"),
]


@pytest.mark.parametrize(("name", "text", "thought", "answer"), THOUGHTS)
def test_thoughts_are_told_apart_however_they_are_cut(name: str, text: str, thought: str, answer: str) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        found = parse([text[:first], text[first:second], text[second:]], None, name)
        assert facts(found) == (answer, thought, [], [])


def test_a_thought_that_the_prompt_opens_and_a_call_behind_it() -> None:
    text = 'I need <tool_call> the time.\n</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for pieces in ([text], list(text)):
        answer = parse(pieces, "hermes", "qwen3", thinking=True)
        assert facts(answer) == ("", "I need <tool_call> the time.", [("now", "{}")], [])


def test_messages_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city":"x<|call|>"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    expected = ("I look.Done.", "Need it.", [("weather", '{"city":"x<|call|>"}')], [])
    for at in range(len(text) + 1):
        assert facts(parse([text[:at], text[at:]], "openai", "openai_gptoss")) == expected
    assert facts(parse(["Plain."], "openai")) == ("Plain.", "", [], [])


@pytest.mark.parametrize("constrained", [True, "now"])
def test_constrained_calls_are_plain_json(constrained: bool | str) -> None:
    text = '[{"name": "now", "arguments": {"a": [1]}}]' if constrained is True else '{"a": [1]}'
    for form in (None, "hermes", "pythonic"):
        for pieces in ([text], list(text)):
            answer = parse(pieces, form, constrained=constrained)
            assert facts(answer) == ("", "", [("now", '{"a": [1]}')], [])
            thought = parse(["hm</think>\n", *pieces], form, "qwen3", constrained=constrained, thinking=True)
            assert facts(thought) == ("", "hm", [("now", '{"a": [1]}')], [])


@pytest.mark.case("TOOL-07")
@pytest.mark.parametrize("form", NAMES)
def test_hostile_text_takes_linear_time(form: str, tmp_path: Path) -> None:
    marks = "".join(tool_format(form).begin)
    begins = ("", '[{"name": "weather", "arguments": {"city": ', "[weather(city=", "call:now{a:")
    heads = [marks + begin for begin in begins]
    texts = ("[" + "A(A=\t)" * 5000 + "]", "{" * 50_000, "[" * 50_000, '"\\' * 100_000, "<" * 100_000, marks * 5000)
    for head, text in itertools.product(heads, texts):
        begin = time.process_time()
        parse([head + text], form)
        assert time.process_time() - begin < 3.0, (head, text[:10])  # what grows with the square takes minutes
    text = heads[1] + '"' + "x" * 50_000
    begin = time.process_time()
    parse([text[i : i + 4] for i in range(0, len(text), 4)], form)
    assert time.process_time() - begin < 3.0
    file = tmp_path / "x"
    answer = parse([f'[weather(city=__import__("os").system("touch {file}"))]'], "pythonic")
    assert answer.calls == []
    assert not file.exists()


def test_random_text_never_raises_and_does_not_depend_on_cuts() -> None:
    random_ = random.Random(7)
    for form in NAMES:
        one = tool_format(form)
        words = [*one.marks, *(mark for r in REASONING_FORMATS for mark in r.marks), *'{}[]()",:\\=<>', "call:", "now"]
        words += ['"name"', '"arguments"', '"now"', "weather(", "city=", "'x'", " ", "\n", "\x00", "1e5", "é😀", "null"]
        words += ["<parameter=city>", "</parameter>", "</function>", "functions.", "```json", ";", "true", "None"]
        for _ in range(300):
            text = "".join(random_.choices(words, k=random_.randrange(1, 40)))
            more = {"parallel": random_.random() < 0.7, "thinking": random_.random() < 0.2}
            cut = random_.random() < 0.5
            pieces, at = [], 0
            while at < len(text):
                size = random_.randrange(1, 9)
                pieces.append(text[at : at + size])
                at += size
            assert facts(parse([text], form, "qwen3", cut, **more)) == facts(parse(pieces, form, "qwen3", cut, **more))
        for _ in range(100):
            data = random_.randbytes(random_.randrange(1, 200)).decode("utf-8", "replace")
            parse([data, *one.begin, data], form, "qwen3")


@pytest.mark.parametrize(("form", "model_type"), [("hermes", "qwen3"), ("qwen3_xml", "qwen3_5"), ("gemma4", "gemma4")])
def test_well_formed_answers_agree_with_transformers(form: str, model_type: str) -> None:
    from transformers.cli.serving import utils
    from transformers.utils.chat_parsing import parse_response

    fallbacks = utils._RESPONSE_TEMPLATE_FALLBACKS
    template = next(value for types, value in fallbacks.items() if model_type in types)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}
        for name, schema in SCHEMAS.items()
    ]
    for calls in ([("weather", VALUES[0])], [("weather", VALUES[3]), ("now", {})]):
        if form == "gemma4":
            calls = calls[:1]
        text = written(form, calls)
        theirs = parse_response(text, template, prefix="", tools=tools)
        expected = [(one["function"]["name"], one["function"]["arguments"]) for one in theirs["tool_calls"]]
        assert [(call.name, json.loads(call.arguments)) for call in parse([text], form).calls] == expected


def test_an_offline_answer_is_read_as_a_server_reads_it(make_llm: Make, tmp_path: Path) -> None:
    marks = ("<|tool_call>", "<tool_call|>")
    script = ["Wait. ", marks[0], 'call:weather{city:<|"|>Rom<|"|>}', marks[1]]
    template = "{# tools <|tool_call> #}{{ messages[-1].content }}"
    scripted_model.write(tmp_path, {"call": script}, marks, template)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    llm = make_llm(tmp_path)
    messages = [{"role": "user", "content": scripted_model.start("call")}]
    for params in (SamplingParams(max_tokens=30, temperature=0), [SamplingParams(max_tokens=30, temperature=0)]):
        (output,) = llm.chat(messages, params, tools=tools, use_tqdm=False)
        (answer,) = llm.read_answer(output, tools)
        assert facts(answer) == ("Wait.", "", [("weather", '{"city":"Rom"}')], [])
    (plain,) = llm.chat(messages, params, use_tqdm=False)
    assert plain.outputs[0].text == script[0] + script[2]


def test_harmony_without_tools_and_with_a_constraint() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert facts(parse(list(text), None, "openai_gptoss")) == ("Four.", "Hm.", [], [])
    forced = parse(list('[{"name": "now", "arguments": {}}]'), "openai", "openai_gptoss", constrained=True)
    assert facts(forced) == ("", "", [("now", "{}")], [])


TEMPLATES = [  # what templates of these models have in them
    ("{%- if tools %}... within <tool_call></tool_call> XML tags{% endif %}", "hermes", None),
    ("{% if tools %}<tool_call></tool_call>{% endif %}{% if '</think>' in content %}", "hermes", "qwen3"),
    ("{% if tools %}<tool_call>\n<function=example>{% endif %}<think>", "qwen3_xml", "qwen3"),
    ('{{ \'<|python_tag|>\' }}{% if tools %}{"name": name, "parameters": dictionary}', "llama3_json", None),
    ("{% if tools %}<|start_header_id|>[func_name1(params_name1=params_value1)]{% endif %}", "pythonic", None),
    ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral", None),
    ("[TOOL_CALLS]{{ name }}[ARGS][THINK]", "mistral", "mistral"),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}{% if '</think>' in content %}", "deepseek_v3", "qwen3"),
    ("<start_function_call>call:", "functiongemma", None),
    ("<|tool_call>call:{{ name }}<tool_call|><|channel>thought<channel|>", "gemma4", "gemma4"),
    ("{{ '<|tool|>' + tools + '<|/tool|>' }}", "phi4_mini_json", None),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    ("{{ '<|im_start|>' + message['content'] }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_a_chat_template_tells_the_formats(template: str, tools: str | None, reasoning: str | None) -> None:
    found = Formats.of(template)
    assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == (tools, reasoning)
    assert Formats.of(template, "none", "none") == Formats()
