"""`python -m octavo.doctor.model_probe NAME`: a model's files, tokenizer and chat template, told as JSON.

A process of its own: a tokenizer's library can end it, and a template can run for ever.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from octavo.core.memory import num_parameters
from octavo.errors import OctavoError
from octavo.findings.explain import cause
from octavo.formats.gguf import GGUFFile
from octavo.formats.safetensors import read_header
from octavo.hub import PULLABLE, ModelFiles, find_model
from octavo.model_spec import ModelSpec, architecture_of
from octavo.registry import check_architecture
from octavo.text.chat import render
from octavo.text.tokenizer import Tokenizer, read_json
from octavo.tools.plan import read

TEXT = "Octavo reads 3 blocks: naïve, 中文."
CHAT = (
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
)


def look(name: str | None) -> dict[str, Any]:
    """The fields of `facts.Model`, each part as those of `facts.Part`."""
    unknown: dict[str, Any] = {}
    try:
        # What lies on this disk must be whole; of a repository only the configuration and the tokenizer are fetched.
        here = name is None or name in PULLABLE or os.path.exists(os.path.expanduser(name))
        files = find_model(name, weights=here)
        gguf = GGUFFile(files.gguf) if files.gguf else None
        config = gguf.hf_config() if gguf else read_json(files.folder / "config.json")
        architecture = architecture_of(config)
        check_architecture(architecture)
        spec = ModelSpec.from_config(config)
        for file in [] if gguf else sorted(files.folder.glob("*.safetensors")):
            read_header(file)
        _, weight_bytes = read(str(files.gguf or files.folder)) if here else (spec, None)
    except Exception as error:
        return {"files": _fault(error), "tokenizer": unknown, "template": unknown}
    number = num_parameters(spec)
    many = f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number:,}"
    says = f"{architecture}, {many} weights, {spec.max_model_len:,} tokens"
    tokenizer, part = _tokenizer(files, spec)
    return {
        "files": {"says": f"{says}, in {files.gguf or files.folder}"},
        "tokenizer": part,
        "template": _template(tokenizer) if tokenizer else unknown,
        "config": config,
        "weight_bytes": weight_bytes or 0,
    }


def _tokenizer(files: ModelFiles, spec: ModelSpec) -> tuple[Tokenizer | None, dict[str, str]]:
    try:
        tokenizer = Tokenizer.from_files(files)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        decoded = tokenizer.raw.decode(ids)
    except Exception as error:
        return None, _fault(error)
    highest = max(tokenizer.vocab_size - 1, *ids) if ids else -1
    says = f"{tokenizer.vocab_size:,} tokens"
    if not ids or not decoded.strip():
        return tokenizer, {
            "fault": "The tokenizer makes nothing of a text.",
            "mend": "Fetch tokenizer.json again, or give another folder with --tokenizer.",
        }
    if max(ids) >= spec.vocab_size:
        return tokenizer, {
            "fault": f"The tokenizer gives the id {max(ids)}, and the model knows {spec.vocab_size} tokens (from 0 to "
            f"{spec.vocab_size - 1}); it goes to {highest}.",
            "mend": "It is another model's: fetch tokenizer.json again, or give its folder with --tokenizer.",
        }
    return tokenizer, {"says": says}


def _template(tokenizer: Tokenizer) -> dict[str, str]:
    if not tokenizer.chat_templates:
        return {
            "level": "warning",
            "fault": "The model has no chat template.",
            "mend": "octavo serve --chat-template FILE.jinja (a base model completes texts without one).",
        }
    try:
        text = render(tokenizer, CHAT)
    except Exception as error:
        return _fault(error)
    return {"says": f"renders a chat of 3 messages to {len(text)} characters"}


def _fault(error: Exception) -> dict[str, str]:
    if isinstance(error, OctavoError):
        return {"fault": error.message, "mend": error.hint}
    return {"fault": cause(error)}


if __name__ == "__main__":
    logging.disable()
    given = sys.argv[1:]
    print(json.dumps(look(given[0] if given and Path(given[0]).name else None), default=str))
