"""How a request is to be sampled and when it ends: values, held to their ranges when they are made.

What depends on the model (its vocabulary, its context) is the engine's affair.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole output must be. Plain and picklable; whether it can be honoured shows when it is compiled.

    `value`: nothing for any JSON object, a JSON text for a schema, a regular expression (Rust's syntax, matched from
    begin to end), the choices, or a grammar in llguidance's variant of Lark.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str | tuple[str, ...] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn and when they end. Checked on construction (InvalidRequest).

    Fields mean what vLLM's mean. `max_tokens` None: up to the context's end; 0: the prompt is computed and nothing is
    drawn. `top_k` 0 or -1: off. `seed`: int64 or None. `num_logprobs`: how many alternatives are reported with each
    token, None for no logprobs at all; `num_prompt_logprobs` the same for the prompt's. `allowed_token_ids` None: all.
    `bad_words`: runs of tokens that the output never has. `skip_special_tokens` False: they show in the text, by name.
    `speculative_tokens`: most draft tokens a step, None for the engine's own choice. `structured_output`: the grammar
    that the output keeps to; it ends (with STOP) where nothing can follow, even before `min_tokens`. `embed`: the mean
    of the prompt's hidden states is wanted.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    speculative_tokens: int | None = None
    structured_output: StructuredOutput | None = None
    embed: bool = False

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0, 2)
        _in_range("top_p", self.top_p, 0, 1, low_open=True)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0, 2, low_open=True)
        _in_range("top_k", self.top_k, -1, INT64_MAX)
        _in_range("min_tokens", self.min_tokens, 0, INT64_MAX)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, INT64_MAX)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _in_range("seed", self.seed, INT64_MIN, INT64_MAX)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", bias, -100, 100, of=f" of token {token_id}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings, limit is {MAX_STOP_STRINGS}", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:  # each token is held against all of them
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, limit is {MAX_STOP_TOKEN_IDS}", "stop_token_ids"
            )
        if "" in self.stop:
            raise InvalidRequest("stop has an empty string", "stop")
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids is an empty list, at least 1 id is needed", "allowed_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words has {len(self.bad_words)} words, limit is {MAX_BAD_WORDS}", "bad_words")
        if () in self.bad_words:
            raise InvalidRequest("bad_words has a word without tokens", "bad_words")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def may_run_dry(self) -> bool:
        """Whether several masks together may leave no token somewhere on the way."""
        masks = (self.allowed_token_ids is not None, bool(self.bad_words), self.structured_output is not None)
        return sum(masks) > 1


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False, of: str = "") -> None:
    if not (low < value if low_open else low <= value) or not value <= high:  # NaN fails both
        opening = "(" if low_open else "["
        raise InvalidRequest(f"{name}{of} is {value}, allowed is {opening}{low}, {high}]", name)
