"""Tokenizers from folders and from GGUF files: special tokens, token texts, ends of text, and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Raw
from transformers import AutoTokenizer

from octavo.errors import InvalidConfig, InvalidRequest, ModelNotFound
from octavo.hub import ModelFiles, find_model
from octavo.text import gguf_tokenizer
from octavo.text.tokenizer import Tokenizer, eos_sources, eos_token_ids, read_json
from tiny_tokenizers import CHATML, TEXTS, f_bpe, f_script, f_spm

HARD_TEXTS = [*TEXTS[:7], "", " ", "  two  spaces  ", "日本語😀", "<s>", "a<|im_end|>b", "\x00\x7f", "x" * 3000]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return f_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def spm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return f_spm(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="module")
def bpe(bpe_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(bpe_folder)


@pytest.fixture(scope="module")
def spm(spm_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(spm_folder)


def change(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> Tokenizer:
    (folder / name).write_text(json.dumps(read_json(folder / name) | values), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def test_ids_and_texts_are_those_of_transformers(bpe_folder: Path, spm_folder: Path) -> None:
    for folder in (bpe_folder, spm_folder):
        tokenizer, oracle = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for text in HARD_TEXTS:
            if text != "<s>":  # where a text has the start token already, no second one is added
                assert tokenizer.encode(text) == oracle.encode(text)
            ids = oracle.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text, add_special_tokens=False) == ids
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
        assert tokenizer.vocab_size == len(oracle)
        assert tokenizer.bos_token_id == oracle.bos_token_id
        assert tokenizer.eos_token_id == oracle.eos_token_id
        assert tokenizer.special_ids == set(oracle.all_special_ids) | set(oracle.added_tokens_decoder)


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    raw = Raw.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=8)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("x" * 100)) > 8
    assert len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize("text", ["half \ud83d of a pair", 5, None, ["a"]])
def test_what_is_no_text_is_refused(bpe: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bpe.encode(text)
    assert ("surrogate" if isinstance(text, str) else "must be a string") in str(caught.value)
    assert ("Character 5" in str(caught.value)) == isinstance(text, str)


@pytest.mark.case("TOK-06")
def test_ids_outside_the_vocabulary_decode_as_nothing(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        n = tokenizer.vocab_size
        assert tokenizer.decode([n, 3, n + 30, -1, 2**40]) == tokenizer.decode([3])
        assert tokenizer.token_bytes(n) == b""
        assert tokenizer.piece(-1) is None


@pytest.mark.case("TOK-07")
def test_the_start_token_is_added_once_or_not_at_all(tmp_path: Path) -> None:
    count = {
        wanted: Tokenizer.from_folder(f_spm(tmp_path / str(wanted), add_bos_token=wanted)).encode("hi").count(1)
        for wanted in (True, False, None)
    }
    assert count == {True: 1, False: 0, None: 1}  # None: as tokenizer.json has it
    spm = Tokenizer.from_folder(tmp_path / "True")
    assert spm.encode("<s>hi").count(1) == 1
    assert spm.encode("hi", add_special_tokens=False).count(1) == 0
    both = change(f_spm(tmp_path / "both"), add_eos_token=True)
    assert both.encode("hi") == [1, *both.encode("hi", add_special_tokens=False), 2]
    assert both.encode("<s>hi").count(1) == 1


def test_the_start_token_comes_first_in_a_vocabulary_without_letters() -> None:
    raw = Raw(models.BPE({"<s>": 0, "1": 1}, []))
    raw.add_special_tokens(["<s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert Tokenizer(raw).encode("1") == [0, 1]


def test_the_start_token_is_added_where_only_the_config_wants_it(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    tokenizer = change(folder, bos_token="<|im_start|>", add_bos_token=True)
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 1
    assert change(folder, add_bos_token=None).encode("hi")[0] != 1


@pytest.mark.case("LP-04")
def test_different_tokens_have_different_texts_and_bytes_add_up(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        every = range(tokenizer.vocab_size)
        assert len({tokenizer.token_text(i) for i in every}) == tokenizer.vocab_size
        assert tokenizer.token_texts(every) == [tokenizer.token_text(i) for i in every]
        for text in ("true and  true   日本 😀👋🏽 naïve\n", "  x"):
            ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(i) for i in ids)
            assert joined.removeprefix(b" ") == f"a{text}".encode()
    with_space, without = spm.token_id("▁true"), spm.token_id("t")
    assert with_space is not None and without is not None
    assert (spm.token_text(with_space), spm.token_text(without)) == (" true", "t")
    outside = [bpe.vocab_size, bpe.vocab_size + 1]
    assert bpe.token_texts([*outside, 3, 3]) == ["", f"token_id:{outside[1]}", bpe.token_text(3), "token_id:3"]


@pytest.mark.case("LP-04")
def test_parts_of_characters_are_spelled_as_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(f_script(tmp_path, [b"\xf0", b"\x9f\x98\x80", "é", "\n", " a"]))
    assert [tokenizer.token_text(i) for i in range(2, 7)] == ["bytes:\\xf0", "bytes:\\x9f\\x98\\x80", "é", "\n", " a"]
    assert tokenizer.token_bytes(2) + tokenizer.token_bytes(3) == "😀".encode()


def test_token_bytes_are_what_the_decoder_makes_of_them(bpe: Tokenizer) -> None:
    added = ["<|x y|>", "日本", "é"]  # the last one is spelled like a byte, and decodes as one
    bpe.raw.add_tokens(added)
    tokenizer = Tokenizer(bpe.raw)
    for i in range(tokenizer.vocab_size):
        decoded = tokenizer.decode([i], skip_special_tokens=False)
        assert tokenizer.token_bytes(i).decode(errors="replace") == decoded


def test_word_pieces_keep_their_space() -> None:
    raw = Raw(models.WordPiece({"[UNK]": 0, "a": 1, "hello": 2, "##lo": 3}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(raw)
    assert [tokenizer.token_text(i) for i in (1, 2, 3)] == [" a", " hello", "lo"]


def test_added_tokens_of_the_config_are_known(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    n = Tokenizer.from_folder(folder).vocab_size
    entry = {"content": "<tool>", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
    hidden = {**entry, "content": "<hide>", "special": True}
    far = {**entry, "content": "<far>"}
    tokens = {str(n): entry, str(n + 1): hidden, str(n + 900): far, "1": {"content": "<|im_start|>", "special": True}}
    tokenizer = change(folder, added_tokens_decoder=tokens)
    assert tokenizer.vocab_size == n + 2
    assert tokenizer.encode("a<tool><hide>")[-2:] == [n, n + 1]
    assert tokenizer.decode([n, n + 1]) == "<tool>"
    assert tokenizer.token_id("<far>") is None, "a token without its row in the vocabulary"


def test_special_tokens_come_as_text_or_object_from_either_file(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    config = read_json(folder / "tokenizer_config.json")
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": "<|im_start|>"}}))
    tokenizer = change(folder, "special_tokens_map.json", eos_token={"content": "<|im_end|>"}, bos_token="other")
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert change(folder, unk_token=None, cls_token="<absent>").token_id("<absent>") is None


def test_a_special_token_of_the_vocabulary_is_found_in_texts_and_hidden(tmp_path: Path) -> None:
    raw = Raw(models.WordLevel({"</s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer = Tokenizer(raw, {"eos_token": "</s>"})
    assert tokenizer.encode("a</s>") == [2, 0]
    assert tokenizer.decode([2, 0]) == "a"


def test_chat_templates_of_files_win_over_the_config(tmp_path: Path) -> None:
    folder = f_bpe(tmp_path)
    assert Tokenizer.from_folder(folder).chat_templates == {"default": CHATML}
    assert change(folder, chat_template=None).chat_templates == {}
    assert change(folder, "chat_template.json", chat_template="of json").chat_templates == {"default": "of json"}
    (folder / "chat_template.jinja").write_text("of jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("of rag")
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    found = change(folder, chat_template=named).chat_templates
    assert found == {"default": "of jinja", "tool_use": "b", "rag": "of rag"}


@pytest.mark.case("LEN-05")
def test_every_listed_end_of_text_counts(bpe: Tokenizer) -> None:
    config: dict[str, Any] = {"eos_token_id": 5}
    assert eos_sources(config, {"eos_token_id": [2, 0]}, bpe) == {
        2: ("generation_config.json", "tokenizer"),
        0: ("generation_config.json",),
        5: ("config.json",),
    }
    assert eos_token_ids({"eos_token_id": [7, 8]}, {}, None) == {7, 8}
    assert eos_token_ids({"text_config": {"eos_token_id": [7, 8]}}, {}, bpe) == {2, 7, 8}
    assert eos_token_ids({}, {}, bpe) == {2}
    assert eos_token_ids({"eos_token_id": None, "text_config": None}, {"eos_token_id": [None, True, -1]}, None) == set()


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_other_formats_are_named_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=name) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json in"):
        Tokenizer.from_files(ModelFiles(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model": 1}'])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = f_bpe(tmp_path)
    (folder / name).write_bytes(content)
    if name != "tokenizer.json" and content.startswith(b'{"'):
        assert Tokenizer.from_folder(folder).vocab_size
        return
    with pytest.raises(InvalidConfig, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": {"x": {}}},
        {"added_tokens_decoder": [1]},
        {"chat_template": [1]},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_values_of_a_wrong_type_are_reported(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="do not fit"):
        change(f_bpe(tmp_path), **values)


def write_gguf(path: Path, spm_folder: Path, add_bos: bool = True) -> Path:
    """F-SPM's tokenizer as a GGUF file without tensors."""
    raw = Raw.from_file(str(spm_folder / "tokenizer.json"))
    pieces = [raw.id_to_token(i) for i in range(raw.get_vocab_size())]
    kinds = [2 if i == 0 else 3 if i < 3 else 6 if piece.startswith("<0x") else 1 for i, piece in enumerate(pieces)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([float(-i) for i in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.mark.case("TOK-07")
def test_a_gguf_file_has_its_tokenizer_inside(tmp_path: Path, spm_folder: Path, spm: Tokenizer, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", spm_folder)
    for _ in range(2):  # converted, then from the cache
        tokenizer = Tokenizer.from_files(ModelFiles(tmp_path, path))
        assert tokenizer.encode("hi there") == [1, *tokenizer.encode("hi there", add_special_tokens=False)]
        assert tokenizer.decode(tokenizer.encode("When 日本 shall we")) == "When 日本 shall we"
        assert tokenizer.encode("<s>hi").count(1) == 1
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, spm.vocab_size)
        assert tokenizer.chat_templates == {"default": "{{ bos_token }}{{ messages[0].content }}"}
    bare = Tokenizer.from_gguf(write_gguf(tmp_path / "bare.gguf", spm_folder, add_bos=False))
    assert bare.encode("hi").count(1) == 0


def test_a_gguf_tokenizer_is_converted_once(
    tmp_path: Path, spm_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", spm_folder)
    first = Tokenizer.from_gguf(path)
    assert [folder.name[0] for folder in cache.iterdir()] != ["."]
    (kept,) = cache.iterdir()
    convert = gguf_tokenizer.tokenizer_json
    calls = []
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_json", lambda metadata: (calls.append(1), convert(metadata))[1])
    assert Tokenizer.from_gguf(path).encode("hi") == first.encode("hi")
    assert calls == []
    (kept / "tokenizer.json").write_text("{")  # a disk that was full
    assert Tokenizer.from_gguf(path).encode("hi") == first.encode("hi")
    assert calls == [1]
    path.touch()  # another state of the file
    Tokenizer.from_gguf(path)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.case("ENV-04")
def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, spm_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "m.gguf", spm_folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_ROOT", str(tmp_path / "file" / "cache"))
    assert Tokenizer.from_gguf(path).encode("hi")[0] == 1
    assert "cannot be written" in caplog.text


@pytest.mark.real_model
def test_a_real_tokenizer() -> None:
    try:
        files = find_model("smollm2")
    except ModelNotFound:
        pytest.skip("octavo pull smollm2")
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_token_id == 2
    assert "default" in tokenizer.chat_templates


def test_added_tokens_of_one_text_keep_their_flags(bpe_folder: Path) -> None:
    raw = Raw.from_file(str(bpe_folder / "tokenizer.json"))
    raw.add_tokens([AddedToken("<pad left>", lstrip=True)])
    tokenizer = Tokenizer(raw)
    assert tokenizer.token_id("<pad left>") not in tokenizer.special_ids
