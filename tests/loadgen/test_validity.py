import pytest

from loadgen.arrivals import Schedule, schedule_requests
from loadgen.benchmark import BenchResult
from loadgen.options import BenchOptions
from loadgen.record import TIMEOUT, Failure
from loadgen.runner import Run
from loadgen.summary import summarize
from loadgen.validity import check_validity
from tests.loadgen.builders import record

SCHEDULE = schedule_requests("constant", 10.0, 200, seed=0)


def requests(*, delay_s=0.0, **fields):
    """200 requests, ten a second, each 2 s under way, leaving so much late."""
    fields = {"num_planned_prompt_tokens": 8, "num_prompt_tokens": 8, "num_billed_output_tokens": 2, **fields}
    times = [float(offset_s) for offset_s in SCHEDULE.offsets_s]
    return [
        record(t_sched=t, t_send=t + delay_s, chunks=[(t + delay_s + 1, 1), (t + delay_s + 2, 1)], **fields)
        for t in times
    ]


def verdicts(records, *, lags=(0.001,) * 10, schedule: Schedule | None = SCHEDULE):
    options = BenchOptions(request_rate=10.0) if schedule else BenchOptions(max_concurrency=20)
    run = Run(0.0, max(r.t_end for r in records), records, list(lags))
    checks = check_validity(summarize(BenchResult(options, "m", schedule, run, None)))
    return {check.name: check.is_ok for check in checks}


def test_a_sound_run_passes_every_check_that_can_be_made():
    assert {"steady window", "prompt tokens from cache"} == {
        name for name, is_ok in verdicts(requests()).items() if is_ok is None
    }
    assert False not in verdicts(requests()).values()


@pytest.mark.parametrize(
    ("fields", "failing"),
    [
        ({"delay_s": 0.02}, {"schedule delay"}),
        ({"delay_s": 1.0}, {"schedule delay", "achieved rate"}),
        ({"num_prompt_tokens": 9}, {"prompt tokens"}),
        ({"num_billed_output_tokens": 3}, {"output tokens"}),
        ({"num_cached_tokens": 1}, {"prompt tokens from cache"}),
    ],
)
def test_each_fault_fails_its_check(fields, failing):
    assert failing == {name for name, is_ok in verdicts(requests(**fields)).items() if is_ok is False}


def test_few_completions_say_nothing_about_littles_law():
    assert verdicts(requests()[:60])["Little's law residual"] is None


def test_a_busy_client_fails():
    assert verdicts(requests(), lags=[0.05] * 10)["client event loop lag"] is False


def test_a_failed_request_fails():
    broken = record(t_sched=1.0, failure=Failure(TIMEOUT, ""))

    assert verdicts([*requests(), broken])["failed requests"] is False


def test_a_queue_that_grows_is_not_steady():
    records = [record(t_sched=0.1 * i, chunks=[(2.0 + 0.3 * i, 1)]) for i in range(400)]

    assert verdicts(records)["Little's law residual"] is False


def test_a_closed_loop_has_no_rate_to_keep():
    checks = verdicts(requests(delay_s=1.0), schedule=None)

    assert checks["achieved rate"] is None
    assert "schedule delay" not in checks
