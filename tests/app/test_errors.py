"""Whatever goes wrong, the answer is OpenAI's error object with the right status, and nothing of our insides."""

import gzip
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import Answer500, ApiError, as_api_error, unavailable
from core import ContextLengthExceeded, EngineDead, InvalidRequest
from core.step import ModelRunnerOutput, SchedulerOutput
from tests.app.servers import in_process, make_engine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequest("m", "seed"), 400, "invalid_request_error", "seed", None),
        (ContextLengthExceeded("m", "prompt"), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (EngineDead("m"), 503, "service_unavailable", None, "engine_dead"),
        (unavailable("m", "queue_full"), 503, "service_unavailable", None, "queue_full"),
        (KeyError("m"), 500, "server_error", None, None),
    ],
)
def test_every_exception_has_its_answer(error: Exception, status: int, kind: str, param: str | None, code: str | None):
    answer = as_api_error(error)

    assert (status, kind, param, code) == (answer.status, answer.kind, answer.param, answer.code)
    assert {"error"} == set(answer.body)
    assert {"message", "type", "param", "code"} == set(answer.body["error"])


def test_our_own_mistakes_are_not_described():
    assert "secret" not in as_api_error(RuntimeError("secret")).message


@pytest.mark.parametrize(
    ("content", "headers", "message", "param"),
    [
        (b"{bad", JSON, "not valid JSON", None),
        (b"", JSON, "must be a JSON object", None),
        (b"[]", JSON, "must be a JSON object", None),
        (b'"text"', JSON, "must be a JSON object", None),
        (b'{"prompt": "p"}', {"content-type": "text/plain"}, "Content-Type must be application/json", None),
        (b'{"prompt": "p"}', {}, "Content-Type must be application/json", None),
        (
            b'{"prompt": "p", "temperature": "hot"}',
            JSON,
            'temperature is "hot": Input should be a valid number',
            "temperature",
        ),
        (b'{"prompt": "p", "n": 129}', JSON, "n is 129: Input should be less than or equal to 128", "n"),
        (b'{"prompt": "p", "seed": 1.5}', JSON, "seed is 1.5: Input should be a valid integer", "seed"),
        (b'{"prompt": "p", "model": 3}', JSON, "model is 3: Input should be a valid string", "model"),
        (b'{"prompt": "p", "temperature": NaN}', JSON, "finite", "temperature"),
        (b'{"prompt": "p", "temperature": 1e999}', JSON, "finite", "temperature"),
        (b'{"prompt": "p", "stop": {"a": 1}}', JSON, "stop", "stop"),
        (b'{"prompt": "\\ud800"}', JSON, "surrogate", "prompt"),
        (b'{"prompt": "p", "seed": ' + b"9" * 5000 + b"}", JSON, "a number in it has more than 4300 digits", None),
        (b'{"prompt": ' + b"[" * 50_000 + b"}", JSON, "nested too deeply", None),
        (b'{"prompt": "p", "x": "\xff"}', JSON, "not UTF-8 at byte 22", None),
        ('{"prompt": "p"}'.encode("utf-16"), JSON, "not UTF-8 at byte 3", None),
        (b'{"prompt": "a\x01"}', JSON, "Invalid control character at character 13", None),
        (gzip.compress(b'{"prompt": "p"}'), {**JSON, "content-encoding": "gzip"}, "Content-Encoding 'gzip'", None),
        (b"\x0b\x07", {**JSON, "content-encoding": "br"}, "Content-Encoding 'br'", None),
        (b'{"prompt": "p", "bad_words": ["\\ud800"]}', JSON, "bad_words has half of a surrogate pair", "bad_words"),
    ],
)
async def test_a_body_that_does_not_fit_is_400_and_never_422(content: bytes, headers: Any, message: str, param: Any):
    async with in_process() as server:
        response = await server.client.post("/v1/completions", content=content, headers=headers)

    error = response.json()["error"]
    assert (400, "invalid_request_error", param) == (response.status_code, error["type"], error["param"])
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/abort_requests", {"request_ids": []}),
    ],
)
async def test_a_strict_server_takes_no_field_that_nobody_knows(path: str, body: dict[str, Any]):
    async with in_process() as server, in_process(strict_fields=True) as strict:
        odd = {**body, "nobody_knows": 1}
        lenient, refused = [await one.client.post(path, json=odd) for one in (server, strict)]
        taken = await strict.client.post(path, json={**body, "metadata": {}})

    assert [200, 400, 200] == [response.status_code for response in (lenient, refused, taken)]
    assert "Unknown parameter: 'nobody_knows'" == refused.json()["error"]["message"]


async def test_a_name_that_has_no_utf8_is_just_unknown():
    async with in_process() as server:
        response = await server.client.post(
            "/v1/completions", content=b'{"prompt": "p", "model": "\\ud800"}', headers=JSON
        )

    assert (404, "model_not_found") == (response.status_code, response.json()["error"]["code"])


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"prompt": "p", "model": "x" * 10_000}),
        (400, {"prompt": "p", "x" * 10_000: 1}),
        (400, {"prompt": "p", "logit_bias": {"x" * 10_000: "y"}}),
        (400, {"prompt": "p", "seed": "x" * 10_000}),
    ],
)
async def test_an_answer_does_not_grow_with_what_was_wrong(status: int, body: dict[str, Any]):
    async with in_process(strict_fields=True) as server:
        response = await server.complete(**body)

    assert status == response.status_code
    assert 400 > len(response.text)


async def test_a_long_path_is_not_given_back_whole():
    async with in_process() as server:
        response = await server.client.get("/" + "x" * 10_000)

    assert 404 == response.status_code
    assert 400 > len(response.text)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, "logprobs"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, "max_completion_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, "max_completion_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}, "chat_template"),
    ],
)
async def test_what_another_api_would_have_heeded_is_not_ignored(path: str, body: dict[str, Any], name: str):
    async with in_process() as server:
        response = await server.client.post(path, json={**body, name: 3})

    assert 400 == response.status_code
    assert f"'{name}' is not supported" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "value", "message"),
    [
        ("/v1/completions", {"prompt": "p"}, {"messages": []}, "'messages' is chat's, completions have prompt"),
        ("/v1/completions", {"prompt": "p"}, {"tools": []}, "'tools' is chat's"),
        ("/v1/completions", {"prompt": "p"}, {"priority": 1}, "'priority' is only taken as 0"),
        ("/v1/chat/completions", CHAT, {"prompt": "p"}, "'prompt' is completions', chat has messages"),
        ("/v1/chat/completions", CHAT, {"echo": True}, "'echo' is completions'"),
        ("/v1/messages", {**CHAT, "max_tokens": 1}, {"prompt": "p"}, "'prompt' is completions', here there is"),
        ("/v1/responses", {"input": "Hi"}, {"messages": []}, "'messages' is chat's, responses have input"),
    ],
)
async def test_a_field_of_another_api_is_told_where_it_belongs(path: str, body: Any, value: Any, message: str):
    async with in_process() as server:
        response = await server.client.post(path, json={**body, **value})

    assert 400 == response.status_code
    assert response.json()["error"]["message"].startswith(message)


async def test_a_long_list_of_problems_is_cut_short():
    async with in_process() as server:
        response = await server.complete(prompt="p", logit_bias={str(i): "x" for i in range(1000)})

    assert "and 995 more" in response.json()["error"]["message"]
    assert 1000 > len(response.text)


ODD: list[Any] = [{}, [[]], ["text"], 1, None, "text"]


@pytest.mark.parametrize(
    ("path", "role", "of_content"),
    [
        ("/v1/chat/completions", "user", lambda odd: [{"type": odd, "text": "a"}]),
        ("/tokenize", "user", lambda odd: [{"type": odd, "text": "a"}]),
        ("/v1/messages", "user", lambda odd: [{"type": odd, "text": "a"}]),
        ("/v1/messages", "assistant", lambda odd: [{"type": odd, "text": "a"}]),
        ("/v1/messages", "user", lambda odd: [{"type": "tool_result", "content": [odd]}]),
        ("/v1/messages", "user", lambda odd: [{"type": "tool_result", "content": {"type": odd}}]),
    ],
)
async def test_a_part_may_be_anything_that_json_has(path: str, role: str, of_content: Callable[[Any], Any]):
    """Also what has no hash, and no fields; where it is no text, it is a 400."""
    async with in_process() as server:
        for odd in ODD:
            body = {"messages": [{"role": role, "content": of_content(odd)}], "max_tokens": 1}
            response = await server.client.post(path, json=body)
            is_text = of_content(odd) == [{"type": "text", "text": "a"}]
            assert (200 if is_text else 400) == response.status_code, (odd, response.text)
            if not is_text:
                assert "type" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "guided_choice", "messages"])
async def test_of_a_list_the_first_wrong_item_is_told(name: str):
    """To find and describe them all takes the event loop ten microseconds each."""
    async with in_process() as server:
        response = await server.chat(**{"messages": [{"role": "user", "content": "Hi"}], name: [0.5] * 1000})

    assert (400, name) == (response.status_code, response.json()["error"]["param"])
    assert 1 == response.text.count(f"{name}.")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/health/", 404), ("GET", "/v1/models/", 404)],
)
async def test_wrong_paths_and_methods_get_error_objects(method: str, path: str, status: int):
    async with in_process() as server:
        response = await server.client.request(method, path)

    assert status == response.status_code
    assert path in response.json()["error"]["message"]


def fail(plan: SchedulerOutput) -> ModelRunnerOutput:
    raise ValueError("a secret")


async def test_a_fault_of_the_engine_in_one_request_is_500_and_the_server_goes_on():
    async with in_process(make_engine(fail)) as server:
        whole = await server.complete(prompt="p")
        stream = await server.complete(prompt="p", stream=True)
        alive = await server.client.get("/health")

    assert (500, "server_error") == (whole.status_code, whole.json()["error"]["type"])
    assert 500 == stream.status_code
    assert "secret" not in whole.text + stream.text
    assert 200 == alive.status_code


async def test_a_route_that_breaks_answers_500(monkeypatch: pytest.MonkeyPatch):
    def break_down(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a secret")

    async with in_process() as server:
        monkeypatch.setattr(server.service, "run", break_down)
        headers = {"x-request-id": "mine", "origin": "http://page"}
        response = await server.client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
        found = await server.metrics()

    assert (500, "server_error") == (response.status_code, response.json()["error"]["type"])
    assert "secret" not in response.text
    assert ("mine", "*") == tuple(response.headers[n] for n in ("x-request-id", "access-control-allow-origin"))
    assert 1 == found["http_requests_total{handler=/v1/completions,method=POST,status=5xx}"]


async def test_what_breaks_after_the_answer_has_begun_is_raised_and_not_answered_twice():
    sent: list[Any] = []

    async def breaks_late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("late")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    with pytest.raises(RuntimeError, match="late"):
        await Answer500(breaks_late)({"type": "http"}, receive, send)
    assert [200] == [message["status"] for message in sent]


def test_an_api_error_is_an_exception_with_its_message():
    assert "no" == str(ApiError(400, "no"))
