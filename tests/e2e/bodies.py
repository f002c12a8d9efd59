"""Random bodies for any operation of an OpenAPI document, valid and invalid mixed.

Values come from the schemas, so that what is added to the API is covered the day it is added; now and then any JSON
stands in their place.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Values = st.SearchStrategy[Any]
MAX_DEPTH = 4
EDGES = [0, 1, -1, 2, 3, 2**31, -(2**63), 2**63 - 1, 2**64, 10**30]
ASKED = {"prompt", "input"}  # not required by their schemas, and yet little happens without
TEXTS = st.text(max_size=12) | st.sampled_from(["", "\x00", "\ud800", "é€😀", "<|end|>", "a" * 300, "{", "user"])
NUMBERS = st.integers(0, 9) | st.sampled_from(EDGES)
REALS = st.floats(0, 2) | st.sampled_from([-1.0, 1e300, 5e-324, float("nan"), float("inf"), 0, 1])
SCALARS = st.none() | st.booleans() | NUMBERS | REALS | TEXTS
JUNK = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


class Bodies:
    """Strategies for the bodies that a document describes."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})

    def of(self, schema: Mapping[str, Any], *, likely: Mapping[str, Values], depth: int = 0) -> Values:
        """Values of a schema, mostly; `likely` says what a property of that name mostly is, in the outermost object."""
        if depth > MAX_DEPTH:
            return st.none()
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rpartition("/")[2]], likely=likely, depth=depth)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return st.one_of([self.of(option, likely=likely, depth=depth) for option in schema[name]])
        if "enum" in schema or "const" in schema:
            return st.sampled_from(schema.get("enum") or [schema["const"]])
        match schema.get("type"):
            case "object":
                return self._object(schema, likely, depth)
            case "array":
                return st.lists(self.of(schema.get("items", {}), likely={}, depth=depth + 1), max_size=3)
            case "string":
                return TEXTS
            case "integer":
                return NUMBERS
            case "number":
                return REALS
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case _:
                return JUNK

    def _object(self, schema: Mapping[str, Any], likely: Mapping[str, Values], depth: int) -> Values:
        more = schema.get("additionalProperties")
        if not schema.get("properties"):
            inner = self.of(more, likely={}, depth=depth + 1) if isinstance(more, Mapping) else JUNK
            return st.dictionaries(TEXTS | st.integers(0, 300).map(str), inner, max_size=3)
        properties = {name: self._property(name, sub, likely, depth) for name, sub in schema["properties"].items()}
        needed = {*schema.get("required", ()), *(ASKED & likely.keys())}
        required = {name: values for name, values in properties.items() if name in needed}
        return self._some_of(required, {n: v for n, v in properties.items() if n not in required})

    def _property(self, name: str, schema: Mapping[str, Any], likely: Mapping[str, Values], depth: int) -> Values:
        return rarely(JUNK, likely[name] if name in likely else self.of(schema, likely={}, depth=depth + 1))

    def _some_of(self, required: dict[str, Values], optional: dict[str, Values]) -> Values:
        """The required properties and a few others: with all of them there, one of them would always be wrong."""
        names = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True) if optional else st.just([])
        return names.flatmap(
            lambda chosen: st.fixed_dictionaries({**required, **{name: optional[name] for name in chosen}})
        )


def rarely(rare: Values, usual: Values) -> Values:
    """Eleven times of twelve what is usual."""
    return st.integers(0, 11).flatmap(lambda pick: rare if pick == 11 else usual)
