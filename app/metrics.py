"""/metrics: the engine's snapshot under vLLM's names, Octavo's own beside it, and HTTP counters.

Nothing is counted twice: engine series are made at scrape time from `engine.stats`, one snapshot, so that they agree
with each other. HTTP series are counted as each request ends (`app.access`); their labels come from routes, never
from clients, so that their number is bounded.
"""

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Histogram as HttpHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from app.engine_loop import EngineLoop
from app.logs import max_concurrency
from app.shares import Shares
from core import Engine, EngineStats, Histogram

# The older text format: every scraper reads it, and promtool.
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE = "0"

# name: (help, field of EngineStats)
GAUGES = {
    "vllm:num_requests_running": ("Requests in the running batch.", "num_running"),
    "octavo:kv_blocks": ("KV blocks in the pool.", "kv_blocks"),
    "octavo:kv_blocks_free": ("KV blocks that can be taken now, cached ones among them.", "kv_blocks_free"),
    "octavo:kv_blocks_cached": ("Free KV blocks whose contents a prefix could still hit.", "kv_blocks_cached"),
    "octavo:kv_blocks_used": ("KV blocks referenced or reserved.", "kv_blocks_used"),
    "octavo:prefix_cache_infinite_hit_rate": (
        "Hit rate that a prefix cache which never forgets would have had so far.",
        "infinite_hit_rate",
    ),
    "octavo:prefix_cache_doubled_hit_rate": (
        "Hit rate that a prefix cache of twice the size would have had so far.",
        "doubled_hit_rate",
    ),
    "octavo:prefix_cache_hit_rate_error": (
        "About one standard error of these two, in their unit; 0 while every block is followed.",
        "hit_rate_error",
    ),
    "octavo:swap_blocks_used": ("Blocks in the second tier.", "swap_slots_used"),
    "octavo:kv_blocks_shared": ("KV blocks referenced by more than one request.", "kv_blocks_shared"),
}
COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "octavo:swapped_out_blocks": ("Blocks copied to the second tier.", "num_swapped_out_blocks"),
    "octavo:swapped_in_blocks": ("Blocks copied back from the second tier.", "num_swapped_in_blocks"),
    "vllm:num_preemptions": ("Preemptions.", "num_preemptions"),
    "octavo:recomputed_tokens": ("Tokens computed a second time, after a preemption.", "num_recomputed_tokens"),
    "vllm:prompt_tokens": ("Prompt tokens, each prompt once.", "num_prompt_tokens"),
    "vllm:generation_tokens": ("Generated tokens.", "num_generation_tokens"),
}
SPECULATION_COUNTERS = {
    "octavo:spec_decode_draft_passes": ("Passes of the draft model.", "num_draft_passes"),
    "octavo:spec_decode_draft_seconds": ("Seconds that they took.", "draft_seconds"),
    "vllm:spec_decode_num_drafts": ("Draft proposals, one per request and step.", "num_drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens proposed.", "num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted, the bonus token excluded.", "num_accepted_tokens"),
}
# Beside vLLM's: what became of drafts and why there were so many.
SPECULATION_GAUGES = {
    "octavo:spec_decode_acceptance_rate": (
        "Accepted by drafted tokens over the last steps that drafted.",
        "acceptance_rate",
    ),
    "octavo:spec_decode_mean_accepted": (
        "Accepted tokens a draft that was drawn from a law, over the last steps.",
        "mean_accepted",
    ),
    "octavo:spec_decode_mean_accepted_bound": (
        "What no rule could have passed on the same drafts.",
        "mean_accepted_bound",
    ),
}
SPECULATION_HISTOGRAMS = {
    "draft_tokens": ("octavo:spec_decode_chosen_draft_tokens", "Draft tokens allowed, by request and step."),
    "acceptance_length": (
        "octavo:spec_decode_acceptance_length",
        "Tokens of a verification, the bonus token included.",
    ),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between outputs of one request.",
    "request_time_per_output_token_seconds": "Per finished request: decode time by tokens after the first.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Prompt tokens per finished request.",
    "request_generation_tokens": "Generated tokens per finished request.",
    "request_max_num_generation_tokens": "Largest output among the samples of a request.",
    "request_params_max_tokens": "The max_tokens of finished requests.",
    "request_params_n": "The n of finished requests.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, cached ones excluded.",
    "request_num_preemptions": "How often a finished request was preempted.",
    "iteration_tokens_total": "Tokens per step, computed prompt tokens and generated ones.",
}
SILENT_HANDLERS = frozenset({"/metrics", "/health", "/ready", "/load", "/ping", "/version", "/server_info"})
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
HTTP_EDGES = (0.1, 0.5, 1.0)
HTTP_FINE_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0),
    60.0,
)


class Metrics:
    """One server's registry: several servers in one process (tests) do not meet."""

    def __init__(self, loop: EngineLoop, shares: Shares, model_name: str, *, has_legacy_names: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a time series beside each counter that nobody asked for
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(loop, shares, model_name, has_legacy_names=has_legacy_names))
        self.http = HttpMetrics(self.registry)
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)

    def expose(self) -> tuple[bytes, str]:
        """The text of a scrape, and its media type."""
        return generate_latest(self.registry), MEDIA_TYPE


class EngineCollector(Collector):
    """Turns the engine's latest snapshot into series. All label values exist from the start, with 0.

    `has_legacy_names`: some series come a second time, under the names that vLLM had for them before.
    """

    def __init__(self, loop: EngineLoop, shares: Shares, model_name: str, *, has_legacy_names: bool = False) -> None:
        self._shares = shares
        self._loop = loop
        self._has_legacy_names = has_legacy_names
        self._labels = (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        num_in_inbox = self._loop.num_in_inbox  # before the snapshot: who moves on meanwhile counts twice, not never
        engine, stats = self._loop.engine, self._loop.engine.stats
        yield from self._gauges(stats, num_in_inbox)
        yield _cache_config(engine)
        yield from self._counters(stats)
        yield self._rejections()
        if engine.config.speculative is not None:
            yield from self._speculation(stats)
            yield from self._outlook(stats, engine.config.speculative.num_speculative_tokens)
        for name, histogram in stats.histograms.items():
            if name in HISTOGRAMS:
                yield self._histogram(f"vllm:{name}", HISTOGRAMS[name], histogram)
        if self._has_legacy_names:
            yield from self._legacy(stats)

    def _gauges(self, stats: EngineStats, num_in_inbox: int) -> Iterator[Metric]:
        for name, (text, attribute) in GAUGES.items():
            yield self._gauge(name, text, getattr(stats, attribute))
        num_waiting = stats.num_waiting + num_in_inbox
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a place.", num_waiting)
        num_deferred = min(stats.num_deferred, num_waiting)
        by_reason = {"capacity": num_waiting - num_deferred, "deferred": num_deferred}
        yield self._gauge_by("vllm:num_requests_waiting_by_reason", "The same by reason.", "reason", by_reason)
        yield self._gauge("octavo:event_loop_tasks", "Tasks of the server's event loop.", _num_tasks())
        share = stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", share)
        slots = _slots_by_state(stats, self._loop.engine.config.block_size)
        yield self._gauge_by("octavo:kv_slots", "Token slots of the pool by what is in them.", "state", slots)

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (text, attribute) in COUNTERS.items():
            yield self._counter(name, text, getattr(stats, attribute))
        sources = stats.prompt_tokens_by_source
        yield self._counter_by("vllm:prompt_tokens_by_source", "Prompt tokens by origin.", "source", sources)
        cached = stats.cached_tokens_by_source
        yield self._counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", sum(cached.values()))
        yield self._counter_by("vllm:prompt_tokens_cached_by_source", "The same by tier.", "source", cached)
        yield self._counter_by("vllm:request_success", "Finished requests.", "finished_reason", stats.finished)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (text, attribute) in SPECULATION_COUNTERS.items():
            yield self._counter(name, text, getattr(stats, attribute))
        per_position = {str(position): number for position, number in enumerate(stats.accepted_per_position)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._counter_by(name, "Accepted draft tokens by position.", "position", per_position)
        for name, (text, attribute) in SPECULATION_GAUGES.items():
            yield self._gauge(name, text, getattr(stats, attribute))
        for key, (name, text) in SPECULATION_HISTOGRAMS.items():
            yield self._histogram(name, text, stats.histograms[key])

    def _outlook(self, stats: EngineStats, num_drafts: int) -> Iterator[Metric]:
        """Why so many drafts: what they cost and promise. 0 until it is measured, and where the number is fixed."""
        text = "Steps by the reason for their number of drafts."
        yield self._counter_by("octavo:spec_decode_steps", text, "reason", stats.draft_steps)
        outlook = stats.draft_outlook
        text = "A draft step in steps of the target without drafts."
        yield self._gauge("octavo:spec_decode_draft_cost", text, outlook.draft_cost if outlook else 0.0)
        costs = {str(k): outlook.verification_costs.get(k, 0.0) if outlook else 0.0 for k in range(1, num_drafts + 1)}
        text = "A step that verifies so many drafts of each request, in steps without drafts."
        yield self._gauge_by("octavo:spec_decode_verification_cost", text, "draft_tokens", costs)
        text = "Tokens per second that the chosen drafts promise, by those without drafts."
        yield self._gauge("octavo:spec_decode_expected_gain", text, outlook.expected_gain if outlook else 0.0)

    def _rejections(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused by a limit.", labels=("model_name", "reason")
        )
        by_reason = {
            "max_num_queued_reqs": self._loop.num_rejections,
            "max_num_queued_tokens": 0,  # a limit that we have not; vLLM's series
            **self._shares.num_refused,
        }
        for reason, number in by_reason.items():
            family.add_metric((self._labels[0], reason), number)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _legacy(self, stats: EngineStats) -> Iterator[Metric]:
        num_tier_slots = self._loop.engine.config.num_tier_slots
        gauges = {
            "vllm:gpu_cache_usage_perc": (stats.kv_blocks_used, stats.kv_blocks),
            "vllm:cpu_cache_usage_perc": (stats.swap_slots_used, num_tier_slots),
            "vllm:gpu_prefix_cache_hit_rate": (stats.prefix_cache_hits, stats.prefix_cache_queries),
            "vllm:num_requests_swapped": (0, 1),  # preempted requests wait, whatever became of their blocks
        }
        for name, (part, whole) in gauges.items():
            yield self._gauge(name, "An old name.", part / whole if whole else 0.0)
        yield self._counter("vllm:gpu_prefix_cache_queries", "An old name.", stats.prefix_cache_queries)
        yield self._counter("vllm:gpu_prefix_cache_hits", "An old name.", stats.prefix_cache_hits)
        gaps = stats.histograms["inter_token_latency_seconds"]
        yield self._histogram("vllm:time_per_output_token_seconds", "An old name.", gaps)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        buckets, cumulated = [], 0
        for edge, count in zip((*map(str, histogram.edges), "+Inf"), histogram.counts, strict=True):
            cumulated += count
            buckets.append((edge, cumulated))
        family.add_metric(self._labels, buckets, histogram.sum)
        return family


def _slots_by_state(stats: EngineStats, block_size: int) -> dict[str, int]:
    """Where the pool's slots are: filled, wasted behind a last token, free but still hittable, free."""
    return {
        "token": stats.kv_blocks_used * block_size - stats.kv_slots_wasted,
        "waste": stats.kv_slots_wasted,
        "cached": stats.kv_blocks_cached * block_size,
        "free": (stats.kv_blocks_free - stats.kv_blocks_cached) * block_size,
    }


def _num_tasks() -> int:
    """0 where no loop runs, as when the series are registered."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def _cache_config(engine: Engine) -> Metric:
    """vLLM's info series; routers read block_size and num_gpu_blocks from its labels."""
    values = {
        "block_size": engine.config.block_size,
        "num_gpu_blocks": engine.num_kv_blocks,
        "num_cpu_blocks": engine.config.num_tier_slots,
        "enable_prefix_caching": engine.config.enable_prefix_caching,
        "prefix_caching_hash_algo": "sha256",
        "cache_dtype": engine.config.kv_cache_dtype,
        "sliding_window": None,
        "hash_block_size": engine.config.block_size,
        "kv_cache_size_tokens": engine.num_kv_blocks * engine.config.block_size,
        "kv_cache_max_concurrency": round(max_concurrency(engine), 2),
        "engine": ENGINE,
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=tuple(values))
    family.add_metric(tuple(map(str, values.values())), 1)
    return family


def handler_of(scope: Scope) -> str:
    """The route's path, for which there are as many values as routes."""
    return getattr(scope.get("route"), "path", None) or "other"


class HttpMetrics:
    """Counts requests by route, as prometheus-fastapi-instrumentator would."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels, handler = ("handler", "method"), ("handler",)
        self._requests = Counter("http_requests", "Requests.", ("handler", "method", "status"), registry=registry)
        self._request_bytes = Summary("http_request_size_bytes", "Bodies of requests.", handler, registry=registry)
        self._response_bytes = Summary("http_response_size_bytes", "Bodies of responses.", handler, registry=registry)
        self._duration = HttpHistogram(
            "http_request_duration_seconds",
            "Until the end of the response.",
            labels,
            buckets=HTTP_EDGES,
            registry=registry,
        )
        self._fine_duration = HttpHistogram(
            "http_request_duration_highr_seconds", "The same, finer.", buckets=HTTP_FINE_EDGES, registry=registry
        )

    def observe(self, scope: Scope, status: int, *, num_in: int, num_out: int, seconds: float) -> None:
        handler = handler_of(scope)
        if handler in SILENT_HANDLERS:
            return
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._request_bytes.labels(handler).observe(num_in)
        self._response_bytes.labels(handler).observe(num_out)
        self._duration.labels(handler, method).observe(seconds)
        self._fine_duration.observe(seconds)
