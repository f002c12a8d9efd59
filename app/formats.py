"""What a body says of its output's form: OpenAI's `response_format`, vLLM's `structured_outputs`, its older `guided_*`.

All come down to one `core.StructuredOutput`; a body may say it in one way only. A schema is enforced whether `strict`
or not.
"""

import json
from collections.abc import Iterator
from typing import Any

from app.schemas.generation import GenerationRequest, ResponseFormat, StructuredOutputs
from core import InvalidRequest, StructuredOutput


def structured_output(body: GenerationRequest) -> StructuredOutput | None:
    """What the output is held to, None for nothing. Raises InvalidRequest for two forms at once, or half a one."""
    asked = _asked(body)
    return asked[1] if asked else None


def format_field(body: GenerationRequest) -> str | None:
    """The field in which the body says it, for errors."""
    asked = _asked(body)
    return asked[0] if asked else None


def _asked(body: GenerationRequest) -> tuple[str, StructuredOutput] | None:
    found = list(_forms(body))
    if len(found) > 1:
        raise InvalidRequest(f"{found[0][0]} and {found[1][0]} both give a form, an output has one", found[1][0])
    return found[0] if found else None


def _forms(body: GenerationRequest) -> Iterator[tuple[str, StructuredOutput]]:
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield "structured_outputs", _of_structured_outputs(body.structured_outputs)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", _form(name, value)


def _of_response_format(given: ResponseFormat) -> StructuredOutput:
    given.refuse_unsupported()
    if given.type != "json_schema":
        return StructuredOutput("json_object")
    if given.json_schema is None:
        raise InvalidRequest("response_format of the type json_schema needs json_schema", "response_format")
    schema = given.json_schema.schema_
    return StructuredOutput("json_object") if schema is None else StructuredOutput("json_schema", _text(schema))


def _of_structured_outputs(given: StructuredOutputs) -> StructuredOutput:
    given.refuse_unsupported()
    names = {name: field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    kinds = {known: value for name, known in names.items() if (value := getattr(given, name)) is not None}
    if len(kinds) != 1:
        raise InvalidRequest(
            f"structured_outputs has {len(kinds)} forms ({', '.join(kinds) or 'none'}), it must have one of"
            f" {', '.join(names.values())}",
            "structured_outputs",
        )
    return _form(*kinds.popitem())


def _form(name: str, value: Any) -> StructuredOutput:
    match name:
        case "json":
            return StructuredOutput("json_schema", value if isinstance(value, str) else _text(value))
        case "choice":
            return StructuredOutput("choice", tuple(value))
        case "regex":
            return StructuredOutput("regex", value)
        case "json_object":
            return StructuredOutput("json_object")
        case _:
            return StructuredOutput("grammar", value)


def _text(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest("json_schema is nested too deep", "structured_output") from error
