import asyncio

import pytest

from loadgen.client import CompletionClient, RequestOptions, open_http
from loadgen.metrics import icl, itl, measure, tpot, ttft
from loadgen.workload import Prompt
from tests.loadgen.stubs import (
    DONE,
    ScriptedServer,
    SteppedClock,
    chunk,
    event,
    plain_answer,
    serve,
    serve_bytes,
    usage,
)

PROMPT = Prompt((1, 2, 3, 4, 5), 12)


async def ask(url, *, clock=None, deadline=None, prompt=PROMPT, **options):
    async with open_http(url, {"authorization": "Bearer k"}) as http:
        client = CompletionClient(http, RequestOptions(model="m", **options), clock=clock)
        return await client.complete(3, prompt, t_sched=0.0, t_queue=0.0, deadline=deadline)


def three_tokens_every_9_ms(**first_fields):
    """Four chunks of three tokens, the first after 100 ms."""
    frames = [event(chunk("abc", **first_fields), 0.1 + 0.009 * j) for j in range(4)]
    return [*frames, event({"choices": [], "usage": usage(5, 12)}, 0.127), event("[DONE]", 0.127)]


@pytest.mark.parametrize("fields", [{"token_ids": [1, 2, 3]}, {}], ids=["token ids", "total usage only"])
async def test_chunks_of_several_tokens_give_the_time_of_a_token(fields):
    """12 tokens in 4 chunks 9 ms apart: 3 ms a token, and not the 9 of the chunks nor the 27/11 of n - 1."""
    clock = SteppedClock()
    async with serve(ScriptedServer(lambda body: three_tokens_every_9_ms(**fields), clock)) as url:
        record = await ask(url, clock=clock)

    assert record.is_ok
    assert 12 == record.num_output_tokens
    assert 0.1 == pytest.approx(ttft(record))
    assert [0.003] * 9 == pytest.approx(itl(record))
    assert 0.003 == pytest.approx(tpot(record))
    assert [0.009] * 3 == pytest.approx(icl(record))


async def test_running_usage_counts_tokens_where_there_are_no_ids():
    clock = SteppedClock()
    frames = [event(chunk("x", usage=usage(5, n)), 0.01 * n) for n in (1, 3, 6)]
    async with serve(ScriptedServer(lambda body: [*frames, event("[DONE]", 0.06)], clock)) as url:
        record = await ask(url, clock=clock)

    assert [1, 2, 3] == [piece.num_tokens for piece in record.chunks]
    assert [0.01, 0.03, 0.06] == [piece.time_s for piece in record.chunks]


async def test_a_keep_alive_comment_is_not_the_first_token():
    clock = SteppedClock()
    comment = [type(DONE)(b": keep-alive\n\n", 15.0), event(chunk("a", token_ids=[1]), 20.0), event("[DONE]", 20.0)]
    async with serve(ScriptedServer(lambda body: comment, clock)) as url:
        record = await ask(url, clock=clock)

    assert 20.0 == ttft(record)


async def test_an_answer_is_recorded_with_what_it_says_of_itself():
    frames = [event(chunk("a", token_ids=[7])), event({"choices": [], "usage": usage(5, 1, 4)}), DONE]
    async with serve(ScriptedServer(lambda body: frames)) as url:
        record = await ask(url)

    assert (3, 5, 12) == (record.index, record.num_planned_prompt_tokens, record.num_planned_output_tokens)
    assert (5, 4, 1, 200) == (
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_billed_output_tokens,
        record.status,
    )


async def failed_record(frames):
    async with serve(ScriptedServer(lambda body: frames)) as url:
        return await ask(url)


A_CHUNK = event(chunk("a", token_ids=[1]))


@pytest.mark.parametrize(
    ("frames", "kind", "detail"),
    [
        ([A_CHUNK, event({"error": {"message": "engine died", "code": 500}}), DONE], "error frame", "engine died"),
        ([A_CHUNK, A_CHUNK], "truncated", "DONE"),
        ([A_CHUNK, event("{oops")], "malformed", "oops"),
        ([DONE], "empty", "no choices"),
        (503, "http 503", "refused by the script"),
    ],
)
async def test_a_bad_answer_is_a_failure_and_in_no_figure(frames, kind, detail):
    """Also when its status was 200 and tokens came: what ends in an error has no latency."""
    record = await failed_record(frames)

    assert kind == record.failure.kind
    assert detail in record.failure.detail
    assert measure("ttft", [record]) is None


@pytest.mark.parametrize("is_reset", [True, False], ids=["reset", "closed within the stream"])
async def test_a_connection_that_breaks_is_a_failure(is_reset):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"%x\r\n%s\r\n" % (len(A_CHUNK.data), A_CHUNK.data)
    async with serve_bytes(head + body, is_reset=is_reset) as url:
        record = await ask(url)

    assert "connection" == record.failure.kind
    assert measure("itl", [record]) is None


async def test_a_server_that_is_not_there_is_a_failure():
    async with serve(ScriptedServer(lambda body: [])) as url:
        pass
    record = await ask(url)

    assert "connection" == record.failure.kind
    assert record.status is None


class SilentServer(ScriptedServer):
    """Sends one chunk and then nothing until the client has left."""

    async def __call__(self, scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": A_CHUNK.data, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass


async def test_a_request_past_its_timeout_has_failed():
    async with serve(SilentServer(lambda body: [])) as url:
        record = await ask(url, timeout_s=0.05)

    assert "timeout" == record.failure.kind


async def test_a_request_still_under_way_at_the_deadline_is_cancelled():
    async with serve(SilentServer(lambda body: [])) as url:
        record = await ask(url, deadline=asyncio.get_running_loop().time() + 0.05)

    assert "cancelled" == record.failure.kind


async def sent(**arguments):
    server = ScriptedServer(lambda body: plain_answer(5, 1))
    async with serve(server) as url:
        await ask(url, **arguments)
    return server.bodies[0], server.headers[0]


async def test_a_request_asks_for_a_stream_that_counts_its_tokens():
    body, headers = await sent()

    assert {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 12,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    } == body
    assert "Bearer k" == headers["authorization"]
    assert "identity" == headers["accept-encoding"]


async def test_extra_fields_are_added_and_a_null_takes_one_out():
    body, _ = await sent(extra_body={"seed": 5, "return_token_ids": None}, ignore_eos=True, temperature=0.5)

    assert (5, True, 0.5) == (body["seed"], body["ignore_eos"], body["temperature"])
    assert "return_token_ids" not in body


async def test_a_chat_endpoint_gets_messages():
    body, _ = await sent(prompt=Prompt("Hello", 4), endpoint="/v1/chat/completions")

    assert [{"role": "user", "content": "Hello"}] == body["messages"]
    assert "prompt" not in body
