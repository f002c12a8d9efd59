"""The shapes of /v1/completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.schemas.generation import Chunk, FinishReason, GenerationRequest, PromptLogprobs, ResponseMetrics, Usage
from app.schemas.prompts import PromptShape

MAX_BEST_OF = 20


class CompletionRequest(GenerationRequest):
    prompt: PromptShape = None
    best_of: Annotated[int, Field(ge=0, le=MAX_BEST_OF)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None
    max_completion_tokens: int | None = None  # chat's; some clients send both


class CompletionLogprobs(BaseModel):
    """Four lists of one length. The first token of an echoed prompt has no law: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Chunk):
    """A whole completion, or one chunk of a stream: the two have the same shape and the same `object`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
