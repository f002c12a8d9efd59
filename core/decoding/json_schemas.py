"""JSON schemas as grammars: what llguidance makes of them, and where it makes too much or too little, what we do.

llguidance refuses most of what it cannot enforce, and so do we then. This is about the rest: keys that ask for nothing
are left out, bounds that it would round are refused, and so is what it would take for something else.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

MAX_SCHEMA_DEPTH = 64  # levels of JSON
LARGEST_INTEGER = 2**63 - 1

# One space may follow a comma or a colon, none stand elsewhere: a model that likes blanks cannot write them for ever.
_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Escapes but \u: a key written with it would not be known for one that the schema has a property for.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
_NEEDS_CODES = re.compile(r"\\u|\x7f|\\\\[xup]")  # in a schema's text: characters that have no other escape

# Of a schema's keys, those whose values are data, in which nothing means anything; and those whose values' keys are
# the caller's names.
_DATA_KEYS = {"const", "enum", "default", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Keys that llguidance refuses, with the values by which they ask for nothing.
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    # OpenAPI's and pydantic's, for what is done with the text: any text is one.
    "format": ("password", "binary", "path", "file-path", "directory-path"),
}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_GAP = 1e-6  # of a range
# A date's beginning: any month but February, February up to the 28th, or the 29th of a leap year.
_REAL_DAY = (
    "^(?:....-(?:0[13-9]|1[0-2])-|....-02-(?:[01].|2[0-8])"
    "|(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)


def lark_json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema as a term of a grammar, in the one form that we let models write.

    Raises:
        InvalidRequest: it passes our limits, or asks for what llguidance only seems to honour.
    """
    if "draft-03" in str(schema.get("$schema")):
        raise refusal("json_schema is of draft 3, which is not supported")
    honoured = _honoured(schema, depth=1)
    escapes = {} if _NEEDS_CODES.search(json.dumps(honoured, ensure_ascii=False)) else _ESCAPES
    return f"%json {json.dumps({**honoured, 'x-guidance': {**_FORM, **escapes}})}"


def check_regex(kind: str, text: str) -> None:
    """Raises InvalidRequest for an expression whose last escape would take in what stands behind it."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise refusal(f"{kind} ends in the middle of an escape")


def refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, "structured_output")


def _honoured(part: Any, *, depth: int, has_names: bool = False) -> Any:
    """A schema, or what is in one, as llguidance is to have it; `has_names`: its keys are the caller's names."""
    if not isinstance(part, dict | list):
        return part
    if depth > MAX_SCHEMA_DEPTH:
        raise refusal(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    if isinstance(part, list):
        return [_honoured(item, depth=depth + 1) for item in part]
    if has_names:
        return {name: _honoured(value, depth=depth + 1) for name, value in part.items()}
    _check_keys(part)
    return {
        key: value if key in _DATA_KEYS else _honoured(value, depth=depth + 1, has_names=key in _NAMED)
        for key, value in _with_real_days(_with_open_bounds(part)).items()
        if value not in _ASKS_NOTHING.get(key, ())
    }


def _check_keys(part: Mapping[str, Any]) -> None:
    least, required = part.get("minProperties"), part.get("required")
    # Keys of a map are not kept apart, so two of them may be one.
    if isinstance(least, int) and least > 1 + (len(required) if isinstance(required, list) else 0):
        raise refusal(f"json_schema has minProperties {least}, supported is 1 more than are required by name")
    named = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            check_regex("json_schema has a pattern that", pattern)
    for key in (*_LOWER, *_UPPER):
        bound = _number(part, key)
        if bound is not None and bound == math.floor(bound):
            _check_bound(key, int(bound))


def _check_bound(key: str, bound: int) -> None:
    """Bounds are rounded to 53 bits and cut to 64: refused where that would let in what is outside."""
    near = max(-LARGEST_INTEGER - 1, min(int(float(max(-(2**64), min(bound, 2**64)))), LARGEST_INTEGER))
    if near < bound if key in _LOWER else near > bound:
        raise refusal(f"json_schema has {key} {str(bound)[:32]}, which is rounded to {near} and cannot be enforced")


def _with_open_bounds(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where an open bound is a whole number and the other one less than 1 away, the bound itself would be let in."""
    lows = [bound for key in _LOWER if (bound := _number(part, key)) is not None]
    highs = [bound for key in _UPPER if (bound := _number(part, key)) is not None]
    if not lows or not highs or not 0 < (width := min(highs) - max(lows)) < 1:
        return part
    tight = dict(part)
    if _number(part, "exclusiveMinimum") == max(lows) == math.floor(max(lows)):
        tight["minimum"] = max(lows) + width * _GAP
    if _number(part, "exclusiveMaximum") == min(highs) == math.floor(min(highs)):
        tight["maximum"] = min(highs) - width * _GAP
    return tight


def _with_real_days(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """llguidance takes the 29th of February in every year."""
    if part.get("format") not in ("date", "date-time"):
        return part
    others = part.get("allOf", [])
    return {**part, "allOf": [*others, {"pattern": _REAL_DAY}]} if isinstance(others, list) else part


def _number(part: Mapping[str, Any], key: str) -> float | None:
    """A finite number; in draft 4 exclusive bounds are true or false."""
    value = part.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None
