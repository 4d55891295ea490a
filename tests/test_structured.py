"""Structured output, offline: what follows a grammar, what is refused, and that neighbours do not notice."""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import schemas
import tiny_models
import tiny_tokenizers
from conftest import Make
from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.engine.constraints import Constraints
from octavo.errors import InvalidRequest
from octavo.grammar.grammars import Grammars
from octavo.grammar.guidance import Guidance
from octavo.grammar.state import State, fill
from octavo.text.tokenizer import Tokenizer
from octavo.types import Request

OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a vocabulary of 640 for a tokenizer of 600."""
    folder = tmp_path_factory.mktemp("structured")
    tiny_models.save(tiny_models.oracle(vocab_size=640), folder)
    return tiny_tokenizers.f_bpe(folder)


@pytest.fixture
def llm(make_llm: Make, folder: Path) -> LLM:
    return make_llm(folder, max_model_len=512)


def params(form: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 300, "seed": 1, **more, "structured_outputs": form})


def answers(llm: LLM, *given: SamplingParams) -> list[Any]:
    outputs = llm.generate(["When shall we"] * len(given), list(given), use_tqdm=False)
    return [sample for output in outputs for sample in output.outputs]


@pytest.mark.case("SO-01")
@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "str"}},
        {"json": {"type": "object", "properties": {"foo": "bar"}}},
        {"json": '{"type": "ob'},
        {"json": ""},
        {"json": []},
        {"json": True},
        {"json": "true"},
        {"json": {"type": "object", "properties": "bar"}},
        {"regex": "("},
        {"regex": "[.*"},
        {"regex": ""},
        {"regex": "\0"},
        {"regex": "a\0b"},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)b"},
        {"grammar": ""},
        {"grammar": "not a grammar"},
        {"grammar": "start: missing"},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'start: x "b"\nx: start? "c"'},
        {"grammar": 'start: "a" start'},
        {"grammar": 'root ::= root "a" | "b"'},
        {"choice": []},
        {"choice": [""]},
        {"choice": "yes"},
        {"json_object": False},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"regex": "a", "choice": ["a"]},
        {"xml": "a"},
        {},
    ],
    ids=lambda form: json.dumps(form)[:40],
)
def test_what_cannot_be_followed_is_refused(llm: LLM, form: dict[str, Any]) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidRequest, match="structured_outputs") as caught:
        answers(llm, params(form, n=2))
    assert caught.value.param == "structured_outputs"
    assert time.monotonic() - begin < 5
    (after,) = answers(llm, params({"choice": ["still", "here"]}))
    assert after.text in ("still", "here")


@pytest.mark.case("SO-02")
@pytest.mark.parametrize("keyword", schemas.UNENFORCED)
def test_a_keyword_that_is_not_enforced_is_named_or_lenient(llm: LLM, keyword: str) -> None:
    schema = schemas.UNENFORCED[keyword]
    with pytest.raises(InvalidRequest, match=keyword):
        answers(llm, params({"json": schema}))
    (answer,) = answers(llm, params({"json": schema, "lenient": True}))
    if answer.finish_reason == "stop":
        json.loads(answer.text)


@pytest.mark.case("SO-02")
@pytest.mark.parametrize("schema", schemas.IMPOSSIBLE, ids=lambda schema: json.dumps(schema)[:40])
def test_an_impossible_schema_is_refused(llm: LLM, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json"):
        answers(llm, params({"json": schema}))


@pytest.mark.case("SO-02", "SO-04")
def test_every_finished_answer_validates(llm: LLM) -> None:
    assert len(schemas.ALL) >= 200
    given = [params({"json": schema}, seed=i, temperature=2.0) for i, schema in enumerate(schemas.ALL)]
    finished = 0
    for schema, answer in zip(schemas.ALL, answers(llm, *given), strict=True):
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert finished > 0.8 * len(given)


@pytest.mark.parametrize("regex", ["[0-9]{3}", "^abc$", "(a|b)+c?", r"\d{4}-\d\d", "[а-яё]{2,4}", "😀+|é"])
def test_a_regular_expression_matches_whole(llm: LLM, regex: str) -> None:
    for answer in answers(llm, *(params({"regex": regex}, seed=seed) for seed in range(4))):
        if answer.finish_reason == "stop":
            assert re.fullmatch(regex, answer.text)
        else:
            assert answer.finish_reason == "length"


def test_grammars_in_both_notations(llm: LLM) -> None:
    lark = 'start: item ("," item)~1..3\nitem: "x" | "(" item ")"'
    gbnf = 'root ::= item ("," item)+ "!"\nitem ::= "x" | "yy"'
    for answer in answers(llm, *(params({"grammar": lark}, seed=seed) for seed in range(6))):
        if answer.finish_reason == "stop":
            assert re.fullmatch(r"\(*x\)*(,\(*x\)*){1,3}", answer.text)
    for answer in answers(llm, *(params({"grammar": gbnf}, seed=seed) for seed in range(6))):
        if answer.finish_reason == "stop":
            assert re.fullmatch("(x|yy)(,(x|yy))+!", answer.text)


def test_tags_follow_their_schema_within_free_text(llm: LLM) -> None:
    tag = {"begin": "<f=add>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "end": "</f>"}
    (answer,) = answers(llm, params({"structural_tag": {"structures": [tag], "triggers": ["<f="]}}, max_tokens=30))
    assert answer.finish_reason in ("stop", "length")


def grammars_of(tokenizer: Tokenizer, vocab_size: int) -> Constraints:
    return Constraints(Grammars(Guidance(tokenizer, vocab_size, [2])), vocab_size)


@pytest.mark.case("SO-04")
@pytest.mark.parametrize("kind", ["f_bpe", "f_spm"])
def test_every_member_can_be_said_and_nothing_near_it(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_folder(getattr(tiny_tokenizers, kind)(tmp_path))
    grammars = grammars_of(tokenizer, tokenizer.vocab_size + 40).grammars
    members = ["日本", "é", "😀", 'a"b', "a\\b", "/", "new\nline", "tab\t."]
    cases = [({"choice": members}, [*members], ["日", "日本語", "e", "a'b", "a\\"])]
    cases += [({"regex": "[а-яё]{2,4}"}, ["да", "ёлка"], ["д", "da", "елками"])]
    cases += [({"json": {"enum": members}}, [json.dumps(m, ensure_ascii=False) for m in members], ['"日"', '"e"'])]
    for form, good, bad in cases:
        wanted = StructuredOutputsParams.of(form)
        assert wanted is not None
        grammar = grammars.compile(wanted)
        for text, is_member in [*((text, True) for text in good), *((text, False) for text in bad)]:
            request = Request("a", (1,), params(form), frozenset({2}))
            state = State(grammars.backend, grammar, request, tokenizer.vocab_size + 40)
            assert said(grammars, state, ids_of(grammars, text)) == is_member, (form, text)


def ids_of(grammars: Grammars, text: str) -> list[int]:
    """As the tokenizer says it within a text."""
    return list(backend_of(grammars).tokens.tokenize_str(text))


def said(grammars: Grammars, state: State, token_ids: list[int]) -> bool:

    for token in token_ids:
        masks = np.zeros((1, -(-backend_of(grammars).vocab_size // 32)), np.int32)
        if not state.rules:
            return False
        fill(grammars.backend, [state], masks)
        if not masks[0, token >> 5] >> (token & 31) & 1:
            return False
        state.accept(token)
    return state.finished or state.may_end


def backend_of(grammars: Grammars) -> Guidance:
    assert isinstance(grammars.backend, Guidance)
    return grammars.backend


@pytest.mark.case("SO-06")
def test_big_bounds_compile_and_work(llm: LLM) -> None:
    forms: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"t": {"type": "string", "maxLength": size}}, "required": ["t"]}}
        for size in (2000, 65536)
    ]
    forms.append({"json": {"type": "array", "items": {"type": "number"}, "minItems": 10, "maxItems": 1000}})
    forms.append({"json": {"enum": [f"value {i}" for i in range(20_000)]}})
    for form in forms:
        (answer,) = answers(llm, params(form, max_tokens=40))
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), form["json"])
    with pytest.raises(InvalidRequest, match="64 levels"):
        deep: dict[str, Any] = {}
        for _ in range(300):
            deep = {"type": "array", "items": deep}
        answers(llm, params({"json": deep}))


@pytest.mark.case("SO-06")
def test_the_cache_of_grammars_is_bounded(folder: Path) -> None:
    grammars = grammars_of(Tokenizer.from_folder(folder), 640).grammars
    for i in range(600):
        grammars.compile(StructuredOutputsParams(choice=(f"number {i}",)))
    assert len(grammars._kept) <= 256
    big = StructuredOutputsParams(json={"enum": ["x" * 900_000]})
    for i in range(12):
        grammars.submit(dataclasses.replace(big, whitespace_pattern=f" {{1,{i + 1}}}"))
    assert grammars._length <= 9 << 20


@pytest.mark.case("SO-07", "SMP-01", "KV-03")
@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 1}, {"depth": 2, "num_scheduler_steps": 4}], ids=str)
def test_neighbours_do_not_notice(make_llm: Make, folder: Path, options: dict[str, Any]) -> None:
    """Half JSON, a quarter choices, the rest free; few blocks, short chunks: preemption and chunked prefill."""
    tight = {"max_num_batched_tokens": 32, "max_num_seqs": 12, "kv_cache_memory_bytes": "1M", "block_size": 16}
    crowded = make_llm(folder, max_model_len=256, **tight, **options)
    prompts = [f"Fair is foul and foul is fair {i}" * (1 + i % 3) for i in range(16)]
    given = []
    for i in range(16):
        if i % 4 in (0, 1):
            given.append(params({"json": OBJECT}, seed=i, n=3 if i % 4 == 0 else 1, max_tokens=100))
        elif i % 4 == 2:
            given.append(params({"choice": ["yes", "no"]}, seed=i, max_tokens=9))
        else:
            given.append(SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    together = crowded.generate(prompts, given, use_tqdm=False)
    for i, (output, wanted) in enumerate(zip(together, given, strict=True)):
        for sample in output.outputs:
            if i % 4 in (0, 1):
                if sample.finish_reason == "stop":
                    jsonschema.validate(json.loads(sample.text), OBJECT)
            elif i % 4 == 2:
                assert sample.text in ("yes", "no")
            else:
                (alone,) = crowded.generate([prompts[i]], wanted, use_tqdm=False)
                assert alone.outputs[0].token_ids == sample.token_ids
    assert crowded.engine.loop.constraints is not None
    assert not crowded.engine.loop.constraints._states


@pytest.mark.case("SO-07")
def test_a_grammar_that_fails_on_the_way_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = State.accept

    def failing(self: State, token_id: int) -> None:
        accept(self, token_id)
        if self.user_ends:
            self.matcher.error = "planted"

    monkeypatch.setattr(State, "accept", failing)
    good, bad = answers(llm, params({"json": OBJECT}), params({"json": OBJECT}, stop_token_ids=[599]))
    assert bad.finish_reason == "error"
    assert "planted" in bad.stop_reason
    assert good.finish_reason in ("stop", "length")


@pytest.mark.case("SO-08")
def test_an_answer_ends_when_its_grammar_does(llm: LLM) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"stop_token_ids": [300]}, {"temperature": 0}):
        for answer in answers(llm, params({"regex": "[0-9]{3}"}, **more)):
            assert re.fullmatch("[0-9]{3}", answer.text), more
            assert answer.finish_reason == "stop"
        for answer in answers(llm, *(params({"choice": ["a", "ab"]}, **{**more, "seed": seed}) for seed in range(6))):
            assert answer.text == "ab" if more.keys() & {"ignore_eos", "min_tokens"} else answer.text in ("a", "ab")
            assert answer.finish_reason == "stop"


@pytest.mark.case("SO-08")
def test_a_cut_answer_says_so(llm: LLM) -> None:
    (answer,) = answers(llm, params({"json": OBJECT}, max_tokens=3))
    assert answer.finish_reason == "length"
    (answer,) = answers(llm, params({"regex": "[0-9]{3}x"}, max_tokens=300, stop=["x"]))
    assert re.fullmatch("[0-9]{3}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "x")


@pytest.mark.case("SO-08")
def test_whitespace_is_bounded(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    blanks = {
        token: 100.0 for token in range(600) if (text := tokenizer.token_bytes(token)) and not text.strip(b" \n\t\r")
    }
    (answer,) = answers(
        llm, params({"json": {"type": "array", "items": {"type": "null"}, "maxItems": 1}}, logit_bias=blanks)
    )
    assert answer.finish_reason == "stop"
    assert json.loads(answer.text) in ([], [None])
    (tight,) = answers(llm, params({"json": OBJECT, "disable_any_whitespace": True}, logit_bias=blanks))
    assert tight.text.startswith('{"name":"')


def test_what_no_token_satisfies_ends_with_an_error(llm: LLM) -> None:
    (answer,) = answers(llm, params({"regex": "[0-9]+"}, allowed_token_ids=[5]))
    assert answer.finish_reason == "error"
    assert "structured_outputs, allowed_token_ids" in answer.stop_reason


def test_logprobs_stay_raw(llm: LLM) -> None:
    free = llm.generate(["When shall we"], SamplingParams(temperature=0, max_tokens=1, logprobs=5), use_tqdm=False)
    (bound,) = answers(llm, params({"regex": "[0-9]{3}"}, temperature=0, logprobs=5))
    best = free[0].outputs[0].logprobs
    assert best is not None and bound.logprobs is not None
    top = max(best[0].items(), key=lambda item: item[1].logprob)[0]
    assert bound.logprobs[0][top].logprob == pytest.approx(best[0][top].logprob, abs=1e-5)


@pytest.mark.case("ABT-03")
def test_an_abort_while_compiling(llm: LLM) -> None:
    engine = llm.engine
    group = engine.inputs.group("When", params({"json": {"enum": [f"v{i}" for i in range(5000)]}}, n=2))
    engine.add(group)
    assert engine.loop.num_compiling == 2 and engine.has_unfinished
    engine.abort(group.id)
    assert engine.loop.num_compiling == 0
    engine.drain()
    assert not engine.has_unfinished


def test_without_a_tokenizer_it_is_refused(make_llm: Make) -> None:
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        make_llm().generate([[1, 2]], params({"regex": "a"}, max_tokens=9), use_tqdm=False)
