"""The shape of requests to /v1/messages; what generation needs besides is as in completions and chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from app.schemas.base import UNSUPPORTED, Items, Lacking, StrictModel
from app.schemas.chat import MAX_TOOLS, FunctionName
from app.schemas.generation import GenerationRequest

Content = str | Items[dict[str, Any]]


class Message(StrictModel):
    role: Literal["user", "assistant"]
    content: Content


class CustomTool(StrictModel):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(StrictModel):
    format: dict[str, Any] | None = None


class CountTokensRequest(StrictModel):
    """A conversation, which is all that decides how long its prompt is."""

    unsupported_fields: ClassVar[Mapping[str, Lacking]] = {
        **UNSUPPORTED,
        "container": Lacking(),
        "context_management": Lacking(),
        "logprobs": Lacking(False),
        "max_completion_tokens": Lacking(),
        "mcp_servers": Lacking([]),
        "output_format": Lacking(),
        "prompt": Lacking(why="is completions', here there is messages"),
        "thinking": Lacking({"type": "disabled"}),
    }

    model: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, GenerationRequest):
    max_tokens: int  # required, as clients know
    stop_sequences: Items[str] | None = None


class TokenCount(BaseModel):
    input_tokens: int
