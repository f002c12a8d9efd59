"""From a request's body to the engine's requests.

One HTTP request is a `Job`: its prompts, times `n` samples, are so many sequences, and choice `prompt * n + sample` is
the sequence of that place. What becomes of it is in `app.run`, what is particular to completions or to chat in their
own modules.
"""

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.engine_loop import family_ids
from app.formats import structured_output
from app.prompts import (
    Prompt,
    PromptItem,
    check_bad_words,
    encode,
    encode_bad_words,
    prompt_items,
    shortened,
    with_pieces,
)
from app.schemas.generation import GenerationRequest, StreamOptions
from core import (
    ContextLengthExceeded,
    Engine,
    InvalidRequest,
    NewRequest,
    SamplingParams,
    ScriptEntry,
)

logger = logging.getLogger(__name__)

# Fields that go over as they are; a null leaves the engine's default, which is OpenAI's.
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, checked and ready for the engine: for each prompt a NewRequest with its siblings, or several.

    `num_samples` of each prompt are drawn and `n` of them shown; `request_ids[i]` is sample i, prompt after prompt.
    """

    id: str
    trace_id: str
    created: int
    model: str
    n: int
    num_samples: int
    prompts: tuple[Prompt, ...]
    requests: tuple[NewRequest, ...]
    has_prediction: bool = False

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def wants_logprobs(self) -> bool:
        """Of its outputs or of its prompts."""
        params = self.requests[0].params
        return params.num_logprobs is not None or params.num_prompt_logprobs is not None

    @property
    def request_ids(self) -> list[str]:
        return [request_id for request in self.requests for request_id in family_ids(request)]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked of the engine, before there are tokens.

    `kind` starts the id, as clients know it: cmpl or chatcmpl. `prompt` is as the body has it, looked at only outside
    the event loop: it may be long. `names` are the body's, where they are not the engine's. A `max_tokens` that is a
    default is cut to the room that the context leaves. Of a prompt longer than `max_prompt_tokens` the end is kept; -1
    stands for the context length.
    """

    kind: str
    model: str
    prompt: Any
    params: SamplingParams
    n: int
    best_of: int | None = None
    echo: bool = False
    bad_words: Sequence[str] = ()
    max_prompt_tokens: int | None = None
    is_max_tokens_default: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    cache_salt: Mapping[str, str] = field(default_factory=dict)
    script: tuple[ScriptEntry, ...] | None
    prediction: str | None = None
    add_special_tokens: bool
    trace_id: str | None
    arrival_s: float


def sampling_params(
    body: GenerationRequest,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    may_be_empty: bool = False,
) -> SamplingParams:
    """The body's sampling fields; an empty answer only where it `may_be_empty`.

    Raises:
        InvalidRequest: naming the field that is out of range.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if max_tokens == 0 and not may_be_empty:
        raise InvalidRequest("max_tokens is 0, at least 1 is needed", "max_tokens")
    given: dict[str, Any] = {name: value for name in _PLAIN_FIELDS if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        logit_bias=_logit_bias(body.logit_bias or {}),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        structured_output=structured_output(body),
        speculative_tokens=body.speculative.num_speculative_tokens if body.speculative else None,
        **given,
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not re.fullmatch(r"[0-9]{1,19}", key):  # JSON has only text for keys
            raise InvalidRequest(f"logit_bias has the key {key[:32]!r}, which is no token id", "logit_bias")
    return {int(key): value for key, value in given.items()}


def build(engine: Engine, ask: Ask) -> Job:
    """Take the prompts apart, tokenize and check each; runs outside the event loop.

    Raises:
        InvalidRequest: one of them cannot be served, so none is; the message names it.
    """
    num_samples = ask.best_of or ask.n
    check_bad_words(engine, ask.bad_words)
    ask = replace(ask, params=replace(ask.params, bad_words=encode_bad_words(engine.tokenizer, ask.bad_words)))
    job_id, items = f"{ask.kind}-{uuid.uuid4().hex}", prompt_items(ask.prompt)
    prompts: list[Prompt] = []
    prediction = encode(engine, ask.prediction or "", add_special_tokens=False, param="prediction").token_ids
    requests: list[NewRequest] = []
    for number, item in enumerate(items):
        try:
            prompt = _prompt(engine, item, ask)
            params = _checked(engine, ask, prompt)
        except InvalidRequest as error:
            explained = _explained(error, engine, f"prompt {number}: " if len(items) > 1 else "")
            raise renamed(explained, ask.names) from error
        prompts.append(prompt)
        ids = [f"{job_id}-{number * num_samples + sample}" for sample in range(num_samples)]
        requests += _families(ids, engine.config.max_num_seqs, prompt, params, ask, prediction)
    return Job(
        id=job_id,
        trace_id=ask.trace_id or job_id,
        created=int(time.time()),
        model=ask.model,
        n=ask.n,
        num_samples=num_samples,
        prompts=tuple(prompts),
        requests=tuple(requests),
        has_prediction=ask.prediction is not None,
    )


def _prompt(engine: Engine, item: PromptItem, ask: Ask) -> Prompt:
    prompt = encode(engine, item, add_special_tokens=ask.add_special_tokens)
    if ask.max_prompt_tokens is not None:
        prompt = shortened(engine, prompt, ask.max_prompt_tokens)
    return with_pieces(engine.tokenizer, prompt, goes_on=ask.params.max_tokens != 0) if ask.echo else prompt


def _checked(engine: Engine, ask: Ask, prompt: Prompt) -> SamplingParams:
    if not ask.is_max_tokens_default or ask.params.max_tokens is None:
        return engine.check(prompt.token_ids, ask.params)
    params = engine.check(prompt.token_ids, replace(ask.params, max_tokens=None))
    assert params.max_tokens is not None
    return replace(params, max_tokens=min(ask.params.max_tokens, params.max_tokens))


def _families(
    ids: Sequence[str], max_size: int, prompt: Prompt, params: SamplingParams, ask: Ask, prediction: tuple[int, ...]
) -> list[NewRequest]:
    """The samples of one prompt, as one request; where more are wanted than can run at once, one after the other."""
    return [
        NewRequest(
            request_id=ids[first],
            prompt_token_ids=prompt.token_ids,
            params=params,
            choice=first,
            arrival_s=ask.arrival_s,
            sibling_ids=tuple(ids[first + 1 : first + max_size]),
            cache_salt=ask.cache_salt,
            script=ask.script,
            prediction_token_ids=prediction,
        )
        for first in range(0, len(ids), max_size)
    ]


def _explained(error: InvalidRequest, engine: Engine, where: str) -> InvalidRequest:
    """The error with the prompt's number, and with the phrases by which client libraries know a context overflow."""
    message = str(error)
    if isinstance(error, ContextLengthExceeded) and "maximum context length is" not in message:
        limit = f"This model's maximum context length is {engine.max_model_len} tokens"
        message = f"{limit} and the prompt is too long, alone or with its max_tokens: {message}"
    return type(error)(where + message, error.param)


def in_words(message: str, param: str | None, names: Mapping[str, str]) -> str:
    """What is said of a field, with the body's names.

    "prompt is too long" stays as it is: clients look for the phrase. So does a place in a list, `messages[3]`: in a
    body that means it by another name it is another.
    """
    for name in names.keys() & {"max_tokens", param}:
        message = re.sub(rf"\b{name}\b(?! is too long|\[)", names[name], message)
    return message


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error in the words of the body."""
    message = in_words(str(error), error.param, names)
    if error.param == "structured_output":  # what it calls itself is no field of the body
        message = f"{names.get(error.param, error.param)}: {message}"
    return type(error)(message, names.get(error.param or "", error.param))


def stream_options(body: GenerationRequest) -> StreamOptions:
    """The body's stream options, checked: they make no sense without a stream."""
    if body.stream_options is None:
        return StreamOptions()
    body.stream_options.refuse_unsupported()
    if not body.stream and any(value is not None for value in dict(body.stream_options).values()):
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
        raise InvalidRequest("continuous_usage_stats needs include_usage", "stream_options")
    return body.stream_options
