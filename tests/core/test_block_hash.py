"""A block's name: what it holds, all that stands before it, and who may know."""

import hashlib
import struct

import pytest

from core.block_hash import ROOT, BlockHashes, block_hash, encode_salt


def test_a_hash_is_sha256_over_parent_tokens_and_salt():
    parent = bytes(range(32))

    assert hashlib.sha256(parent + struct.pack("<3Q", 1, 2, 2**63) + b"salt").digest() == (
        block_hash(parent, [1, 2, 2**63], b"salt")
    )


def test_the_first_blocks_parent_is_nothing():
    assert hashlib.sha256(struct.pack("<2Q", 1, 2)).digest() == block_hash(ROOT, [1, 2])


def test_a_chain_hashes_full_blocks_and_nothing_else():
    first = block_hash(ROOT, [1, 2])

    assert [first, block_hash(first, [3, 4])] == BlockHashes(2).up_to([1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize("changed", [0, 1, 2, 3, 4, 5])
def test_a_token_changes_its_block_and_all_behind_it(changed: int):
    tokens = [7] * 6
    other = [*tokens[:changed], 8, *tokens[changed + 1 :]]
    same = [a == b for a, b in zip(BlockHashes(2).up_to(tokens, 3), BlockHashes(2).up_to(other, 3), strict=True)]

    assert [i < changed // 2 for i in range(3)] == same


def test_equal_blocks_behind_different_ones_have_different_names():
    tokens = [1, 2, 9, 9, 9, 9]

    assert 3 == len(set(BlockHashes(2).up_to(tokens, 3)))


def test_a_salt_is_in_the_first_block_and_so_changes_every_block():
    tokens = [1, 2, 3, 4]
    first, second = BlockHashes(2, b"salt").up_to(tokens, 2)

    assert (block_hash(ROOT, [1, 2], b"salt"), block_hash(first, [3, 4])) == (first, second)
    assert {first, second}.isdisjoint(BlockHashes(2).up_to(tokens, 2))
    assert {first, second}.isdisjoint(BlockHashes(2, b"other").up_to(tokens, 2))


def test_a_chain_grows_with_its_tokens_and_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    hashed: list[list[int]] = []

    def counted(parent: bytes, token_ids: list[int], salt: bytes = b"") -> bytes:
        hashed.append(list(token_ids))
        return block_hash(parent, token_ids, salt)

    monkeypatch.setattr("core.block_hash.block_hash", counted)
    chain, tokens = BlockHashes(2, b"s"), [1, 2, 3]
    early = chain.up_to(tokens, 1)
    tokens += [4, 5, 6]

    assert early == chain.up_to(tokens, 3)[:1] == chain.up_to(tokens, 1)
    assert [[1, 2], [3, 4], [5, 6]] == hashed
    assert BlockHashes(2, b"s").up_to(tokens, 3) == chain.up_to(tokens, 3)


def test_the_order_of_a_salts_parts_does_not_matter():
    assert encode_salt({"a": "1", "b": "2"}) == encode_salt({"b": "2", "a": "1"})


def test_no_part_of_a_salt_can_pass_for_another():
    """A caller who knows another's key cannot repeat it as his own salt, whatever he writes."""
    salts = [
        {},
        {"api_key": ""},
        {"api_key": "x"},
        {"cache_salt": "x"},
        {"api_key": "x", "cache_salt": "x"},
        {"api_key": "xx"},
        {"cache_salt": '"], ["api_key", "x'},
        {"api_key": "x", "cache_salt": ""},
    ]

    assert len(salts) == len({encode_salt(salt) for salt in salts})


def test_no_salt_is_nothing():
    assert b"" == encode_salt({})
