"""A Responses body as the chat request that it means."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import unsupported
from app.responses.schemas import NamedTool, ResponsesRequest
from app.schemas.chat import ChatRequest
from app.translation import chat_request, extensions
from core import InvalidRequest

# Fields of the chat request by what they are called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """Raises InvalidRequest, ApiError or RequestValidationError, in the words of the body."""
    if body.max_tokens is not None:
        raise unsupported("max_tokens", "is called max_output_tokens here")
    if body.n not in (None, 1):
        raise InvalidRequest(f"n is {body.n}, a response has one answer", "n")
    given = {
        "max_tokens": body.max_output_tokens,
        "tools": _tools(body),
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
    }
    fields = {**extensions(body), **{name: value for name, value in given.items() if value is not None}}
    return chat_request({**fields, "messages": messages(body.input, body.instructions)}, NAMES)


def messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Input items as messages; calls join the assistant's message before them, as chat has it."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    if not items:
        raise InvalidRequest("input is an empty list", "input")
    for number, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                found.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                _append_call(found, item)
            case "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            case "reasoning":  # other servers' models', given back; ours write none
                pass
            case kind:
                raise InvalidRequest(
                    f"input[{number}] has the type {str(kind)[:32]!r}, which is not supported", "input"
                )
    return found


def _append_call(found: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    found[-1].setdefault("tool_calls", []).append(call)


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """None for none: here, unlike in chat, an empty list is the default."""
    tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools or ()]
    return [{"type": "function", "function": function} for function in tools] or None


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, NamedTool):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return None if body.tool_choice == "auto" else body.tool_choice  # clients send auto where there are no tools


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Of a text format; its schema is one level deeper in chat."""
    given = (body.text.format if body.text else None) or {"type": "text"}
    match given.get("type"):
        case "text":
            return None
        case "json_schema":
            if given.get("schema") is None:  # in chat it may be left out
                raise InvalidRequest("text.format of the type json_schema needs a schema", "text")
            return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}
        case _:
            return given
