"""What the translated APIs share: refusals in the words of the body, and signs of life in a stream."""

import pytest
from fastapi.exceptions import RequestValidationError

from app.errors import ApiError, unsupported
from app.translation import chat_request, dump, in_words_of
from core import InvalidRequest

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
    assert ("messages[2].role is 'robot'", "input") == (
        str(placed.value),
        placed.value.param,
    )  # the body's place may be 1
    assert "max_output_tokens" == invalid.value.param
    assert ("input", "'input' is not supported by this server") == (refused.value.param, refused.value.message)
    assert "echo" == other.value.param


def test_any_text_that_json_can_carry_can_be_dumped():
    assert b'{"a":"\xc3\xa9\\ud800"}' == dump({"a": "é\ud800"})
