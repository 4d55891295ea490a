"""JSON schemas for conformance: each keyword by itself and with others, and those that must be refused."""

from itertools import product
from typing import Any

Schema = dict[str, Any]

NUMBERS: list[Schema] = [
    {"type": kind, **bounds}
    for kind, bounds in product(
        ("integer", "number"),
        (
            {},
            {"minimum": -3},
            {"maximum": 12},
            {"minimum": 5, "maximum": 5},
            {"minimum": -20, "maximum": 1000},
            {"exclusiveMinimum": 0, "maximum": 9},
            {"exclusiveMinimum": -2, "exclusiveMaximum": 2},
            {"minimum": 0.5, "maximum": 99.5},
            {"multipleOf": 7, "minimum": 0, "maximum": 700},
            {"multipleOf": 4, "minimum": 1, "maximum": 64},
        ),
    )
]
STRINGS: list[Schema] = [
    {"type": "string", **bounds}
    for bounds in (
        {"maxLength": 0},
        {"maxLength": 5},
        {"minLength": 2, "maxLength": 4},
        {"minLength": 3, "maxLength": 3},
        {"pattern": "^[a-z]{1,8}$"},
        {"pattern": "^[A-Z][a-z]*[0-9]{2}$"},
        {"pattern": "^(cat|dog|bird)s?$"},
        {"pattern": "^[а-яё]{2,4}$"},
        {"pattern": "^\\d{3}-\\d{4}$"},
        {"pattern": "^[^\\u0000-\\u007f]{1,5}$"},
        {"format": "date"},
        {"format": "time"},
        {"format": "date-time"},
        {"format": "email", "maxLength": 30},
        {"format": "ipv4"},
        {"format": "uuid"},
    )
]
VALUES: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"const": None},
    {"const": 'a"b\\c/d'},
    {"const": {"deep": [1, {"x": "é"}]}},
    {"enum": ["日本", "é", "😀", 'a"b', "a\\b", "/"]},
    {"enum": [1, 2.5, None, True, "x", [1], {"k": 0}]},
    {"type": ["integer", "null"]},
    {"type": ["boolean", "string"], "maxLength": 3},
    {"type": "string", "enum": ["only"]},
    {"anyOf": [{"type": "integer"}, {"const": "none"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    {"type": "integer", "description": "a number", "title": "N", "default": 3, "examples": [1]},
]
ITEMS = [NUMBERS[1], STRINGS[2], VALUES[1], VALUES[5], {"type": "array", "items": {"type": "null"}, "maxItems": 2}]
ARRAYS: list[Schema] = [
    {"type": "array", "items": item, **bounds}
    for item, bounds in product(
        ITEMS, ({"maxItems": 0}, {"maxItems": 3}, {"minItems": 1, "maxItems": 2}, {"minItems": 2, "maxItems": 2})
    )
] + [
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "head"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
]
NAMES = ("name", 'quo"te', "new\nline", "emoji😀", "")
OBJECTS: list[Schema] = [
    {"type": "object", "properties": {name: value}, "required": required, "additionalProperties": False}
    for name, value in product(NAMES, (VALUES[1], NUMBERS[3], STRINGS[1], ARRAYS[1]))
    for required in ([name], [])
] + [
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "properties": {"a": {"const": 1}},
        "required": ["a"],
    },
    {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "minProperties": 0, "properties": {"a": VALUES[0]}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"id": {"$ref": "#/$defs/id"}, "kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}},
        "required": ["id"],
        "additionalProperties": False,
        "$defs": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
]
COMBINED: list[Schema] = [
    {
        "type": "object",
        "properties": {"first": first, "second": second},
        "required": ["first", "second"],
        "additionalProperties": False,
    }
    for first, second in zip([*STRINGS, *NUMBERS, *VALUES], [*NUMBERS, *VALUES, *STRINGS], strict=True)
] + [{"anyOf": [a, b]} for a, b in zip(STRINGS[:16], [*NUMBERS[:8], *VALUES[:8]], strict=True)]
COMBINED += [{"type": "array", "items": schema, "minItems": 1, "maxItems": 2} for schema in [*VALUES, *STRINGS[:10]]]

ALL: list[Schema] = [*NUMBERS, *STRINGS, *VALUES, *ARRAYS, *OBJECTS, *COMBINED]

UNENFORCED: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "minContains": {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "nonsense": {"type": "string", "format": "nonsense"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
}
IMPOSSIBLE: list[Schema] = [
    {"enum": []},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "integer", "minimum": 3.2, "maximum": 3.8},
    {"const": 1, "type": "string"},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
]
