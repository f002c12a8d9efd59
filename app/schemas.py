"""The shapes of OpenAI's requests and responses, vLLM's extensions included.

Types are strict (1.5 is no seed, true is no number) and numbers finite; ranges are the engine's affair
(`core.SamplingParams`) and are not repeated here. A field that is null means the same as one that is absent. Unknown
fields are accepted and logged once; fields that we know and do not honour are refused (`UNSUPPORTED`), because
ignoring them would be a wrong answer that looks right. Responses are dumped with `exclude_unset`: a field that was
not set is not there, a field set to None is null.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from app.errors import unsupported
from app.faults import Faults

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_BEST_OF = 20
MAX_PROMPTS = 1024
MAX_TOOLS = 128

# Values of known fields that ask for nothing we lack. Whatever else is sent there is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # completions
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_embeds": (),
    # chat
    "echo": (False,),
    "best_of": (1,),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    # both
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
# Fields of OpenAI's that ask nothing of an engine: labels, bookkeeping, hints.
HARMLESS = {
    "cache_control",
    "disable_fallback",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
_logged_fields: set[str] = set()
_MAX_LOGGED_FIELDS = 1000  # names come from clients: their memory is bounded


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    def refuse_unsupported(self) -> Self:
        """Raise ApiError for a known field that we do not honour; log unknown ones once per process."""
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported_fields:
                if value is not None and value not in self.unsupported_fields[name]:
                    raise unsupported(name)
            elif name not in HARMLESS and name not in _logged_fields and len(_logged_fields) < _MAX_LOGGED_FIELDS:
                _logged_fields.add(name)
                logger.warning("unknown request field ignored", extra={"field": name[:64]})
        return self


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
    content: str | list[dict[str, Any]]


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
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """vLLM's way to say what the output must be; one of the fields."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
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
    stop: str | list[str] | None = None
    prediction: Prediction | None = None
    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
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
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")] | None = None
    # ours
    speculative: Speculative | None = None
    script: Script | None = None
    fault: Faults | None = None


PromptShape = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest):
    # Told apart by hand: a union would try a list of 4,096 ids as a list of texts first, and report 4,096 errors.
    prompt: PromptShape = None
    best_of: Annotated[int, Field(ge=0, le=MAX_BEST_OF)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None


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
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


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
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
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


class TokenizeRequest(StrictModel):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: list[int]


class AbortRequest(StrictModel):
    """`request_ids`: as responses have them in `id`, or as the caller sent them in X-Request-Id."""

    request_ids: Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    all: bool | None = None


class AbortResponse(BaseModel):
    aborted: list[str]


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
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


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
    speculative_decoding: SpeculativeDecodingMetrics


FinishReason = Literal["stop", "length"]
ChatFinishReason = FinishReason | Literal["tool_calls"]


class CompletionLogprobs(BaseModel):
    """Four lists of one length. The first token of an echoed prompt has no law: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """vLLM's entry for one token at one place of the prompt; `rank` is 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt its own entry and the most likely ones', by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Chunk(BaseModel):
    """What the events of both endpoints have. `obfuscation`: random padding, where the client asked for it."""

    obfuscation: str | None = None


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


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


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


class DetokenizeResponse(BaseModel):
    prompt: str
