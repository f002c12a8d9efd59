"""What a model can be asked: ids of its vocabulary, and as much as its context and the pool have room for.

Nothing here ever changes, so any thread may ask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from core.config import EngineConfig
from core.errors import ContextLengthExceeded, InvalidRequest
from core.memory.block_manager import blocks_needed
from core.model.config import ModelConfig
from core.sampling_params import SamplingParams


class Limits:
    """Those of one model in one pool. The context is the least of what model, configuration and pool allow.

    Args:
        config: `num_kv_blocks` must be set by now.
        model_config: the model's sizes.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        if config.num_kv_blocks is None:
            raise ValueError("num_kv_blocks is not set")
        self.num_kv_blocks = config.num_kv_blocks
        self.max_model_len = min(
            config.max_model_len or model_config.max_position_embeddings,
            model_config.max_position_embeddings,
            config.num_kv_blocks * config.block_size,
        )
        self._block_size = config.block_size
        self._vocab_size = model_config.vocab_size
        self._max_logprobs = config.max_logprobs

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """All but the room.

        Raises:
            InvalidRequest: ids outside the vocabulary, an empty prompt, too many log-probabilities.
        """
        if not prompt_token_ids:
            raise InvalidRequest("prompt has 0 tokens, at least 1 is needed", "prompt")
        self.check_ids("prompt", prompt_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self.check_ids("bad_words", (token_id for word in params.bad_words for token_id in word))
        for name, num in (("logprobs", params.num_logprobs), ("prompt_logprobs", params.num_prompt_logprobs)):
            if num is not None and not 0 <= num <= self._max_logprobs:
                raise InvalidRequest(f"{name} is {num}, allowed is [0, {self._max_logprobs}]", name)

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        """Raises InvalidRequest, naming the field, for an id outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"{name} has token id {token_id}, allowed is [0, {self._vocab_size - 1}]", name)

    def fit(self, num_prompt_tokens: int, params: SamplingParams) -> SamplingParams:
        """The parameters with `max_tokens` set: what was asked, or the room that the context leaves.

        Raises:
            ContextLengthExceeded: prompt and output do not fit the context.
        """
        room = self._room_behind(num_prompt_tokens, to_come=0 if params.max_tokens == 0 else 1)
        if params.max_tokens is None:
            return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        if params.max_tokens > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens: the prompt is too long for"
                f" max_tokens {params.max_tokens} ({num_prompt_tokens} tokens leave room for {room})",
                "max_tokens",
            )
        return params

    def _room_behind(self, num_prompt_tokens: int, *, to_come: int) -> int:
        room = self.max_model_len - num_prompt_tokens
        if room < to_come:
            needed = blocks_needed(num_prompt_tokens, self._block_size)
            blocks = f" (it needs {needed} KV blocks of {self._block_size} tokens, {self.num_kv_blocks} exist)"
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens: prompt is too long,"
                f" {num_prompt_tokens} tokens and at least {to_come} to come"
                f"{blocks if needed > self.num_kv_blocks else ''}",
                "prompt",
            )
        return room
