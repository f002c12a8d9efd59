"""Public reports about characters and white space in streams: BC-001, BC-002 and BC-004, and others of their kinds."""

import json
from typing import Any

import pytest

from tests.reports.answers import REPLACEMENT, WAYS, ask, ask_choices
from tests.reports.conftest import Serve, scripted

# Scripts that need two, three and four bytes a character, and pictures made of several characters.
CHARACTERS = ["é", "ß", "Ж", "ש", "한", "안녕", "漢字", "नमस्ते", "ไทย", "😀", "👩‍👩‍👧", "🇰🇷", "❤️", "𝔘", "e\u0301"]
SPECULATION = pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def bytewise(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


# BC-001: incomplete UTF-8 sequence emitted as U+FFFD


@SPECULATION
async def test_a_character_of_several_tokens_arrives_whole(serve: Serve, speculation: str | None):
    """BC-001, incomplete UTF-8 sequence emitted as U+FFFD."""
    server = await serve(speculative_config=speculation)
    for character in CHARACTERS:
        pieces = bytewise(character)
        for way in WAYS:
            for script in ([*pieces, " ok"], [[*pieces, " ok"]], [pieces[:-1], [pieces[-1], " ok"]]):
                answer = await ask(server, way, **scripted(*script), temperature=0, max_tokens=len(pieces) + 1)

                assert f"{character} ok" == answer.text, (way, script)
                assert not any(REPLACEMENT in piece for piece in answer.pieces), (way, script)
                assert len(pieces) + 1 == answer.num_tokens


async def test_the_reported_emoji_takes_five_tokens(serve: Serve):
    server = await serve()
    for way in WAYS:
        answer = await ask(server, way, **scripted(b"\xf0", b"\x9f", b"\x98", b"\x80", " ok"), max_tokens=5)

        assert ("😀 ok", 5) == (answer.text, answer.num_tokens)


@EVERY_WAY
async def test_tokens_may_cut_characters_anywhere(serve: Serve, way: str):
    server = await serve()
    text = "a😀é안b👩‍👩‍👧c"
    data = text.encode()
    for size in (1, 2, 3, 4, 5, 7):
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        answer = await ask(server, way, **scripted(*pieces), max_tokens=len(pieces))

        assert text == answer.text, size
        assert not any(REPLACEMENT in piece for piece in answer.pieces)


@EVERY_WAY
async def test_every_sample_keeps_its_own_open_character(serve: Serve, way: str):
    server = await serve()
    for answer in await ask_choices(server, way, **scripted(*bytewise("안😀é")), n=3, max_tokens=9):
        assert "안😀é" == answer.text


@EVERY_WAY
async def test_a_replacement_character_that_was_meant_is_passed_on(serve: Serve, way: str):
    server = await serve()
    answer = await ask(server, way, **scripted("a", *bytewise(REPLACEMENT), "b"), max_tokens=5)

    assert f"a{REPLACEMENT}b" == answer.text


@pytest.mark.parametrize(
    "data", [b"a\xffb", b"\x80\x80", b"\xf0\x9fA", b"\xc3(", b"\xed\xa0\x80.", b"\xe2\x82\xf0\x9f!"]
)
async def test_bytes_that_are_no_text_are_replaced_alike_in_every_way(serve: Serve, data: bytes):
    server = await serve()
    for way in WAYS:
        for script in ([data], [data[i : i + 1] for i in range(len(data))]):
            answer = await ask(server, way, **scripted(*script), max_tokens=len(script))

            assert data.decode("utf-8", "replace") == answer.text, (way, script)


@SPECULATION
async def test_a_model_that_speaks_in_broken_bytes_streams_what_it_says_whole(serve: Serve, speculation: str | None):
    """No script: the model itself is pushed to the bytes of two characters, in an order of its own."""
    server = await serve(speculative_config=speculation)
    bias = {str(byte): 100.0 for byte in (0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9)}
    body: dict[str, Any] = {"temperature": 2, "seed": 3, "max_tokens": 60, "ignore_eos": True, "logit_bias": bias}
    whole = await ask(server, "completion", **body)
    streamed = await ask(server, "streamed completion", **body)

    assert REPLACEMENT in whole.text
    assert (whole.text, 60) == (streamed.text, streamed.num_tokens)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_line_separators_in_the_text_end_no_event(serve: Serve, path: str):
    """Of BC-001's kind: clients that read lines as Python knows them would see the end of one within a text."""
    server, text = await serve(), "a\u2028b\u2029c\x85d\v\f\x1c\x1d\x1e\r\ne"
    message = {"role": "user", "content": "x"}
    asked = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": [message]})
    body = {
        **asked,
        **scripted(*text),
        "stream": True,
        "max_output_tokens" if path == "responses" else "max_tokens": 99,
    }
    lines = [line async for line in (await server.client.post(f"/v1/{path}", json=body)).aiter_lines()]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    assert all(line == "" or line.startswith(("data: ", "event: ")) for line in lines)
    assert text == "".join(map(delta_of, events))


def delta_of(event: Any) -> str:
    """The text that an event of any of the APIs adds."""
    if "choices" in event:
        (choice,) = event["choices"]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""


# BC-002: crash / invalid output when the budget ends mid-character


@SPECULATION
async def test_a_budget_that_ends_within_a_character_leaves_one_replacement(serve: Serve, speculation: str | None):
    """BC-002, crash / invalid output when the budget ends mid-character."""
    server = await serve(speculative_config=speculation)
    for character in CHARACTERS:
        lead = bytewise(character)[: len(character[0].encode()) - 1]  # all of the first character but its last byte
        if not lead:
            continue
        for way in WAYS:
            for before in ([], ["so "]):
                for script in ([*before, *bytewise(character)], [[*before, *bytewise(character)]]):
                    budget = len(before) + len(lead)
                    answer = await ask(server, way, **scripted(*script), max_tokens=budget)

                    assert "".join(before) + REPLACEMENT == answer.text, (way, script)
                    assert ("length", budget) == (answer.finish_reason, answer.num_tokens)


async def test_the_server_goes_on_after_a_cut_character(serve: Serve):
    server = await serve()
    for way in WAYS:
        cut = await ask(server, way, **scripted(*bytewise("😀"), " ok"), max_tokens=2)
        following = await ask(server, way, **scripted("fine"), max_tokens=2)

        assert (REPLACEMENT, "length", 2) == (cut.text, cut.finish_reason, cut.num_tokens)
        assert ("fine", "stop") == (following.text, following.finish_reason)


@EVERY_WAY
async def test_every_sample_that_is_cut_within_a_character_gets_its_own_replacement(serve: Serve, way: str):
    server = await serve()
    for answer in await ask_choices(server, way, **scripted("a", *bytewise("😀")), n=2, max_tokens=3):
        assert (f"a{REPLACEMENT}", "length") == (answer.text, answer.finish_reason)


@EVERY_WAY
async def test_an_end_token_or_a_stop_string_within_a_character_leaves_one_replacement(serve: Serve, way: str):
    server = await serve()
    ended = await ask(server, way, **scripted("a", b"\xf0", b"\x9f"), max_tokens=9)
    stopped = await ask(server, way, **scripted("a", b"\xf0", b"\x9f", "STOP"), stop=["STOP"], max_tokens=9)

    assert (f"a{REPLACEMENT}", "stop") == (ended.text, ended.finish_reason)
    assert (f"a{REPLACEMENT}", "stop") == (stopped.text, stopped.finish_reason)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_character_that_the_prompt_leaves_open_is_gone_on_with(serve: Serve, is_streamed: bool):
    """Of BC-002's kind: who goes on by token ids from where a budget cut gets the character, and not its halves."""
    server = await serve()
    cases = [
        ([b"\x98", b"\x80", "!"], "😀!", 3),
        ([b"\x98"], REPLACEMENT, 1),
        (["x"], f"{REPLACEMENT}x", 1),
        (["x"], REPLACEMENT, 0),
    ]
    for script, text, max_tokens in cases:
        for echo in [False, True] if max_tokens else [True]:
            body = {"prompt": [97, 0xF0, 0x9F], **scripted(*script), "max_tokens": max_tokens, "echo": echo}
            response = await server.complete(**body, logprobs=0, stream=is_streamed)
            events = response.text.split("\n\n")[:-2] if is_streamed else [f"data: {response.text}"]
            choices = [choice for event in events for choice in json.loads(event[6:])["choices"]]

            assert "a" * echo + text == "".join(choice["text"] for choice in choices)
            assert all(choice["text"] == "".join(choice["logprobs"]["tokens"]) for choice in choices)
            assert 3 * echo + max_tokens == sum(len(choice["logprobs"]["tokens"]) for choice in choices)


# BC-004: whitespace lost between stream chunks

SPACES = [
    "  two  spaces  ",
    "\ttabs\t\tbetween\t",
    "\n\nlines\r\n and\n",
    " \u00a0no break\u3000ideographic ",
    " ",
    "\n",
]


async def test_white_space_arrives_as_it_was_said(serve: Serve):
    """BC-004, whitespace lost between stream chunks."""
    server = await serve()
    for text in SPACES:
        words = [word for word in text.replace(" ", "\0 \0").split("\0") if word]
        for way in WAYS:
            for script in ([text], list(text), [list(text)], words):
                answer = await ask(server, way, **scripted(*script), max_tokens=len(text))

                assert text == answer.text, (way, script)


@SPECULATION
@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_a_stream_joins_to_the_whole_text_byte_for_byte(serve: Serve, speculation: str | None, kind: str):
    server = await serve(speculative_config=speculation)
    for prompt in ("Once  upon a\ttime,\n\nthere was", " Tom said:  \n", "One\tday "):
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 48}
        whole = await ask(server, kind, **body)
        streamed = await ask(server, f"streamed {kind}", **body)

        assert whole.text == streamed.text
        assert len(streamed.pieces) > 1
        assert (whole.num_tokens, whole.finish_reason) == (streamed.num_tokens, streamed.finish_reason)
