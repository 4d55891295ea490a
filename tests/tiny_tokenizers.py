"""Small tokenizers for tests: each function writes a model folder's tokenizer files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
    "When shall we three meet again? In thunder, lightning, or in rain? When the hurlyburly's done,",
    "When the battle's lost and won. That will be ere the set of sun. Where the place? Upon the heath.",
    "It is true that two times three is six, and that 1234 + 5678 = 6912; is this not true?",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, 2 * i))\n",
    "Fair is foul, and foul is fair: hover through the fog and filthy air. So foul and fair a day I have not seen.",
    "Naïve façade, señor Müller; 日本語の文章と中文字符, Привет мир, smile 😀 and wave 👋🏽.",
] * 4
BYTES = pre_tokenizers.ByteLevel.alphabet()


def f_bpe(folder: Path, vocab_size: int = 600) -> Path:
    """Byte-level BPE, ChatML, two ids that end a text: `<|endoftext|>` and `<|im_end|>`. No BOS."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(BYTES), show_progress=False
    )
    raw.train_from_iterator(TEXTS, trainer)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return write(folder, raw, config, eos_token_id=[raw.token_to_id("<|im_end|>"), raw.token_to_id("<|endoftext|>")])


def f_spm(
    folder: Path, vocab_size: int = 700, add_bos_token: bool | None = True, chat_template: str | None = LLAMA2_CHAT
) -> Path:
    """SentencePiece style: `▁` for spaces, byte fallback, `<s>` before every text."""
    special = ["<unk>", "<s>", "</s>"]
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_texts = ["".join(c for c in text if c.isascii()) for text in TEXTS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256, special_tokens=special, limit_alphabet=100, show_progress=False
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()  # only so that training keeps words apart
    raw.train_from_iterator(ascii_texts, trainer)
    state = json.loads(raw.to_str())["model"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in sorted(state["vocab"], key=state["vocab"].get) if piece not in pieces]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in state["merges"]]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(special)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token
    if chat_template is not None:
        config["chat_template"] = chat_template
    return write(folder, raw, config, eos_token_id=2)


def f_script(folder: Path, pieces: Sequence[str | bytes], special: Sequence[str] = ("</s>", "<|im_end|>")) -> Path:
    """A byte-level vocabulary of exactly these pieces: id of `special[i]` is i, then one id a piece.

    `bytes` pieces may be parts of characters. Texts are not tokenized into them: use the ids.
    """
    character_of = _byte_characters()
    words = [
        "".join(character_of[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
        for piece in pieces
    ]
    vocab = {word: i for i, word in enumerate([*special, *words])}
    if len(vocab) != len(special) + len(words):
        raise ValueError("a piece appears twice")
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    return write(folder, raw, {"eos_token": special[0]}, eos_token_id=list(range(len(special))))


def write(folder: Path, raw: Tokenizer, config: dict[str, Any], eos_token_id: int | list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}), encoding="utf-8")
    return folder


def _byte_characters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
