"""What a step costs beside the model: CPU time of scheduling, of the engine's books, and of streaming over HTTP.

Three figures, each with a null model that says the same token every time and costs nothing:

* schedule + update of a batch that decodes, without text, and with detokenizing and stop strings beside it;
* the engine's whole step over the same batch, with its outputs and statistics;
* streams over HTTP, one event a token: events for each CPU second of the server process, the client in another.

CPU time, best of many steps (of several runs over HTTP), since what disturbs only adds.

    python -m benchmarks.scheduler [--requests 64] [--rounds 30] [--no-http] [--runs 3] [--profile FILE]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import load_line, print_table
from benchmarks.peers.client import Work, run_over_http
from benchmarks.peers.processes import cpu_s, free_port
from core import ByteTokenizer, Engine, EngineConfig, NewRequest, SamplingParams
from core.memory.block_manager import BlockManager
from core.model import tiny
from core.model.weights import load_model_config
from core.request import Request
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput
from core.tokenizer import IncrementalDetokenizer

PROMPT_LEN = 128
NEW_TOKENS = 1024
MAX_STEP_US = 300.0
MIN_EVENTS_PER_CPU_S = 20_000
STOPS = ("\n\nUser:", "<|im_end|>", "###")
SAID = ord("a")  # what the null model says; it begins no stop string
BLOCK_SIZE = 16
STEPS_A_ROUND = 32  # two blocks of each request, so that every round has the same share of new blocks


def say_a(plan: SchedulerOutput) -> ModelRunnerOutput:
    """An `execute` that computes nothing and says the same token for everybody."""
    sampled = {r.request_id: SampledTokens((SAID,)) for s in plan.scheduled for r in s.yielding_requests}
    return ModelRunnerOutput(sampled)


def params(num_tokens: int, stops: tuple[str, ...]) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, stop=stops)


def running_scheduler(num_requests: int, num_tokens: int, *, has_text: bool) -> ContinuousBatchingScheduler:
    """A scheduler whose requests have all been prefilled."""
    blocks_each = -(-(PROMPT_LEN + num_tokens) // BLOCK_SIZE)
    manager = BlockManager(num_requests * blocks_each, BLOCK_SIZE)
    scheduler = ContinuousBatchingScheduler(num_requests, manager, execute=say_a, enable_prefix_caching=True)
    for i in range(num_requests):
        decoder = IncrementalDetokenizer(ByteTokenizer()) if has_text else None
        sampling = params(num_tokens, STOPS if has_text else ())
        scheduler.add_request(Request(str(i), [i % 256] * PROMPT_LEN, sampling, decoder=decoder))
    while scheduler.num_waiting:
        scheduler.step()
    scheduler.take_outputs()
    return scheduler


def scheduler_us(num_requests: int, rounds: int, *, has_text: bool) -> float:
    """CPU microseconds of schedule and update in one step: the cheapest round's mean."""
    scheduler = running_scheduler(num_requests, rounds * STEPS_A_ROUND + 8, has_text=has_text)

    def step() -> int:
        started_ns = time.thread_time_ns()
        plan = scheduler.schedule()
        spent_ns = time.thread_time_ns() - started_ns
        result = say_a(plan)
        started_ns = time.thread_time_ns()
        scheduler.update(plan, result)
        spent_ns += time.thread_time_ns() - started_ns
        scheduler.take_outputs()
        return spent_ns

    return _best_mean_us(step, rounds)


def engine_us(num_requests: int, rounds: int) -> float:
    """CPU microseconds of the engine's whole step, text and stop strings included."""
    num_tokens = rounds * STEPS_A_ROUND + 8
    engine = null_engine(num_requests, num_tokens)
    for i in range(num_requests):
        engine.add(
            NewRequest(request_id=str(i), prompt_token_ids=(i % 256,) * PROMPT_LEN, params=params(num_tokens, STOPS))
        )
    while engine.stats.num_waiting:
        engine.step()

    def step() -> int:
        started_ns = time.thread_time_ns()
        engine.step()
        return time.thread_time_ns() - started_ns

    return _best_mean_us(step, rounds)


def null_engine(num_requests: int, num_tokens: int) -> Engine:
    """An engine with all its books and no model."""
    blocks_each = -(-(PROMPT_LEN + num_tokens) // BLOCK_SIZE)
    config = EngineConfig(
        num_kv_blocks=num_requests * blocks_each,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT_LEN,
        speculative=None,
    )
    return Engine(config, load_model_config(tiny.TARGET_DIR), ByteTokenizer(), say_a)


def _best_mean_us(step: Callable[[], int], rounds: int) -> float:
    return min(sum(step() for _ in range(STEPS_A_ROUND)) for _ in range(rounds)) / STEPS_A_ROUND / 1e3


def events_per_cpu_s(num_streams: int, runs: int, profile: Path | None) -> Iterator[tuple[float, float]]:
    """(events a CPU second of the server, tokens a second) of each run, all streams at once."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.null_server", str(port), str(num_streams), str(NEW_TOKENS)]
    server = subprocess.Popen([*command, *([str(profile)] if profile else [])], stdin=subprocess.PIPE)
    assert server.stdin is not None
    try:
        _wait_for(port)
        for run in range(runs):
            work = Work([[run % 256, i % 256] * (PROMPT_LEN // 2) for i in range(num_streams)], NEW_TOKENS)
            before_s = cpu_s(server.pid)
            outcome = run_over_http("127.0.0.1", port, "", work)
            spent_s = cpu_s(server.pid) - before_s
            yield outcome.num_tokens / spent_s, outcome.tokens_per_s
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            run_over_http("127.0.0.1", port, "", Work([[1, 2]], 1))
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise SystemExit("the server did not start")


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runs", type=int, default=3, help="over HTTP")
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--profile", type=Path, help="write the server's event loop's cProfile there")
    options = parser.parse_args()
    bare = scheduler_us(options.requests, options.rounds, has_text=False)
    rows = [
        ("schedule + update, no text", f"{bare:7.0f} us"),
        ("target", f"at most {MAX_STEP_US:.0f} us: {_verdict(bare <= MAX_STEP_US)}"),
        (
            "with detokenizing and stop strings",
            f"{scheduler_us(options.requests, options.rounds, has_text=True):7.0f} us",
        ),
        ("the engine's step, the same", f"{engine_us(options.requests, options.rounds):7.0f} us"),
    ]
    if not options.no_http:
        runs = list(events_per_cpu_s(options.requests, options.runs, options.profile))
        best = max(events for events, _ in runs)
        rows += [
            ("events a CPU second of the server", f"{best:7,.0f} ({min(e for e, _ in runs):,.0f} to {best:,.0f})"),
            ("target", f"at least {MIN_EVENTS_PER_CPU_S:,}: {_verdict(best >= MIN_EVENTS_PER_CPU_S)}"),
            ("events a second, client beside it", f"{max(rate for _, rate in runs):7,.0f}"),
        ]
    rows.append(load_line())
    print_table(f"CPU time beside the model, {options.requests} requests that decode", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
