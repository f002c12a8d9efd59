"""What a decode step costs, and what speculation makes of it: CPU time of the engine alone, no server, no waiting.

Three figures: a step of the target and of the draft over a batch (the draft's share must stay at or below 0.2 for
drafting to pay), and for the whole engine the CPU time and the tokens of a step: without drafts, with a draft model and
with prompt look-up, greedy, with seeds (the keyed rule) and without (token rule, block verification), on a story and on
a text that repeats itself. CPU time, since it does not count what other processes take; each figure is the best of
several runs, since what disturbs only adds. Tokens and acceptance are the same in every run.

    python -m benchmarks.step [--repeats 5] [--batch 1 8 32] [--drafts 3]
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
STORY = "Once upon a time there was a little girl. One day "
REFRAIN = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog"
OUTPUT_LEN = 96
MIN_REQUESTS = 8  # measured one after another where the batch is smaller

Config = Mapping[str, Any]  # arguments of SpeculativeConfig; empty for no speculation
DRAFT_MODEL: Config = {"method": "draft_model"}
LOOK_UP: Config = {"method": "ngram"}
GREEDY, SEEDED, SAMPLED = "greedy", "seeded", "sampled"
# Name, text, sampling, drafts; each block begins with what the others are compared to.
CASES: list[tuple[str, str, str, Config]] = [
    ("story, greedy, no drafts", STORY, GREEDY, {}),
    ("story, greedy, draft model", STORY, GREEDY, DRAFT_MODEL),
    ("story, greedy, look-up", STORY, GREEDY, LOOK_UP),
    ("refrain, greedy, no drafts", REFRAIN, GREEDY, {}),
    ("refrain, greedy, draft model", REFRAIN, GREEDY, DRAFT_MODEL),
    ("refrain, greedy, look-up", REFRAIN, GREEDY, LOOK_UP),
    ("story, sampled, no drafts", STORY, SAMPLED, {}),
    ("story, sampled, draft model, block", STORY, SAMPLED, {**DRAFT_MODEL, "verification": "block"}),
    ("story, sampled, draft model, token", STORY, SAMPLED, {**DRAFT_MODEL, "verification": "token"}),
    ("story, seeded, draft model, keyed", STORY, SEEDED, DRAFT_MODEL),
    ("story, sampled, look-up", STORY, SAMPLED, LOOK_UP),
]


@dataclass(frozen=True)
class Run:
    """Runs of the engine, their prompts not counted. A turn is one request's share of a step."""

    cpu_s: float
    num_steps: int
    num_turns: int
    num_tokens: int
    num_drafted: int
    num_accepted: int

    @property
    def cpu_s_per_token(self) -> float:
        return self.cpu_s / self.num_tokens

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


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


def requests_of(numbers: range, text: str, sampling: str) -> Iterator[NewRequest]:
    """What sets a request apart stands in front, so that their texts differ and share no blocks."""
    for number in numbers:
        params = SamplingParams(
            max_tokens=OUTPUT_LEN,
            ignore_eos=True,
            temperature=0.0 if sampling == GREEDY else 1.0,
            seed=number if sampling == SEEDED else None,
        )
        prompt = tuple(f"{number}. {text}".encode())
        yield NewRequest(request_id=str(number), prompt_token_ids=prompt, params=params)


def run_engine(batch: int, text: str, sampling: str, speculative: SpeculativeConfig | None) -> Run:
    """Decode requests to their end, `batch` at a time; the clock runs when all prompts of a batch are computed."""
    # All prompts of a batch fit one step, so that nobody decodes before the clock runs.
    limits: dict[str, Any] = {"num_kv_blocks": batch * 16, "max_num_batched_tokens": batch * 128}
    engine = load_engine(EngineConfig(speculative=speculative, num_threads=1, **limits))
    cpu_s, num_steps, num_turns, num_tokens = 0.0, 0, 0, 0
    for first in range(0, max(batch, MIN_REQUESTS), batch):
        for request in requests_of(range(first, first + batch), text, sampling):
            engine.add(request)
        engine.step()
        num_before, started_s = engine.stats.num_generation_tokens, time.process_time()
        while engine.has_unfinished_requests:
            num_turns += len(engine.step())
            num_steps += 1
        cpu_s += time.process_time() - started_s
        num_tokens += engine.stats.num_generation_tokens - num_before
    stats = engine.stats
    return Run(cpu_s, num_steps, num_turns, num_tokens, stats.num_draft_tokens, stats.num_accepted_tokens)


def best_run(batch: int, text: str, sampling: str, speculative: SpeculativeConfig | None, repeats: int) -> Run:
    runs = (run_engine(batch, text, sampling, speculative) for _ in range(repeats))
    return min(runs, key=lambda run: run.cpu_s)


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


def compare_speculation(batches: list[int], repeats: int, num_drafts: int) -> None:
    rows = []
    for batch in batches:
        plain: Run | None = None
        for name, text, sampling, config in CASES:
            # However many run: what drafts cost in a large batch is the question.
            speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, disable_by_batch_size=batch, **config)
            run = best_run(batch, text, sampling, speculative if config else None, repeats)
            plain = run if plain is None or not config else plain
            rows.append((f"batch {batch:2}, {name}", _row(run, plain)))
    title = f"The engine, {num_drafts} drafts: CPU time a step, a token; accepted; tokens a request and step; gain"
    print_table(title, rows)


def _row(run: Run, plain: Run) -> str:
    return (
        f"{run.cpu_s / run.num_steps * 1e3:8.2f} ms {run.cpu_s_per_token * 1e3:8.3f} ms {run.acceptance:7.1%}"
        f" {run.num_tokens / run.num_turns:6.2f} {plain.cpu_s_per_token / run.cpu_s_per_token:6.2f} x"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=3)
    options = parser.parse_args()
    with threadpool_limits(limits=1, user_api="blas"):
        compare_models(options.batch, options.repeats)
        compare_speculation(options.batch, options.repeats, options.drafts)
    print_table("", [load_line()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
