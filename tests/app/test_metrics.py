"""/metrics: names, labels and numbers, from the engine's snapshot and from HTTP."""

import asyncio
import re

import pytest

from tests.app.servers import Gate, in_process, live, make_engine

NAMES_AT_START = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason{reason=capacity}",
    "vllm:num_requests_waiting_by_reason{reason=deferred}",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total{source=local_compute}",
    "vllm:generation_tokens_total",
    "vllm:request_success_total{finished_reason=stop}",
    "vllm:request_success_total{finished_reason=length}",
    "vllm:request_success_total{finished_reason=abort}",
    "vllm:request_success_total{finished_reason=error}",
    "vllm:request_success_total{finished_reason=repetition}",
    "vllm:admission_rejections_total{reason=max_num_queued_reqs}",
    "vllm:admission_rejections_total{reason=max_num_queued_tokens}",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:iteration_tokens_total_count",
    "octavo:kv_blocks",
    "octavo:kv_blocks_free",
    "octavo:kv_blocks_cached",
    "octavo:kv_blocks_used",
    "octavo:kv_blocks_shared",
}


async def test_every_series_is_there_before_the_first_request():
    async with in_process() as server:
        found = await server.metrics()

    assert set() == NAMES_AT_START - set(found)
    assert (64, 64) == (found["octavo:kv_blocks"], found["octavo:kv_blocks_free"])
    assert not any("spec_decode" in name for name in found)
    assert not any(name.endswith("_created") for name in found)


async def test_the_text_is_of_the_version_that_every_scraper_reads():
    async with in_process(served_model_name=("name",)) as server:
        response = await server.client.get("/metrics")

    assert "text/plain; version=0.0.4; charset=utf-8" == response.headers["content-type"]
    assert 'vllm:num_requests_running{engine="0",model_name="name"} 0.0' in response.text
    assert re.search(r'vllm:cache_config_info{block_size="4",.*engine="0",.*num_gpu_blocks="64".*} 1.0', response.text)
    assert {"cache_dtype", "hash_block_size", "num_cpu_blocks", "sliding_window"} <= set(
        re.findall(r"(\w+)=", re.findall("vllm:cache_config_info{.*}", response.text)[0])
    )
    assert "# TYPE vllm:iteration_tokens_total histogram" in response.text


async def test_two_scrapes_differ_by_the_requests_between_them():
    async with in_process() as server:
        before = await server.metrics()
        await server.complete(prompt="abc", script=["x", ["y", "z"]])
        await server.complete(prompt="abcd", max_tokens=2)
        after = await server.metrics()

    changed = {name: after[name] - before.get(name, 0) for name in after}
    assert (
        7 == changed["vllm:prompt_tokens_total"] == changed["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    )
    assert 6 == changed["vllm:generation_tokens_total"]
    assert 1 == changed["vllm:request_success_total{finished_reason=stop}"]
    assert 1 == changed["vllm:request_success_total{finished_reason=length}"]
    assert 2 == changed["vllm:time_to_first_token_seconds_count"] == changed["vllm:e2e_request_latency_seconds_count"]
    assert 2 == changed["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"]


async def test_histograms_are_cumulative_and_end_with_infinity():
    async with in_process() as server:
        await server.complete(prompt="abc", max_tokens=3)
        found = await server.metrics()

    name = "vllm:request_generation_tokens"
    assert [0, 0, 1, 1] == [found[f"{name}_bucket{{le={edge}}}"] for edge in ("1.0", "2.0", "5.0", "+Inf")]
    assert (1, 3) == (found[f"{name}_count"], found[f"{name}_sum"])


async def test_gauges_show_what_runs_and_what_waits():
    gate = Gate()
    gate.let_through(1)
    async with live(make_engine(gate, max_num_seqs=1), max_num_seqs=1) as server, gate:
        body = {"prompt": "12345", "stream": True, "max_tokens": 3}
        async with server.client.stream("POST", "/v1/completions", json=body):
            await gate.until_arrived(2)
            queued = asyncio.create_task(server.complete(prompt="p"))
            while server.service.loop.num_in_inbox == 0:
                await asyncio.sleep(0)
            found = await server.metrics()
        gate.open()
        await queued

    assert (1, 1) == (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"])
    assert (2, 62) == (found["octavo:kv_blocks_used"], found["octavo:kv_blocks_free"])
    assert 2 / 64 == found["vllm:kv_cache_usage_perc"]


async def test_random_paths_and_methods_make_one_label_only():
    async with in_process() as server:
        for number in range(20):
            await server.client.get(f"/random/{number}/${{x}}")
            await server.client.request(f"WEIRD{number}", "/v1/models")
        found = await server.metrics()

    assert {
        "http_requests_total{handler=other,method=GET,status=4xx}",
        "http_requests_total{handler=/v1/models,method=other,status=4xx}",
    } == {name for name in found if name.startswith("http_requests_total")}


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ping", "/load", "/version", "/ready", "/server_info"])
async def test_probes_are_not_counted(path: str):
    async with in_process() as server:
        await server.client.get(path)

        assert not [name for name in await server.metrics() if name.startswith("http_requests_total")]


LEGACY = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds_count": "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_sum": "vllm:inter_token_latency_seconds_sum",
}


async def test_old_names_say_the_same_where_they_are_asked_for():
    async with in_process(legacy_metric_names=True) as server, in_process() as plain:
        for _ in range(2):
            await server.complete(prompt="x" * 13, max_tokens=3)
        found, others = await server.metrics(), await plain.metrics()

    assert {name: found[new] for name, new in LEGACY.items()} == {name: found[name] for name in LEGACY}
    assert found["vllm:time_per_output_token_seconds_count"] == 4
    assert 12 / 26 == pytest.approx(found["vllm:gpu_prefix_cache_hit_rate"])
    assert (0, 0) == (found["vllm:cpu_cache_usage_perc"], found["vllm:num_requests_swapped"])
    assert set() == {*LEGACY, "vllm:num_requests_swapped"} & set(others)
