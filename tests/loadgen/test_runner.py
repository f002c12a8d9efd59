"""Scheduling in virtual time: the real runner, on an event loop whose clock jumps to the next timer."""

import asyncio

import pytest

from loadgen.arrivals import all_at_once, schedule_requests
from loadgen.metrics import achieved_rate, measure
from loadgen.record import Chunk, RequestRecord
from loadgen.runner import Runner
from loadgen.workload import RandomPrompts
from tests.loadgen.stubs import run_virtually

PROMPTS = RandomPrompts(0, 4, 4)


class Station:
    """A server without a network: each request takes `service_s`, one after the other if it has one place."""

    def __init__(self, service_s, *, num_places=None):
        self.service_s = service_s
        self.places = asyncio.Semaphore(num_places or 1_000_000)
        self.num_in_flight = self.max_in_flight = 0
        self.prompts = {}

    async def complete(self, index, prompt, *, t_sched, t_queue, deadline):
        now = asyncio.get_running_loop().time
        t_send = now()
        self.prompts[index] = prompt
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        async with self.places:
            await asyncio.sleep(self.service_s)
        self.num_in_flight -= 1
        t_end = now()
        return RequestRecord(index, t_sched, t_queue, t_send, t_end, t_end, t_end, (Chunk(t_end, 1),))


def run_open(service_s, schedule, *, num_places=None, **limits):
    async def main():
        station = Station(service_s, num_places=num_places)
        return station, await Runner(station.complete, PROMPTS, **limits).open_loop(schedule)

    return run_virtually(main)


def run_closed(service_s, num_requests, *, duration_s=None, **limits):
    async def main():
        station = Station(service_s)
        runner = Runner(station.complete, PROMPTS, **limits)
        return station, await runner.closed_loop(num_requests, duration_s=duration_s)

    return run_virtually(main)


def test_a_client_side_queue_is_seen_from_the_intended_time_alone():
    """D/D/1: service .5 s, arrivals every .1 s, 8 of them, one in flight. From sending, every first token takes
    .5 s; from the intended time the i-th waits i (.5 - .1) more: 1.9 s in the mean, 3.3 s at most."""
    schedule = schedule_requests("constant", 10.0, 8, seed=0)
    _, run = run_open(0.5, schedule, max_concurrency=1)

    assert 0.5 == pytest.approx(measure("ttft", run.records).mean)
    assert 1.9 == pytest.approx(measure("ttft_corrected", run.records).mean)
    assert 3.3 == pytest.approx(measure("ttft_corrected", run.records).max)
    assert 2.8 == pytest.approx(measure("client_queue", run.records).max)
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [record.index for record in run.records]


def test_an_open_loop_keeps_its_schedule_however_slow_the_server():
    schedule = schedule_requests("poisson", 10.0, 50, seed=1)
    station, run = run_open(100.0, schedule)

    assert 50 == station.max_in_flight
    by_index = sorted(run.records, key=lambda record: record.index)
    assert list(schedule.offsets_s) == pytest.approx([record.t_send for record in by_index])
    assert 10.0 == pytest.approx(achieved_rate(run.records, schedule.horizon_s))


def test_a_queue_at_a_single_server_waits_as_queueing_theory_says():
    """M/D/1 at load .7: mean wait S rho / (2 (1 - rho)) = 1.1667 S. The tolerance is three sigma of the mean of
    2000 correlated waits."""
    schedule = schedule_requests("poisson", 7.0, 2000, seed=0, is_exact=False)
    _, run = run_open(0.1, schedule, num_places=1)

    assert 1.1667 == pytest.approx(measure("ttft", run.records).mean / 0.1 - 1, rel=0.36)


def test_all_at_once_is_all_at_once():
    station, run = run_open(1.0, all_at_once(20))

    assert 20 == station.max_in_flight
    assert {0.0} == {record.t_send for record in run.records}
    assert 1.0 == pytest.approx(run.duration_s)


def test_a_closed_loop_keeps_its_number_in_flight_to_the_end():
    """Not waves: whoever finishes is replaced at once."""
    station, run = run_closed(1.0, 12, max_concurrency=4)

    assert 4 == station.max_in_flight
    assert 12 == len(run.records)
    assert 3.0 == pytest.approx(run.duration_s)
    assert 0.0 == measure("schedule_delay", run.records).max


def test_a_closed_loop_with_a_duration_starts_nothing_after_it():
    _, run = run_closed(1.0, None, duration_s=4.5, max_concurrency=2)

    assert 10 == len(run.records)
    assert 4.0 == pytest.approx(max(record.t_send for record in run.records))
    assert 5.0 == pytest.approx(run.duration_s)


def test_what_still_queues_when_waiting_ends_is_recorded_as_never_sent():
    """One at a time, 1 s each, so that three leave within 2.5 s; dropping the others would hide the overload."""
    _, run = run_open(1.0, schedule_requests("constant", 4.0, 8, seed=0), max_concurrency=1, stop_after_s=2.5)

    assert 8 == len(run.records)
    assert 3 == sum(record.is_ok for record in run.records)
    assert {"not sent"} == {record.failure.kind for record in run.records if not record.is_ok}
    assert 3 == sum(record.was_sent for record in run.records)


def test_prompts_do_not_depend_on_how_they_are_scheduled():
    stations = [
        run_closed(1.0, 6, max_concurrency=1)[0],
        run_closed(1.0, 6, max_concurrency=5)[0],
        run_open(1.0, schedule_requests("poisson", 3.0, 6, seed=9))[0],
    ]

    assert [{index: PROMPTS(index) for index in range(6)}] * 3 == [station.prompts for station in stations]


def test_everyone_who_asks_hears_of_each_end():
    heard = []
    _, run = run_closed(1.0, 5, max_concurrency=2, on_done=heard.append)

    assert run.records == heard


def test_a_client_that_stands_still_shows_as_lag():
    async def main():
        async def complete(index, prompt, **times):
            # Time passes without the event loop running, as when the client computes.
            asyncio.get_running_loop()._jumping.elapsed_s += 0.4
            return await Station(0.2).complete(index, prompt, **times)

        return await Runner(complete, PROMPTS, max_concurrency=1).closed_loop(2)

    assert 0.3 < max(run_virtually(main).loop_lags_s)


def test_a_client_that_is_late_does_not_move_the_intended_times():
    """Making a prompt takes it .3 s here, three times the gap: requests leave late and are counted from before."""
    schedule = schedule_requests("constant", 10.0, 5, seed=0)

    def slow_prompts(index):
        asyncio.get_running_loop()._jumping.elapsed_s += 0.3
        return PROMPTS(index)

    async def main():
        return await Runner(Station(0.1).complete, slow_prompts, max_concurrency=9).open_loop(schedule)

    records = sorted(run_virtually(main).records, key=lambda record: record.index)
    assert [0.0, 0.1, 0.2, 0.3, 0.4] == pytest.approx([record.t_sched for record in records])
    assert [0.3, 0.5, 0.7, 0.9, 1.1] == pytest.approx([record.t_send - record.t_sched for record in records])


@pytest.mark.parametrize(("stop_after_s", "deadline"), [(None, None), (7.5, 7.5)])
def test_each_request_is_told_when_waiting_ends(stop_after_s, deadline):
    told = []

    async def main():
        async def complete(index, prompt, **times):
            told.append(times["deadline"])
            return await Station(0.1).complete(index, prompt, **times)

        await Runner(complete, PROMPTS, stop_after_s=stop_after_s).closed_loop(1)
        await Runner(complete, PROMPTS, stop_after_s=stop_after_s).open_loop(all_at_once(1))

    run_virtually(main)
    assert [deadline, deadline and pytest.approx(deadline + 0.1)] == told
