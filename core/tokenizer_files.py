"""Tokenizers with a vocabulary: run by the package `tokenizers`, loaded from a directory with tokenizer.json.

The package splits text and finds ids. Back from ids it gives text only, which is no good for streaming, so the bytes
of a token are worked out here, by one of two alphabets: byte-level BPE writes each byte as one printable character,
SentencePiece writes a space as U+2581 and a byte that has no token as <0x0A>.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from core.errors import ModelLoadError
from core.model.weights import read_json
from core.tokenizer import decode_whole, text_bytes

META_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class VocabularyTokenizer:
    """A `core.tokenizer.Tokenizer` over the package's.

    Args:
        tokenizer: splits text into ids. Its own post-processor is not used: BOS is put here, exactly once.
        bos_token_id: needed if `adds_bos`.
        eos_token_ids: ids that end a generation.
        chat_template: Jinja source or None.
        special_token_texts: for chat templates.

    Raises:
        ModelLoadError: its decoder is of a kind whose bytes we do not know.
    """

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *,
        bos_token_id: int | None,
        adds_bos: bool,
        eos_token_ids: frozenset[int],
        chat_template: str | None,
        special_token_texts: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level, self._has_byte_tokens, self.strips_leading_space = _decoder_traits(tokenizer)
        self._added = {
            token_id: b"" if token.special else token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # A byte-level token has one character a byte; elsewhere, and for added tokens, the text itself is meant.
        longest = max((len(t if self._is_byte_level else t.encode()) for t in vocabulary), default=1)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self.max_token_bytes = max([longest, *(len(text.encode()) for text in added)])
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos and bos_token_id is not None
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.special_token_texts = special_token_texts
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text_bytes(text)  # refuses what has no UTF-8
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        # A template or a user may have written BOS already; a second one would shift every position.
        if add_special_tokens and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        if self._added.get(token_id) == b"":
            return self._tokenizer.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        return decode_whole(self, token_ids)

    def to_json(self) -> str:
        """What its tokenizer.json would hold."""
        return self._tokenizer.to_str()

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._is_byte_level:
            alphabet = byte_alphabet()
            # A character outside of the alphabet stands for itself, as in the package.
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(META_SPACE, " ").encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte by the character that byte-level BPE writes for it: itself if printable, else from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def load_directory(path: Path) -> VocabularyTokenizer:
    """The tokenizer of a directory as Hugging Face lays it out. Raises ModelLoadError."""
    file = path / "tokenizer.json"
    if not file.exists():
        raise ModelLoadError(f"{file} does not exist")
    try:
        tokenizer = HfTokenizer.from_file(str(file))
    except Exception as error:  # the package raises the base class
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    _forget_training(tokenizer)
    config = _read_json_if_there(path / "tokenizer_config.json")
    more = _read_json_if_there(path / "special_tokens_map.json")
    texts = _special_texts(config, more)
    special = {*texts.values(), *_further_special_texts(config, more)}
    _add_tokens(tokenizer, {**_told_tokens(path, special), **_described_tokens(config, path)})
    _mark_special(tokenizer, special)
    bos_token_id = _bos_token_id(tokenizer, texts)
    return VocabularyTokenizer(
        tokenizer,
        bos_token_id=bos_token_id,
        adds_bos=_adds_bos(tokenizer, config, bos_token_id),
        eos_token_ids=_eos_token_ids(path, tokenizer, texts),
        chat_template=_chat_template(path, config),
        special_token_texts=texts,
    )


def _forget_training(tokenizer: HfTokenizer) -> None:
    """It may have been saved with what training needed: texts cut and filled up, and merges left out by chance."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def _decoder_traits(tokenizer: HfTokenizer) -> tuple[bool, bool, bool]:
    """(is byte-level, has tokens like <0x0A>, drops the text's first space), read from how the package would decode."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return True, False, False
    replaces = any(step.get("pattern") == {"String": META_SPACE} for step in steps)
    if not replaces and "Metaspace" not in kinds:
        raise ModelLoadError(f"tokenizer decoder {' + '.join(map(str, kinds))} is not supported")
    strips = any(
        (step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return False, "ByteFallback" in kinds, strips


def _read_json_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _special_texts(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; each is a string or an object with `content`. Earlier sources win."""
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and name not in texts:
                texts[name] = text
    return texts


def _further_special_texts(*sources: Mapping[str, Any]) -> set[str]:
    """Of special tokens without a role: a list, or an object with names of the model's own."""
    found = set()
    for name in ("additional_special_tokens", "extra_special_tokens"):
        for value in (source.get(name) or [] for source in sources):
            for item in value.values() if isinstance(value, dict) else value:
                text = item.get("content") if isinstance(item, dict) else item
                found |= {text} if isinstance(text, str) else set()
    return found


def _told_tokens(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """By id: what added_tokens.json, the older form, has."""
    told = _read_json_if_there(path / "added_tokens.json")
    return {
        token_id: AddedToken(text, special=text in special, normalized=False)
        for text, token_id in told.items()
        if isinstance(token_id, int)
    }


def _described_tokens(config: Mapping[str, Any], path: Path) -> dict[int, AddedToken]:
    """By id: what the config says of added tokens. It may be newer than tokenizer.json."""
    traits = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        return {
            int(token_id): AddedToken(entry["content"], **{name: entry[name] for name in traits if name in entry})
            for token_id, entry in (config.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: added_tokens_decoder cannot be read: {error}") from error


def _add_tokens(tokenizer: HfTokenizer, tokens: Mapping[int, AddedToken]) -> None:
    """Tokens that tokenizer.json does not have, or has with other traits.

    Raises ModelLoadError when one cannot have its id: the package numbers them by itself.
    """
    for token_id, token in sorted(tokens.items()):
        is_new = tokenizer.token_to_id(token.content) is None
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        if is_new and (got := tokenizer.token_to_id(token.content)) != token_id:
            raise ModelLoadError(f"token {token.content} has id {token_id}, tokenizer.json leaves {got} for it")


def _mark_special(tokenizer: HfTokenizer, texts: Iterable[str]) -> None:
    """Tokens that are named as special are so, wherever their text stands, if tokenizer.json has them at all."""
    for text in sorted(texts):
        token_id = tokenizer.token_to_id(text)
        if token_id is None:
            continue
        token = tokenizer.get_added_tokens_decoder().get(token_id) or AddedToken(text, normalized=False)
        if not token.special:
            token.special = True
            tokenizer.add_special_tokens([token])


def _bos_token_id(tokenizer: HfTokenizer, texts: Mapping[str, str]) -> int | None:
    """The token that is named so, else what tokenizer.json's own post-processor puts before a text, if anything."""
    if "bos_token" in texts:
        return tokenizer.token_to_id(texts["bos_token"])
    some = tokenizer.encode("a")
    return some.ids[0] if some.special_tokens_mask[:1] == [1] else None


def _adds_bos(tokenizer: HfTokenizer, config: Mapping[str, Any], bos_token_id: int | None) -> bool:
    """What the config says, else what tokenizer.json's own post-processor does to an empty text."""
    said = config.get("add_bos_token")
    return bool(tokenizer.encode("").ids[:1] == [bos_token_id] if said is None else said)


def _eos_token_ids(path: Path, tokenizer: HfTokenizer, texts: Mapping[str, str]) -> frozenset[int]:
    """The tokenizer's own end token, and all that the model's two configs name."""
    ids: set[int] = set()
    if "eos_token" in texts and (eos := tokenizer.token_to_id(texts["eos_token"])) is not None:
        ids.add(eos)
    for name in ("generation_config.json", "config.json"):
        named = _read_json_if_there(path / name).get("eos_token_id")
        these = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token_id) is int for token_id in these):
            raise ModelLoadError(f"{path / name}: eos_token_id is {named!r}, whole numbers are needed")
        ids.update(token_id for token_id in these if token_id >= 0)  # -1 stands for none
    return frozenset(ids)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja if there, else the config's; of several named ones, `default`."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return template if isinstance(template, str) else None
