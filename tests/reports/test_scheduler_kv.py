"""Public reports on requests that hold what they should not: a queue, a place in the batch, KV blocks."""

import asyncio

from tests.reports.conftest import Serve, scripted

HELLO = [{"role": "user", "content": "Hi"}]


async def test_bc_059_a_prompt_larger_than_the_kv_cache_is_refused_at_once(serve: Serve):
    """BC-059, vllm-project/vllm#35541: it was retried for ever and blocked everything behind it."""
    server = await serve(num_kv_blocks=50, block_size=16, max_model_len=2048)
    large, short, long_output = await asyncio.gather(
        server.complete(prompt=[7] * 1002, max_tokens=1),
        server.complete(prompt="short", max_tokens=4),
        server.complete(prompt=[7] * 700, max_tokens=500),
    )

    assert 400 == large.status_code
    message = large.json()["error"]["message"]
    assert "needs 63 KV blocks" in message
    assert "50 exist" in message
    assert 200 == short.status_code
    assert (400, "max_tokens") == (long_output.status_code, long_output.json()["error"]["param"])
    await server.until_idle()


async def test_bc_065_three_hundred_streams_left_early_leave_nothing_behind(serve: Serve):
    """BC-065, InternLM/lmdeploy#1788: after some hundred aborted streams the server stopped answering."""
    server = await serve(live=True, max_num_seqs=8)
    body = {"messages": HELLO, "max_tokens": 1000, "stream": True, "ignore_eos": True}

    async def leave_early() -> None:
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_bytes())

    for _ in range(30):
        await asyncio.gather(*(leave_early() for _ in range(10)))

    found = await server.until_idle()
    assert found["octavo:kv_blocks"] == found["octavo:kv_blocks_free"]
    assert 300 == found["vllm:request_success_total{finished_reason=abort}"]
    assert 0 == server.service.loop.num_open_streams
    assert 200 == (await server.chat(messages=HELLO, max_tokens=4)).status_code


async def test_bc_066_a_request_whose_client_left_the_queue_is_never_computed(serve: Serve):
    """BC-066, ggml-org/llama.cpp#13262: a waiting request was generated although its client had gone."""
    server = await serve(live=True, max_num_seqs=1)
    # Long enough to outlast the other's coming and going: it ends when this test lets go of it.
    body = {"prompt": "A", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    async with server.client.stream("POST", "/v1/completions", json=body) as running:
        events = running.aiter_bytes()
        await anext(events)
        queued = asyncio.create_task(server.complete(prompt="BBBBB", max_tokens=4))
        while (await server.metrics())["vllm:num_requests_waiting"] == 0:
            await anext(events)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        while (await server.metrics())["vllm:num_requests_waiting"] == 1:
            await anext(events)
        still_running = await server.metrics()

    found = await server.until_idle()
    assert 1 == still_running["vllm:num_requests_running"]
    assert 1 == found["vllm:prompt_tokens_total"]
    assert 2 == found["vllm:request_success_total{finished_reason=abort}"]
    assert "ok" == (await server.complete(prompt="p", **scripted("ok"))).json()["choices"][0]["text"]
