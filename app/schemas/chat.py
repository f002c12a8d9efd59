"""The shapes of /v1/chat/completions: messages, tools and their calls, answers whole and in chunks."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.schemas.base import Items, StrictModel
from app.schemas.generation import Chunk, FinishReason, GenerationRequest, PromptLogprobs, ResponseMetrics, Usage

MAX_TOOLS = 128


class FunctionCall(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    """A call that the model has made, as it comes back in the messages."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictModel):
    role: str
    content: str | Items[dict[str, Any]] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


# OpenAI takes 64 characters, Anthropic 128.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class FunctionDefinition(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatRequest(GenerationRequest):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ChatFinishReason = FinishReason | Literal["tool_calls"]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class MadeFunctionCall(BaseModel):
    name: str
    arguments: str


class MadeToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MadeToolCall] | None = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A call's first delta has everything but arguments, its others have nothing else."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    metrics: ResponseMetrics | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Chunk):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
    prompt_token_ids: list[int] | None = None
