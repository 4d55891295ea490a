"""Incremental text: equal to one-shot decoding however it is cut, never a broken character, exact stop strings."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models

from octavo.text.detokenize import MAX_BYTE_RUN, Detokenizer
from octavo.text.stops import StopStrings
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, SamplingParams
from tiny_tokenizers import f_bpe, f_script, f_spm

LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT
EOS, IM_END = 0, 1  # of f_script
STRINGS = [
    "The quick brown fox", "日本語の文章。中文字符", "မြန်မာဘာသာ စကား", "👩‍👩‍👧‍👦 family 👋🏽", "a  b   c    d",
    "  leading", "trailing  ", "\n\n\ttabs\r\n", "naïve café e\u0301", "مرحبا بالعالم", "🇫🇷🇯🇵",
    "", " ", "x", "\u2028\ufeff",
]  # fmt: skip


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(f_bpe(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(f_spm(tmp_path_factory.mktemp("spm")))


@pytest.fixture(params=["bpe", "spm", "wordpiece", "no decoder"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param in ("bpe", "spm"):
        found: Tokenizer = request.getfixturevalue(request.param)
        return found
    words = ["[UNK]", "hello", "##lo", "world", ".", "don", "'", "t", "##ing", "日", "\ufffd", "[SEP]"]
    raw = Raw(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    if request.param == "wordpiece":
        raw.decoder = decoders.WordPiece()
    raw.add_special_tokens(["[SEP]"])
    return Tokenizer(raw)


def scripted(folder: Path, *pieces: str | bytes) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with these pieces, and the ids that write them one after the other."""
    return Tokenizer.from_folder(f_script(folder, pieces)), list(range(2, 2 + len(pieces)))


def cut(ids: Sequence[int], step: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), step):
        yield list(ids[start : start + step])


def run(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    step: int = 1,
    finish: FinishReason = LENGTH,
    prompt: Sequence[int] = (),
    **params: Any,
) -> tuple[list[str], Detokenizer]:
    """The deltas of ids that come `step` at a time; the finish comes with the last ones."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    parts = list(cut(ids, step)) or [[]]
    deltas = []
    for part in parts:
        last = part is parts[-1]
        deltas.append(detokenizer.feed(part, finish if last else None))
        if detokenizer.stopped:
            break
    return deltas, detokenizer


@pytest.mark.case("TOK-01")
@pytest.mark.parametrize("step", [1, 2, 3, 10])
def test_characters_in_pieces_come_out_whole(tmp_path: Path, step: int) -> None:
    tokenizer, ids = scripted(
        tmp_path, b"\xf0", b"\x9f\x98\x80", "x", b"\xf0\x9f", b"\x98\x81", b"\xe6", b"\xad\xaa", " ok"
    )
    deltas, _ = run(tokenizer, [*ids, EOS], step, STOP)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids) == "😀x😁歪 ok"


@pytest.mark.case("TOK-03")
@pytest.mark.parametrize("step", [1, 3])
def test_bad_bytes_become_what_one_shot_decoding_makes_of_them(tmp_path: Path, step: int) -> None:
    tokenizer, ids = scripted(
        tmp_path, "a", b"\x85", "b", b"\xc0", b"\xed\xa0\x80", "c", b"\xff", "d", b"\xed", b"\xb8"
    )
    for end in range(len(ids) + 1):
        deltas, _ = run(tokenizer, [*ids[:end], EOS], step, STOP)
        assert "".join(deltas) == tokenizer.decode(ids[:end])
    assert tokenizer.decode(ids) == "a\ufffdb\ufffd\ufffd\ufffd\ufffdc\ufffdd\ufffd\ufffd"


@pytest.mark.case("TOK-03", "TOK-05", "TOK-06")
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_equal_one_shot_decoding_at_every_cut(tokenizer: Tokenizer, skip: bool) -> None:
    checked = 0
    for seed in range(400):
        draw = random.Random(seed)
        ids = [draw.randrange(-2, tokenizer.vocab_size + 40) for _ in range(draw.randrange(1, 40))]
        start = draw.randrange(len(ids) + 1)
        deltas, _ = run(tokenizer, ids[start:], draw.choice([1, 2, 5]), prompt=ids[:start], skip_special_tokens=skip)
        whole, before = tokenizer.decode(ids, skip), tokenizer.decode(ids[:start], skip)
        if whole.startswith(before):
            checked += 1
            assert "".join(deltas) == whole[len(before) :], (seed, ids, start)
    assert checked > 300


@pytest.mark.case("TOK-05")
@pytest.mark.parametrize("skip", [True, False])
def test_texts_equal_one_shot_decoding_from_every_start(bpe: Tokenizer, spm: Tokenizer, skip: bool) -> None:
    for tokenizer, special in ((bpe, "<|im_end|>"), (spm, "</s>")):
        for text in [*STRINGS, *(f"{a}{special}{special} {b}" for a in STRINGS for b in STRINGS[:3])]:
            ids = tokenizer.encode(text)
            whole = tokenizer.decode(ids, skip)
            for start in range(len(ids) + 1):
                before = tokenizer.decode(ids[:start], skip)
                if whole.startswith(before):
                    deltas, _ = run(tokenizer, ids[start:], prompt=ids[:start], skip_special_tokens=skip)
                    assert "".join(deltas) == whole[len(before) :], (text, start)


@pytest.mark.case("TOK-05")
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode("some words before 👋🏽 after")
        whole = tokenizer.decode(ids)
        for start in range(1, len(ids)):
            text = "".join(run(tokenizer, ids[start:], prompt=ids[:start])[0])
            assert whole.endswith(text)
            before = tokenizer.decode(ids[:start]).rstrip("\ufffd")
            assert len(text) <= len(whole) - len(before)


@pytest.mark.case("TOK-06")
def test_ids_outside_the_vocabulary_are_empty_and_harmless(tokenizer: Tokenizer) -> None:
    n = tokenizer.vocab_size
    deltas, detokenizer = run(tokenizer, [1, n, n + 1, 2**31, 2**63, -1, 3], prompt=[n + 5, -7, 2])
    assert "".join(deltas) == "".join(run(tokenizer, [1, 3], prompt=[2])[0])
    assert detokenizer.num_tokens == 7


def test_a_leading_space_of_the_output_stays_after_a_prompt(spm: Tokenizer) -> None:
    ids = spm.encode("true true", add_special_tokens=False)
    assert "".join(run(spm, ids, prompt=[1])[0]) == "true true"
    assert "".join(run(spm, ids, prompt=spm.encode("is"))[0]) == " true true"
    assert "".join(run(spm, ids, prompt=[1], skip_special_tokens=False)[0]) == " true true"


def test_bytes_wait_for_the_end_of_their_run_but_not_for_ever(spm: Tokenizer) -> None:
    one = spm.encode("😀", add_special_tokens=False)[-4:]
    deltas, _ = run(spm, one * 100)
    assert "".join(deltas) == "😀" * 100
    waits = [i for i, delta in enumerate(deltas) if delta]
    assert max(b - a for a, b in zip([-1, *waits], waits, strict=False)) <= MAX_BYTE_RUN
    bad = spm.token_id("<0xFF>")
    assert bad is not None
    assert "".join(run(spm, [*one, bad])[0]) == spm.decode([*one, bad]) == "\ufffd" * 5
    assert "".join(run(spm, [bad] * 500)[0]) == "\ufffd" * 500


def test_special_tokens_are_shown_or_not(bpe: Tokenizer, spm: Tokenizer) -> None:
    ids = [*bpe.encode("hi<|im_end|><|im_end|>"), bpe.vocab_size]
    assert "".join(run(bpe, ids)[0]) == "hi"
    assert "".join(run(bpe, ids, skip_special_tokens=False)[0]) == "hi<|im_end|><|im_end|>"
    spaced = Tokenizer(Raw(models.WordLevel({"a": 0, "<x>": 1}, unk_token="a")), {"eos_token": "<x>"})
    shown = {
        between: "".join(run(spaced, [0, 1, 1, 0], skip_special_tokens=False, spaces_between_special_tokens=between)[0])
        for between in (True, False)
    }
    assert shown == {True: "a <x> <x> a", False: "a <x><x> a"}


def test_nothing_is_decoded_when_not_asked(bpe: Tokenizer) -> None:
    deltas, detokenizer = run(bpe, bpe.encode("hello"), detokenize=False)
    assert "".join(deltas) == ""
    assert detokenizer.num_tokens == len(bpe.encode("hello"))


PIECES = ("The ", "qui", "ck", " bro", "wn", " fox")


@pytest.mark.case("STOP-01")
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_no_part_of_a_stop_string_is_shown(tmp_path: Path, step: int) -> None:
    tokenizer, ids = scripted(tmp_path, *PIECES)
    deltas, detokenizer = run(tokenizer, ids, step, stop=["ck bro"])
    assert "".join(deltas) == "The qui"
    assert all("c" not in delta for delta in deltas)
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("ck bro", 4)  # whatever the steps
    assert detokenizer.feed([2, 3], LENGTH) == ""
    assert detokenizer.num_tokens == 4
    deltas, _ = run(tokenizer, ids, step, stop=["ck bro"], include_stop_str_in_output=True)
    assert "".join(deltas) == "The quick bro"


def test_no_more_is_held_back_than_could_become_a_stop_string(tmp_path: Path) -> None:
    tokenizer, ids = scripted(tmp_path, *PIECES)
    deltas, _ = run(tokenizer, ids, stop=["ck brx", "never seen, and much longer than all the rest"])
    assert deltas == ["The ", "qui", "", "ck bro", "w", "n fox"]


@pytest.mark.case("STOP-03")
@pytest.mark.parametrize("last", [EOS, 4])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_wins_over_the_end_in_the_same_step(
    tmp_path: Path, last: int, step: int, include: bool, text: str
) -> None:
    tokenizer, _ = scripted(tmp_path, "ab", "cd", "end")
    deltas, detokenizer = run(tokenizer, [2, 3, last], step, STOP, stop="cd", include_stop_str_in_output=include)
    assert "".join(deltas) == text
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("cd", 2)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_the_token_that_ends_is_counted_and_not_shown(tmp_path: Path, include: bool, text: str) -> None:
    tokenizer, ids = scripted(tmp_path, "ab", "cd")
    deltas, detokenizer = run(tokenizer, ids, finish=STOP, include_stop_str_in_output=include)
    assert ("".join(deltas), detokenizer.num_tokens, detokenizer.stop_reason) == (text, 2, None)


@pytest.mark.case("STOP-04")
def test_only_generated_text_is_searched(tmp_path: Path) -> None:
    late = "0123456789abcdefghijklmnopqrstuvwxyzABCD"
    tokenizer, ids = scripted(tmp_path, "END", "EN", "Done", "long text ", late[:13], late[13:39], late[39:], " tail")
    end, en, done, filler, a, b, c, tail = ids
    assert "".join(run(tokenizer, [done, tail], prompt=[end], stop="END")[0]) == "Done tail"
    assert "".join(run(tokenizer, [done, tail], prompt=[en], stop="END")[0]) == "Done tail"
    assert "".join(run(tokenizer, [done, en, done], prompt=[en], stop="END")[0]) == "Done"
    for step in (1, 4):
        deltas, found = run(tokenizer, [*[filler] * 20, a, b, c, tail], step, stop=late)
        assert "".join(deltas) == "long text " * 20
        assert (found.stop_reason, found.num_tokens) == (late, 23)


@pytest.mark.case("STOP-05")
@pytest.mark.parametrize("finish", [LENGTH, STOP, ABORT])
def test_held_text_comes_out_at_the_end(tmp_path: Path, finish: FinishReason) -> None:
    tokenizer, ids = scripted(tmp_path, "one two ", "ST")
    ids = [*ids, EOS] if finish is STOP else ids
    for step in (1, 3):
        deltas, detokenizer = run(tokenizer, ids, step, finish, stop=["STOP"])
        assert "".join(deltas) == "one two ST"
        assert detokenizer.num_tokens == len(ids)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop="STOP"))
    assert detokenizer.feed(ids[:2]) == "one two "
    assert detokenizer.feed([], finish) == "ST"


def test_an_unfinished_character_comes_out_at_the_end(tmp_path: Path) -> None:
    tokenizer, ids = scripted(tmp_path, "a", b"\xf0\x9f")
    assert run(tokenizer, ids)[0] == ["a", "\ufffd"]


def test_the_first_end_counts_and_then_the_longest(tmp_path: Path) -> None:
    tokenizer, ids = scripted(tmp_path, "xa", "bcd", "e")
    for step in (1, 3):
        assert "".join(run(tokenizer, ids, step, stop=["abcd", "bc"])[0]) == "xa"
        assert "".join(run(tokenizer, ids, step, stop=["c", "abc", "bc"])[0]) == "x"
        assert run(tokenizer, ids, step, stop=["c", "abc", "bc"])[1].stop_reason == "abc"
        assert "".join(run(tokenizer, ids, step, stop=["cde", "e"])[0]) == "xab"


def test_stop_strings_are_not_looked_for_before_min_tokens(tmp_path: Path) -> None:
    tokenizer, _ = scripted(tmp_path, "S", "x")
    ids = [2, 3, 2, 3, 2, 3]
    texts = ["".join(run(tokenizer, ids, stop="S", min_tokens=n)[0]) for n in range(7)]
    assert texts == ["", "Sx", "Sx", "SxSx", "SxSx", "SxSxSx", "SxSxSx"]
    assert "".join(run(tokenizer, ids, stop="xS", min_tokens=2)[0]) == "S"  # it may begin before


PIECE = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECE, max_size=12), st.lists(PIECE, min_size=1, max_size=4), st.integers(0, 4))
def test_stop_strings_agree_with_a_plain_search(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    unique = list(dict.fromkeys(pieces))
    raw = Raw(models.WordLevel({piece: i for i, piece in enumerate([*unique, "<unk>"])}, unk_token="<unk>"))
    raw.decoder = decoders.Fuse()
    tokenizer = Tokenizer(raw)
    ids = [unique.index(piece) for piece in pieces]
    text = "".join(pieces)
    ignored = len("".join(pieces[:min_tokens]))
    ends = [
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > ignored
    ]
    for step in (1, 3):
        deltas, detokenizer = run(tokenizer, ids, step, stop=stops, min_tokens=min_tokens)
        if ends:
            end, length, stop = min(ends)
            assert ("".join(deltas), detokenizer.stop_reason) == (text[: end + length], stop)
        else:
            assert ("".join(deltas), detokenizer.stop_reason) == (text, None)


def test_a_match_may_begin_inside_a_failed_one(tmp_path: Path) -> None:
    tokenizer, ids = scripted(tmp_path, "xaa", "ab", "y")
    assert "".join(run(tokenizer, ids, stop="aab")[0]) == "xa"


def test_the_automaton_is_linear_in_a_text_made_to_be_slow() -> None:
    stops = StopStrings(["a" * 5000 + "b"])
    begin, state = time.process_time(), 0
    for character in ("a" * 4999 + "c") * 20:
        state = stops.advance(state, character)
    assert time.process_time() - begin < 1.0
    assert state == 0


@pytest.mark.parametrize("name", ["eos", "pad", "bad byte", "text"])
def test_time_is_linear_in_the_length(bpe: Tokenizer, spm: Tokenizer, name: str) -> None:
    for tokenizer in (bpe, spm):
        bad = tokenizer.token_id("<0xFF>") or tokenizer.token_id("ÿ") or 0
        token = {"eos": 2, "pad": tokenizer.vocab_size + 1, "bad byte": bad, "text": 300}[name]
        begin = time.process_time()
        run(tokenizer, [token] * 20_000, stop=["never", "seen"])
        assert time.process_time() - begin < 1.0
