"""What all requests have in common: strict types, and known fields that are refused rather than ignored."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from app.errors import unknown_field, unsupported

logger = logging.getLogger(__name__)

# Values of known fields that ask for nothing we lack. Whatever else is sent there is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # completions
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_embeds": (),
    "messages": (),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    # chat
    "prompt": (),
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
    "include_metrics",  # vLLM's: whether there are any is for the server's operator to say
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
T = TypeVar("T")
# A list of which the first wrong item is told: to describe a million of them takes ten seconds, in which nobody else is
# answered.
Items = Annotated[list[T], Field(fail_fast=True)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    unsupported_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    def refuse_unsupported(self, *, is_strict: bool = False) -> Self:
        """Raise ApiError for a known field that we do not honour; unknown ones too if strict, else log them once."""
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported_fields:
                if value is not None and value not in self.unsupported_fields[name]:
                    raise unsupported(name)
            elif name not in HARMLESS:
                if is_strict:
                    raise unknown_field(name)
                _log_once(name)
        return self


def _log_once(name: str) -> None:
    if name not in _logged_fields and len(_logged_fields) < _MAX_LOGGED_FIELDS:
        _logged_fields.add(name)
        logger.warning("unknown request field ignored", extra={"field": name[:64]})


def dumped(answer: BaseModel) -> bytes:
    """As JSON, the fields that were set."""
    return answer.__pydantic_serializer__.to_json(answer, exclude_unset=True)
