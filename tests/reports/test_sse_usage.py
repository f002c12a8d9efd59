"""Public reports on what the chunks of a stream carry, and on errors inside of one."""

import json
from typing import Any

import pytest
from httpx import Response
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.app.servers import RunningServer
from tests.reports.conftest import Serve, scripted

HELLO = [{"role": "user", "content": "Hi"}]
KINDS = ("chat", "completion")


async def ask(server: RunningServer, kind: str, **body: Any) -> Response:
    if kind == "chat":
        return await server.chat(**{"messages": HELLO, **body})
    return await server.complete(**{"prompt": "Hi", **body})


def chunks(response: Response) -> list[Any]:
    assert 200 == response.status_code, response.text
    *events, done, end = response.text.split("\n\n")
    assert ("data: [DONE]", "") == (done, end)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
async def test_bc_093_usage_is_null_but_in_one_last_chunk_without_choices(serve: Serve, kind: str, n: int):
    """BC-093, vllm-project/vllm#7262: it stood in every chunk, or the last one had choices."""
    server = await serve(enable_prefix_caching=False)
    asked = {**scripted("Hel", "lo", " there"), "n": n, "max_tokens": 9}
    whole = (await ask(server, kind, **asked)).json()
    *events, last = chunks(await ask(server, kind, **asked, stream=True, stream_options={"include_usage": True}))

    assert all(event["usage"] is None and event["choices"] for event in events)
    assert ([], whole["usage"]) == (last["choices"], last["usage"])
    plain = chunks(await ask(server, kind, **asked, stream=True))
    assert not any("usage" in event for event in plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_tokens", "reason"), [(9, "stop"), (2, "length")])
async def test_bc_095_finish_reason_is_null_until_the_last_chunk(serve: Serve, kind: str, max_tokens: int, reason: str):
    """BC-095, sgl-project/sglang#3912: it was an empty string, or missing, and strict clients failed."""
    server = await serve()
    asked = {**scripted("Hel", "lo", " there"), "max_tokens": max_tokens, "n": 2}
    events = chunks(await ask(server, kind, **asked, stream=True))

    sdk_type = ChatCompletionChunk if kind == "chat" else Completion
    for event in events:
        if kind == "completion":  # the SDK's type has no null where a stream must have one
            event = {
                **event,
                "choices": [{**c, "finish_reason": c["finish_reason"] or reason} for c in event["choices"]],
            }
        sdk_type.model_validate(event)
    assert 1 == len({(event["id"], event["created"], event["model"]) for event in events})
    for index in range(2):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [None] * (len(choices) - 1) + [reason] == [choice["finish_reason"] for choice in choices]
        if kind == "chat":
            roles = [choice["delta"].get("role") for choice in choices]
            assert ["assistant"] + [None] * (len(choices) - 1) == roles


@pytest.mark.parametrize("kind", KINDS)
async def test_bc_098_a_stream_that_cannot_start_is_refused_with_a_status(serve: Serve, kind: str):
    """BC-098, BerriAI/litellm#6054: invalid requests came back as HTTP 200 with the error inside."""
    server = await serve(max_model_len=64)
    bad: dict[str, tuple[Any, int]] = {"max_tokens": (1000, 400), "temperature": (9, 400), "model": ("gpt-9", 404)}
    too_long = "x" * 65
    bad |= (
        {"messages": ([{"role": "user", "content": too_long}], 400)} if kind == "chat" else {"prompt": (too_long, 400)}
    )
    for name, (value, status) in bad.items():
        response = await ask(server, kind, **{name: value}, stream=True)
        assert (status, "application/json") == (response.status_code, response.headers["content-type"]), name
        assert name == response.json()["error"]["param"]


@pytest.mark.parametrize("kind", KINDS)
async def test_bc_098_a_fault_on_the_way_is_one_error_event_and_no_finish_reason(serve: Serve, kind: str):
    """BC-098, errors wrapped in a 200 stream."""
    server = await serve(enable_fault_injection=True)
    asked = {**scripted(*"abcdef"), "max_tokens": 9, "fault": {"type": "error", "after_events": 3}}
    *events, error = chunks(await ask(server, kind, **asked, stream=True))

    assert 3 == len(events)
    assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
    assert {"error"} == set(error)
    assert "server_error" == error["error"]["type"]
