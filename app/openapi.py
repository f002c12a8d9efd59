"""The OpenAPI document: FastAPI's, with what all routes have in common said once for all of them.

Every refusal has OpenAI's error object and none is FastAPI's 422, so the statuses that any route may answer with are
added here, where a route has not said otherwise itself; and where a body may ask for a stream, so is the stream.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

METHODS = {"get", "post", "put", "patch", "delete", "head", "options"}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """What every failure is told in."""

    error: ErrorObject


_SCHEMA = {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
# By what brings them about: any request, or one with a body or a name in its path.
_ANY = {
    "401": "The API key is missing or wrong.",
    "404": "What is asked for is not there, or is turned off on this server.",
    "499": "The client has left; nobody reads this.",
    "500": "A fault of the server's own.",
    "503": "Not now: the queue is full, the server shuts down, or its engine has died or is stuck.",
}
_WITH_INPUT = {
    "400": "Refused; the message names the field, its value and the limit.",
    "408": "The body, or the reading of the answer, took too long.",
    "410": "Somebody has ended the request by /abort_requests.",
    "413": "The body is longer than this server takes.",
    "429": "This key has had its share for now: of places, of requests a minute or of tokens.",
    "504": "The request took longer than this server lets it.",
}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The application's document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for operations in document["paths"].values():
            for method in METHODS & operations.keys():
                _complete(operations[method], schemas)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        defined = ErrorResponse.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**defined.pop("$defs"), "ErrorResponse": defined}
        app.openapi_schema = document
    return app.openapi_schema


def _complete(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    has_input = "requestBody" in operation or "parameters" in operation
    for status, description in {**_ANY, **(_WITH_INPUT if has_input else {})}.items():
        responses.setdefault(status, {"description": description, "content": {"application/json": _SCHEMA}})
    if "stream" in _body_properties(operation, schemas):
        responses["200"].setdefault("content", {})["text/event-stream"] = {"schema": {"type": "string"}}


def _body_properties(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    properties: dict[str, Any] = schemas.get(reference.rpartition("/")[2], {}).get("properties", {})
    return properties
