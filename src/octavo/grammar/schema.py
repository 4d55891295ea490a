"""What a JSON schema must be before it is compiled: readable, not too deep, enforceable, and possible to end."""

import json
from collections.abc import Iterator
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.structured_outputs import FIELD

MAX_DEPTH = 64  # containers within each other, as in vLLM
MAX_LOOKS = 20_000  # at subschemas, in search of one that never ends

# Keywords that constrain a document and that the grammar cannot follow.
UNENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
ONE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def read(name: str, text: str) -> dict[str, Any]:
    """A schema from its text.

    Raises:
        InvalidRequest: it is not JSON, not an object, or nested too deeply.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise _refuse(name, f"it is not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise _refuse(name, f"a schema is an object, not {shown(schema, 40)}")
    if _depth(schema) > MAX_DEPTH:
        raise _too_deep(name)
    return schema


def check(name: str, schema: dict[str, Any], lenient: bool) -> None:
    """
    Raises:
        InvalidRequest: a keyword that is not enforced, unless `lenient`; or documents of it never end.
    """
    if not lenient and (found := unenforced(schema)):
        raise _refuse(
            name,
            f"the keyword{'s' if len(found) > 1 else ''} {', '.join(map(repr, found))} cannot be enforced",
            'Leave it out, or send "lenient": true to have it ignored.',
        )
    if not _Ends(schema).ends(schema, ()):
        raise _refuse(name, "no document satisfies it: a required part contains itself without end")


def unenforced(schema: dict[str, Any]) -> list[str]:
    """Names of the keywords in it that constrain documents and are not followed, in the order of their names."""
    found = set()
    for part in _subschemas(schema):
        for keyword in UNENFORCED.intersection(part):
            if keyword == "uniqueItems" and part[keyword] is False:
                continue
            if keyword in ("minContains", "maxContains") and "contains" not in part:
                continue
            found.add(keyword)
    return sorted(found)


def close_objects(schema: dict[str, Any]) -> None:
    """Forbid, in place, properties that an object's schema does not name, where it does not say otherwise."""
    for part in _subschemas(schema):
        if "properties" in part or part.get("type") == "object":
            part.setdefault("additionalProperties", False)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all that it holds: never what only looks like one inside `enum`, `const` or `default`."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting += [part[name] for name in ONE if name in part]
        for name in LISTS:
            if isinstance(part.get(name), list):
                waiting += part[name]
        for name in NAMED:
            if isinstance(part.get(name), dict):
                waiting += part[name].values()


class _Ends:
    """Searches for a document that ends: `required` and `minItems` may lead back to where they began."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.known: set[str] = set()  # references whose documents end
        self.looks = 0

    def ends(self, schema: Any, within: tuple[str, ...]) -> bool:
        """Whether some document of it ends; inside the references `within`. Whatever is unclear ends."""
        self.looks += 1
        if not isinstance(schema, dict) or self.looks > MAX_LOOKS:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._reference_ends(reference, within):
            return False
        if not all(self.ends(part, within) for part in _list(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            options = _list(schema, name)
            if options and not any(self.ends(part, within) for part in options):
                return False
        if "enum" in schema or "const" in schema:
            return True
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not set(kinds) <= {"object", "array"}:
            return True  # a number, say
        return any(self._container_ends(kind, schema, within) for kind in kinds)

    def _reference_ends(self, reference: str, within: tuple[str, ...]) -> bool:
        if reference in self.known:
            return True
        if reference in within:
            return False
        found = self.ends(_target(self.root, reference), (*within, reference))
        if found:
            self.known.add(reference)
        return found

    def _container_ends(self, kind: object, schema: dict[str, Any], within: tuple[str, ...]) -> bool:
        if kind == "object":
            properties = schema.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            return all(
                self.ends(properties.get(name), within) for name in _list(schema, "required") if isinstance(name, str)
            )
        least = schema.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        first = _list(schema, "prefixItems") or _list(schema, "items")
        rest = [schema.get("items")] if len(first) < least and not isinstance(schema.get("items"), list) else []
        return all(self.ends(part, within) for part in [*first[:least], *rest])


def _target(root: Any, reference: str) -> Any:
    """What a JSON pointer within the document names; None where it names nothing or lies elsewhere."""
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(step)
        elif isinstance(root, list) and step.isdigit() and int(step) < len(root):
            root = root[int(step)]
        else:
            return None
    return root


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += item.values()
            elif isinstance(item, list):
                inside += item
        level = [item for item in inside if isinstance(item, dict | list)]
        depth += 1
    return depth


def _too_deep(name: str) -> InvalidRequest:
    return _refuse(name, f"it is nested more than {MAX_DEPTH} levels deep")


def _refuse(name: str, why: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(f"{name}: {why}.", hint, param=FIELD)
