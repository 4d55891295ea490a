"""A model's tokenizer: text to token ids and back, read from a folder's tokenizer.json and its companions."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tokenizers

from octavo.errors import InvalidConfig, InvalidRequest, ModelNotFound
from octavo.formats.gguf import GGUFFile
from octavo.hub import ModelFiles
from octavo.text import gguf_tokenizer, tokenizer_cache

# Roles of special tokens: a chat template sees their texts under these names
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
OTHER_FORMATS = {
    "tokenizer.model": "a SentencePiece or tiktoken file",
    "tekken.json": "a Mistral file",
    "vocab.json": "the older pair vocab.json and merges.txt",
    "spiece.model": "a SentencePiece file",
}


class Tokenizer:
    """Text to token ids and back, with what a model's folder says about special tokens and chat templates.

    `special_tokens` maps the names of `SPECIAL_ROLES` to texts. `chat_templates` maps names ("default",
    "tool_use") to Jinja sources. `byte_tokens` maps the ids of pieces that stand for one byte to that byte,
    in vocabularies with byte fallback.
    Truncation and padding that tokenizer.json may ask for are switched off: a prompt is never cut in silence.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        config = config or {}
        raw.no_truncation()
        raw.no_padding()
        self.special_tokens = _special_tokens(config)
        self.chat_templates = {name: text for name, text in (chat_templates or {}).items() if isinstance(text, str)}
        _add_tokens(raw, config.get("added_tokens_decoder") or {}, self.special_tokens.values())
        self.raw = raw
        added = raw.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max(raw.get_vocab_size(), max(added, default=-1) + 1)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token"))
        self.pad_token_id = self.token_id(self.special_tokens.get("pad_token"))
        self._prefix, self._suffix = self._template_ids(config)
        decoders = _decoder_types(raw)
        self.is_byte_level = decoders == ["ByteLevel"]
        self.byte_tokens = _byte_tokens(raw) if "ByteFallback" in decoders else {}
        self._bytes: dict[int, bytes] = {}
        self._anchor = next((i for i in self._encode("a") if raw.decode([i])), None)

    @classmethod
    def from_files(cls, files: ModelFiles) -> Self:
        """The tokenizer of a model: its folder's, or the one inside its GGUF file.

        Raises:
            ModelNotFound: there is no tokenizer.json.
            InvalidConfig, InvalidWeights: a file is damaged; the message names it.
        """
        return cls.from_gguf(files.gguf) if files.gguf else cls.from_folder(files.folder)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The tokenizer of tokenizer.json, as tokenizer_config.json and special_tokens_map.json complete it."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise _no_tokenizer(folder)
        raw = _parse(path.read_bytes(), path)
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        try:
            with _panics_as_errors():
                return cls(raw, config, _chat_templates(folder, config))
        except Exception as error:  # values of another type, or what the library makes of them
            kind = type(error).__name__
            raise InvalidConfig(f"The tokenizer files of {folder} do not fit together: {kind}: {error}.") from None

    @classmethod
    def from_gguf(cls, path: Path) -> Self:
        """The tokenizer inside a GGUF file, converted once and then read from the cache folder."""
        folder = tokenizer_cache.folder_of(path)
        with contextlib.suppress(OSError, InvalidConfig):  # not there yet, unreadable or damaged
            return cls.from_folder(folder)
        metadata = GGUFFile(path).metadata
        text, config = gguf_tokenizer.tokenizer_json(metadata), gguf_tokenizer.tokenizer_config(metadata)
        templates = gguf_tokenizer.chat_templates(metadata)
        complete = {**config, "chat_template": templates}
        tokenizer_cache.store(folder, {"tokenizer.json": text, "tokenizer_config.json": json.dumps(complete)})
        return cls(_parse(text.encode(), path), config, templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        `add_special_tokens` adds the ids that the model wants around a text, most often one at the start,
        unless the text begins with that already, as the output of a chat template does.

        Raises:
            InvalidRequest: `text` is not a string, or has half a surrogate pair in it.
        """
        ids = self._encode(text)
        return self._surround(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids that the vocabulary lacks give nothing; bytes that are no text give U+FFFD.

        Spaces before punctuation stay: `clean_up_tokenization_spaces` is not obeyed. Files set it by
        mistake, and a text that is streamed cannot take a space back.
        """
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]  # others overflow in the library
        return self.raw.decode(known, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str | None) -> int | None:
        """Id of a vocabulary entry, written as the vocabulary writes it."""
        return None if token is None else self.raw.token_to_id(token)

    def piece(self, token_id: int) -> str | None:
        """A vocabulary entry as the vocabulary writes it, or None for an id that it lacks."""
        return self.raw.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, leading space included; it may be a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self.piece(token_id)
            if piece is None:
                return b""
            known = self._bytes[token_id] = self._find_bytes(token_id, piece)
        return known

    def token_text(self, token_id: int) -> str:
        r"""A token for people to read, leading space included.

        Bytes that are no text by themselves are written `bytes:\xf0\x9f`, and so is a byte token whose
        text is another entry of the vocabulary.
        """
        data = self.token_bytes(token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return _spell(data)
        twin = token_id in self.byte_tokens and self.token_id(text.replace(" ", "▁")) is not None
        return _spell(data) if twin else text

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """`token_text` of each id, fit to be keys: a text that came before is written `token_id:7`."""
        texts: list[str] = []
        for token_id in token_ids:
            text = self.token_text(token_id)
            texts.append(f"token_id:{token_id}" if text in texts else text)
        return texts

    def _encode(self, text: str) -> list[int]:
        try:
            with _panics_as_errors():
                encoding: tokenizers.Encoding = self.raw.encode(text, add_special_tokens=False)
        except TypeError:
            raise _unreadable(text) from None
        except Exception as error:  # the library raises nothing narrower: an unknown piece and no token for such
            raise InvalidRequest(f"The tokenizer cannot read the text: {error}.", param="prompt") from None
        return encoding.ids

    def _surround(self, ids: list[int]) -> list[int]:
        prefix = [] if self._prefix and ids[: len(self._prefix)] == self._prefix else self._prefix
        return [*prefix, *ids, *self._suffix]

    def _template_ids(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Ids that go before and after a text: tokenizer.json's own, corrected by an explicit add_bos_token."""
        bare = self._encode("a")
        full: list[int] = self.raw.encode("a", add_special_tokens=True).ids
        starts = [i for i in range(len(full)) if full[i : i + len(bare)] == bare]
        start = starts[0] if bare and starts else len(full)  # nothing left of "a": all of it goes before
        prefix, suffix = full[:start], full[start + len(bare) :]
        for name, token_id, around in (("bos", self.bos_token_id, prefix), ("eos", self.eos_token_id, suffix)):
            wanted = config.get(f"add_{name}_token")
            if token_id is None or wanted is None:
                continue
            if not wanted:
                around[:] = [other for other in around if other != token_id]
            elif token_id not in around:
                around.insert(0, token_id)
        return prefix, suffix

    def _find_bytes(self, token_id: int, piece: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
            except KeyError:  # an added token, which the decoder takes as it is
                return piece.encode()
        if token_id in self.byte_tokens:
            return bytes([self.byte_tokens[token_id]])
        if token_id in self.added_tokens:
            return self.added_tokens[token_id].encode()
        if self._anchor is None:
            return self.decode([token_id]).encode()
        # decoded after another token, so that the decoder does not take it for the start of the text
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token_id]).removeprefix(before).encode()


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic inside the library is no `Exception`, and would pass by all that catch those."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # it cannot be imported
            raise ValueError(f"the tokenizers library panicked: {error}") from None
        raise


def _parse(data: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        with _panics_as_errors():
            return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise InvalidConfig(f"{path} has no tokenizer that can be read: {error}.") from None


def eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every id that ends a text, as any of `eos_sources` says."""
    return frozenset(eos_sources(config, generation, tokenizer))


def eos_sources(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[int, tuple[str, ...]]:
    """Ids that end a text, each with the names of those that list it.

    `config` and `generation` are the contents of config.json and generation_config.json. They often differ
    (a chat model's end of turn is in one of them only), so all of them count.
    """
    text_config = config.get("text_config")
    inside = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    listed = {
        "generation_config.json": [generation.get("eos_token_id")],
        "config.json": [config.get("eos_token_id"), inside],
        "tokenizer": [tokenizer.eos_token_id if tokenizer else None],
    }
    sources: dict[int, tuple[str, ...]] = {}
    for name, values in listed.items():
        for value in values:
            for token_id in value if isinstance(value, list) else [value]:
                if type(token_id) is int and token_id >= 0 and name not in sources.get(token_id, ()):
                    sources[token_id] = (*sources.get(token_id, ()), name)
    return sources


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, empty where there is no such file.

    Raises:
        InvalidConfig: the file is damaged, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidConfig(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def _no_tokenizer(folder: Path) -> ModelNotFound:
    for name, kind in OTHER_FORMATS.items():
        if (folder / name).is_file():
            convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            return ModelNotFound(
                f"{folder} has {name} ({kind}) and no tokenizer.json, the one format that is read.",
                f'Write it once: python -c "from transformers import AutoTokenizer; {convert}"',
            )
    return ModelNotFound(f"There is no tokenizer.json in {folder}.", "Give another folder with --tokenizer.")


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over tokenizer_config.json, the newer kind over the older."""
    inside = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, dict):
        templates.update(inside)
    elif isinstance(inside, list):
        templates.update((entry["name"], entry["template"]) for entry in inside)
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, which a file gives as such or as an object with flags."""
    found = {role: config.get(role) for role in SPECIAL_ROLES}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):  # names of the model's own, such as image_token
        found |= extra
    texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str) and text}


def _add_tokens(raw: tokenizers.Tokenizer, listed: Mapping[str, Any], special: Iterable[str]) -> None:
    """Bring tokenizer.json up to what tokenizer_config.json says about added and special tokens.

    A token that has no row in the vocabulary is left out: its new id would have no embedding.
    """
    present = raw.get_added_tokens_decoder()
    missing: list[tokenizers.AddedToken] = []
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {name: entry[name] for name in ADDED_TOKEN_FLAGS if name in entry}
        token = tokenizers.AddedToken(entry["content"], **flags)
        at = raw.token_to_id(entry["content"])
        expected = raw.get_vocab_size() + len([1 for other in missing if raw.token_to_id(other.content) is None])
        if present.get(int(token_id)) != token and int(token_id) == (expected if at is None else at):
            missing.append(token)
    raw.add_tokens(missing)
    contents = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    raw.add_special_tokens([text for text in special if text not in contents and raw.token_to_id(text) is not None])


def _decoder_types(raw: tokenizers.Tokenizer) -> list[str]:
    """Names of the steps that make text of pieces, as tokenizer.json names them."""
    if raw.decoder is None:
        return []
    state = json.loads(raw.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps]


def _unreadable(text: object) -> InvalidRequest:
    if not isinstance(text, str):
        return InvalidRequest(f"A text must be a string, not {type(text).__name__}.", param="prompt")
    at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return InvalidRequest(
        f"Character {at} of the text is half of a surrogate pair ({text[at : at + 1]!r}), which is no character.",
        param="prompt",
    )


def _byte_tokens(raw: tokenizers.Tokenizer) -> dict[int, int]:
    """Byte values of the pieces `<0x00>` to `<0xFF>`, by id."""
    ids = {raw.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in ids.items() if token_id is not None}


def _spell(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_characters() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as they are, the others from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
