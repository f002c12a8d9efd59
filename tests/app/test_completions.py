"""POST /v1/completions, whole and streamed."""

import asyncio
import json
from typing import Any

import pytest
from httpx import Response

from tests.app.servers import Gate, in_process, make_engine

SCRIPT = ["Hel", "lo", [" wor", "ld"], "!"]


def chunks(response: Response) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    assert 200 == response.status_code, response.text
    *events, done, end = response.text.split("\n\n")
    assert ("data: [DONE]", "") == (done, end)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


async def test_a_completion_has_openais_shape():
    async with in_process(served_model_name=("tiny", "alias")) as server:
        body = (await server.complete(model="alias", prompt="Say", script=SCRIPT)).json()

    assert body["id"].startswith("cmpl-")
    assert ("text_completion", "alias") == (body["object"], body["model"])
    assert [
        {"index": 0, "text": "Hello world!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ] == body["choices"]
    assert {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    } == body["usage"]


async def test_a_stream_says_the_same_in_pieces():
    async with in_process() as server:
        events = chunks(await server.complete(prompt="Say", script=SCRIPT, stream=True))

    assert "Hello world!" == text_of(events)
    assert [None] * (len(events) - 1) + ["stop"] == [event["choices"][0]["finish_reason"] for event in events]
    assert 1 == len({(event["id"], event["created"], event["model"], event["object"]) for event in events})
    assert not any("usage" in event for event in events)
    assert " world" in [event["choices"][0]["text"] for event in events]  # both tokens of one step


async def test_tokens_default_to_sixteen():
    async with in_process() as server:
        body = (await server.complete(prompt="p")).json()

    assert (16, "length") == (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"])


@pytest.mark.parametrize(("piece", "num_signs"), [("a", 0), ("z", 1)])
@pytest.mark.parametrize("asked", [{"prompt": "p"}, {"messages": [{"role": "user", "content": "p"}]}])
async def test_a_stream_whose_text_is_held_back_gives_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], piece: str, num_signs: int
):
    """Each "z" may begin the stop string, so all of them are kept until the end; an "a" is shown at once."""
    now, gate = 0.0, Gate()
    async with in_process(make_engine(gate)) as server, gate:
        monkeypatch.setattr(server.service.loop, "_clock", lambda: now)
        path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
        body = {**asked, "script": [piece] * 6, "stop": ["z" * 9], "stream": True}
        asking = asyncio.create_task(server.client.post(path, json=body))
        for step in range(1, 4):
            await gate.until_arrived(step)
            now = 20.0 * (step == 3)
            gate.let_through(1)
        await gate.until_arrived(4)
        gate.open()
        response = await asking

    assert num_signs == response.text.count(": keep-alive")


async def test_the_last_chunk_of_a_stream_cut_by_length_carries_text():
    async with in_process() as server:
        events = chunks(await server.complete(prompt="p", script=["a", "b", "c"], max_tokens=2, stream=True))

    assert ("b", "length") == (events[-1]["choices"][0]["text"], events[-1]["choices"][0]["finish_reason"])


async def test_choices_are_numbered_by_prompt_and_sample_and_each_prompt_is_counted_once():
    async with in_process() as server:
        body = (await server.complete(prompt=["a", "bcd"], n=2, echo=True, script=["x"], max_tokens=5)).json()

    assert ["ax", "ax", "bcdx", "bcdx"] == [choice["text"] for choice in body["choices"]]
    assert [0, 1, 2, 3] == [choice["index"] for choice in body["choices"]]
    assert (4, 8) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169]])
async def test_echo_puts_the_prompt_first_whole_and_streamed(prompt: Any):
    async with in_process() as server:
        asked = {"prompt": prompt, "echo": True, "script": ["x", "y"]}
        whole = (await server.complete(**asked)).json()
        events = chunks(await server.complete(**asked, stream=True))

    assert "héxy" == whole["choices"][0]["text"] == text_of(events)
    assert "hé" == events[0]["choices"][0]["text"]


@pytest.mark.parametrize("prompts", [["The sky", "i"], [list(b"The sky"), [105]]])
async def test_echo_without_new_tokens_gives_the_prompts_back(prompts: Any):
    async with in_process() as server:
        body = (await server.complete(prompt=prompts, echo=True, max_tokens=0)).json()

    assert [("The sky", "length"), ("i", "length")] == [(c["text"], c["finish_reason"]) for c in body["choices"]]
    assert (8, 0, 8) == tuple(body["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens"))


@pytest.mark.parametrize("prompts", [["The sky", "i"], [list(b"The sky"), [105]]])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_stream_of_echoes_alone_says_the_same(prompts: Any, logprobs: int | None):
    async with in_process() as server:
        asked = {"prompt": prompts, "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": 2}
        whole = (await server.complete(**asked)).json()["choices"]
        events = chunks(await server.complete(**asked, stream=True))

    assert ["The sky", "The sky", "i", "i"] == [choice["text"] for choice in whole]
    assert [choice["text"] for choice in whole] == [text_of(events, i) for i in range(4)]
    for i, choice in enumerate(whole):
        last = [c for event in events for c in event["choices"] if c["index"] == i][-1]
        assert ("length", "") == (last["finish_reason"], last["text"])
        assert choice["logprobs"] == (logprobs and lists_of(events, i))


def lists_of(events: list[dict[str, Any]], index: int = 0) -> dict[str, list[Any]]:
    """The four lists of one choice, put together from its chunks."""
    parts = [c["logprobs"] for event in events for c in event["choices"] if c["index"] == index]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a€<|end|>b", ["a", "", "", "€", "<|end|>", "b"]),
        ([97, 226, 130, 172, 256, 98], ["a", "", "", "€", "", "b"]),
    ],
)
async def test_echoed_tokens_are_listed_with_their_logprobs_and_join_to_the_text(
    prompt: Any, texts: list[str], max_tokens: int
):
    async with in_process() as server:
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "script": ["x", "yz"]}
        whole = (await server.complete(**asked)).json()["choices"][0]
        events = chunks(await server.complete(**asked, stream=True))

    lists = whole["logprobs"]
    assert [*texts, *(["x", "yz", ""] if max_tokens else [])] == lists["tokens"]
    assert whole["text"] == "".join(lists["tokens"]) == text_of(events)
    assert [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))] == lists["text_offset"]
    assert [None] + [0.0] * (len(lists["tokens"]) - 1) == lists["token_logprobs"]
    assert [None] + [{text: 0.0} for text in lists["tokens"][1:]] == lists["top_logprobs"]
    assert lists == lists_of(events)
    assert texts == events[0]["choices"][0]["logprobs"]["tokens"]


async def test_prompt_logprobs_have_vllms_shape_in_each_choice():
    async with in_process() as server:
        body = (await server.complete(prompt=["abc", "d"], n=2, prompt_logprobs=0, max_tokens=1)).json()

    b, c = ({str(i): {"logprob": 0.0, "rank": 1, "decoded_token": chr(i)}} for i in (98, 99))
    assert [[None, b, c]] * 2 + [[None]] * 2 == [choice["prompt_logprobs"] for choice in body["choices"]]
    assert [None] * 4 == [choice["logprobs"] for choice in body["choices"]]


async def test_tokens_go_by_their_ids_where_that_is_asked_for():
    async with in_process() as server:
        asked = {"prompt": "a", "script": ["b", [226, 130], [172]], "logprobs": 1, "echo": True}
        asked |= {"return_tokens_as_token_ids": True, "max_tokens": 3}
        lists = (await server.complete(**asked)).json()["choices"][0]["logprobs"]

    assert ["token_id:97", "token_id:98", "token_id:257", "token_id:258"] == lists["tokens"]
    assert [None, {"token_id:98": 0.0}, {"token_id:257": 0.0}, {"token_id:258": 0.0}] == lists["top_logprobs"]
    assert [0, 1, 2, 2] == lists["text_offset"]


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, "f"), (3, "def"), (6, "abcdef"), (9, "abcdef"), (-1, "abcdef"), (None, "abcdef")]
)
@pytest.mark.parametrize("prompt", ["abcdef", list(b"abcdef")])
async def test_of_a_truncated_prompt_the_end_is_kept(limit: int | None, kept: str, prompt: Any):
    async with in_process() as server:
        asked = {"prompt": prompt, "truncate_prompt_tokens": limit, "echo": True, "max_tokens": 0}
        body = (await server.complete(**asked, return_token_ids=True)).json()

    assert (kept, len(kept)) == (body["choices"][0]["text"], body["usage"]["prompt_tokens"])
    assert list(kept.encode()) == body["choices"][0]["prompt_token_ids"]


async def test_a_prompt_is_cut_to_the_context_where_that_is_asked_for():
    async with in_process(max_model_len=8) as server:
        asked = {"prompt": "abcdefghij", "echo": True, "max_tokens": 0}
        cut = (await server.complete(**asked, truncate_prompt_tokens=-1)).json()

    assert "cdefghij" == cut["choices"][0]["text"]


@pytest.mark.parametrize(("skips", "text"), [(None, "ab"), (True, "ab"), (False, "a<|end|>b")])
async def test_special_tokens_show_where_that_is_asked_for(skips: bool | None, text: str):
    async with in_process() as server:
        asked = {"prompt": "p", "script": ["a", "<|end|>", "b"], "ignore_eos": True, "max_tokens": 3}
        body = (await server.complete(**asked, skip_special_tokens=skips)).json()

    assert text == body["choices"][0]["text"]


async def test_best_of_none_is_no_best_of():
    async with in_process() as server:
        body = (await server.complete(prompt="p", best_of=0, n=2, script=["a"], max_tokens=5)).json()

    assert (2, 4) == (len(body["choices"]), body["usage"]["completion_tokens"])


@pytest.mark.parametrize("script", [["a"] * 9, ["a", "bc", "d" * 70]])
async def test_padded_events_are_of_one_length_whatever_they_say(script: list[str]):
    async with in_process() as server:
        options = {"include_obfuscation": True, "include_usage": True}
        asked = {"prompt": "p", "script": script, "stream": True}
        padded = await server.complete(**asked, stream_options=options)
        plain = chunks(await server.complete(**asked, stream_options={"include_obfuscation": False}))

    *events, usage = chunks(padded)
    sent = padded.text.split("\n\n")[: len(events)]
    assert {0} == {(len(event.encode()) + 2) % 64 for event in sent}
    assert all("obfuscation" in event for event in events)
    assert not any("obfuscation" in event for event in [usage, *plain])
    assert text_of(plain) == text_of(events)


async def test_usage_comes_last_when_asked_for_and_is_null_before():
    async with in_process() as server:
        asked = {"prompt": "p", "script": SCRIPT, "n": 2}
        whole = (await server.complete(**asked)).json()
        options = {"include_usage": True}
        *events, last = chunks(await server.complete(**asked, stream=True, stream_options=options))

    assert [None] * len(events) == [event["usage"] for event in events]
    assert ([], whole["usage"]) == (last["choices"], last["usage"])


async def test_continuous_usage_counts_up():
    async with in_process() as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = chunks(await server.complete(prompt="p", script=SCRIPT, stream=True, stream_options=options))

    assert [1, 2, 4, 5, 6, 6] == [event["usage"]["completion_tokens"] for event in events]


async def test_logprobs_lists_are_aligned_with_the_text():
    async with in_process() as server:
        asked = {"prompt": "p", "script": ["a", [226, 130], [172], "b", "STOP", "c"], "stop": "STOP", "logprobs": 2}
        whole = (await server.complete(**asked)).json()["choices"][0]
        events = chunks(await server.complete(**asked, stream=True))

    lists = whole["logprobs"]
    assert "a€b" == whole["text"]
    assert "a€b" == "".join(lists["tokens"]) == text_of(events)
    assert [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))] == lists["text_offset"]
    assert [{token: 0.0} for token in lists["tokens"]] == lists["top_logprobs"]
    for name, values in lists.items():
        assert values == [v for event in events for v in event["choices"][0]["logprobs"][name]]


async def test_token_ids_are_returned_when_asked_for():
    async with in_process() as server:
        asked = {"prompt": "p", "script": ["a", ["b", "c"]], "return_token_ids": True}
        whole = (await server.complete(**asked)).json()["choices"][0]
        events = chunks(await server.complete(**asked, stream=True))

    assert ([112], [97, 98, 99, 256]) == (whole["prompt_token_ids"], whole["token_ids"])
    assert [[97], [98, 99], [256]] == [event["choices"][0]["token_ids"] for event in events]
    assert [[112]] == [c["prompt_token_ids"] for event in events for c in event["choices"] if "prompt_token_ids" in c]


@pytest.mark.parametrize("held", [["S", "T", "x"], ["S", "T", "OP"], [[226], [130], [172]]])
async def test_the_prompts_ids_come_with_the_first_event_however_late_that_is(held: list[Any]):
    """What is held back, for a stop string or an open character, is shown with a later token than the first."""
    async with in_process() as server:
        asked = {"prompt": ["p", "q"], "n": 2, "script": held, "stop": ["STOP"], "return_token_ids": True}
        events = chunks(await server.complete(**asked, stream=True))

    choices = [choice for event in events for choice in event["choices"]]
    firsts = [next(choice for choice in choices if choice["index"] == index) for index in range(4)]
    assert [[112], [112], [113], [113]] == [choice["prompt_token_ids"] for choice in firsts]
    assert 4 == sum("prompt_token_ids" in choice for choice in choices)


async def test_the_string_that_stopped_it_is_told():
    async with in_process() as server:
        stopped = (await server.complete(prompt="p", script=["a", "b.", "c"], stop=["x", "."])).json()["choices"][0]
        by_token = (await server.complete(prompt="p", script=["a", "b"], stop_token_ids=[98])).json()["choices"][0]

    assert ("ab", "stop", ".") == (stopped["text"], stopped["finish_reason"], stopped["stop_reason"])
    assert ("stop", 98) == (by_token["finish_reason"], by_token["stop_reason"])


async def test_the_callers_id_comes_back_and_is_never_the_engines():
    async with in_process() as server:
        answers = [
            await server.client.post("/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "mine"})
            for _ in range(2)
        ]
        by_body = await server.complete(prompt="p", request_id="body's")
        unsafe = await server.complete(prompt="p", request_id="a\r\nset-cookie: b")

    assert ["mine", "mine"] == [answer.headers["x-request-id"] for answer in answers]
    assert 2 == len({answer.json()["id"] for answer in answers})
    assert "body's" == by_body.headers["x-request-id"]
    assert unsafe.json()["id"] == unsafe.headers["x-request-id"]


async def test_best_of_draws_more_than_it_shows_and_counts_all_that_were_drawn():
    async with in_process() as server:
        body = (await server.complete(prompt="p", best_of=3, n=2, script=["a", "b"], max_tokens=5)).json()

    assert [(0, "ab"), (1, "ab")] == [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert (1, 9) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


async def test_best_of_samples_without_a_token_are_as_good_as_each_other():
    """Where only the prompt is scored."""
    async with in_process() as server:
        response = await server.complete(prompt="p", best_of=3, n=2, max_tokens=0, echo=True)

    assert ["p", "p"] == [choice["text"] for choice in response.raise_for_status().json()["choices"]]
