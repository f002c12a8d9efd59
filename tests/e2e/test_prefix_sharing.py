"""Shared KV memory over HTTP: what a common prompt saves, who may share it, and the flags, fields and series of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.live import DEADLINE_S, LiveServer

BLOCK_SIZE = 16
NUM_REQUESTS = 100
STORY = "Once upon a time there was a girl who lived by the sea. "
SYSTEM_PROMPT = (STORY * 10)[:512]
SUFFIXES = [f"{i:02} tell me about " + "the old dog" * (1 + i % 3) for i in range(NUM_REQUESTS)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def complete_together(server: LiveServer, prompts: Sequence[str], **body: Any) -> list[Any]:
    """All at once; their answers in order."""

    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as client:
            posts = (client.post("/v1/completions", json={"prompt": p, **body}) for p in prompts)
            return await asyncio.gather(*posts)

    return [response.raise_for_status().json() for response in asyncio.run(all_of_them())]


def cached_tokens(answer: Any) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


# What a common prompt saves


@pytest.mark.parametrize("num_priming", [1, 0], ids=["one primes, 99 together", "100 together"])
def test_a_system_prompt_of_512_tokens_is_computed_once_for_100_requests(serve: Serve, num_priming: int):
    server = serve("--speculative-config", "null")
    prompts = [SYSTEM_PROMPT + suffix for suffix in SUFFIXES]
    answers = complete_together(server, prompts[:num_priming], max_tokens=2, **GREEDY)
    answers += complete_together(server, prompts[num_priming:], max_tokens=2, **GREEDY)
    after = server.wait_until_idle()

    sources = "vllm:prompt_tokens_by_source_total"
    assert 512 + sum(map(len, SUFFIXES)) == after.total(sources, source="local_compute")
    assert 99 * 512 == after.total(sources, source="local_cache_hit")
    assert 99 * 512 == after.total("vllm:prefix_cache_hits_total")
    assert sum(map(len, prompts)) == after.total("vllm:prompt_tokens_total")
    assert sum(map(len, prompts)) == after.total("vllm:prefix_cache_queries_total")
    assert [0] + [512] * 99 == sorted(map(cached_tokens, answers))
    assert 99 * 512 / sum(map(len, prompts)) == pytest.approx(after.total("octavo:prefix_cache_infinite_hit_rate"))


def test_without_prefix_caching_everybody_computes_the_same_answers(serve: Serve):
    caching, plain = serve(), serve("--no-enable-prefix-caching")
    prompts = [SYSTEM_PROMPT[:100] + suffix for suffix in SUFFIXES[:6]]
    answers = [complete_together(server, prompts, max_tokens=8, **GREEDY) for server in (caching, plain)]
    after = plain.wait_until_idle()

    assert [[answer["choices"][0]["text"] for answer in answers[0]]] * 2 == [
        [answer["choices"][0]["text"] for answer in part] for part in answers
    ]
    assert [0] + [96] * 5 == sorted(map(cached_tokens, answers[0]))
    assert [0] * 6 == list(map(cached_tokens, answers[1]))
    assert 0 == after.total("vllm:prefix_cache_queries_total")
    assert 0 == after.total("octavo:kv_blocks_cached")
    assert 1 == after.total("vllm:cache_config_info", enable_prefix_caching="False")


def test_usage_says_what_was_cached_in_every_form_of_answer_until_the_cache_is_reset(serve: Serve):
    server = serve()
    body = {"prompt": SYSTEM_PROMPT[:70], "max_tokens": 4, **GREEDY}
    chat = {"messages": [{"role": "user", "content": SYSTEM_PROMPT[:70]}], "max_tokens": 4, **GREEDY}
    streamed = {"stream_options": {"include_usage": True}}

    def rounds() -> list[int]:
        return [
            cached_tokens(server.complete(**body)),
            cached_tokens(server.events("/v1/completions", body | streamed)[-1]),
            cached_tokens(server.post("/v1/chat/completions", chat)),
            cached_tokens(server.events("/v1/chat/completions", chat | streamed)[-1]),
        ]

    first, second = rounds(), rounds()
    assert [0, 64, 0] == first[:3]
    assert first[3] > 0
    assert [64, 64, first[3], first[3]] == second
    assert {"success": True} == server.post("/reset_prefix_cache", {})
    assert 0 == server.scrape().total("octavo:kv_blocks_cached")
    assert first == rounds()


# Who may share


def test_tenants_do_not_meet_nor_by_repeating_each_others_salt(serve: Serve):
    server = serve("--api-key", "key-a", "--api-key", "key-b", "--num-kv-blocks", "400")

    def cached(key: str, cache_salt: str | None) -> int:
        body = {"prompt": SYSTEM_PROMPT, "max_tokens": 1} | ({"cache_salt": cache_salt} if cache_salt else {})
        response = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return cached_tokens(response.raise_for_status().json())

    uses = [(key, salt) for key in ("key-a", "key-b") for salt in (None, "mine", "key-a", "key-b")]
    assert [0] * 8 == [cached(*use) for use in uses]
    assert [496] * 8 == [cached(*use) for use in uses]


# Preemption modes


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_pool_of_little_more_than_one_request_changes_no_text(
    serve: Serve, tiny: LiveServer, mode: str, tmp_path: Path
):
    """16 at once over 6 blocks of 16 tokens; the largest needs 5."""
    flags = [] if mode == "recompute" else ["--swap-space-bytes", "4M", "--swap-file", str(tmp_path / "tier")]
    server = serve("--num-kv-blocks", "6", "--max-num-seqs", "32", "--preemption-mode", mode, *flags)
    prompts = [f"{i} {STORY}"[: 36 + i] for i in range(16)]
    body = {"max_tokens": 30, "seed": 5, "ignore_eos": True}
    expected = complete_together(tiny, prompts, **body)
    found = complete_together(server, prompts, **body)
    after = server.wait_until_idle()

    assert [answer["choices"] for answer in expected] == [answer["choices"] for answer in found]
    assert [30] * 16 == [answer["usage"]["completion_tokens"] for answer in found]
    assert after.total("vllm:num_preemptions_total") > 0
    assert (mode != "recompute") == (after.total("octavo:swapped_out_blocks_total") > 0)
    assert (mode != "recompute") == (after.total("octavo:swap_blocks_used") > 0)
    assert bool(flags) == (tmp_path / "tier.target").exists() == (tmp_path / "tier.draft").exists()
    assert [6, 0] == [after.total("octavo:kv_blocks_free"), after.total("octavo:kv_blocks_used")]


# The best of several samples


def mean_logprob(choice: Any) -> float:
    logprobs: list[float] = choice["logprobs"]["token_logprobs"]
    return sum(logprobs) / len(logprobs)


def test_best_of_shows_the_likeliest_samples_and_counts_all(tiny: LiveServer):
    body = {"prompt": STORY, "seed": 11, "temperature": 1, "max_tokens": 12, "logprobs": 0}
    samples = tiny.complete(**body, n=5)
    best = tiny.complete(**body, n=2, best_of=5)

    ranked = sorted(samples["choices"], key=mean_logprob, reverse=True)
    assert [choice["text"] for choice in ranked[:2]] == [choice["text"] for choice in best["choices"]]
    assert [0, 1] == [choice["index"] for choice in best["choices"]]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [samples["usage"][count] for count in counts] == [best["usage"][count] for count in counts]


def test_best_of_reports_no_logprobs_that_nobody_asked_for(tiny: LiveServer):
    answer = tiny.complete(prompt=STORY, seed=11, max_tokens=4, best_of=3)

    assert [None] == [choice["logprobs"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 3, "stream": True}, {"best_of": 1, "n": 2}, {"best_of": 65}],
    ids=["stream", "below n", "places"],
)
def test_best_of_that_cannot_be_is_refused_by_name(tiny: LiveServer, fields: dict[str, Any]):
    response = tiny.http.post("/v1/completions", json={"prompt": STORY, "max_tokens": 4, **fields})

    assert (400, "best_of") == (response.status_code, response.json()["error"]["param"])


# What an operator sees


def test_block_tables_are_shown_only_where_debugging_is_on(serve: Serve, tiny: LiveServer):
    server = serve("--enable-debug", "--speculative-config", "null")
    server.complete(prompt=STORY[:40], max_tokens=1)
    idle = server.http.get("/debug/kv").json()
    body = {"prompt": STORY[:40], "n": 2, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running = httpx.get(f"{server.url}/debug/kv", timeout=DEADLINE_S).json()

    assert 404 == tiny.http.get("/debug/kv").status_code
    assert [] == idle["requests"]
    assert [0, 0] == [block["ref_count"] for block in idle["blocks"]]
    assert all(len(bytes.fromhex(block["hash"])) == 32 for block in idle["blocks"])
    tables = [request["block_table"] for request in running["requests"]]
    cached = {block["block"]: block for block in idle["blocks"]}
    shared = tables[0][:2]
    assert shared == tables[1][:2]
    assert set(shared) == set(cached)
    ref_counts = {block["block"]: block["ref_count"] for block in running["blocks"]}
    assert [2, 2] == [ref_counts[block] for block in shared]
    assert BLOCK_SIZE == running["block_size"]
    used = {block for table in tables for block in table}
    assert running["num_blocks"] == running["num_free_blocks"] + len(used)


SERIES = {
    "octavo:kv_blocks_cached": ({},),
    "octavo:kv_blocks_shared": ({},),
    "octavo:kv_slots": tuple({"state": state} for state in ("token", "waste", "cached")),
    "octavo:prefix_cache_infinite_hit_rate": ({},),
    "octavo:prefix_cache_doubled_hit_rate": ({},),
    "octavo:prefix_cache_hit_rate_error": ({},),
    "octavo:swap_blocks_used": ({},),
    "octavo:swapped_out_blocks_total": ({},),
    "octavo:swapped_in_blocks_total": ({},),
    "vllm:prefix_cache_queries_total": ({},),
    "vllm:prefix_cache_hits_total": ({},),
    "vllm:prompt_tokens_cached_total": ({},),
    "vllm:prompt_tokens_cached_by_source_total": ({"source": "device"}, {"source": "host"}),
    "vllm:prompt_tokens_by_source_total": ({"source": "local_compute"}, {"source": "local_cache_hit"}),
    "vllm:num_requests_waiting_by_reason": ({"reason": "deferred"},),
}


def test_every_series_of_kv_memory_is_there_before_the_first_request(serve: Serve):
    scrape = serve("--num-kv-blocks", "50", "--preemption-mode", "swap", "--swap-space-bytes", "1M").scrape()

    found = {(name, *labels.values()): scrape.total(name, **labels) for name, of in SERIES.items() for labels in of}
    assert dict.fromkeys(found, 0.0) == found
    assert 50 * BLOCK_SIZE == scrape.total("octavo:kv_slots", state="free")
    assert scrape.total("vllm:cache_config_info", prefix_caching_hash_algo="sha256", enable_prefix_caching="True") == 1
