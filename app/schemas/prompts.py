"""The shapes a prompt may have, where it is no conversation."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

MAX_PROMPTS = 1024
# Told apart by hand: a union would try a list of 4,096 ids as a list of texts first, and report 4,096 errors.
PromptShape = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            ]
        }
    ),
]
