"""What llguidance alone would let through, or refuse for nothing: an output keeps to its schema, or there is none."""

import json
from typing import Any

import pytest

from core.decoding.constraints import GrammarCompiler
from core.errors import InvalidRequest
from core.sampling_params import StructuredOutput
from core.tokenizer import ByteTokenizer
from tests.builders import END

BYTES = GrammarCompiler(ByteTokenizer())


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the whole output may be this text."""
    said = BYTES.compile(StructuredOutput("json_schema", json.dumps(schema))).constraint()
    ids = list(text.encode())
    return said.num_allowed([], ids) == len(ids) and bool(said.allowed(ids)[END // 8] >> END % 8 & 1)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # An open bound that is whole, beside one less than 1 away.
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25"], ["0", "0.0", "-0", "0.51"]),
        ({"type": "number", "minimum": -1, "exclusiveMinimum": -1, "exclusiveMaximum": -0.5}, ["-0.6"], ["-1", "-0.5"]),
        ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.6", "1.990"], ["2", "2.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1"]),
        # Bounds that are the largest or the last exact ones.
        ({"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53}, [str(2**53)], [str(2**53 + 1)]),
        ({"type": "integer", "minimum": 2**63 - 2, "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        # A key in disguise is that key.
        (
            {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}, "type": "object"},
            ['{"b": 1, "c": 2}', '{"a": null}', '{"\\n": 1}'],
            ['{"a": 1}', '{"\\u0061": 1}'],
        ),
        (
            {
                "patternProperties": {"^é": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
                "type": "object",
            },
            ['{"é": null}', '{"e": 1}'],
            ['{"é": 1}', '{"\\u00e9": 1}'],
        ),
        # The 29th of February is in leap years.
        (
            {"type": "string", "format": "date", "allOf": [{"maxLength": 99}]},
            ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-01-29"', '"1999-12-31"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"'],
        ),
        (
            {"type": ["string", "null"], "format": "date-time"},
            ['"2024-02-29T10:00:00Z"', "null"],
            ['"2023-02-29T10:00:00Z"'],
        ),
        # Characters that have no other escape.
        ({"enum": ["\x01", "\x7f"]}, ['"\\u0001"', '"\\u007f"'], ['"\\u0002"']),
        ({"type": "string", "pattern": "^\\x01$"}, ['"\\u0001"'], ['""']),
        # Names are no keywords.
        ({"type": "object", "properties": {"minProperties": {"const": 5}}, "required": ["minProperties"]}, [], ["{}"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_an_output_keeps_to_its_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert good == [text for text in good if takes(schema, text)]
    assert [] == [text for text in bad if takes(schema, text)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "exclusiveMinimum": 2**63},
        {"type": "integer", "minimum": 1e20, "maximum": 1e21},
        {"type": "integer", "minimum": 10**400},
        {"type": "integer", "maximum": -(2**64)},
        {"type": "string", "pattern": "^a\\"},
        {"type": "object", "patternProperties": {"a\\\\\\": {"type": "null"}}},
        {"type": "object", "properties": {"default": {"type": "object", "minProperties": 5}}},
        {"type": "object", "properties": {"enum": {"type": "string", "pattern": "\\"}}},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_would_be_taken_for_something_else_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="json_schema has"):
        takes(schema, "")


@pytest.mark.parametrize(
    "asking_nothing",
    [
        {"uniqueItems": False},
        {"unevaluatedItems": True},
        {"unevaluatedProperties": {}},
        {"propertyNames": {}},
        {"dependentRequired": {}, "dependentSchemas": {}},
        {"maximum": 2**63 - 1},
    ],
    ids=json.dumps,
)
def test_what_asks_for_nothing_is_not_refused(asking_nothing: dict[str, Any]) -> None:
    assert takes({"type": "array", "items": {"type": "integer", **asking_nothing}, **asking_nothing}, "[1, 1]")


@pytest.mark.parametrize("name", ["password", "binary", "path"])
def test_a_format_that_says_what_is_done_with_a_text_lets_any_text_pass(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": ["string", "null"], "format": name}}}

    assert takes(schema, '{"format": "any text"}')
    assert not takes(schema, '{"format": 1}')
