"""What a decode step costs, and what speculation makes of it: CPU time of the engine alone, no server, no waiting.

Three figures: a step of the target and of the draft over a batch (the draft's share must stay at or below 0.2 for
drafting to pay), and for the whole engine the CPU time and the tokens of a step with speculation and without. CPU time,
since it does not count what other processes take; each figure is the best of several runs, since what disturbs only
adds.

    python -m benchmarks.step [--repeats 5] [--batch 1 8 32]
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import load_line, print_table
from core import EngineConfig, NewRequest, SamplingParams, SpeculativeConfig, load_engine
from core.model import tiny
from core.model.kv_cache import KVCache
from core.model.transformer import Transformer, flat_batch
from core.model.weights import load_model_files

BLOCK_SIZE = 16
CONTEXT = 128  # tokens behind each request when a step is measured
MAX_RATIO = 0.2
NUM_STEPS = 20
PROMPT = "Once upon a time there was a little girl. One day "
OUTPUT_LEN = 96


@dataclass(frozen=True)
class Run:
    """A whole run of the engine, its prompts not counted."""

    cpu_s: float
    num_steps: int
    num_tokens: int

    @property
    def cpu_s_per_token(self) -> float:
        return self.cpu_s / self.num_tokens


def best_cpu_s(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the cheapest of many calls, the first of which only warms up."""
    times = []
    for _ in range(repeats * NUM_STEPS + 1):
        started_s = time.process_time()
        work()
        times.append(time.process_time() - started_s)
    return min(times[1:])


def model_step_s(directory: object, batch: int, repeats: int) -> float:
    """CPU seconds of one forward pass over one new token of each of `batch` requests."""
    weights = load_model_files(directory)  # type: ignore[arg-type]
    model = Transformer(weights.config, weights.tensors, CONTEXT + 1)
    blocks_each = -(-(CONTEXT + 1) // BLOCK_SIZE)
    cache = KVCache(weights.config, batch * blocks_each, BLOCK_SIZE)
    tables = np.arange(batch * blocks_each).reshape(batch, blocks_each)
    runs = [([ord("a") + i % 26], CONTEXT, tuple(table.tolist())) for i, table in enumerate(tables)]

    return best_cpu_s(lambda: model.forward(flat_batch(runs, BLOCK_SIZE), cache, np.arange(batch)), repeats)


def run_engine(num_drafts: int | None, batch: int, temperature: float) -> Run:
    """Decode `batch` requests to their end; the clock starts when all prompts are computed."""
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    engine = load_engine(EngineConfig(speculative=speculative, num_kv_blocks=batch * 16, num_threads=1))
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=temperature, seed=1, ignore_eos=True)
    for i in range(batch):
        engine.add(NewRequest(request_id=str(i), prompt_token_ids=tuple(f"{PROMPT}{i}".encode()), params=params))
    while engine.stats.num_generation_tokens < batch:
        engine.step()
    num_before, num_steps, started_s = engine.stats.num_generation_tokens, 0, time.process_time()
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
    return Run(time.process_time() - started_s, num_steps, engine.stats.num_generation_tokens - num_before)


def best_run(num_drafts: int | None, batch: int, temperature: float, repeats: int) -> Run:
    return min((run_engine(num_drafts, batch, temperature) for _ in range(repeats)), key=lambda run: run.cpu_s)


def compare_models(batches: list[int], repeats: int) -> bool:
    """Prints cost of target and draft; whether the draft is cheap enough at every batch size."""
    rows, ratios = [], []
    for batch in batches:
        target, draft = (model_step_s(path, batch, repeats) for path in (tiny.TARGET_DIR, tiny.DRAFT_DIR))
        ratios.append(draft / target)
        rows.append((f"batch {batch}", f"{target * 1e3:8.2f} ms {draft * 1e3:8.2f} ms   {draft / target:.3f}"))
    rows.append(("target", f"ratio at most {MAX_RATIO}: {'met' if max(ratios) <= MAX_RATIO else 'MISSED'}"))
    print_table("One model step, CPU time: target, draft, ratio", rows)
    return max(ratios) <= MAX_RATIO


def compare_speculation(batches: list[int], repeats: int) -> None:
    rows = []
    for temperature in (0.0, 1.0):
        for batch in batches:
            plain = best_run(None, batch, temperature, repeats)
            for num_drafts in (None, 3):
                run = plain if num_drafts is None else best_run(num_drafts, batch, temperature, repeats)
                rows.append(
                    (f"temperature {temperature:g}, batch {batch}, {num_drafts or 0} drafts", _row(run, plain, batch))
                )
    print_table("The engine, decoding: CPU time a step, a token; tokens a request and step; against no drafts", rows)


def _row(run: Run, plain: Run, batch: int) -> str:
    per_step = run.num_tokens / run.num_steps / batch
    ratio = plain.cpu_s_per_token / run.cpu_s_per_token
    return (
        f"{run.cpu_s / run.num_steps * 1e3:8.2f} ms {run.cpu_s_per_token * 1e3:8.3f} ms {per_step:6.2f} {ratio:6.2f} x"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    with threadpool_limits(limits=1, user_api="blas"):
        compare_models(options.batch, options.repeats)
        compare_speculation(options.batch, options.repeats)
    print_table("", [load_line()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
