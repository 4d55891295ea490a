"""Text through the whole engine: stop strings, split characters, ends of sequence, chat; cumulative and by deltas."""

import dataclasses
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from conftest import Make
from octavo import LLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.errors import InvalidRequest
from test_invariance import assert_idle

SPECIAL = ("</s>", "<|im_end|>")


def scripted(make_llm: Make, folder: Path, pieces: Sequence[str | bytes], end: int | None = 0, **options: Any) -> LLM:
    """A model that says these pieces one after the other, each once, after the start piece; then token `end`."""
    first = len(SPECIAL)
    chain = {first + i: first + i + 1 for i in range(len(pieces))}
    if end is None:
        del chain[first + len(pieces)]
    else:
        chain[first + len(pieces)] = end
    tiny_models.save(tiny_models.chain_model(chain, first + len(pieces) + 1), folder)
    tiny_tokenizers.f_script(folder, ["<start>", *pieces], SPECIAL)
    return make_llm(folder, **options)


START = [len(SPECIAL)]


def said(llm: LLM, **params: Any) -> RequestOutput:
    """The one answer, after checking that the deltas of a second run add up to it at every step."""
    params = {"temperature": 0, "max_tokens": 60, **params}
    (whole,) = llm.generate([START], SamplingParams(**params), use_tqdm=False)
    engine = llm.engine
    engine.add(engine.check(START, SamplingParams(**params, output_kind=RequestOutputKind.DELTA)))
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    ends: dict[int, Any] = {}
    while engine.has_unfinished:
        for output in engine.step():
            for sample in output.outputs:
                assert "\ufffd" not in sample.text or "\ufffd" in whole.outputs[sample.index].text
                texts[sample.index] = texts.get(sample.index, "") + sample.text
                ids.setdefault(sample.index, []).extend(sample.token_ids)
                assert whole.outputs[sample.index].text.startswith(texts[sample.index])
                if sample.finish_reason:
                    assert sample.index not in ends, "one finish a sample"
                    ends[sample.index] = (sample.finish_reason, sample.stop_reason)
    for sample in whole.outputs:
        assert texts[sample.index] == sample.text
        assert ids[sample.index] == sample.token_ids
        assert ends[sample.index] == (sample.finish_reason, sample.stop_reason)
    assert_idle(llm)
    return whole


@pytest.mark.case("TOK-01")
@pytest.mark.parametrize("steps", [1, 3])
def test_split_characters_come_whole(make_llm: Make, tmp_path: Path, steps: int) -> None:
    pieces = [b"\xf0", b"\x9f\x98\x80", "x", b"\xf0\x9f", b"\x98\x81", b"\xe6", b"\xad\xaa", " ok"]
    llm = scripted(make_llm, tmp_path, pieces, num_scheduler_steps=steps)
    assert said(llm).outputs[0].text == "😀x😁歪 ok"


@pytest.mark.case("TOK-03")
def test_bytes_that_are_no_text_become_replacements(make_llm: Make, tmp_path: Path) -> None:
    llm = scripted(make_llm, tmp_path, ["a", b"\x85", "b", b"\xc0", b"\xed\xa0\x80", "c", b"\xff"])
    output = said(llm).outputs[0]
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
    assert output.text.replace("\ufffd", "") == "abc"


@pytest.mark.case("TOK-03", "TOK-06")
def test_random_tokens_never_break_the_decoder(make_llm: Make, tmp_path: Path) -> None:
    """Padded vocabulary: ids from the tokenizer's end to the model's are sampled too, and decode to nothing."""
    tiny_models.save(tiny_models.oracle(vocab_size=640), tmp_path)
    tiny_tokenizers.f_bpe(tmp_path)
    llm = make_llm(tmp_path, max_model_len=600)
    params = SamplingParams(temperature=2, max_tokens=500, ignore_eos=True, logit_bias={630: 50.0})
    wild = SamplingParams(temperature=2, max_tokens=500, ignore_eos=True)
    outputs = llm.generate([[5]] + [[7, 8]] * 8, [params] + [wild] * 8, use_tqdm=False)
    assert 630 in outputs[0].outputs[0].token_ids
    for output in outputs:
        sample = output.outputs[0]
        assert len(sample.token_ids) == 500
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids)
    assert_idle(llm)


@pytest.mark.case("STOP-01")
def test_a_stop_string_over_three_tokens_is_never_shown(make_llm: Make, tmp_path: Path) -> None:
    llm = scripted(make_llm, tmp_path, ["The ", "qui", "ck", " bro", "wn", " fox"])
    output = said(llm, stop=["ck bro"]).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("The qui", "stop", "ck bro")
    assert said(llm, stop=["ck bro"], include_stop_str_in_output=True).outputs[0].text == "The quick bro"
    assert len(output.token_ids) == 4


@pytest.mark.case("STOP-03")
@pytest.mark.parametrize("steps", [1, 8])
def test_a_stop_string_wins_over_the_end_in_the_same_step(make_llm: Make, tmp_path: Path, steps: int) -> None:
    llm = scripted(make_llm, tmp_path, ["ab", "cd"], num_scheduler_steps=steps)
    for params, text in (({}, "ab"), ({"include_stop_str_in_output": True}, "abcd")):
        output = said(llm, stop=["cd"], **params).outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "cd")
    cd = len(SPECIAL) + 2
    output = said(llm, stop=["zz"], stop_token_ids=[cd]).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", cd)


@pytest.mark.case("STOP-04")
def test_only_generated_text_is_searched(make_llm: Make, tmp_path: Path) -> None:
    long = string.ascii_letters[:40]
    llm = scripted(make_llm, tmp_path, ["D.", "..", *[f"{i:02d}." for i in range(70)], *long, "!"])
    assert said(llm, stop=["<start>"], max_tokens=3).outputs[0].finish_reason == "length"
    assert said(llm, stop=["t>D"], max_tokens=3).outputs[0].finish_reason == "length"
    output = said(llm, stop=[long], max_tokens=200).outputs[0]
    assert (output.stop_reason, len(output.text)) == (long, 4 + 3 * 70)


@pytest.mark.case("STOP-05")
def test_what_was_held_back_comes_out_at_the_end(make_llm: Make, tmp_path: Path) -> None:
    llm = scripted(make_llm, tmp_path, ["one ", "two ", "ST", "x"])
    output = said(llm, stop=["STOP"], max_tokens=3).outputs[0]
    assert (output.text, output.finish_reason) == ("one two ST", "length")
    ended = scripted(make_llm, tmp_path / "ended", ["one ", "two ", "ST"])
    output = said(ended, stop=["STOP"]).outputs[0]
    assert (output.text, output.finish_reason) == ("one two ST", "stop")
    both = said(ended, stop=["STOP"], n=2, temperature=0.01, seed=1).outputs
    assert [sample.text for sample in both] == ["one two ST"] * 2


def test_an_abort_brings_out_what_was_held_back(make_llm: Make, tmp_path: Path) -> None:
    engine = scripted(make_llm, tmp_path, ["one ", "ST", "x", "y", "z"], depth=0).engine
    engine.add(engine.check(START, SamplingParams(temperature=0, stop=["STOP"]), request_id="a"))
    engine.step()
    engine.step()
    output = engine.abort("a")
    assert output is not None
    assert output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("one ST", "abort")
    assert engine.abort("a") is None
    engine.drain()


@pytest.mark.case("LEN-05")
@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_every_listed_end_ends_the_text(make_llm: Make, tmp_path: Path, where: str) -> None:
    """The chain ends with <|im_end|> (1); the tokenizer knows </s> (0) only."""
    scripted(make_llm, tmp_path, ["hi", " there"], end=1).close()
    for name in ("generation_config.json", "config.json"):
        content = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        content["eos_token_id"] = [0, 1] if name == where else 0
        (tmp_path / name).write_text(json.dumps(content))
    output = said(make_llm(tmp_path)).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi there", "stop", None)
    assert output.token_ids[-1] == 1
    output = said(make_llm(tmp_path), stop_token_ids=[len(SPECIAL) + 1]).outputs[0]
    assert output.text == ""


@pytest.mark.case("SMP-08")
@pytest.mark.parametrize("n", [1, 3])
def test_bad_words_never_appear(make_llm: Make, tmp_path: Path, n: int) -> None:
    tiny_models.save(tiny_models.oracle(), tmp_path)
    tiny_tokenizers.f_bpe(tmp_path)
    llm = make_llm(tmp_path)
    tokenizer = llm.get_tokenizer()
    free = SamplingParams(temperature=0.7, seed=3, n=n, max_tokens=100, ignore_eos=True)
    before = llm.generate(["the"], free, use_tqdm=False)[0].outputs
    words = [w for s in before for w in (tokenizer.decode([s.token_ids[0]]), tokenizer.decode(s.token_ids[10:13])) if w]
    assert words
    after = llm.generate(["the"], dataclasses.replace(free, bad_words=words), use_tqdm=False)[0].outputs
    banned = [tokenizer.encode(text, add_special_tokens=False) for w in words for text in (w, " " + w.lstrip())]
    assert any(_contains(s.token_ids, b) for s in before for b in banned)
    for sample in after:
        assert not any(_contains(sample.token_ids, b) for b in banned)


def _contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


@pytest.fixture
def chat_llm(make_llm: Make, tmp_path: Path) -> LLM:
    tiny_models.save(tiny_models.oracle(), tmp_path)
    tiny_tokenizers.f_bpe(tmp_path)
    return make_llm(tmp_path)


@pytest.mark.case("LEN-07")
def test_empty_texts_are_refused(chat_llm: LLM) -> None:
    for prompts in ("", [""], ["fine", ""]):
        with pytest.raises(InvalidRequest, match="empty"):
            chat_llm.generate(prompts, use_tqdm=False)
    assert chat_llm.generate([], use_tqdm=False) == []
    for messages in ([], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}]):
        with pytest.raises(InvalidRequest):
            chat_llm.chat(messages, use_tqdm=False)
    assert chat_llm.chat([{"role": "user", "content": ""}], use_tqdm=False)


def test_a_chat_is_its_rendered_prompt(chat_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    talks = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "a longer question"}]]
    outputs = chat_llm.chat(talks, params, use_tqdm=False)
    for output in outputs:
        assert output.prompt is not None
        again = chat_llm.generate(
            {"prompt_token_ids": chat_llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)},
            params,
            use_tqdm=False,
        )
        assert again[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert chat_llm.chat(talks[0], params, use_tqdm=False)[0].outputs[0] == outputs[0].outputs[0]


@pytest.mark.case("ABT-06")
def test_one_bad_conversation_is_named(chat_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="Conversation 1"):
        chat_llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": 5}]], use_tqdm=False)
    assert chat_llm.engine.num_unfinished == 0


@pytest.mark.case("LEN-08")
def test_ids_and_their_text_say_the_same(chat_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    ids = chat_llm.get_tokenizer().encode("some words")
    by_text, by_ids = (chat_llm.generate(p, params, use_tqdm=False)[0] for p in ("some words", ids))
    assert by_text.outputs[0] == by_ids.outputs[0]
    assert by_text.prompt_token_ids == ids
    assert (by_text.prompt, by_ids.prompt) == ("some words", None)


@pytest.mark.case("LP-04")
def test_logprobs_name_their_tokens(chat_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=10, prompt_logprobs=4, ignore_eos=True)
    output = chat_llm.generate("some words", params, use_tqdm=False)[0]
    tokenizer = chat_llm.get_tokenizer()
    for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
        assert len(row) in (10, 11)
        assert row[token].decoded_token == tokenizer.token_text(token)
    spelled = b"".join(tokenizer.token_bytes(t) for t in output.outputs[0].token_ids if t not in tokenizer.special_ids)
    assert spelled.decode(errors="replace") == output.outputs[0].text


def test_final_only_comes_once(chat_llm: LLM) -> None:
    engine = chat_llm.engine
    params = SamplingParams(temperature=0, max_tokens=7, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True)
    engine.add(engine.check("hi", params))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert len(outputs) == 1
    assert outputs[0].finished
    assert len(outputs[0].outputs[0].token_ids) == 7


def test_a_text_without_detokenizing_stays_empty(chat_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
    output = chat_llm.generate("hi", params, use_tqdm=False)[0].outputs[0]
    assert output.text == ""
    assert len(output.token_ids) == 4
