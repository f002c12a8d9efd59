"""The shapes of /v1/embeddings."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.schemas.base import CacheSalt, StrictModel
from app.schemas.prompts import PromptShape


class EmbeddingRequest(StrictModel):
    """OpenAI's, with vLLM's extensions; `dimensions` may only say what the model's hidden states have anyway."""

    model: str | None = None
    input: PromptShape
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None
    cache_salt: CacheSalt | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
