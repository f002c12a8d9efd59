"""POST /v1/chat/completions, whole and streamed."""

from typing import Any

import pytest

from tests.app.servers import in_process, make_engine
from tests.app.test_completions import chunks

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT = "user: Hi\nassistant: "


async def test_a_models_own_broken_template_is_400_each_time():
    engine = make_engine()
    async with in_process(engine) as server:
        engine.tokenizer.chat_template = "{% bad"
        for _ in range(2):
            response = await server.chat(messages=HELLO)
            assert (400, "messages") == (response.status_code, response.json()["error"]["param"])
    assert "broken: line 1" in response.json()["error"]["message"]


async def test_an_answer_has_openais_shape():
    async with in_process() as server:
        body = (await server.chat(messages=HELLO, script=["Hel", "lo"])).json()

    assert body["id"].startswith("chatcmpl-")
    assert "chat.completion" == body["object"]
    assert [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ] == body["choices"]
    assert (len(PROMPT), 3) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


async def test_a_stream_is_role_then_text_then_an_empty_delta_with_the_reason():
    async with in_process() as server:
        events = chunks(await server.chat(messages=HELLO, script=["Hel", "lo"], max_tokens=2, stream=True))

    assert [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo"}, None),
        ({}, "length"),
    ] == [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in events]
    assert {"chat.completion.chunk"} == {event["object"] for event in events}
    assert 1 == len({(event["id"], event["created"], event["model"]) for event in events})


async def test_every_choice_of_a_stream_has_its_own_role_and_reason():
    async with in_process() as server:
        options = {"include_usage": True}
        asked = {"messages": HELLO, "script": ["x"], "n": 2}
        whole = (await server.chat(**asked)).json()
        await server.client.post("/reset_prefix_cache")  # or the second usage would tell of cached tokens
        *events, last = chunks(await server.chat(**asked, stream=True, stream_options=options))

    for index in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [True, False] == ["role" in own[0]["delta"], any("role" in c["delta"] for c in own[1:])]
        assert [None] * (len(own) - 1) + ["stop"] == [c["finish_reason"] for c in own]
        assert "x" == "".join(c["delta"].get("content", "") for c in own)
    assert [None] * len(events) == [event["usage"] for event in events]
    assert ([], whole["usage"]) == (last["choices"], last["usage"])


async def test_an_answer_may_fill_the_context():
    async with in_process(max_model_len=len(PROMPT) + 7) as server:
        body = (await server.chat(messages=HELLO)).json()

    assert (7, "length") == (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"])


async def test_the_newer_name_of_the_token_limit_wins():
    async with in_process() as server:
        body = (await server.chat(messages=HELLO, max_tokens=9, max_completion_tokens=2)).json()
        wrong = (await server.chat(messages=HELLO, max_completion_tokens=-1)).json()

    assert 2 == body["usage"]["completion_tokens"]
    assert "max_completion_tokens" == wrong["error"]["param"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": [{"role": "user", "content": "x" * 50}]}, "messages", "prompt is too long"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "prompt is too long"),
        ({"max_completion_tokens": 50}, "max_completion_tokens", "max_completion_tokens 50"),
        ({"max_tokens": 50}, "max_tokens", "max_tokens 50"),
        ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "max_completion_tokens"),
    ],
)
async def test_what_the_engine_refuses_is_told_in_the_words_of_the_body(body: Any, param: str, said: str):
    async with in_process(max_model_len=40) as server:
        error = (await server.chat(**{"messages": HELLO, **body})).json()["error"]

    assert param == error["param"]
    assert said in error["message"]


async def test_logprobs_list_every_token_with_its_bytes():
    async with in_process() as server:
        asked = {"messages": HELLO, "script": ["a", "é"], "logprobs": True, "top_logprobs": 2}
        whole = (await server.chat(**asked)).json()["choices"][0]["logprobs"]
        events = chunks(await server.chat(**asked, stream=True))

    assert [("a", [97]), ("é", [195, 169]), ("<|end|>", [])] == [(t["token"], t["bytes"]) for t in whole["content"]]
    streamed = [t for e in events if e["choices"][0]["logprobs"] for t in e["choices"][0]["logprobs"]["content"]]
    assert whole["content"] == streamed


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"logprobs": 1}, "logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"bad_words": [""]}, "bad_words"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], param: str):
    async with in_process() as server:
        response = await server.chat(**{"messages": HELLO, **body})

    assert (400, param) == (response.status_code, response.json()["error"]["param"])


async def test_fields_that_ask_for_nothing_special_are_taken():
    async with in_process() as server:
        extra = {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "store": False}
        response = await server.chat(messages=HELLO, script=["x"], top_logprobs=0, **extra)

    assert 200 == response.status_code


async def test_the_prompts_logprobs_belong_to_the_answer_not_to_a_choice():
    async with in_process(chat_template="{{ messages[0].content }}") as server:
        body = (await server.chat(messages=HELLO, script=["x"], prompt_logprobs=0, n=2)).json()

    assert [None, {"105": {"logprob": 0.0, "rank": 1, "decoded_token": "i"}}] == body["prompt_logprobs"]
    assert 2 == len(body["choices"])


async def test_tokens_go_by_their_ids_where_that_is_asked_for():
    async with in_process() as server:
        asked = {"messages": HELLO, "script": ["a"], "logprobs": True, "return_tokens_as_token_ids": True}
        content = (await server.chat(**asked)).json()["choices"][0]["logprobs"]["content"]

    assert [("token_id:97", [97]), ("token_id:256", [])] == [(t["token"], t["bytes"]) for t in content]


async def test_a_template_takes_variables_of_its_own():
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}"
    async with in_process(chat_template=template) as server:
        asked = {"messages": HELLO, "chat_template_kwargs": {"loud": True, "never_heard_of": 1}}
        loud = (await server.chat(**asked, script=["x"], return_token_ids=True)).json()
        plain = (await server.chat(messages=HELLO, script=["x"], return_token_ids=True)).json()
        tokens = (await server.client.post("/tokenize", json=asked)).json()["tokens"]

    assert list(b"Hi!") == loud["prompt_token_ids"] == tokens
    assert list(b"Hi") == plain["prompt_token_ids"]


async def test_a_conversation_to_go_on_with_counts_as_it_is_gone_on_with():
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    asked = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    async with in_process() as server:
        body = (await server.chat(**asked, script=["x"], return_token_ids=True)).json()
        tokens = (await server.client.post("/tokenize", json=asked)).json()["tokens"]

    assert bytes(tokens).endswith(b"assistant: Well, ")
    assert tokens == body["prompt_token_ids"]


async def test_of_a_truncated_conversation_the_end_is_kept():
    async with in_process(chat_template="{{ messages[0].content }}") as server:
        body = (await server.chat(messages=HELLO, truncate_prompt_tokens=1, script=["x"], return_token_ids=True)).json()

    assert list(b"i") == body["prompt_token_ids"]


async def test_a_template_can_be_given_by_flag():
    async with in_process(chat_template="{{ messages[0].content }}!") as server:
        body = (await server.chat(messages=HELLO, script=["x"], return_token_ids=True)).json()

    assert list(b"Hi!") == body["prompt_token_ids"]
