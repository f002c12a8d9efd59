"""Text to token ids and back, byte by byte.

A token stands for bytes, not characters: one emoji may take four tokens. So a tokenizer here says the bytes of each
token (`token_bytes`), and text is made in one place only, the incremental detokenizer, which holds an unfinished
character back. `decode` runs the same detokenizer over a whole sequence: streamed and whole text cannot differ.

Three kinds: bytes themselves (the embedded model), byte-level BPE, and SentencePiece-like vocabularies with U+2581
for a space. The latter two are run by the package `tokenizers`: see `core.tokenizer_files`, `core.tokenizer_gguf`.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from core.errors import InvalidRequest

MOST_OPEN_BYTES = 3  # of a character that is not finished


class TokenSource(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


class Tokenizer(Protocol):
    """What the engine and the service ask of a tokenizer.

    Attributes:
        vocab_size: ids are below this; a model's own vocabulary may be padded beyond.
        adds_bos: `encode` puts `bos_token_id` first.
        eos_token_ids: ids that end a generation.
        special_token_texts: `bos_token` and `eos_token`, for chat templates.
        max_token_bytes: no token stands for more bytes of text than this.
        strips_leading_space: the first space of a whole text is the tokenizer's own, not the writer's.
    """

    vocab_size: int
    bos_token_id: int | None
    adds_bos: bool
    eos_token_ids: frozenset[int]
    chat_template: str | None
    special_token_texts: Mapping[str, str]
    max_token_bytes: int
    strips_leading_space: bool

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Texts of special tokens are recognised; BOS comes first exactly once, if at all.

        Raises InvalidRequest for a text that has no UTF-8.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; b"" for special tokens and for ids without a token."""

    def token_text(self, token_id: int) -> str:
        """A token for display: special ones by name, bytes that are no text as U+FFFD."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of a whole sequence, special tokens left out."""


class IncrementalDetokenizer:
    """Text of tokens as they come. Pieces joined are the text of all; U+FFFD only for bytes that can be no character.

    Args:
        tokenizer: says each token's bytes.
        at_start: the tokens begin a text (a prompt), rather than go on with one. Matters where
            `strips_leading_space`: a generated " Paris" keeps its space, a prompt's first word has none.
        shows_special: special tokens are text, too, by their names.
        behind: what comes before. A character that it leaves open is gone on with, and shown whole.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        at_start: bool = False,
        shows_special: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = at_start and tokenizer.strips_leading_space
        self.is_open = False  # bytes of an unfinished character are held
        for token_id in behind[-MOST_OPEN_BYTES:]:
            self.decode(token_id)

    def decode(self, token_id: int) -> str:
        """Text that this token completes; '' while a character is still open."""
        data = self._tokenizer.token_bytes(token_id)
        if not data and self._shows_special:
            data = self._tokenizer.token_text(token_id).encode()
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        if not self.is_open and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self.is_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left at the end: one U+FFFD if a character stayed open, else ''."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.is_open = False
        return text


def decode_pieces(tokenizer: Tokenizer, token_ids: Iterable[int], *, goes_on: bool = False) -> list[str]:
    """Text that each token of a sequence completes.

    The last has what is left of an open character, unless the text `goes_on`.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, at_start=True)
    pieces = [detokenizer.decode(token_id) for token_id in token_ids]
    if not goes_on and (rest := detokenizer.flush()):
        pieces[-1] += rest
    return pieces


def decode_whole(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """Text of a whole sequence by the incremental detokenizer."""
    return "".join(decode_pieces(tokenizer, token_ids))


def text_bytes(text: str) -> bytes:
    """UTF-8 of a text. Raises InvalidRequest for a lone surrogate, which JSON allows and UTF-8 does not."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("text holds half of a surrogate pair, which is no character", "prompt") from error


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end. The embedded model's."""

    END_TOKEN_ID = 256
    END_TEXT = "<|end|>"

    def __init__(self, chat_template: str | None = None) -> None:
        self.vocab_size = 257
        self.bos_token_id: int | None = None
        self.adds_bos = False
        self.eos_token_ids = frozenset({self.END_TOKEN_ID})
        self.chat_template = chat_template
        self.special_token_texts: Mapping[str, str] = {"eos_token": self.END_TEXT}
        self.max_token_bytes = len(self.END_TEXT)
        self.strips_leading_space = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({re.escape(self.END_TEXT)})", text):
            ids += [self.END_TOKEN_ID] if part == self.END_TEXT else text_bytes(part)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        if token_id == self.END_TOKEN_ID:
            return self.END_TEXT
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        return decode_whole(self, token_ids)


def load_tokenizer(path: Path, *, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a .gguf file, or of a directory with tokenizer.json.

    Args:
        path: file or directory.
        cache_dir: where a GGUF's converted tokenizer is kept for the next start; None to convert every time.

    Raises:
        ModelLoadError: files are missing, damaged, or of a kind we do not know.
    """
    if path.is_dir():  # imported here: the embedded model should not wait for the package `tokenizers`
        from core.tokenizer_files import load_directory

        return load_directory(path)
    from core.tokenizer_gguf import load_gguf_tokenizer

    return load_gguf_tokenizer(path, cache_dir=cache_dir)
