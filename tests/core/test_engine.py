"""The engine: what it takes, what it says, what it counts, and how it ends. Its model is a function here."""

import logging
from collections.abc import Mapping, Sequence

import pytest

from core.errors import DuplicateRequest, EngineDead, InvalidRequest, InvariantViolation
from core.request import FinishReason, RequestTimes
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput, count_only
from tests.builders import END, Clock, engine, new_request, run, text_of, token_ids_of
from tests.core.scheduling.checked_runner import CheckedRunner, next_token


class Talker:
    """Says what it was told to, step by step: lists of tokens by request; all but the last are accepted drafts."""

    def __init__(self, steps: Mapping[str, Sequence[Sequence[int]]], num_drafted: int | None = None) -> None:
        self._steps = {name: list(groups) for name, groups in steps.items()}
        self._num_drafted = num_drafted
        self.seeds: dict[str, int] = {}

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampled = {}
        for s in plan.scheduled:
            self.seeds[s.request_id] = s.request.seed
            if s.yields_token:
                tokens = self._steps[s.request_id].pop(0)
                drafted = len(tokens) - 1 if self._num_drafted is None else s.num_draft_slots
                sampled[s.request_id] = SampledTokens(tokens, num_draft_tokens=drafted)
        return ModelRunnerOutput(sampled)


def bytes_of(text: str) -> list[list[int]]:
    return [[byte] for byte in text.encode()]


# What it takes


def test_a_request_as_long_as_the_pool_runs():
    it = engine(num_kv_blocks=3, block_size=5)
    it.add(new_request(prompt=[1] * 8, max_tokens=None))

    assert 7 == len(token_ids_of(run(it)["a"]))


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    it = engine()
    it.add(new_request(max_tokens=2))
    with pytest.raises(DuplicateRequest, match="request 'a' exists already"):
        it.add(new_request(max_tokens=9))

    assert 2 == len(token_ids_of(run(it)["a"]))


def test_scripts_are_taken_only_where_they_are_on():
    with pytest.raises(InvalidRequest, match="script is taken only by a server started with --enable-scripts") as no:
        engine(enable_scripts=False).add(new_request(script=["a"]))
    assert "script" == no.value.param


# What it says


def test_a_request_is_answered_in_deltas():
    it = engine(Talker({"a": [*bytes_of("Hi!"), [END]]}))
    it.add(new_request(prompt=[1, 2], max_tokens=9))
    outputs = run(it)["a"]

    assert ["H", "i", "!", ""] == [output.text for output in outputs]
    assert [1, 2, 3, 4] == [output.num_generated_tokens for output in outputs]
    assert {(2, 0)} == {(output.num_prompt_tokens, output.num_cached_tokens) for output in outputs}
    assert [None] * 3 + [FinishReason.STOP] == [output.finish_reason for output in outputs]


def test_a_step_on_nothing_says_nothing():
    it = engine(lambda plan: pytest.fail("nothing is to be computed"))

    assert [] == it.step()


def test_an_aborted_request_says_nothing_more_and_frees_its_blocks():
    it = engine()
    it.add(new_request("a", max_tokens=30))
    it.add(new_request("b", max_tokens=2))
    it.step()
    it.abort("a")

    assert ["b"] == [output.request_id for output in it.step()]
    assert (it.stats.kv_blocks, 0, 1) == (it.stats.kv_blocks_free, it.stats.num_running, it.stats.finished["abort"])


def test_aborting_what_is_not_there_is_ignored():
    it = engine()
    it.abort("never was")
    it.add(new_request(max_tokens=1))
    it.step()
    it.abort("a")

    assert 0 == it.stats.finished["abort"]


# Seeds and drafts


def test_a_request_has_its_own_seed_or_one_that_the_engine_draws():
    def seeds(engine_seed: int) -> dict[str, int]:
        talker = Talker({name: [[0]] for name in "abc"})
        it = engine(talker, seed=engine_seed)
        it.add(new_request("a", max_tokens=1, seed=-7))
        it.add(new_request("b", max_tokens=1))
        it.add(new_request("c", max_tokens=1))
        run(it)
        return talker.seeds

    first, again, other = seeds(-1), seeds(-1), seeds(2)
    assert -7 == first["a"]
    assert first["b"] != first["c"]
    assert first == again
    assert {first["b"], first["c"]}.isdisjoint({other["b"], other["c"]})


@pytest.mark.parametrize(("asked", "slots"), [(None, 3), (0, 0), (2, 2), (9, 3)])
def test_a_request_may_ask_for_fewer_drafts_but_not_for_more(asked: int | None, slots: int):
    plans: list[SchedulerOutput] = []

    def model(plan: SchedulerOutput) -> ModelRunnerOutput:
        plans.append(plan)
        return count_only(plan)

    it = engine(model, num_drafts=3)
    it.add(new_request(max_tokens=20, speculative_tokens=asked))
    it.step()

    assert slots == plans[0].scheduled[0].num_draft_slots


# What it counts


def test_tokens_and_ends_are_counted_exactly():
    """Three requests: 5 + 4 tokens by length, 3 + 2 by the end token, 2 + 1 aborted."""
    it = engine(Talker({"a": [[1]] * 4, "b": [[1], [END]], "c": [[1]] * 9}))
    it.add(new_request("a", prompt=[1] * 5, max_tokens=4))
    it.add(new_request("b", prompt=[1] * 3, max_tokens=9))
    it.add(new_request("c", prompt=[1] * 2, max_tokens=9))
    it.step()
    it.abort("c")
    run(it)
    stats = it.stats

    assert (10, 7) == (stats.num_prompt_tokens, stats.num_generation_tokens)
    assert {"stop": 1, "length": 1, "abort": 1, "error": 0, "repetition": 0} == stats.finished
    assert (0, 0, 100, 100, 0) == (
        stats.num_running,
        stats.num_waiting,
        stats.kv_blocks,
        stats.kv_blocks_free,
        stats.kv_blocks_used,
    )
    assert 10 + 7 == stats.histograms["iteration_tokens_total"].sum


def test_gauges_show_the_moment():
    it = engine(max_num_seqs=1)
    for name in "ab":
        it.add(new_request(name, prompt=[1] * 5, max_tokens=9))
    assert (0, 2) == (it.stats.num_running, it.stats.num_waiting)
    it.step()

    assert (1, 1, 98, 2) == (
        it.stats.num_running,
        it.stats.num_waiting,
        it.stats.kv_blocks_free,
        it.stats.kv_blocks_used,
    )


def test_a_prompt_counts_once_although_preemption_computes_it_again():
    it = engine(num_kv_blocks=6, block_size=1)
    for name in "ab":
        it.add(new_request(name, prompt=[1, 2], max_tokens=4))
    run(it)
    stats = it.stats

    assert stats.num_preemptions > 0
    assert (4, 8) == (stats.num_prompt_tokens, stats.num_generation_tokens)
    assert stats.num_preemptions == stats.histograms["request_num_preemptions"].sum


def test_drafts_behind_an_end_were_not_emitted_and_do_not_count():
    """BC-058: of [d1, d2, END, d4, d5, bonus] three tokens are emitted; two of the five drafts count as accepted."""
    it = engine(Talker({"a": [[1, 2, END, 4, 5, 6]]}), num_drafts=5)
    it.add(new_request(max_tokens=20))
    (output,) = it.step()
    stats = it.stats

    assert [1, 2, END] == [token.token_id for token in output.tokens]
    assert (1, 5, 2, (1, 1, 0, 0, 0)) == (
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.accepted_per_position,
    )
    assert (3, 2 / 5) == (stats.num_generation_tokens, stats.acceptance_rate)
    assert 3 == 1 + stats.num_accepted_tokens / stats.num_drafts
    assert 1 + 3 == stats.histograms["iteration_tokens_total"].sum


def test_rejected_drafts_count_as_drafted_only():
    it = engine(Talker({"a": [[1], [1, 2], [1]]}, num_drafted=-1), num_drafts=2)
    it.add(new_request(max_tokens=4))
    run(it)
    stats = it.stats

    # Slots: 2 of 3 left, then 2 of 2 less the last token, then none.
    assert (2, 2 + 2, 1) == (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)


def test_accepted_never_pass_drafted_nor_generated():
    runner = CheckedRunner(num_blocks=20, block_size=4, has_draft_model=True)
    runner.chance_of_good_draft = 0.6
    it = engine(runner, num_kv_blocks=20, num_drafts=4)
    for i in range(12):
        it.add(new_request(f"r{i}", prompt=[i % 11, 3], max_tokens=15))
    outputs = run(it)
    stats = it.stats

    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens <= stats.num_generation_tokens == 12 * 15
    assert stats.num_accepted_tokens == sum(stats.accepted_per_position)
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    for i in range(12):
        tokens = [i % 11, 3]
        for _ in range(15):
            tokens.append(next_token(tokens))
        assert tokens[2:] == token_ids_of(outputs[f"r{i}"])


def test_latencies_are_read_off_the_given_clock():
    clock = Clock()

    def model(plan: SchedulerOutput) -> ModelRunnerOutput:
        clock.now_s += 2.0
        return count_only(plan)

    it = engine(model, clock=clock)
    clock.now_s = 10.0
    it.add(new_request(max_tokens=3, arrival_s=9.0))
    times = [output.times for output in run(it)["a"]]
    sums = {name: h.sum for name, h in it.stats.histograms.items()}

    assert (1.0, 3.0, 4.0, 7.0, 2.0) == (
        sums["request_queue_time_seconds"],
        sums["time_to_first_token_seconds"],
        sums["inter_token_latency_seconds"],
        sums["e2e_request_latency_seconds"],
        sums["request_time_per_output_token_seconds"],
    )
    assert [RequestTimes(10.0, 12.0, 12.0), None, RequestTimes(10.0, 12.0, 16.0)] == times


# When it fails


class Poisoned:
    """Cannot compute a prompt that starts with 13."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if any(s.request.token_ids[0] == 13 for s in plan.scheduled):
            raise self._error
        return count_only(plan)


def test_a_request_that_fails_fails_alone(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    it = engine(Poisoned(RuntimeError("bad row")))
    it.add(new_request("a", max_tokens=3))
    it.add(new_request("bad", prompt=[13], max_tokens=3))
    it.add(new_request("c", max_tokens=3))
    outputs = run(it)

    assert ["RuntimeError: bad row"] == [output.error for output in outputs["bad"]]
    assert (FinishReason.ERROR, 0) == (outputs["bad"][-1].finish_reason, outputs["bad"][-1].num_generated_tokens)
    assert [3, 3] == [len(token_ids_of(outputs[name])) for name in "ac"]
    assert (1, 2, 6, 2) == (
        it.stats.finished["error"],
        it.stats.finished["length"],
        it.stats.num_generation_tokens,
        it.stats.num_prompt_tokens,
    )
    assert it.stats.kv_blocks == it.stats.kv_blocks_free


@pytest.mark.parametrize("error", [InvariantViolation("a book does not balance"), MemoryError()])
def test_what_it_cannot_survive_ends_it_for_good(error: BaseException):
    it = engine(Poisoned(error))
    it.add(new_request(prompt=[13]))
    with pytest.raises(type(error)):
        it.step()

    for call in (it.step, lambda: it.add(new_request("b")), it.step):
        with pytest.raises(EngineDead, match="the engine has ended after a fault"):
            call()


def test_a_result_for_nobody_ends_it():
    it = engine(lambda plan: ModelRunnerOutput())
    it.add(new_request())

    with pytest.raises(InvariantViolation, match="should have yielded a token"):
        it.step()
    with pytest.raises(EngineDead):
        it.step()


def test_what_nobody_foresaw_ends_it_too():
    """More log-probabilities than tokens: the request is half advanced when that comes out."""
    it = engine(lambda plan: ModelRunnerOutput({"a": SampledTokens([1], logprobs=[None, None])}))
    it.add(new_request())

    with pytest.raises(ValueError, match="zip"):
        it.step()
    with pytest.raises(EngineDead):
        it.step()


def test_text_is_what_the_tokens_say_and_stops_are_the_engines():
    it = engine(Talker({"a": bytes_of("say →STOP now")}))
    it.add(new_request(max_tokens=30, stop=("STOP",)))
    outputs = run(it)["a"]

    assert ("say →", "STOP") == (text_of(outputs), outputs[-1].stop_reason)


def test_samples_of_one_prompt_share_its_cost_and_say_how_many_they_are():
    it = engine()
    it.add(new_request("a", prompt=[1] * 9, max_tokens=2, sibling_ids=["b", "c"]))
    outputs = run(it)
    stats = it.stats
    samples, computed = (stats.histograms[f"request_{name}"] for name in ("params_n", "prefill_kv_computed_tokens"))

    assert {"a": 2, "b": 2, "c": 2} == {name: len(token_ids_of(said)) for name, said in outputs.items()}
    assert (9, 9, 6) == (stats.num_prompt_tokens, stats.prefix_cache_queries, stats.num_generation_tokens)
    assert (1, 3.0) == (samples.count, samples.sum)
    assert (3, 9.0) == (computed.count, computed.sum)


def test_an_heir_counts_its_prompt_once():
    """The first sample leaves when half of the prompt is computed; the second goes on from there."""
    it = engine(max_num_batched_tokens=4)
    it.add(new_request("a", prompt=[1] * 8, max_tokens=2, sibling_ids=["b"]))
    it.step()
    it.abort("a")
    run(it)

    assert (8, 8) == (it.stats.prefix_cache_queries, it.stats.num_prompt_tokens)
    assert {"abort": 1, "length": 1} == {reason: n for reason, n in it.stats.finished.items() if n}
