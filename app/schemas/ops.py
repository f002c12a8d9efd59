"""The shapes of what operators and tools ask: the tokenizer by itself, and ends of requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from app.schemas.base import UNSUPPORTED, Items, Lacking, StrictModel
from app.schemas.chat import ChatMessage, Tools
from app.schemas.prompts import MAX_PROMPTS


class ToolRequest(StrictModel):
    """A request to a tool beside the API. People may send it a body of the API as it is, of which it reads a part."""

    unsupported_fields: ClassVar[Mapping[str, Lacking]] = {}


class TokenizeRequest(ToolRequest):
    # What would change the tokens.
    unsupported_fields: ClassVar[Mapping[str, Lacking]] = {
        name: UNSUPPORTED[name] for name in ("chat_template", "documents", "mm_processor_kwargs")
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """What a client needs that cuts texts into tokens by /tokenize; lm-eval's remote tokenizer, for one."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class DetokenizeRequest(ToolRequest):
    model: str | None = None
    tokens: Items[int]


class DetokenizeResponse(BaseModel):
    prompt: str


class AbortRequest(ToolRequest):
    """`request_ids`: as responses have them in `id`, or as the caller sent them in X-Request-Id."""

    request_ids: Annotated[Items[str], Field(max_length=MAX_PROMPTS)] | None = None
    all: bool | None = None


class AbortResponse(BaseModel):
    aborted: list[str]
