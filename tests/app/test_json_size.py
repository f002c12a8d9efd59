"""How much there is in a JSON text is known before it is parsed, wherever its bytes are cut."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_size import MAX_PARTS, MAX_VALUES, JsonSize
from tests.app.servers import in_process

TEXTS = st.text(alphabet='ab\\"[{:,\u00e9\n', max_size=8)
JSON = st.recursive(
    TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20
)


def size_of(value: Any) -> tuple[int, int]:
    """Lists, objects and keys; and commas."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [size_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    num_parts = 1 + (len(value) if isinstance(value, dict) else 0)
    return num_parts + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(values for _, values in inner)


@given(JSON, st.booleans(), st.integers(1, 7))
def test_all_is_counted_but_what_stands_in_strings(value: Any, is_ascii: bool, piece_size: int):
    data, size = json.dumps(value, ensure_ascii=is_ascii).encode(), JsonSize()
    for start in range(0, len(data), piece_size):
        size.feed(data[start : start + piece_size])

    assert size_of(value) == (size.num_parts, size.num_values)


async def in_pieces(data: bytes, sent: list[int]) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 2**16):
        sent.append(start)
        yield data[start : start + 2**16]


@pytest.mark.parametrize(
    ("unit", "what"),
    [
        ("[1]", f"{MAX_PARTS} lists, objects and keys"),
        ('{"role": "user"}', f"{MAX_PARTS} lists, objects and keys"),
        ("1", f"{MAX_VALUES} values"),
    ],
)
async def test_a_body_of_too_many_parts_is_refused_before_it_is_read_whole(unit: str, what: str):
    """However small: parsing and checking them would hold up everybody's answers for many seconds."""
    body, sent = f'{{"prompt": [{", ".join([unit] * 4_000_000)}]}}'.encode(), list[int]()
    async with in_process() as server:
        response = await server.client.post("/v1/completions", content=in_pieces(body, sent))

    assert 413 == response.status_code
    assert f"the body has more than {what}" == response.json()["error"]["message"]
    assert sent[-1] < len(body) - 2**16


async def test_a_body_of_one_long_text_is_not_large():
    text = '[{:,\\"' * 200_000
    async with in_process() as server:
        response = await server.complete(prompt=text)

    assert "context_length_exceeded" == response.json()["error"]["code"]
