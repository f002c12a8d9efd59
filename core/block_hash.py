"""Content hashes of full blocks, chained: a block's hash says what it holds and all that stands before it.

SHA-256 over the parent's hash, the token ids, and in the first block a salt. Equal hash means equal prefix, so a block
found by its hash needs no comparing; and what a tenant cannot name by its salt it cannot probe. Chained block hashes:
vLLM's automatic prefix caching; salts against probing: PromptPeek, NDSS 2025.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence

ROOT = b""


def encode_salt(parts: Mapping[str, str]) -> bytes:
    """One salt from named parts. Names keep them apart: no value of one part can pass for another part's."""
    return json.dumps(sorted(parts.items())).encode() if parts else b""


def block_hash(parent: bytes, token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """32 bytes that name a full block. `parent` is the hash of the block before, ROOT for the first."""
    return hashlib.sha256(parent + array("Q", token_ids).tobytes() + salt).digest()


class BlockHashes:
    """The chain of one request, made as far as it is asked for and kept."""

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self._block_size = block_size
        self._salt = salt
        self._hashes: list[bytes] = []

    def up_to(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks of `token_ids`, which must be full."""
        size = self._block_size
        for i in range(len(self._hashes), num_blocks):
            parent, salt = (self._hashes[-1], b"") if i else (ROOT, self._salt)
            self._hashes.append(block_hash(parent, token_ids[i * size : (i + 1) * size], salt))
        return self._hashes[:num_blocks]
