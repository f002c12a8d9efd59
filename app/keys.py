"""API keys as they are kept: a name and a digest.

Only the name goes further: into the log, and into the salt of the prefix cache, so that several keys of one name (an
old one and a new one) are one caller.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_SPACE = " \t\r\n"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: whoever logs it logs no secret."""

    name: str
    digest: bytes


def parse_keys(texts: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys from `KEY` or `NAME:KEY`; those without a name are called by their place, key-1 and so on.

    White space around a key is none of it: no header could carry it.

    Raises:
        ValueError: one of them is empty. The message holds its place, and nothing of it.
    """
    keys = []
    for number, text in enumerate(texts, 1):
        text = text.strip(_SPACE)
        match = _NAMED.fullmatch(text)
        name, key = (match[1], match[2].strip(_SPACE)) if match else (f"key-{number}", text)
        if not key:
            raise ValueError(f"key {number} is empty")
        keys.append(ApiKey(name, digest_of(key.encode())))
    return tuple(keys)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
