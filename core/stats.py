"""What the engine has done, as an immutable snapshot: counters, gauges and histograms under vLLM's names.

The engine's thread gathers and replaces the snapshot after each step; anyone may read it. No clock is read here: times
are handed in. Names and edges are vLLM's (see docs), with finer low edges for gaps between tokens.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.request import FinishReason, Request, RequestOutput, RequestTimes
from core.scheduling.drafting import DraftOutlook
from core.stats_drafts import DraftGatherer
from core.step import SchedulerOutput

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.001, 0.0025, 0.005),  # a small model on a CPU is faster than vLLM's first edge
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_STEP = tuple(float(edge) for edge in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def token_edges(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the largest that is at most `max_model_len`."""
    edges = [float(m * 10**e) for e in range(len(str(max_model_len))) for m in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= max_model_len)


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` observations lie at or below `edges[i]` and above the edge before; the last count is for the rest."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class _Gatherer:
    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._edges, value)] += 1
        self._sum += value

    def snapshot(self) -> Histogram:
        return Histogram(self._edges, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment of the engine. Counters only grow; token counts are exact.

    `num_prompt_tokens` counts each prompt once, when its request is first computed to its end, cached tokens
    included and recomputed ones not. `accepted_per_position[i]`: how often draft i was kept. `acceptance_rate`:
    accepted / drafted over the last steps that drafted, 0 before. `mean_accepted` and `mean_accepted_bound`: accepted
    tokens a draft, and what no rule could pass on these drafts, over those of the last steps that had draft laws.
    `num_draft_passes`, `draft_seconds`: what the draft model ran and took. `draft_steps`: steps by the reason for their
    number of drafts; `draft_outlook`: what that was chosen by.
    `num_deferred`: of the waiting, those that wait only for a block that somebody is computing.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_used: int = 0
    kv_blocks_shared: int = 0
    kv_slots_wasted: int = 0
    swap_slots_used: int = 0
    infinite_hit_rate: float = 0.0
    doubled_hit_rate: float = 0.0
    hit_rate_error: float = 0.0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prompt_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    cached_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    num_draft_passes: int = 0
    draft_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    acceptance_rate: float = 0.0
    mean_accepted: float = 0.0
    mean_accepted_bound: float = 0.0
    draft_steps: Mapping[str, int] = field(default_factory=dict)
    draft_outlook: DraftOutlook | None = None
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(slots=True)
class _Times:
    """One request's moments, in seconds on the engine's clock."""

    first_scheduled: float | None = None
    is_born: bool = False  # of a prompt that was counted for its first sample
    first_token: float | None = None
    last_token: float | None = None
    num_generated: int = 0


@dataclass(slots=True)
class _Family:
    """The samples of one prompt: how many have not ended, and the longest output of those that ended well."""

    num_open: int
    longest: int | None = None


class StatsGatherer:
    """Gathers what `EngineStats` shows. One thread only.

    Args:
        max_model_len: bounds the edges of token histograms.
        num_draft_positions: most drafts a step, for the per-position counter.
        has_prefix_cache: whether prompts are looked up at all.
    """

    def __init__(self, max_model_len: int, num_draft_positions: int, *, has_prefix_cache: bool = True) -> None:
        tokens = token_edges(max_model_len)
        self._histograms = {
            "time_to_first_token_seconds": _Gatherer(_TTFT),
            "inter_token_latency_seconds": _Gatherer(_GAP),
            "request_time_per_output_token_seconds": _Gatherer(_GAP),
            "e2e_request_latency_seconds": _Gatherer(_REQUEST),
            "request_queue_time_seconds": _Gatherer(_REQUEST),
            "request_prefill_time_seconds": _Gatherer(_REQUEST),
            "request_decode_time_seconds": _Gatherer(_REQUEST),
            "request_inference_time_seconds": _Gatherer(_REQUEST),
            "request_prompt_tokens": _Gatherer(tokens),
            "request_generation_tokens": _Gatherer(tokens),
            "request_max_num_generation_tokens": _Gatherer(tokens),
            "request_params_max_tokens": _Gatherer(tokens),
            "request_params_n": _Gatherer((1.0, 2.0, 5.0, 10.0, 20.0)),
            "request_prefill_kv_computed_tokens": _Gatherer(tokens),
            "request_num_preemptions": _Gatherer((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
            "iteration_tokens_total": _Gatherer(_STEP),
            "draft_tokens": _Gatherer(tuple(map(float, range(num_draft_positions + 1)))),
            "acceptance_length": _Gatherer(tuple(map(float, range(1, num_draft_positions + 2)))),
        }
        self._times: dict[str, _Times] = {}
        self._families: dict[int, _Family] = {}  # of which one has ended, by their arrival
        self._finished: Counter[str] = Counter(dict.fromkeys(FINISHED_REASONS, 0))
        self._sources: Counter[str] = Counter(dict.fromkeys(PROMPT_SOURCES, 0))
        self._cached: Counter[str] = Counter(dict.fromkeys(CACHE_SOURCES, 0))
        self._num_swapped_out = self._num_swapped_in = 0
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._has_prefix_cache = has_prefix_cache
        self._queries = self._hits = 0  # tokens looked up in the prefix cache, and found
        self.drafts = DraftGatherer(num_draft_positions)

    def on_iteration(self, num_tokens: int) -> None:
        """A step computed and emitted so many tokens."""
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def on_step(self, plan: SchedulerOutput, started_s: float) -> None:
        """A plan was computed, not yet taken up by the requests; it began at `started_s`."""
        self._num_swapped_out += len(plan.tier_stores)
        self._num_swapped_in += len(plan.tier_loads)
        self.drafts.on_plan(plan)
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.yields_token and request.num_drafts_wanted:
                self._histograms["draft_tokens"].observe(scheduled.num_draft_slots)
            times = self._times_of(request)
            if times.first_scheduled is None:
                times.first_scheduled = started_s
                if self._has_prefix_cache and not request.needs_every_row:
                    self._queries += request.num_prompt_tokens
                self._hits += request.num_cached_tokens
            for sibling in scheduled.born_siblings:
                self._times[sibling.request_id] = _Times(times.first_scheduled, is_born=True)

    def on_output(self, request: Request, output: RequestOutput, now_s: float) -> RequestTimes | None:
        """A request has new tokens, or has ended; returns its times for the first output and the last."""
        times = self._times_of(request)
        num_new = output.num_generated_tokens - times.num_generated
        is_first = times.last_token is None
        if num_new:
            if times.first_token is None:
                self._on_first_token(request, times, now_s)
            elif times.last_token is not None:
                self._histograms["inter_token_latency_seconds"].observe(now_s - times.last_token)
            times.last_token = now_s
            times.num_generated = output.num_generated_tokens
            self._num_generation_tokens += num_new
        elif output.finish_reason is FinishReason.LENGTH and not request.num_output_tokens and not times.is_born:
            self._count_prompt(request)  # it wanted no tokens, so none will count it
        if output.is_finished:
            self.on_finish(request, now_s)
        if times.first_scheduled is None or not (is_first or output.is_finished):
            return None
        return RequestTimes(times.first_scheduled, times.first_token, times.last_token)

    def _times_of(self, request: Request) -> _Times:
        times = self._times.get(request.request_id)
        if times is None:
            times = self._times[request.request_id] = _Times()
        return times

    def _on_first_token(self, request: Request, times: _Times, now_s: float) -> None:
        times.first_token = now_s
        self._histograms["time_to_first_token_seconds"].observe(now_s - request.arrival_s)
        if not times.is_born:
            self._count_prompt(request)

    def _count_prompt(self, request: Request) -> None:
        self._num_prompt_tokens += request.num_prompt_tokens
        self._sources["local_cache_hit"] += request.num_cached_tokens
        self._cached["device"] += request.num_cached_tokens - request.num_host_cached_tokens
        self._cached["host"] += request.num_host_cached_tokens
        self._sources["local_compute"] += request.num_prompt_tokens - request.num_cached_tokens

    def on_hand_down(self, request: Request, heir: Request) -> None:
        """`heir`, an unborn sibling, goes on where `request` leaves; what was counted once is not counted again."""
        if (times := self._times.pop(request.request_id, None)) is not None:
            self._times[heir.request_id] = times

    def on_finish(self, request: Request, now_s: float) -> None:
        """A request has ended, for whatever reason."""
        assert request.finish_reason is not None
        self._finished[request.finish_reason.value] += 1
        times = self._times.pop(request.request_id, _Times())
        ended_well = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if ended_well:
            self._observe_finished(request, times, now_s)
        self._on_finish_of_sample(request, ended_well=ended_well)

    def _on_finish_of_sample(self, request: Request, *, ended_well: bool) -> None:
        """What is told of all samples of a prompt is observed once, when the last of them has ended."""
        arrival, _ = request.age
        family = self._families.setdefault(arrival, _Family(request.num_samples))
        family.num_open -= 1
        if ended_well:
            family.longest = max(request.num_output_tokens, family.longest or 0)
        if family.num_open:
            return
        del self._families[arrival]
        if family.longest is not None:
            self._histograms["request_max_num_generation_tokens"].observe(family.longest)
            self._histograms["request_params_n"].observe(request.num_samples)

    def _observe_finished(self, request: Request, times: _Times, now_s: float) -> None:
        assert times.first_scheduled is not None
        num_output = request.num_output_tokens
        # Without a token the prompt's end is the end.
        prefilled_s = now_s if times.first_token is None else times.first_token
        decoded_s = now_s if times.last_token is None else times.last_token
        decode_s = decoded_s - prefilled_s
        observed = {
            "e2e_request_latency_seconds": now_s - request.arrival_s,
            "request_queue_time_seconds": times.first_scheduled - request.arrival_s,
            "request_prefill_time_seconds": prefilled_s - times.first_scheduled,
            "request_decode_time_seconds": decode_s,
            "request_inference_time_seconds": decoded_s - times.first_scheduled,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": num_output,
            "request_params_max_tokens": request.max_tokens,
            "request_prefill_kv_computed_tokens": (
                0 if times.is_born else request.num_prompt_tokens - request.num_cached_tokens
            ),
            "request_num_preemptions": request.num_preemptions,
        }
        if num_output > 1:
            observed["request_time_per_output_token_seconds"] = decode_s / (num_output - 1)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def on_drafts(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """A step verified drafts: how many tokens of each request, and how many of those were emitted."""
        self.drafts.on_verified(num_drafted, num_accepted)
        for accepted in num_accepted:
            self._histograms["acceptance_length"].observe(accepted + 1)

    def snapshot(self, **gauges: Any) -> EngineStats:
        """Everything so far, with the gauges of this moment."""
        return EngineStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            prompt_tokens_by_source=dict(self._sources),
            cached_tokens_by_source=dict(self._cached),
            num_swapped_out_blocks=self._num_swapped_out,
            num_swapped_in_blocks=self._num_swapped_in,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            finished=dict(self._finished),
            **self.drafts.snapshot(),
            histograms={name: gatherer.snapshot() for name, gatherer in self._histograms.items()},
            **gauges,
        )
