"""What the translated APIs share: refusals in the words of the body, and what is said."""

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from app.errors import ApiError, unsupported
from app.translation import chat_request, dump, in_words_of
from core import InvalidRequest
from tests.app.servers import RunningServer, in_process

NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}


def test_what_the_chat_request_finds_wrong_is_told_with_the_bodys_names():
    with pytest.raises(RequestValidationError) as caught:
        chat_request({"messages": [{"role": "user", "content": 7}], "seed": "x"}, NAMES)

    assert {("body", "input"), ("body", "seed")} == {problem["loc"][:2] for problem in caught.value.errors()}


def test_what_is_refused_within_is_told_with_the_bodys_names():
    with pytest.raises(InvalidRequest, match="max_output_tokens is 0") as invalid, in_words_of(NAMES):
        raise InvalidRequest("max_tokens is 0", "max_tokens")
    with pytest.raises(ApiError, match="'messages'") as refused, in_words_of(NAMES):
        raise unsupported("messages")
    with pytest.raises(ApiError) as other, in_words_of(NAMES):
        raise unsupported("echo")

    with pytest.raises(InvalidRequest) as once, in_words_of({"stop": "stop_sequences"}):
        raise InvalidRequest("stop has an empty string", "stop")
    with pytest.raises(InvalidRequest) as placed, in_words_of(NAMES):
        raise InvalidRequest("messages[2].role is 'robot'", "messages")

    assert "stop_sequences has an empty string" == str(once.value)
    # A place stays: in the body it may be another.
    assert ("messages[2].role is 'robot'", "input") == (str(placed.value), placed.value.param)
    assert "max_output_tokens" == invalid.value.param
    assert ("input", "'input' is not supported by this server") == (refused.value.param, refused.value.message)
    assert "echo" == other.value.param


def test_any_text_that_json_can_carry_can_be_dumped():
    assert b'{"a":"\xc3\xa9\\ud800"}' == dump({"a": "é\ud800"})


SAID: list[tuple[list[Any], dict[str, Any], int, str, str | None, int]] = [
    # script, more fields, most tokens; text, the string that stopped it (or "length"), tokens counted
    (["so ", "ST", "OP", "x"], {"stop": ["STOP"]}, 9, "so ", "STOP", 3),
    (["so ", "ST", "OP x"], {"stop": ["STOP"], "include_stop_str_in_output": True}, 9, "so STOP", "STOP", 3),
    (["a", ["b", "c", "d"]], {"stop": ["c"]}, 9, "ab", "c", 3),
    (["a", "ST"], {"stop": ["STOP"]}, 9, "aST", None, 3),
    (["b", "b", "b"], {"stop": ["b"], "min_tokens": 2}, 9, "bb", "b", 3),
    (["a", "b"], {"stop_token_ids": [98]}, 9, "a", None, 2),
    ([[0xF0], [0x9F], [0x98], [0x80], " ok"], {}, 9, "😀 ok", None, 6),
    (["a", [0xF0], [0x9F]], {}, 3, "a\ufffd", "length", 3),
    ([["a", "b", "c", "d"]], {}, 2, "ab", "length", 2),
    (["STOP"], {"stop": ["STOP"]}, 9, "", "STOP", 1),
]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stops_characters_and_tokens_are_those_of_chat(is_streamed: bool):
    async with in_process() as server:
        for script, fields, max_tokens, text, end, num_tokens in SAID:
            asked = {**fields, "script": script, "stream": is_streamed}
            response = await response_of(server, input="Hi", max_output_tokens=max_tokens, **asked)
            message = await message_of(server, max_tokens=max_tokens, **asked)

            assert (text, end == "length", num_tokens) == response, script
            assert (text, end, num_tokens) == message, script


async def response_of(server: RunningServer, **body: Any) -> tuple[str, bool, int]:
    """(text, whether the limit cut it, tokens) of /v1/responses."""
    reply = await server.client.post("/v1/responses", json=body)
    if not body["stream"]:
        answer = reply.json()
        return answer["output"][0]["content"][0]["text"], answer["status"] == "incomplete", tokens_of(answer)
    *events, last = events_of(reply.text)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return text, last["response"]["status"] == "incomplete", tokens_of(last["response"])


async def message_of(server: RunningServer, **body: Any) -> tuple[str, str | None, int]:
    """(text, what ended it, tokens) of /v1/messages."""
    body["messages"] = [{"role": "user", "content": "Hi"}]
    reply = await server.client.post("/v1/messages", json=body)
    if not body["stream"]:
        answer = reply.json()
        return "".join(block["text"] for block in answer["content"]), end_of(answer), tokens_of(answer)
    events = events_of(reply.text)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return text, end_of(events[-2]["delta"]), tokens_of(events[-2])


def events_of(stream: str) -> list[Any]:
    return [json.loads(event.partition("data: ")[2]) for event in stream.removesuffix("\n\n").split("\n\n")]


def end_of(said: Any) -> str | None:
    sequence: str | None = said["stop_sequence"]
    return "length" if said["stop_reason"] == "max_tokens" else sequence


def tokens_of(said: Any) -> int:
    num_tokens: int = said["usage"]["output_tokens"]
    return num_tokens
