"""Counters and histograms from moments handed in: no clock, no engine."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from core.config import MAX_SPECULATIVE_TOKENS
from core.request import FinishReason, OutputToken, Request, RequestOutput
from core.scheduling.drafting import DRAFT_REASONS
from core.stats import EngineStats, Histogram, StatsGatherer, token_edges
from core.stats_drafts import ACCEPTANCE_WINDOW_STEPS
from core.step import DraftChoice, SampledTokens, SchedulerOutput
from tests.builders import family, plan, request


def output(it: Request, num_new: int) -> RequestOutput:
    """The request says so many tokens more."""
    it.token_ids += [0] * num_new
    tokens = (OutputToken(0, ""),) * num_new
    return RequestOutput(
        it.request_id, "", tokens, it.num_prompt_tokens, it.num_cached_tokens, it.num_output_tokens, it.finish_reason
    )


def bucket_of(histogram: Histogram) -> float:
    """The upper edge of the one bucket that holds anything; infinity for the last."""
    (index,) = (i for i, count in enumerate(histogram.counts) if count)
    return [*histogram.edges, float("inf")][index]


@pytest.mark.parametrize(
    ("limit", "edges"), [(1, (1,)), (10, (1, 2, 5, 10)), (99, (1, 2, 5, 10, 20, 50)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_token_edges_are_1_2_5_up_to_the_limit(limit: int, edges: tuple[int, ...]):
    assert edges == token_edges(limit)


def test_an_observation_on_an_edge_belongs_to_the_bucket_below_it():
    gatherer = StatsGatherer(100, 0)
    for num_tokens in (1, 8, 9, 20_000):
        gatherer.on_iteration(num_tokens)
    histogram = gatherer.snapshot().histograms["iteration_tokens_total"]

    assert ((1, 1, 1), 1, 4, 20_018.0) == (histogram.counts[:3], histogram.counts[-1], histogram.count, histogram.sum)


def test_a_requests_moments_become_its_latencies():
    """Arrives at 10, scheduled at 11, first token at 13, then two at 14 and one at 16, where it ends."""
    gatherer, it = StatsGatherer(100, 0), request(prompt=[0] * 7, max_tokens=50)
    it.arrival_s = 10.0
    gatherer.on_step(plan(it), 11.0)
    gatherer.on_output(it, output(it, 1), 13.0)
    gatherer.on_step(plan(it), 13.0)
    gatherer.on_output(it, output(it, 2), 14.0)
    it.finish(FinishReason.LENGTH)
    gatherer.on_output(it, output(it, 1), 16.0)
    sums = {name: (h.count, h.sum) for name, h in gatherer.snapshot().histograms.items() if h.count}

    assert {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (2, 3.0),
        "request_time_per_output_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 6.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 3.0),
        "request_inference_time_seconds": (1, 5.0),
        "request_prompt_tokens": (1, 7.0),
        "request_generation_tokens": (1, 4.0),
        "request_max_num_generation_tokens": (1, 4.0),
        "request_params_max_tokens": (1, 50.0),
        "request_params_n": (1, 1.0),
        "request_prefill_kv_computed_tokens": (1, 7.0),
        "request_num_preemptions": (1, 0.0),
    } == sums


def test_prompt_tokens_count_once_and_with_their_source():
    gatherer, it = StatsGatherer(100, 0), request(prompt=[0] * 7, max_tokens=50)
    it.num_cached_tokens = 4
    gatherer.on_step(plan(it), 0.0)
    assert 0 == gatherer.snapshot().num_prompt_tokens
    gatherer.on_output(it, output(it, 1), 0.0)
    gatherer.on_step(plan(it), 0.0)  # recomputed after a preemption
    gatherer.on_output(it, output(it, 2), 0.0)
    stats = gatherer.snapshot()

    assert (7, 3) == (stats.num_prompt_tokens, stats.num_generation_tokens)
    assert {"local_compute": 3, "local_cache_hit": 4, "external_kv_transfer": 0} == stats.prompt_tokens_by_source
    assert (7, 4) == (stats.prefix_cache_queries, stats.prefix_cache_hits)


def test_hits_in_the_second_tier_have_a_source_of_their_own():
    gatherer, it = StatsGatherer(100, 0), request(prompt=[0] * 9)
    it.num_cached_tokens, it.num_host_cached_tokens = 8, 6
    gatherer.on_step(plan(it), 0.0)
    gatherer.on_output(it, output(it, 1), 0.0)
    cached = gatherer.snapshot().cached_tokens_by_source

    assert {"device": 2, "host": 6, "p2p": 0, "disk": 0, "external_unspecified": 0} == cached


def test_without_a_prefix_cache_nothing_is_looked_up():
    gatherer, it = StatsGatherer(100, 0, has_prefix_cache=False), request(prompt=[0] * 7)
    gatherer.on_step(plan(it), 0.0)

    assert 0 == gatherer.snapshot().prefix_cache_queries


def test_a_prompt_of_several_samples_counts_once_and_each_sample_has_its_own_latencies():
    """Scheduled at 1, both samples have their first token at 3, the second ends with it."""
    gatherer, it = StatsGatherer(100, 0), family("a", 2, [0] * 7)
    sibling = it.siblings[0]
    gatherer.on_step(plan(it), 1.0)
    gatherer.on_output(it, output(it, 1), 3.0)
    sibling.finish(FinishReason.LENGTH)
    gatherer.on_output(sibling, output(sibling, 1), 3.0)
    stats = gatherer.snapshot()

    assert (7, 7, 2) == (stats.num_prompt_tokens, stats.prefix_cache_queries, stats.num_generation_tokens)
    assert 2 == stats.histograms["time_to_first_token_seconds"].count
    assert (1, 2.0) == (
        stats.histograms["request_prefill_time_seconds"].count,
        stats.histograms["request_prefill_time_seconds"].sum,
    )


@pytest.mark.parametrize(
    ("ends", "observed"),
    [
        ([("length", 3), ("stop", 7), ("stop", 5)], (1, 7.0, 3.0)),
        ([("stop", 7), ("abort", 9), ("length", 3)], (1, 7.0, 3.0)),
        ([("error", 2), ("abort", 9), ("stop", 4)], (1, 4.0, 3.0)),
        ([("abort", 1), ("error", 9), ("abort", 1)], (0, 0.0, 0.0)),
        ([("stop", 7), ("length", 8)], (0, 0.0, 0.0)),  # one goes on
    ],
)
def test_what_all_samples_of_a_prompt_have_in_common_is_observed_once(
    ends: list[tuple[str, int]], observed: tuple[int, float, float]
):
    """How many they are, and the longest output of those that ended well; the prompt was computed for the first."""
    gatherer, it = StatsGatherer(100, 0), family("a", 3, [0] * 7)
    members = [it, *it.siblings]
    gatherer.on_step(plan(it), 0.0)
    for member, (reason, num_tokens) in zip(members, ends, strict=False):
        member.finish(FinishReason(reason))
        gatherer.on_output(member, output(member, num_tokens), 1.0)
    found = gatherer.snapshot().histograms
    longest, samples, computed = (
        found[f"request_{name}"] for name in ("max_num_generation_tokens", "params_n", "prefill_kv_computed_tokens")
    )

    assert observed == (longest.count, longest.sum, samples.sum)
    assert (7.0 if ends[0][0] in ("stop", "length") else 0.0) == computed.sum


@pytest.mark.parametrize("params", [{"num_prompt_logprobs": 0}, {"embed": True}])
def test_a_prompt_of_which_every_row_is_wanted_is_not_looked_up(params: dict[str, Any]):
    gatherer, it = StatsGatherer(100, 0), request(prompt=[0] * 7, **params)
    gatherer.on_step(plan(it), 0.0)
    gatherer.on_output(it, output(it, 1), 0.0)
    stats = gatherer.snapshot()

    assert (0, 7) == (stats.prefix_cache_queries, stats.num_prompt_tokens)


def test_moved_blocks_are_counted_as_the_plan_says():
    gatherer = StatsGatherer(100, 0)
    moves = SchedulerOutput(1, (), tier_stores=((1, 0), (2, 1)), tier_loads=((0, 3),))
    gatherer.on_step(moves, 0.0)
    gatherer.on_step(moves, 0.0)
    stats = gatherer.snapshot()

    assert (4, 2) == (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks)


def test_a_failed_or_aborted_request_counts_as_such_and_leaves_no_latencies():
    gatherer = StatsGatherer(100, 0)
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        it = request(reason.value)
        it.finish(reason)
        gatherer.on_finish(it, 1.0)
    stats = gatherer.snapshot()

    assert {"stop": 0, "length": 0, "abort": 1, "error": 1, "repetition": 0} == stats.finished
    assert 0 == sum(histogram.count for histogram in stats.histograms.values())


def test_an_id_that_is_used_again_starts_over():
    gatherer = StatsGatherer(100, 0)
    for arrival_s in (0.0, 10.0):
        it = request(max_tokens=1)
        it.arrival_s = arrival_s
        gatherer.on_step(plan(it), arrival_s)
        it.finish(FinishReason.LENGTH)
        gatherer.on_output(it, output(it, 1), arrival_s + 1)
    ttft = gatherer.snapshot().histograms["time_to_first_token_seconds"]

    assert (2, 2.0, 1.0) == (ttft.count, ttft.sum, bucket_of(ttft))


def test_a_single_token_has_no_time_per_output_token():
    gatherer, it = StatsGatherer(100, 0), request(max_tokens=1)
    gatherer.on_step(plan(it), 0.0)
    it.finish(FinishReason.LENGTH)
    gatherer.on_output(it, output(it, 1), 1.0)

    assert 0 == gatherer.snapshot().histograms["request_time_per_output_token_seconds"].count


def test_drafts_count_by_request_token_and_position():
    gatherer = StatsGatherer(100, 3)
    gatherer.on_drafts([3, 2], [2, 0])
    gatherer.on_drafts([3], [3])
    stats = gatherer.snapshot()

    assert (3, 8, 5, (2, 2, 1)) == (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.accepted_per_position,
    )
    assert 5 / 8 == stats.acceptance_rate


def test_a_script_may_draft_more_than_there_are_positions():
    gatherer = StatsGatherer(100, 1)
    gatherer.on_drafts([4], [3])

    assert (1, 1, 1, 0) == gatherer.snapshot().accepted_per_position


def test_positions_are_bounded_however_long_the_groups_that_scripts_say():
    """Each is a label in the metrics; all that was accepted is counted all the same."""
    gatherer = StatsGatherer(100, 1)
    gatherer.on_drafts([1000], [900])
    stats = gatherer.snapshot()

    assert (MAX_SPECULATIVE_TOKENS, 900) == (len(stats.accepted_per_position), stats.num_accepted_tokens)
    assert {1} == set(stats.accepted_per_position)


def test_the_bound_stands_beside_what_was_accepted_of_the_same_drafts():
    """Of three drafts with laws and one without."""
    gatherer = StatsGatherer(100, 4)
    gatherer.drafts.on_bounds([SampledTokens([1, 2], acceptance_bound=1.5), SampledTokens([1] * 5, num_draft_tokens=4)])
    gatherer.drafts.on_bounds([SampledTokens([1], acceptance_bound=0.5), SampledTokens([1] * 4, acceptance_bound=2.5)])
    gatherer.drafts.on_bounds([SampledTokens([1] * 4)])  # nothing to do with it
    stats = gatherer.snapshot()

    assert (4 / 3, 4.5 / 3) == (stats.mean_accepted, stats.mean_accepted_bound)


def test_what_was_chosen_is_counted_by_request_and_why_by_step():
    gatherer = StatsGatherer(100, 3)
    asking, plain, full = (
        request("a", num_drafts=3, max_tokens=9),
        request("b"),
        request("c", num_drafts=3, max_tokens=9),
    )
    for reason, slots in (("pays", 2), ("pays", 3), ("does_not_pay", 0)):
        chosen = plan(asking, full, plain, num_draft_slots=slots)
        gatherer.on_step(replace(chosen, draft_choice=DraftChoice(reason=reason)), 0.0)
    stats = gatherer.snapshot()

    assert ((2, 0, 2, 2, 0), 10) == (stats.histograms["draft_tokens"].counts, stats.histograms["draft_tokens"].sum)
    assert {"pays": 2, "does_not_pay": 1} == {reason: num for reason, num in stats.draft_steps.items() if num}
    assert set(DRAFT_REASONS) == set(stats.draft_steps)


def test_the_length_of_a_verification_counts_its_bonus_token():
    gatherer = StatsGatherer(100, 3)
    gatherer.on_drafts([3, 3, 2], [3, 0, 0])
    assert (2, 0, 0, 1, 0) == gatherer.snapshot().histograms["acceptance_length"].counts


def test_the_acceptance_rate_is_that_of_the_last_steps_that_drafted():
    gatherer = StatsGatherer(100, 2)
    assert 0.0 == gatherer.snapshot().acceptance_rate
    gatherer.on_drafts([2], [0])
    for _ in range(ACCEPTANCE_WINDOW_STEPS - 1):
        gatherer.on_drafts([2], [2])
        gatherer.on_drafts([], [])  # a step without drafts pushes nothing out
    assert 1.0 > gatherer.snapshot().acceptance_rate
    gatherer.on_drafts([2], [2])

    assert 1.0 == gatherer.snapshot().acceptance_rate


def test_a_snapshot_does_not_change_behind_its_readers_back():
    gatherer = StatsGatherer(100, 2)
    before = gatherer.snapshot(num_running=3)
    gatherer.on_drafts([2], [1])
    gatherer.on_iteration(5)

    assert (0, 0, (0, 0)) == (
        before.num_draft_tokens,
        before.histograms["iteration_tokens_total"].count,
        before.accepted_per_position,
    )
    assert 3 == before.num_running
    with pytest.raises(FrozenInstanceError):
        before.num_running = 4  # type: ignore[misc]


def test_before_anything_all_is_zero():
    stats = EngineStats()

    assert (0, 0.0, {}) == (stats.num_generation_tokens, stats.acceptance_rate, stats.histograms)
