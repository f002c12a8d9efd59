"""What completions and chat have in common, in what is asked and in what is answered."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, WithJsonSchema
from typing_extensions import TypedDict  # on Python 3.11 pydantic takes no other

from app.faults import Faults
from app.schemas.base import CacheSalt, Items, Lacking, StrictModel

MAX_CHOICES = 128


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


Script = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "type": "array",
            "description": "What to say instead of the model: pieces of one token each, strings, lists of bytes "
            "or objects as in a chat answer's logprobs; a nested list of pieces is emitted in one step. "
            "Needs --enable-scripts.",
        }
    ),
]


class Prediction(StrictModel):
    """What the client expects to be said, to take drafts from. It shows in no answer, only in how soon it comes."""

    type: Literal["content"]
    content: str | Items[dict[str, Any]]


class Speculative(StrictModel):
    """Drafting for this request alone; 0 turns it off."""

    num_speculative_tokens: Annotated[int, Field(ge=0)]


class JsonSchemaFormat(StrictModel):
    """A schema by name. It is enforced whether `strict` or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    # Others' ways to give a form; ignored, any JSON would seem to be what was asked for.
    unsupported_fields: ClassVar[Mapping[str, Lacking]] = {name: Lacking() for name in ("schema", "grammar", "pattern")}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """vLLM's way to say what the output must be; one of the fields."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None


class GenerationRequest(StrictModel):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    prediction: Prediction | None = None
    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    cache_salt: CacheSalt | None = None
    # ours
    speculative: Speculative | None = None
    script: Script | None = None
    fault: Faults | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecodingMetrics(BaseModel):
    """How drafts fared in one request: vLLM's per-request acceptance metrics. Lists by step only where asked for."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class ResponseMetrics(BaseModel):
    """What the server tells of one request where its operator wants it to: vLLM's per-request metrics."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecodingMetrics | None = None


FinishReason = Literal["stop", "length"]


class PromptLogprob(TypedDict):
    """vLLM's entry for one token at one place of the prompt; `rank` is 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt its own entry and the most likely ones', by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Chunk(BaseModel):
    """What the events of both endpoints have. `obfuscation`: random padding, where the client asked for it."""

    obfuscation: str | None = None
