"""Public report BC-019, min_tokens off by one: an end may come right behind the tokens asked for, and not before.

An end token counts in completion_tokens and is no text. A bias makes the model want to end at once.
"""

from typing import Any

import pytest

from tests.reports.answers import WAYS, ask
from tests.reports.conftest import Serve, scripted

EOS = 256
SPECULATION = pytest.mark.parametrize(
    "speculation",
    [None, '{"num_speculative_tokens": 6}', '{"method": "ngram", "num_speculative_tokens": 4}', "null"],
    ids=["default", "six drafts", "look-up", "off"],
)


@SPECULATION
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1}], ids=str)
async def test_bc_019_an_end_comes_right_behind_min_tokens(
    serve: Serve, speculation: str | None, sampling: dict[str, Any]
):
    """BC-019, vllm-project/vllm#46243: min_tokens = N forced N + 1 tokens before the end token was let through."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        for min_tokens in (None, 0, 1, 2, 4, 9):
            body: dict[str, Any] = {"prompt": "hi", "max_tokens": 32, "logit_bias": {str(EOS): 100}, **sampling}
            answer = await ask(server, way, **body, min_tokens=min_tokens)

            expected = (min_tokens or 0) + 1
            assert ("stop", expected) == (answer.finish_reason, answer.num_tokens), (way, min_tokens)


@SPECULATION
async def test_min_tokens_up_to_the_limit_leaves_no_room_for_an_end(serve: Serve, speculation: str | None):
    server = await serve(speculative_config=speculation)
    body: dict[str, Any] = {"prompt": "hi", "temperature": 0, "logit_bias": {str(EOS): 100}}
    for way in WAYS:
        full = await ask(server, way, **body, min_tokens=6, max_tokens=6)
        room = await ask(server, way, **body, min_tokens=6, max_tokens=7)

        assert [("length", 6), ("stop", 7)] == [(a.finish_reason, a.num_tokens) for a in (full, room)]


@SPECULATION
async def test_min_tokens_holds_back_stop_ids_and_stop_strings_too(serve: Serve, speculation: str | None):
    """Tokens one by one, and all in one step."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        for script in (("a", "b", "a", "b", "a"), (["a", "b", "a", "b", "a"],)):
            body: dict[str, Any] = {**scripted(*script), "max_tokens": 5}
            by_id = await ask(server, way, **body, stop_token_ids=[ord("b")], min_tokens=2)
            by_text = await ask(server, way, **body, stop=["b"], min_tokens=2)
            early = await ask(server, way, **body, stop=["b"], min_tokens=1)

            assert [("aba", 4), ("aba", 4), ("a", 2)] == [(a.text, a.num_tokens) for a in (by_id, by_text, early)]


@SPECULATION
async def test_an_end_that_is_ignored_ends_nothing(serve: Serve, speculation: str | None):
    server = await serve(speculative_config=speculation)
    body: dict[str, Any] = {"prompt": "hi", "temperature": 0, "logit_bias": {str(EOS): 100}, "ignore_eos": True}
    for way in WAYS:
        answer = await ask(server, way, **body, max_tokens=5)

        assert ("", "length", 5) == (answer.text, answer.finish_reason, answer.num_tokens)
