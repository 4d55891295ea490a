"""Takes secrets out of texts that people will show to others."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REMOVED = "<removed>"
MIN_SECRET = 6  # characters of a value that is looked for everywhere; a shorter one would hit ordinary words

NAMES = (
    r"[\w.-]*(?:token|api[_-]?key|apikey|secret|passw|pwd|credential|authorization|cookie|signature|private|_key|-key)"
)
"""How names of secrets begin, in any case of letters. Names that go on (api_keys, password) are met too."""

_SECRET_NAME = re.compile(r"token|key|secret|passw|pwd|credential|auth|cookie|session|signature|private", re.IGNORECASE)
_HARMLESS = re.compile(
    r"(?:max|min|num|prompt|output|input|total|completion|cached|generated|kv)_\w*tokens|tokens|\w*token_ids?|tokenizers?_\w*"
    r"|\w*tokenizer\w*|(?:eos|bos|unk|sep|pad|cls|mask)_token|keyfile|ssl_keyfile|key_?board",
    re.IGNORECASE,
)
_NO_VALUE = re.compile(r"session|auth_sock|xauthority", re.IGNORECASE)
"""Names whose values are words that stand in other places too, such as DESKTOP_SESSION=ubuntu."""
_BEARER = re.compile(r"\b(bearer|basic|digest)(\s+|%20)[\w.~+/=%-]{4,}", re.IGNORECASE)
_HEADER = re.compile(
    r"((?:proxy-)?authorization|x-api-key|api-key|cookie|set-cookie)(\"?\s*[:=]\s*)([^\r\n]+)", re.IGNORECASE
)
_USER_INFO = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s/?#\"'<>]*)@", re.IGNORECASE)
_BARE_USER_INFO = re.compile(r"(?<![^\s=\"'(])[^\s/@:=\"'(]+:[^\s@/]+@(?=[\w.-])")
_QUERY = re.compile(rf"([?&;]{NAMES}[\w.-]*=|[?&;](?:sig|key|code|auth)=)[^&\s\"'#;]+", re.IGNORECASE)
_PAIR = re.compile(
    rf"(?<![\w/])(?P<open>[\"']?)(?P<dashes>-{{0,2}})(?P<name>{NAMES}[\w.-]*)(?P=open)"
    r"(?P<between>[ \t]*[=:][ \t]*|[ \t]+)"
    r"(?P<value>\"[^\"\n]*\"?|'[^'\n]*'?|\[[^\]]*\]|\([^)\n]*\)|(?:\n\s*-\s[^\n]*)+|[^\s,;&\"'\]})]+)",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bapi_org_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}|\bgh[pousr]_[A-Za-z0-9]{8,}|\bgithub_pat_\w{8,}"
    r"|\bglpat-[\w-]{8,}|\bxox[abeprs]-[\w-]{8,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\bya29\.[\w-]{8,}"
    r"|\bnvapi-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_END_OF_PEM = re.compile(r"\A.*-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)  # a text that begins within one


def is_secret(name: str) -> bool:
    """Whether a variable or field of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _is_harmless(name)


class Redactor:
    """Removes what looks like a secret, and wherever else they stand the values that are known to be ones."""

    def __init__(self, environment: Iterable[tuple[str, str]] = ()) -> None:
        pairs = list(environment)
        known = {value.strip() for name, value in pairs if is_secret(name) and not _NO_VALUE.search(name)}
        known = {value for value in known if not Path(value).exists()}  # a name such as KEYFILE may stand for a place
        known |= {part for _, value in pairs for part in _passwords(value)}
        self.secrets = sorted((value for value in known if len(value) >= MIN_SECRET), key=len, reverse=True)
        self.home = str(Path("~").expanduser())

    def __call__(self, text: str) -> str:
        text = _END_OF_PEM.sub(REMOVED, _PEM.sub(REMOVED, text))
        text = _USER_INFO.sub(rf"\1{REMOVED}@", text)
        for secret in self.secrets:
            text = text.replace(secret, REMOVED)
        text = _BARE_USER_INFO.sub(f"{REMOVED}@", text)
        text = _HEADER.sub(rf"\1\2{REMOVED}", text)
        text = _BEARER.sub(rf"\1 {REMOVED}", text)
        text = _QUERY.sub(rf"\1{REMOVED}", text)
        text = _PAIR.sub(_pair, text)
        text = _SHAPES.sub(REMOVED, text)
        if len(self.home) > 1:
            text = re.sub(rf"{re.escape(self.home)}(?=/|\b)", "~", text)
        return text

    def tree(self, value: Any, name: str = "") -> Any:
        """The same for the texts in lists and mappings, as JSON has them."""
        if isinstance(value, dict):
            return {self(str(key)): self.tree(item, str(key)) for key, item in value.items()}
        if value and is_secret(name) and isinstance(value, str | list | tuple):
            return REMOVED
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return self(value) if isinstance(value, str) else value

    def variable(self, name: str, value: str) -> str:
        """The value of an environment variable as a report may show it."""
        return REMOVED if value and is_secret(name) else self(value)


def _is_harmless(name: str) -> bool:
    # The working folder in every shell; in small letters it is a password.
    return name in ("PWD", "OLDPWD") or bool(_HARMLESS.fullmatch(name.strip("-").replace("-", "_")))


def _passwords(value: str) -> list[str]:
    """Passwords of the URLs in a value."""
    return [user_info.partition(":")[2] for _, user_info in _USER_INFO.findall(value) if ":" in user_info]


def _pair(found: re.Match[str]) -> str:
    """`name=value`, `"name": "value"`, `--name value`, YAML: the value goes where the name is a secret's."""
    name, between, dashes = found["name"], found["between"], found["dashes"]
    if _is_harmless(name) or (not between.strip() and len(dashes) < 2):
        return found[0]
    value = f'"{REMOVED}"' if found["value"].startswith('"') else REMOVED
    return f"{found['open']}{dashes}{name}{found['open']}{between}{value}"
