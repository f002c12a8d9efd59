"""/metrics of a live server: every series from the start, and counters that move by exactly what was done."""

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.live import LiveServer

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "octavo:kv_blocks",
    "octavo:kv_blocks_free",
    "octavo:kv_blocks_cached",
    "octavo:kv_blocks_used",
    "octavo:kv_blocks_shared",
)
COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
LABELLED = {
    ("vllm:num_requests_waiting_by_reason", "reason"): ("capacity", "deferred"),
    ("vllm:prompt_tokens_by_source_total", "source"): ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ("octavo:spec_decode_steps_total", "reason"): (
        "pays",
        "does_not_pay",
        "exploring",
        "measuring",
        "fixed",
        "crowded",
    ),
    ("octavo:spec_decode_verification_cost", "draft_tokens"): ("1", "2", "3"),
    ("vllm:request_success_total", "finished_reason"): ("stop", "length", "abort", "error", "repetition"),
}
SPECULATION = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "octavo:spec_decode_acceptance_rate",
    "octavo:spec_decode_mean_accepted",
    "octavo:spec_decode_mean_accepted_bound",
    "octavo:spec_decode_draft_cost",
)
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_num_preemptions",
    "vllm:iteration_tokens_total",
    "octavo:spec_decode_chosen_draft_tokens",
    "octavo:spec_decode_acceptance_length",
)
NAMES = {"model_name": "storyteller", "engine": "0"}


def test_every_series_exists_before_the_first_request(serve: Serve):
    server = serve("--served-model-name", "storyteller", "--num-kv-blocks", "50")
    first = server.scrape()

    zeros = [first.total(name, **NAMES) for name in COUNTERS + SPECULATION]
    zeros += [first.total(name, **NAMES, **{label: v}) for (name, label), values in LABELLED.items() for v in values]
    zeros += [first.total(name + end, **NAMES) for name in HISTOGRAMS for end in ("_count", "_sum")]
    zeros += [first.total(f"{name}_bucket", **NAMES, le="+Inf") for name in HISTOGRAMS]
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    zeros += [first.total(positions, **NAMES, position=str(position)) for position in range(3)]
    zeros += [first.total("vllm:admission_rejections_total", model_name="storyteller", reason="max_num_queued_reqs")]
    assert {0.0} == set(zeros)
    assert [0, 0, 0, 50, 50, 0, 0, 0] == [first.total(name, **NAMES) for name in GAUGES]
    assert 1 == first.total("vllm:cache_config_info", block_size="16", num_gpu_blocks="50", engine="0")


def test_series_of_speculation_exist_only_where_there_is_some(serve: Serve):
    scrape = serve("--speculative-config", "null").scrape()

    assert not [name for name, _ in scrape.samples if "spec_decode" in name]


def test_metrics_come_in_the_old_text_format_without_a_redirect(tiny: LiveServer):
    response = tiny.http.get("/metrics")

    assert 200 == response.status_code
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_low_edges_are_added_to_the_gaps_between_tokens_and_none_is_missing(tiny: LiveServer):
    edges = {
        dict(labels)["le"]
        for name, labels in tiny.scrape().samples
        if name == "vllm:inter_token_latency_seconds_bucket"
    }
    ours = {"0.001", "0.0025", "0.005"}
    those_of_vllm = {
        *("0.01", "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5", "0.75"),
        *("1.0", "2.5", "5.0", "7.5", "10.0", "20.0", "40.0", "80.0", "+Inf"),
    }

    assert ours | those_of_vllm == edges


def test_scrapes_differ_by_exactly_the_tokens_of_the_requests_between(tiny: LiveServer):
    before = tiny.wait_until_idle()
    usages = [
        tiny.complete(**GREEDY)["usage"],
        tiny.complete(**{**GREEDY, "prompt": ["The dog", "One day"], "n": 2, "max_tokens": 7})["usage"],
        tiny.complete(**{**GREEDY, "stop": [" "]})["usage"],
        tiny.events("/v1/completions", {**GREEDY, "stream_options": {"include_usage": True}})[-1]["usage"],
        tiny.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 9})[
            "usage"
        ],
    ]
    tiny.http.post("/v1/completions", json={**GREEDY, "temperature": 9})  # refused: counts for nothing
    after = tiny.wait_until_idle()

    def moved(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    generated = sum(usage["completion_tokens"] for usage in usages)
    assert sum(usage["prompt_tokens"] for usage in usages) == moved("vllm:prompt_tokens_total")
    assert generated == moved("vllm:generation_tokens_total")
    assert generated == moved("vllm:request_generation_tokens_sum")
    assert 8 == moved("vllm:request_success_total")
    assert 8 == moved("vllm:e2e_request_latency_seconds_count")
    assert 8 == moved("vllm:time_to_first_token_seconds_count")
    assert moved("vllm:request_success_total", finished_reason="stop") >= 1


def test_the_acceptance_rate_is_that_of_the_run(serve: Serve):
    server = serve()
    usage = server.complete(**GREEDY)["usage"]
    after = server.wait_until_idle()

    drafts, drafted, accepted = (after.total(f"vllm:spec_decode_num_{what}_total") for what in _COUNTED)
    assert accepted / drafted == pytest.approx(after.total("octavo:spec_decode_acceptance_rate"))
    assert 0 < accepted <= drafted
    assert accepted == after.total("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    # The first token comes from the prompt's step; each later step gives its accepted drafts and one more.
    assert usage["completion_tokens"] == 1 + after.total("vllm:inter_token_latency_seconds_count") + accepted
    assert drafts <= after.total("vllm:inter_token_latency_seconds_count") + 1


_COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


def test_free_blocks_follow_a_run(serve: Serve):
    server = serve("--num-kv-blocks", "100")
    body = {**GREEDY, "max_tokens": 500, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        during = server.scrape()
        while "data: [DONE]" != next(lines):
            pass
    after = server.wait_until_idle()

    used, free = during.total("octavo:kv_blocks_used"), during.total("octavo:kv_blocks_free")
    assert 1 <= used <= 33
    assert 100 == used + free
    assert used / 100 == during.total("vllm:kv_cache_usage_perc")
    assert 1 == during.total("vllm:num_requests_running")
    assert [100, 0] == [after.total("octavo:kv_blocks_free"), after.total("octavo:kv_blocks_used")]
