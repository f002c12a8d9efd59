"""Prompts: told apart by their shapes, cut into tokens, and shown again where they are echoed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.schemas.prompts import MAX_PROMPTS
from core import MAX_BAD_WORDS, ContextLengthExceeded, Engine, InvalidRequest, Tokenizer, decode_pieces

PromptItem = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, its text where it came as text, and where it is echoed the text of each token."""

    token_ids: tuple[int, ...]
    text: str | None
    pieces: tuple[str, ...] = ()


def prompt_items(value: Any) -> list[PromptItem]:
    """The prompts of a completions request, told apart by their shapes: text, texts, ids, lists of ids."""
    if isinstance(value, str):
        return [value]
    if value is None or value == []:
        raise InvalidRequest(f"prompt is {'missing' if value is None else 'an empty list'}", "prompt")
    if isinstance(value, list):
        if are_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(value)} items, limit is {MAX_PROMPTS}", "prompt")
        if all(isinstance(item, str) for item in value) or all(isinstance(i, list) and are_ids(i) for i in value):
            return value
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
    )


def are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # True is an int to isinstance


def num_bytes(text: str, param: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} has half of a surrogate pair at character {error.start}", param) from None


def max_text_bytes(engine: Engine) -> int:
    """Of a text that fits the context, however it is cut into tokens."""
    return engine.max_model_len * engine.tokenizer.max_token_bytes


def encode(engine: Engine, item: PromptItem, *, add_special_tokens: bool = True, param: str = "prompt") -> Prompt:
    """Tokens of one prompt. A text that cannot fit, however it is cut into tokens, is refused before it is cut."""
    if not isinstance(item, str):
        return Prompt(tuple(item), None)
    size, limit = num_bytes(item, param), max_text_bytes(engine)
    if size > limit:
        raise ContextLengthExceeded(f"{param} has {size} bytes, limit is {limit}", param)
    return Prompt(tuple(engine.tokenizer.encode(item, add_special_tokens=add_special_tokens)), item)


def check_bad_words(engine: Engine, words: Sequence[str]) -> None:
    """Raises InvalidRequest for too many, and for those that come in no context; before any is cut into tokens."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} words, limit is {MAX_BAD_WORDS}", "bad_words")
    longest, limit = max((num_bytes(word, "bad_words") for word in words), default=0), max_text_bytes(engine)
    if longest > limit:
        raise InvalidRequest(f"bad_words has a word of {longest} bytes, limit is {limit}", "bad_words")


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of words that must not come, each as it stands and, where that is no longer, behind a space.

    As vLLM has it: " cat" is often one token and "cat" another, and neither may come.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise InvalidRequest(f"bad_words has {word!r}, which has no tokens", "bad_words")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)


def shortened(engine: Engine, prompt: Prompt, limit: int) -> Prompt:
    """The last `limit` tokens of a prompt; -1 stands for the context length."""
    if not limit or limit > engine.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {limit}, allowed is -1 or [1, {engine.max_model_len}]", "truncate_prompt_tokens"
        )
    limit = engine.max_model_len if limit < 0 else limit
    return prompt if len(prompt.token_ids) <= limit else Prompt(prompt.token_ids[-limit:], None)


def with_pieces(tokenizer: Tokenizer, prompt: Prompt, *, goes_on: bool = False) -> Prompt:
    """The prompt with its tokens' texts. Special tokens that were written in the text are text, a BOS before it is not.

    Where the output `goes_on` from it, a character that it leaves open is the output's. A tokenizer may change a text
    before it cuts it (and it is echoed as it was read).
    """
    pieces = decode_pieces(tokenizer, prompt.token_ids, goes_on=goes_on)
    if prompt.text is not None and "".join(pieces) != prompt.text:
        pieces = _as_written(tokenizer, prompt.token_ids, pieces, prompt.text) or pieces
    return replace(prompt, pieces=tuple(pieces))


def _as_written(tokenizer: Tokenizer, token_ids: Sequence[int], pieces: Sequence[str], text: str) -> list[str] | None:
    """What of the text each token stands for: special ones too, and without the spaces that a tokenizer adds.

    None where the text cannot be found in the tokens. SentencePiece puts a space of its own before the first word, and
    behind special tokens, too.
    """
    found: list[str] = []
    position = 0
    for token_id, piece in zip(token_ids, pieces, strict=True):
        is_special = not tokenizer.token_bytes(token_id)
        readings = (tokenizer.token_text(token_id), "") if is_special else (piece, piece.removeprefix(" "))
        written = next((reading for reading in readings if text.startswith(reading, position)), None)
        if written is None:
            return None
        found.append(written)
        position += len(written)
    return found if position == len(text) else None
