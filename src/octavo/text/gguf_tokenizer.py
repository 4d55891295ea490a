"""A tokenizer.json, tokenizer_config.json and chat templates out of the metadata of a GGUF file."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.errors import InvalidWeights
from octavo.formats.gguf_config import CONTROL

logger = logging.getLogger("octavo")

USER_DEFINED = 4  # a value of tokenizer.ggml.token_type

SPACE = "▁"  # how SentencePiece writes a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_OF_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST_OF_LLAMA3 = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_OF_TEKKEN = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# the letters with case that DeepSeek's own pattern lists one by one: those of an old Unicode, less some scripts
_CASED_OF_DEEPSEEK = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_CJK_OF_DEEPSEEK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level vocabulary cuts text before merging: each pattern cuts what the one before left.

    `names` are the values of tokenizer.ggml.pre. `whole_words`: a piece that is in the vocabulary is one
    token, whatever the merges say. `add_bos` is what holds where tokenizer.ggml.add_bos_token is absent.
    """

    names: str
    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    normal_form: str | None = None


_SPLITS = (
    _Split("gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling mellum a.x-4.0 gigachat", (_GPT2,)),
    _Split("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    _Split(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        (rf"{_WORDS_OF_LLAMA3}|\p{{N}}{{1,3}}|{_REST_OF_LLAMA3}",),
        whole_words=True,
        add_bos=True,
    ),
    _Split("dbrx smaug-bpe glm4 chatglm-bpe", (rf"{_WORDS_OF_LLAMA3}|\p{{N}}{{1,3}}|{_REST_OF_LLAMA3}",)),
    _Split("qwen2", (rf"{_WORDS_OF_LLAMA3}|\p{{N}}|{_REST_OF_LLAMA3}",), normal_form="NFC"),
    _Split(
        "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open kormo",
        (rf"{_WORDS_OF_LLAMA3}|\p{{N}}|{_REST_OF_LLAMA3}",),
    ),
    _Split(
        "tekken",
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
            rf"|\p{{N}}|{_REST_OF_TEKKEN}",
        ),
        whole_words=True,
        add_bos=True,
    ),
    _Split(
        "gpt-4o llama4",
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}|{_REST_OF_TEKKEN}",
        ),
    ),
    _Split(
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?{_CASED_OF_DEEPSEEK}+",
            r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
            r"\s+$",
            _CJK_OF_DEEPSEEK,
            r"\p{N}+",
        ),
    ),
    _Split("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_DEEPSEEK, r"\p{N}")),
    _Split(
        "deepseek-v3 hunyuan-dense",
        (
            r"\p{N}{1,3}",
            r"[一-龥\x{3040}-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    _Split("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    _Split("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
)
PRE_TOKENIZERS = {name: split for split in _SPLITS for name in split.names.split()}

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The content of a tokenizer.json: byte-level BPE (model "gpt2") or SentencePiece BPE (model "llama").

    A file without tokenizer.ggml.pre gets llama.cpp's default cut, with a warning.

    Raises:
        InvalidWeights: another kind of tokenizer, an unknown pre-tokenizer, or lists that do not fit; the
            message names the key.
    """
    vocabulary = _Vocabulary(metadata)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": vocabulary.added_tokens(),
            "post_processor": _surroundings(vocabulary),
            **(_byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)),
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer_config.json says: texts of bos_token, eos_token, unk_token and pad_token where there
    are such, and the flags add_bos_token and add_eos_token.
    """
    vocabulary = _Vocabulary(metadata)
    ids = {role: vocabulary.special_id(name) for role, name in _ROLES.items()}
    texts = {role: vocabulary.tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    return {**texts, "add_bos_token": vocabulary.adds("bos"), "add_eos_token": vocabulary.adds("eos")}


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Jinja sources by name; the main one is "default"."""
    main = "tokenizer.chat_template"
    named = {key.removeprefix(f"{main}."): value for key, value in metadata.items() if key.startswith(f"{main}.")}
    return named | ({"default": metadata[main]} if main in metadata else {})


class _Vocabulary:
    """The lists of tokenizer.ggml, checked against each other.

    `tokens` are as tokenizer.json spells them, by id. SentencePiece's user-defined runs of spaces come
    out of GGUF as plain spaces; they are spelled with its mark again, as the text will be.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.model = self.get("model")
        if self.model not in ("gpt2", "llama"):
            raise InvalidWeights(
                f"tokenizer.ggml.model={self.model!r} is not a tokenizer that is read from GGUF; gpt2 and llama are.",
                "Give another tokenizer with --tokenizer.",
            )
        self.tokens: list[str] = self.values("tokens", str)
        self.kinds: list[int] = self.values("token_type", int, [1] * len(self.tokens))
        if len(self.kinds) != len(self.tokens):
            raise InvalidWeights(
                f"tokenizer.ggml.token_type has {len(self.kinds)} values for {len(self.tokens)} tokens."
            )
        if self.model == "llama":
            known = set(self.tokens)
            self.tokens = [
                SPACE * len(token) if token and not token.strip(" ") and SPACE * len(token) not in known else token
                for token in self.tokens
            ]
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for token_id, token in enumerate(self.tokens) if self.ids[token] != token_id)
            raise InvalidWeights(f"tokenizer.ggml.tokens has {twice!r} twice.")

    def get(self, key: str, kind: type = str, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise InvalidWeights(f"Metadata key tokenizer.ggml.{key} is absent.", "Give a tokenizer with --tokenizer.")
        if not isinstance(value, kind):
            raise InvalidWeights(f"tokenizer.ggml.{key} must be of type {kind.__name__}.")
        return value

    def values(self, key: str, kind: type, default: Any = None) -> Any:
        """A list; GGUF's have values of one type, so that the first one tells."""
        values = self.get(key, list, default)
        if values and not isinstance(values[0], kind):
            raise InvalidWeights(f"tokenizer.ggml.{key} must be a list of type {kind.__name__}.")
        return values

    def special_id(self, name: str) -> int | None:
        default = _SENTENCEPIECE_IDS.get(name) if self.model == "llama" else None
        token_id = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(self.tokens)):
            raise InvalidWeights(
                f"tokenizer.ggml.{name}_token_id={token_id!r} is not in the vocabulary of {len(self.tokens)}."
            )
        return token_id

    @cached_property
    def split(self) -> _Split:
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is None:
            logger.warning("The GGUF file has no tokenizer.ggml.pre; text is cut as llama.cpp does by default.")
            name = "default"
        if name not in PRE_TOKENIZERS:
            raise InvalidWeights(
                f"tokenizer.ggml.pre={name!r} is not a pre-tokenizer that is known.",
                f"Give another tokenizer with --tokenizer. Known are: {', '.join(PRE_TOKENIZERS)}.",
            )
        return PRE_TOKENIZERS[name]

    def adds(self, name: str) -> bool:
        """Whether the token `name` (bos or eos) goes around every text."""
        absent = name == "bos" and (self.model == "llama" or self.split.add_bos)
        return bool(self.get(f"add_{name}_token", bool, absent)) and self.special_id(name) is not None

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are found in the text before anything else: control ones, and the user-defined."""
        special = {self.special_id(name) for name in _ROLES.values()}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": token, **flags, "special": kind == CONTROL or token_id in special}
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == CONTROL or token_id in special or (kind == USER_DEFINED and not self.is_spaces(token))
        ]

    def is_spaces(self, token: str) -> bool:
        return self.model == "llama" and not token.strip(SPACE)

    def merges(self) -> list[Sequence[str]]:
        """The listed merges, else every way to make a token of two, best token first.

        SentencePiece merges by the score of the result. User-defined tokens come before all others:
        it never cuts them, whatever their score.
        """
        if "tokenizer.ggml.merges" in self.metadata or self.model == "gpt2":
            return [self.merge(text) for text in self.values("merges", str)]
        scores = self.values("scores", float)
        if len(scores) != len(self.tokens):
            raise InvalidWeights(f"tokenizer.ggml.scores has {len(scores)} values for {len(self.tokens)} tokens.")
        order = sorted(range(len(scores)), key=lambda i: (self.kinds[i] != USER_DEFINED, -scores[i]))
        ids = self.ids
        return [
            (token[:cut], token[cut:])
            for token in map(self.tokens.__getitem__, order)
            for cut in range(len(token) - 1, 0, -1)
            if token[:cut] in ids and token[cut:] in ids
        ]

    def merge(self, text: str) -> Sequence[str]:
        left, _, right = text.partition(" ")
        if left not in self.ids or right not in self.ids or left + right not in self.ids:
            raise InvalidWeights(f"tokenizer.ggml.merges has {text!r}, which does not make a token out of two.")
        return left, right


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    split = vocabulary.split
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": split.normal_form} if split.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_only]},
        "decoder": bytes_only,
        "model": _bpe(vocabulary, ignore_merges=split.whole_words),
    }


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """The text is not cut: spaces become marks, and merges may run over them."""
    prefix = vocabulary.get("add_space_prefix", bool, True)
    to_marks = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    from_marks: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        to_marks.insert(0, {"type": "Prepend", "prepend": SPACE})
        from_marks.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.special_id("unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": to_marks},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": from_marks},
        "model": _bpe(
            vocabulary,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(vocabulary: _Vocabulary, **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary.ids,
        "merges": vocabulary.merges(),
    }


def _surroundings(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """The post-processor that puts the first and the last token around a text."""
    around = {name: vocabulary.special_id(name) for name in ("bos", "eos") if vocabulary.adds(name)}
    texts = {name: vocabulary.tokens[token_id] for name, token_id in around.items() if token_id is not None}
    if not texts:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            first = [{"SpecialToken": {"id": texts["bos"], "type_id": type_id}}] if "bos" in texts else []
            last = [{"SpecialToken": {"id": texts["eos"], "type_id": type_id}}] if "eos" in texts else []
            parts += [*first, {"Sequence": {"id": sequence, "type_id": type_id}}, *last]
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in texts.values()
        },
    }
