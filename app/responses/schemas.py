"""The shape of requests to /v1/responses; what generation needs besides is as in completions and chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.schemas.base import UNSUPPORTED, Items, Lacking, StrictModel
from app.schemas.chat import MAX_TOOLS, FunctionName
from app.schemas.generation import GenerationRequest


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(StrictModel):
    type: Literal["function"]
    name: str


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None


class ResponsesRequest(GenerationRequest):
    unsupported_fields: ClassVar[Mapping[str, Lacking]] = {
        **UNSUPPORTED,
        "background": Lacking(False),
        "context_management": Lacking([]),
        "conversation": Lacking(),
        "include": Lacking([]),
        "logprobs": Lacking(False),
        "max_completion_tokens": Lacking(),
        "max_tool_calls": Lacking(),
        "messages": Lacking(why="is chat's, responses have input"),
        "previous_response_id": Lacking(),
        "prompt": Lacking(),
        "response_format": Lacking(),
        "top_logprobs": Lacking(0),
        "truncation": Lacking("disabled"),
    }

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
