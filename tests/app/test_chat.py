"""POST /v1/chat/completions, and the templates that turn messages into prompts."""

from typing import Any

import pytest

from app.chat import ChatTemplate, render_prompt
from app.schemas import ChatMessage
from core import InvalidRequest
from tests.app.servers import CHAT_TEMPLATE, in_process, make_engine
from tests.app.test_completions import chunks

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT = "user: Hi\nassistant: "


def render(source: str, *messages: tuple[str, Any], **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return render_prompt(template, [ChatMessage(role=role, content=content) for role, content in messages], **options)


def test_messages_become_a_prompt_open_for_the_answer():
    assert PROMPT == render(CHAT_TEMPLATE, ("user", "Hi"))
    assert "user: Hi\n" == render(CHAT_TEMPLATE, ("user", "Hi"), add_generation_prompt=False)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_parts_are_joined_with_a_newline(content: Any, text: str):
    assert f"user: {text}\n" == render(CHAT_TEMPLATE, ("user", content), add_generation_prompt=False)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "a"}])
def test_parts_that_are_no_text_are_refused(part: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="text parts"):
        render(CHAT_TEMPLATE, ("user", [part]))


def test_the_last_message_can_be_continued():
    text = render(
        CHAT_TEMPLATE,
        ("user", "Hi"),
        ("assistant", "Hello th"),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert "user: Hi\nassistant: Hello th" == text
    with pytest.raises(InvalidRequest, match="last message of the assistant"):
        render(CHAT_TEMPLATE, ("user", "Hi"), add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("content", ["d", "end", "im_end|>", "a", ""])
def test_a_message_to_continue_is_cut_behind_its_text_whatever_the_text_is(content: str):
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}

    assert f"<|im_start|>assistant\n{content}" == render(chatml, ("assistant", f"{content} "), **options)


@pytest.mark.parametrize("source", ["{{ messages[0].content | upper }}", "{{ messages[0].role }}"])
def test_a_message_that_the_template_changes_cannot_be_continued(source: str):
    with pytest.raises(InvalidRequest, match="does not keep the last message"):
        render(source, ("assistant", "x"), add_generation_prompt=False, continue_final_message=True)


def test_templates_have_the_helpers_they_expect():
    assert '<s>["é<"]' == render("{{ bos_token }}{{ ['é<'] | tojson }}", ("user", "x"))
    assert 4 == len(render("{{ strftime_now('%Y') }}", ("user", "x")))
    assert "ab" == render(
        "{% for c in 'abc' %}{% if c == 'c' %}{% break %}{% endif %}{{ c }}{% endfor %}", ("user", "")
    )
    assert "a" == render("  {% if true %}\na{% endif %}", ("user", ""))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str):
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        render(source, ("user", "Hi"))


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
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"n": 0}, "n"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], param: str):
    async with in_process() as server:
        response = await server.chat(**{"messages": HELLO, **body})

    assert (400, param) == (response.status_code, response.json()["error"]["param"])


async def test_fields_that_ask_for_nothing_special_are_taken():
    async with in_process() as server:
        extra = {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "store": False}
        response = await server.chat(messages=HELLO, script=["x"], **extra)

    assert 200 == response.status_code


async def test_a_template_can_be_given_by_flag():
    async with in_process(chat_template="{{ messages[0].content }}!") as server:
        body = (await server.chat(messages=HELLO, script=["x"], return_token_ids=True)).json()

    assert list(b"Hi!") == body["prompt_token_ids"]
