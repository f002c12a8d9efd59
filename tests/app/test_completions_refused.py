"""What completions refuse, by name and without harm to others, and what they take that asks for nothing."""

import asyncio
import json
from typing import Any

import pytest

from app.factory import load
from tests.app.servers import RunningServer, in_process, make_settings
from tests.app.test_completions import text_of


async def refused(server: RunningServer, **body: Any) -> tuple[int, str | None]:
    response = await server.complete(**body)
    return response.status_code, response.json()["error"]["param"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": -1}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 257]}, "allowed_token_ids"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"bad_words": ["a" * 100_000]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 100_000}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a\nb"}, "cache_salt"),
        ({"cache_salt": "a" * 257}, "cache_salt"),
        ({"max_tokens": 0, "stream": True}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"best_of": 21}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], param: str):
    async with in_process() as server:
        prompt = {"prompt": "p"} if param != "prompt" else {}
        assert (400, param) == await refused(server, **prompt, **body)


async def test_harmless_and_null_fields_are_taken():
    async with in_process() as server:
        nulls = dict.fromkeys(("suffix", "logprobs", "stop", "seed", "n", "tools", "stream_options", "logit_bias"))
        both = {"max_tokens": 2, "max_completion_tokens": 2}
        response = await server.complete(
            prompt="p", user="u", best_of=1, cache_salt=None, never_heard_of=1, **nulls, **both
        )

    assert 200 == response.status_code


async def test_an_unknown_model_is_not_found():
    async with in_process() as server:
        response = await server.complete(model="gpt-9", prompt="p")

    error = response.json()["error"]
    assert (404, "model_not_found", "model") == (response.status_code, error["code"], error["param"])


async def test_a_stream_that_cannot_start_has_a_real_status():
    async with in_process(max_num_seqs=1, max_queue=0) as server:
        too_long = await server.complete(prompt="p", max_tokens=10_000, stream=True)
        server.service.loop.is_draining = True
        closing = await server.complete(prompt="p", stream=True)

    assert (400, "context_length_exceeded") == (too_long.status_code, too_long.json()["error"]["code"])
    assert (503, "shutting_down") == (closing.status_code, closing.json()["error"]["code"])
    assert "1" == closing.headers["retry-after"]


async def test_a_request_that_allows_no_token_is_refused_when_that_shows_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
):
    async with in_process(load(make_settings(max_num_seqs=4))) as server:
        nothing = {"prompt": "p", "allowed_token_ids": [97], "bad_words": ["aaa"], "temperature": 0, "max_tokens": 9}
        refused, streamed, other = await asyncio.gather(
            server.complete(**nothing),
            server.complete(**nothing, stream=True),
            server.complete(prompt="p", allowed_token_ids=[97], bad_words=["b"], max_tokens=9),
        )

    assert (400, "invalid_request_error") == (refused.status_code, refused.json()["error"]["type"])
    assert refused.json()["error"]["message"].startswith("bias, penalties, masks and min_tokens leave no token")
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    *events, error, _, _ = streamed.text.split("\n\n")
    assert "aa" == text_of([json.loads(event.removeprefix("data: ")) for event in events])
    assert "no token that may come next" in error
    assert "a" * 9 == other.json()["choices"][0]["text"]


async def test_what_would_come_behind_a_stop_is_nobodys_fault():
    async with in_process(load(make_settings(max_num_seqs=4))) as server:
        masks = {"allowed_token_ids": [97], "bad_words": ["aaa"], "temperature": 0}
        body = (await server.complete(prompt="p", **masks, stop=["aa"], max_tokens=9)).json()

    assert ("stop", 2) == (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"])


@pytest.mark.parametrize("min_tokens", [0, 16])
async def test_the_default_is_cut_to_the_room_but_what_was_asked_for_is_not(min_tokens: int):
    async with in_process(max_model_len=20) as server:
        asked = {"prompt": ["x" * 15, "x"], "min_tokens": min_tokens}
        body = (await server.complete(**asked)).json()
        refusal = await refused(server, **asked, max_tokens=16)
        long = await refused(server, prompt="p", min_tokens=17)

    assert [5, 16] == [len(choice["text"].encode()) for choice in body["choices"]]
    assert (400, "max_tokens") == refusal
    assert (400, "min_tokens") == long
