"""Public reports about stop strings: BC-006, BC-007, BC-010, BC-012 and BC-014, and others of their kinds.

"One step" is a nested list in a script: several tokens at once, as accepted drafts come. Every text must be the same
whether tokens come one by one or together.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.reports.answers import WAYS, ask, ask_choices
from tests.reports.conftest import Serve, scripted

SPECULATION = pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])


def paces(*pieces: Any) -> list[tuple[Any, ...]]:
    """The same tokens one by one, all in one step, and in steps of two."""
    pairs = tuple(list(pieces[start : start + 2]) for start in range(0, len(pieces), 2))
    return [pieces, (list(pieces),), pairs]


# BC-006: partial stop sequence leaked to the client

BORDERS = [
    # tokens, stop strings, text, tokens counted
    (("xy", "z", "1", "2", "tail"), ["xyz12"], "", 4),
    (("so ", "xy", "z1", "2t", "ail"), ["xyz12"], "so ", 4),
    (("a", "a", "a", "b", "c"), ["aab"], "a", 4),  # a beginning within the beginning
    (("ab", "ab", "ac", "d"), ["abac"], "ab", 3),
    (("end", "\n", "\n", "User", ":"), ["\n\nUser:"], "end", 5),
    ((b"\xec\x95", b"\x88\xeb", b"\x85\x95", "!"), ["안녕"], "", 3),  # borders within characters
    (("ok", b"\xf0\x9f", b"\x98\x80", "!"), ["😀"], "ok", 3),
    (("a<", "/", "s", ">", "b"), ["</s>", "<|im_end|>"], "a", 4),
]


@SPECULATION
@pytest.mark.parametrize(("tokens", "stop", "text", "num_tokens"), BORDERS, ids=[case[1][0] for case in BORDERS])
async def test_nothing_of_a_stop_string_across_tokens_is_shown(
    serve: Serve, speculation: str | None, tokens: Any, stop: list[str], text: str, num_tokens: int
):
    """BC-006, partial stop sequence leaked to the client."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        for script in paces(*tokens):
            answer = await ask(server, way, **scripted(*script), stop=stop, temperature=0, max_tokens=10)

            assert (text, "stop", num_tokens) == (answer.text, answer.finish_reason, answer.num_tokens), (way, script)
            assert stop[0] == answer.stop_reason


async def test_no_content_is_streamed_before_a_stop_string_that_comes_first(serve: Serve):
    server = await serve()
    for way in ("streamed completion", "streamed chat"):
        answer = await ask(server, way, **scripted("xy", "z", "1", "2", "tail"), stop=["xyz12"], max_tokens=10)

        assert () == answer.pieces


async def test_every_sample_stops_by_itself(serve: Serve):
    server = await serve()
    for way in WAYS:
        for script in paces("go ", "xy", "z", "!"):
            answers = await ask_choices(server, way, **scripted(*script), stop=["xyz"], n=3, max_tokens=10)

            assert [("go ", "stop")] * 3 == [(answer.text, answer.finish_reason) for answer in answers]
            assert 3 * 3 == answers[0].num_tokens


# BC-007: held-back text lost at the end of the stream

INSIDE = [
    # tokens, stop strings, text with the stop string cut off, and with it
    (("?\n",), ["\n"], "?", "?\n"),
    (("one STOP two",), ["STOP"], "one ", "one STOP"),
    (("bar", "\nfoo"), ["\n"], "bar", "bar\n"),
    (("bar", "baz.END"), [".END"], "barbaz", "barbaz.END"),
    (("a", "b STO", "P c"), ["STOP"], "ab ", "ab STOP"),
    (("é\n".encode(),), ["\n"], "é", "é\n"),
]


@SPECULATION
@pytest.mark.parametrize(("tokens", "stop", "without", "with_it"), INSIDE, ids=[str(case[0]) for case in INSIDE])
async def test_text_before_a_stop_string_within_a_token_is_kept(
    serve: Serve, speculation: str | None, tokens: Any, stop: list[str], without: str, with_it: str
):
    """BC-007, held-back text lost at the end of the stream."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        for script in paces(*tokens):
            body: dict[str, Any] = {**scripted(*script), "stop": stop, "max_tokens": 8}
            cut = await ask(server, way, **body)
            kept = await ask(server, way, **body, include_stop_str_in_output=True)

            assert (without, "stop") == (cut.text, cut.finish_reason), (way, script)
            assert (with_it, "stop") == (kept.text, kept.finish_reason), (way, script)


async def test_what_was_held_back_is_shown_when_no_stop_string_came_of_it(serve: Serve):
    server = await serve()
    for way in WAYS:
        for script in paces("so", " xy", "z", "1"):
            went_on = await ask(server, way, **scripted(*script, "!"), stop=["xyz12"], max_tokens=10)
            ended = await ask(server, way, **scripted(*script), stop=["xyz12"], max_tokens=10)
            cut = await ask(server, way, **scripted(*script, "2"), stop=["xyz12"], max_tokens=4)

            assert ("so xyz1!", "stop", None) == (went_on.text, went_on.finish_reason, went_on.stop_reason)
            assert ("so xyz1", "stop", None) == (ended.text, ended.finish_reason, ended.stop_reason)
            assert ("so xyz1", "length", 4) == (cut.text, cut.finish_reason, cut.num_tokens)


async def test_logprobs_cover_exactly_the_text_that_is_shown(serve: Serve):
    server = await serve()
    for script in paces("a", "b STO", "P c"):
        body: dict[str, Any] = {**scripted(*script), "prompt": "x", "stop": ["STOP"], "logprobs": 0}
        whole = (await server.complete(**body)).json()["choices"][0]
        events = (await server.complete(**body, stream=True)).text.split("\n\n")[:-2]
        streamed = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]

        assert whole["text"] == "".join(whole["logprobs"]["tokens"]) == "ab "
        assert whole["logprobs"]["tokens"] == [t for choice in streamed for t in choice["logprobs"]["tokens"]]
        assert all(choice["text"] == "".join(choice["logprobs"]["tokens"]) for choice in streamed)


# BC-010: wrong stop chosen when several complete in one multi-token step

SEVERAL = [
    # tokens, stop strings, text, the stop string that counts
    ((" red", " fox", " in", " a"), ["a", "in", ","], " red fox ", "in"),
    ((" red fox in a",), ["a", "in", ","], " red fox ", "in"),
    (("1,", "2;", "3."), [".", ";", ","], "1", ","),
    (("a", " b", " c", " d"), ["c", "b c"], "a ", "b c"),  # both are complete with c, one begins earlier
    (("User", ":", " hi", "\n"), ["\n", "User:"], "", "User:"),
    (("x ab", "c"), ["abc", "b", "ab"], "x ", "ab"),  # in one token, as if characters came one by one
]


@SPECULATION
@pytest.mark.parametrize(("tokens", "stop", "text", "stop_reason"), SEVERAL, ids=[str(case[0]) for case in SEVERAL])
async def test_the_first_stop_string_in_the_text_counts_not_the_first_in_the_list(
    serve: Serve, speculation: str | None, tokens: Any, stop: list[str], text: str, stop_reason: str
):
    """BC-010, wrong stop chosen when several complete in one multi-token step."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        for script in paces(*tokens):
            answer = await ask(server, way, **scripted(*script), stop=stop, temperature=0, max_tokens=50)

            assert (text, "stop", stop_reason) == (answer.text, answer.finish_reason, answer.stop_reason), (way, script)


async def test_a_model_stops_at_the_same_place_with_speculation_and_without(serve: Serve):
    """No script: real drafts are accepted several at a time, and stops fall where they fall."""
    body: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    servers = [await serve(speculative_config=config) for config in (None, "null")]
    whole = await ask(servers[1], "completion", **body)
    for start in range(4, 40, 7):
        stops = [whole.text[start + 2 : start + 5], whole.text[start : start + 3]]
        answers = [
            await ask(server, way, **body, stop=stops)
            for server in servers
            for way in ("completion", "streamed completion")
        ]

        assert 1 == len({(answer.text, answer.stop_reason, answer.num_tokens) for answer in answers})
        assert answers[0].text == whole.text[: min(whole.text.index(stop) for stop in stops)]
        assert "stop" == answers[0].finish_reason


# BC-012: length cap checked before an earlier stop in the same step


@SPECULATION
@pytest.mark.parametrize(
    ("position", "text", "reason", "num_tokens"),
    [
        (2, "ab", "stop", 3),  # as reported, run 1
        (5, "abcde", "length", 5),  # as reported, run 2
        (4, "abcd", "stop", 5),  # at the very last token of the budget
        (0, "", "stop", 1),
    ],
)
async def test_a_stop_within_the_budget_beats_its_end(
    serve: Serve, speculation: str | None, position: int, text: str, reason: str, num_tokens: int
):
    """BC-012, length cap checked before an earlier stop in the same step."""
    server = await serve(speculative_config=speculation)
    tokens = list("abcdef")
    tokens[position] = "STOP"
    for way in WAYS:
        for script in paces(*tokens):
            answer = await ask(server, way, **scripted(*script), stop=["STOP"], max_tokens=5)

            assert (text, reason, num_tokens) == (answer.text, answer.finish_reason, answer.num_tokens), (way, script)


async def test_an_end_token_within_the_budget_beats_its_end(serve: Serve):
    server = await serve()
    for way in WAYS:
        for script in paces("a", "b"):
            answer = await ask(server, way, **scripted(*script), max_tokens=3)

            assert ("ab", "stop", 3) == (answer.text, answer.finish_reason, answer.num_tokens)


# BC-014: empty stop string accepted

MESSAGES = [{"role": "user", "content": "Hello!"}]


@SPECULATION
async def test_no_stop_null_and_an_empty_list_are_the_same(serve: Serve, speculation: str | None):
    """BC-014, empty stop string accepted."""
    server = await serve(speculative_config=speculation)
    for way in WAYS:
        body: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
        answers = [await ask(server, way, **body, **stop) for stop in ({}, {"stop": None}, {"stop": []})]

        assert answers[0].text
        # In how many pieces it is streamed depends on how many drafts paid just then.
        assert 1 == len({replace(answer, pieces=()) for answer in answers})


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], ["x", ""], ["a", "b", "c", "d", "e"], [1], {"a": 1}])
@pytest.mark.parametrize("stream", [False, True])
async def test_empty_stop_strings_too_many_and_others_are_refused(serve: Serve, stop: Any, stream: bool):
    server = await serve()
    completion = await server.complete(prompt="x", stop=stop, stream=stream)
    chat = await server.chat(messages=MESSAGES, stop=stop, stream=stream)

    for response in (completion, chat):
        assert 400 == response.status_code
        assert "stop" == response.json()["error"]["param"]


async def test_four_stop_strings_are_taken(serve: Serve):
    server = await serve()
    for way in WAYS:
        answer = await ask(server, way, **scripted("a", "b", "c"), stop=["w", "x", "y", "c"], max_tokens=9)

        assert ("ab", "c") == (answer.text, answer.stop_reason)
