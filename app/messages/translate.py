"""A Messages body as the chat request that it means."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.messages.schemas import CountTokensRequest, CustomTool, MessagesRequest, MessagesToolChoice
from app.schemas.chat import ChatRequest
from app.translation import chat_request, extensions
from core import InvalidRequest

# Fields of the chat request by what they are called here.
NAMES = {"stop": "stop_sequences", "response_format": "output_config"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Other servers' models', given back; ours write none. No set: a body may have a list there, which has no hash.
_LEFT_OUT = ("thinking", "redacted_thinking")


def to_chat(body: CountTokensRequest) -> ChatRequest:
    """Raises InvalidRequest, ApiError or RequestValidationError, in the words of the body."""
    choice = body.tool_choice or MessagesToolChoice(type="auto")
    given = {
        "tools": _tools(body.tools or ()) or None,
        "tool_choice": _tool_choice(choice) if body.tool_choice else None,
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
        "response_format": _response_format(body),
    }
    fields = {name: value for name, value in given.items() if value is not None}
    if isinstance(body, MessagesRequest):
        fields = {**_generation(body), **fields}
    if body.messages[-1].role == "assistant":  # the answer goes on from there
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat_request({**fields, "messages": messages(body)}, NAMES)


def _generation(body: MessagesRequest) -> dict[str, Any]:
    if body.n not in (None, 1):
        raise InvalidRequest(f"n is {body.n}, a message has one answer", "n")
    return {**extensions(body), **({"stop": body.stop_sequences} if body.stop_sequences is not None else {})}


def messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Chat messages: the system's first, results of tools as messages of their own before what else the user says."""
    found: list[dict[str, Any]] = []
    if body.system is not None:
        found.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        found += _blocks(message.role, blocks, f"messages[{number}].content")
    return found


def _blocks(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    texts: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for block in blocks:
        match role, block.get("type"):
            case _, "text":
                texts.append(block)
            case "user", "tool_result":
                num_results += 1
                content = _text(block.get("content") or "", where)
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            case "assistant", "tool_use":
                calls.append(_call(block, where))
            case "assistant", kind if kind in _LEFT_OUT:
                pass
            case _, kind:
                raise InvalidRequest(
                    f"{where} has a block of type {str(kind)[:32]!r}, which is not supported for the {role}", "messages"
                )
    if texts or calls or not num_results:
        message = {"role": role, "content": _text(texts, where)}
        yield {**message, "tool_calls": calls} if calls else message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where} has a tool_use whose input is no object", "messages")
    function = {"name": block.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    """Blocks of text follow each other without a break: clients cut one text into several to mark what to cache."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else block
        if not isinstance(block, dict) or kind != "text" or not isinstance(block.get("text"), str):
            raise InvalidRequest(
                f"{where} has a block of type {str(kind)[:32]!r}, this model takes text", where.partition("[")[0]
            )
        texts.append(block["text"])
    return "".join(texts)


def _tools(tools: Sequence[CustomTool]) -> list[dict[str, Any]]:
    functions = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in tools
    ]
    return [{"type": "function", "function": function} for function in functions]


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice of type tool needs a name", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(body: CountTokensRequest) -> dict[str, Any] | None:
    given = body.output_config.format if body.output_config else None
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise InvalidRequest(
            f"output_config.format has the type {str(given.get('type'))[:32]!r}, allowed is json_schema",
            "output_config",
        )
    if given.get("schema") is None:
        raise InvalidRequest("output_config.format needs a schema", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}
