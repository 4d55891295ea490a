"""Reads a Lark grammar far enough to know that texts of it can end and that no rule begins with itself."""

import json
import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
      | (?P<special><[^\s<>]+>)
      | (?P<name>[@%]?[A-Za-z_][\w.-]*)
      | (?P<repeat>~\s*\d+(?:\s*\.\.\s*\d*)?|\{\s*\d*\s*(?:,\s*\d*\s*)?\}|[?*+])
      | (?P<mark>[:|()\[\],!])
    """,
    re.VERBOSE,
)
_HEAD = re.compile(r"(?m)^[ \t]*[?!]*([A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)")


@dataclass(slots=True)
class _Part:
    """Alternatives, each a sequence of parts; or a rule's name; or, with neither, some text."""

    options: list[list["_Part"]] = field(default_factory=list)
    rule: str = ""
    empty: bool = False  # it may be nothing


def trouble(text: str) -> str:
    """Why a grammar cannot be followed to an end, or an empty string. What is not understood is let pass."""
    rules = _rules(text)
    if not rules:
        return ""
    ending: set[str] = set()
    nothing: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, body in rules.items():
            if name not in ending and _ends(body, rules, ending):
                ending.add(name)
                changed = True
            if name not in nothing and _may_be_nothing(body, nothing):
                nothing.add(name)
                changed = True
    reached, waiting = set(), ["start"]
    while waiting:
        name = waiting.pop()
        if name in rules and name not in reached:
            reached.add(name)
            waiting += _names(rules[name])
    if "start" in rules and "start" not in ending:
        endless = sorted(reached - ending)
        return f"no text of it ever ends: rule {endless[0]!r} cannot come to an end"
    firsts = {name: _first(rules[name], nothing) & rules.keys() for name in rules}
    for name in sorted(reached):
        seen: set[str] = set()
        waiting = list(firsts[name])
        while waiting:
            other = waiting.pop()
            if other == name:
                return f'rule {name!r} is left-recursive: write it as a repetition, such as item ("+" item)*'
            if other not in seen:
                seen.add(other)
                waiting += firsts[other]
    return ""


def _rules(text: str) -> dict[str, _Part]:
    heads = list(_HEAD.finditer(text))
    rules: dict[str, _Part] = {}
    for head, behind in zip(heads, [*heads[1:], None], strict=False):
        body = text[head.end() : behind.start() if behind else len(text)]
        part = _Reader(body).alternatives()
        if head[1] in rules:
            rules[head[1]].options += part.options
        else:
            rules[head[1]] = part
    return rules


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def alternatives(self) -> _Part:
        """Up to a closing bracket or the end."""
        part = _Part(options=[[]])
        while (token := self._next()) is not None:
            kind, word = token
            if word in (")", "]"):
                break
            if word == "|":
                part.options.append([])
            elif word in ("(", "["):
                inner = self.alternatives()
                inner.empty = word == "["
                part.options[-1].append(inner)
            elif kind == "repeat":
                if part.options[-1] and (word in "?*" or re.match(r"[~{]\s*(0|,)", word)):
                    part.options[-1][-1] = _Part(options=[[part.options[-1][-1]]], empty=True)
            elif word in ("%json", "%regex", "%lark"):
                self._skip_value()
                part.options[-1].append(_Part())
            elif kind == "name" and word[0] == "%":  # a directive ends the rule
                break
            elif kind == "name" and word[0] != "@":
                part.options[-1].append(_Part(rule=word))
            elif kind in ("string", "regex", "special", "name"):
                part.options[-1].append(_Part(empty=word == '""'))
        return part

    def _next(self) -> tuple[str, str] | None:
        while self.at < len(self.text):
            found = _TOKEN.match(self.text, self.at)
            if found is None:
                self.at += 1
                continue
            self.at = found.end()
            if found.lastgroup and found.lastgroup != "comment":
                return found.lastgroup, found[0]
        return None

    def _skip_value(self) -> None:
        begin = self.text.find("{", self.at)
        if begin >= 0:
            try:
                _, self.at = json.JSONDecoder().raw_decode(self.text, begin)
            except ValueError:
                self.at = len(self.text)


def _ends(part: _Part, rules: dict[str, _Part], ending: set[str]) -> bool:
    if part.empty:
        return True
    if part.rule:
        return part.rule in ending or part.rule not in rules
    return not part.options or any(all(_ends(p, rules, ending) for p in option) for option in part.options)


def _may_be_nothing(part: _Part, nothing: set[str]) -> bool:
    if part.empty or part.rule in nothing:
        return True
    return any(all(_may_be_nothing(p, nothing) for p in option) for option in part.options)


def _first(part: _Part, nothing: set[str]) -> set[str]:
    """Rules that a text of this part may begin with."""
    if part.rule:
        return {part.rule}
    found: set[str] = set()
    for option in part.options:
        for inner in option:
            found |= _first(inner, nothing)
            if not _may_be_nothing(inner, nothing):
                break
    return found


def _names(part: _Part) -> set[str]:
    return ({part.rule} if part.rule else set()).union(*(_names(p) for option in part.options for p in option))
