"""API keys: each has a name, and nothing else of it is kept or shown."""

import pytest

from app.keys import ApiKey, digest_of, parse_keys


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("secret", "key-1", b"secret"),
        ("alice:secret", "alice", b"secret"),
        ("alice:se:cret", "alice", b"se:cret"),
        ("two words:secret", "key-1", b"two words:secret"),
        ("alice:sécret", "alice", "sécret".encode()),
        (" alice:  se cret\t", "alice", b"se cret"),
        ("\tsecret\n", "key-1", b"secret"),
    ],
)
def test_a_key_may_have_a_name_before_a_colon(text: str, name: str, key: bytes):
    assert (ApiKey(name, digest_of(key)),) == parse_keys([text])


def test_keys_without_a_name_are_called_by_their_place():
    assert ["key-1", "alice", "key-3"] == [key.name for key in parse_keys(["a", "alice:b", "c"])]


@pytest.mark.parametrize("text", ["", "alice:", " ", "alice: "])
def test_an_empty_key_is_refused_by_its_place(text: str):
    with pytest.raises(ValueError, match=r"^key 2 is empty$"):
        parse_keys(["first", text])


def test_what_is_kept_shows_no_key():
    assert "secret" not in repr(parse_keys(["alice:secret"]))
