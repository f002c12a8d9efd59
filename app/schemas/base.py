"""What all requests have in common: strict types, and known fields that are refused rather than ignored."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from app.errors import unknown_field, unsupported

logger = logging.getLogger(__name__)


class Lacking:
    """A known field that we do not honour: values that ask for nothing we lack, and why anything else is refused."""

    def __init__(self, *harmless: Any, why: str = "is not supported by this server") -> None:
        self.harmless = harmless
        self.why = why


UNSUPPORTED: dict[str, Lacking] = {
    # completions
    "suffix": Lacking(""),
    "use_beam_search": Lacking(False),
    "length_penalty": Lacking(1, 1.0),
    "prompt_embeds": Lacking(),
    "messages": Lacking(why="is chat's, completions have prompt"),
    "tools": Lacking(why="is chat's"),
    "tool_choice": Lacking("none", "auto", why="is chat's"),
    "top_logprobs": Lacking(0, why="is chat's, completions have logprobs"),
    # chat
    "prompt": Lacking(why="is completions', chat has messages"),
    "echo": Lacking(False, why="is completions'"),
    "best_of": Lacking(1, why="is completions'"),
    "functions": Lacking(),
    "function_call": Lacking("none", "auto"),
    "audio": Lacking(),
    "modalities": Lacking(["text"]),
    "web_search_options": Lacking(),
    "chat_template": Lacking(),
    "documents": Lacking([]),
    "mm_processor_kwargs": Lacking({}),
    # both
    "guided_decoding_backend": Lacking("auto", "guidance"),
    "guided_whitespace_pattern": Lacking(),
    "structural_tag": Lacking(),
    "whitespace_pattern": Lacking(),
    "disable_any_whitespace": Lacking(False),
    "disable_additional_properties": Lacking(False),
    "spaces_between_special_tokens": Lacking(True),
    "logits_processors": Lacking([]),
    "priority": Lacking(0, why="is only taken as 0, all requests have one priority"),
    "kv_transfer_params": Lacking(),
    "vllm_xargs": Lacking({}),
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
    unsupported_fields: ClassVar[Mapping[str, Lacking]] = UNSUPPORTED

    def refuse_unsupported(self, *, is_strict: bool = False) -> Self:
        """Raise ApiError for a known field that we do not honour; unknown ones too if strict, else log them once."""
        for name, value in (self.model_extra or {}).items():
            if (lacking := self.unsupported_fields.get(name)) is not None:
                if value is not None and value not in lacking.harmless:
                    raise unsupported(name, lacking.why)
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
