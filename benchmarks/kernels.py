"""What the kernels reach: products by type and rows beside NumPy's, and where the time of a pass goes.

    python -m benchmarks.kernels                      # products, one thread, CPU time
    python -m benchmarks.kernels --model FILE.gguf    # and a pass of a real model, phase by phase, all threads

CPU time, best of several; the phases are stamped by the kernels themselves, in the fastest of several passes.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from app.settings import Settings
from core.model import kernels
from core.model.transformer import flat_batch
from core.model.weights import load_model_files

WIDTHS = (576, 1536)  # of a product of SmolLM2-135M
ROWS = (1, 8, 64, 512)
NUM_WEIGHTS = 20  # taken in turn, so that they do not come from the nearest cache
PHASES = ("norm", "q, k, v", "rotate, store", "attention", "output", "norm", "gate, up", "down")
BLOCK_SIZE = 16


def best(run: Callable[[], None], clock: Callable[[], float] = time.process_time, repeats: int = 9) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        started = clock()
        run()
        times.append(clock() - started)
    return min(times)


def product(dtype: str, num_rows: int) -> Callable[[], None]:
    """Multiplies by NUM_WEIGHTS weights, one after another, as a pass does."""
    from numba import njit

    from core.model.kernels.claims import counters
    from core.model.kernels.packing import VALUES_A_WORD, WORD_DTYPES, aligned, allocate
    from core.model.kernels.products import multiply

    @njit(nogil=True)
    def all_of(sync, weights, x, scales, out):  # type: ignore[no-untyped-def]
        for index in range(weights.words.shape[0]):
            sync[:] = 0
            multiply(sync, 0, weights, index, x, scales, x.shape[0], 64, out, 0)

    width, num_out = WIDTHS
    weights = allocate(dtype, (NUM_WEIGHTS,), width, num_out, 64)
    weights.words.fill(1)  # zeros that nobody wrote are all one page, and come from the nearest cache
    x = aligned((num_rows, width // VALUES_A_WORD[dtype]), WORD_DTYPES[dtype])
    scales, out = np.ones((num_rows, width // 64), np.float32), aligned((num_rows, num_out), np.float32)
    sync = counters(1)
    return lambda: all_of(sync, weights, x, scales, out)


def numpy_product(num_rows: int) -> Callable[[], None]:
    width, num_out = WIDTHS
    weights = [np.ones((width, num_out), np.float32) for _ in range(NUM_WEIGHTS)]
    x = np.ones((num_rows, width), np.float32)

    def all_of() -> None:
        for weight in weights:
            x @ weight

    return all_of


def print_products() -> None:
    width, num_out = WIDTHS
    print(f"\nProducts of (rows, {width}) by ({width}, {num_out}), one thread, us (GFLOP/s):\n")
    print("| rows | NumPy float32 | float32 | bfloat16 | int8 |\n|---|---|---|---|---|")
    for num_rows in ROWS:
        runs = [numpy_product(num_rows), *(product(dtype, num_rows) for dtype in ("float32", "bfloat16", "int8"))]
        with threadpool_limits(1):
            seconds = [best(run) / NUM_WEIGHTS for run in runs]
        flop = 2 * num_rows * width * num_out
        cells = [f"{s * 1e6:.0f} ({flop / s / 1e9:.0f})" for s in seconds]
        print(f"| {num_rows} | {' | '.join(cells)} |")


def phase_times(model: Any, cache: Any, runs: Sequence[Any], rows: Any, repeats: int = 12) -> tuple[float, list[float]]:
    """Seconds of the fastest pass, and of those the ones in each of PHASES, all layers together."""
    from core.model.kernels.claims import STAMP

    batch, fastest, shares = flat_batch(runs, BLOCK_SIZE), float("inf"), [0.0]
    for _ in range(repeats):
        started = time.perf_counter()
        model.hidden_states(batch, cache, rows)
        seconds = time.perf_counter() - started
        if seconds < fastest:
            layers = np.diff(model.stamps(STAMP)[: 1 + len(PHASES) * model.config.num_layers]).astype(float)
            by_phase = layers.reshape(-1, len(PHASES)).sum(axis=0)
            fastest, shares = seconds, (by_phase / by_phase.sum() * seconds).tolist()
    return fastest, shares


def print_passes(path: Path, num_threads: int) -> None:
    weights = load_model_files(path, cache_dir=Settings().cache_dir)
    provider = kernels.load(Settings().cache_dir)
    from core.model.kernels.packed_cache import PackedKVCache

    table = range(20)
    batches = {
        f"{n} x 1 token behind 192": ([([5], 192, [20 * i + b for b in table]) for i in range(n)], np.arange(n))
        for n in (1, 8, 32, 64)
    }
    batches["a prompt of 512"] = ([([5] * 512, 0, list(range(32)))], np.array([511]))
    print(f"\nA pass of {path.name}, {num_threads} threads, ms:\n")
    print(
        f"| weights | batch | pass | {' | '.join(PHASES)} | output layer |\n|---|---|---|{'---|' * (len(PHASES) + 1)}"
    )
    for dtype in ("bfloat16", "int8"):
        model = provider.PackedTransformer(weights.config, weights.tensors, 1024, dtype=dtype, num_threads=num_threads)
        cache = PackedKVCache(weights.config, 64 * len(table), BLOCK_SIZE, "bfloat16")
        for array in cache.arrays[:2]:
            array.fill(0x3C003C00)  # see product(); a small number, twice
        for name, (runs, rows) in batches.items():
            seconds, phases = phase_times(model, cache, runs, rows)
            hidden = model.hidden_states(flat_batch(runs, BLOCK_SIZE), cache, rows)
            head = best(lambda hidden=hidden, model=model: model.logits(hidden), time.perf_counter)
            cells = [f"{1e3 * s:.1f}" for s in (seconds, *phases, head)]
            print(f"| {dtype} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .gguf file or a directory")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    kernels.load(Settings().cache_dir)
    print_products()
    if options.model:
        print_passes(options.model, options.num_threads)


if __name__ == "__main__":
    main()
