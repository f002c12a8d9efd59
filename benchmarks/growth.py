"""How cost grows, measured and drawn: with the streams, with the context, with how many run and how many wait.

* Output tokens a second of the engine against the streams that decode together, wall time.
* Time of a decode step against the context of each request, for a few batch sizes: CPU time of the model alone.
* CPU time of schedule and update in a step, against requests that run (nobody waits) and against requests that wait
  (up to 10,000, behind 64 that run and leave no place), and of adding one more request and aborting it behind those.

    python -m benchmarks.growth --svg docs/growth.svg [--model octavo-tiny] [--only streams context scheduler]

Drawn by matplotlib, dependency group `bench`; the numbers are printed too.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import load_line, print_table
from benchmarks.scheduler import BLOCK_SIZE, PROMPT_LEN, running_scheduler, say_a, scheduler_us
from core import Engine, EngineConfig, NewRequest, SamplingParams, load_engine
from core.request import Request

STREAMS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 64, 256, 1024, 2048, 4096, 7680)
CONTEXT_BATCHES = (1, 8)
RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WAITING = (0, 10, 100, 1000, 3000, 10_000)
NEW_TOKENS = 64


@dataclass
class Panel:
    """One drawing: lines by name, each (x, y) points."""

    title: str
    x_label: str
    y_label: str
    is_log: bool = False
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        return [(f"{name}, {x:,g}", f"{y:,.4g}") for name, points in self.lines.items() for x, y in points]


def engine_of(model: str, num_streams: int, num_tokens: int) -> Engine:
    blocks = num_streams * -(-num_tokens // BLOCK_SIZE)
    limits: dict[str, Any] = {"max_num_batched_tokens": max(512, num_streams * 16)}
    return load_engine(EngineConfig(model=model, num_kv_blocks=blocks, max_num_seqs=num_streams, **limits))


def fill(engine: Engine, num_streams: int, prompt_len: int, new_tokens: int) -> None:
    """Add requests with prompts of their own, and step until each has been prefilled and has a token."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for i in range(num_streams):
        prompt = tuple((i + j * 7) % 256 for j in range(prompt_len))
        engine.add(NewRequest(request_id=str(i), prompt_token_ids=prompt, params=sampling))
    answered: set[str] = set()
    while len(answered) < num_streams:
        answered.update(output.request_id for output in engine.step())


def against_streams(model: str) -> Panel:
    """Tokens a second of all streams together while all decode."""
    panel = Panel("Throughput", "streams", "output tokens/s", is_log=True)
    for num_streams in STREAMS:
        engine = engine_of(model, num_streams, PROMPT_LEN + 4 * NEW_TOKENS)
        fill(engine, num_streams, PROMPT_LEN, 4 * NEW_TOKENS)
        best = min(_timed(engine.step, time.perf_counter) for _ in range(NEW_TOKENS))
        panel.lines.setdefault("best step", []).append((num_streams, num_streams / best))
    return panel


def against_context(model: str) -> Panel:
    """Milliseconds of a decode step behind so much context."""
    panel = Panel("A decode step", "tokens of context, each request", "CPU ms")
    for batch in CONTEXT_BATCHES:
        for context in CONTEXTS:
            # Whoever is prefilled first decodes until the last one is.
            new_tokens = NEW_TOKENS + batch * (1 + context // 512)
            engine = engine_of(model, batch, context + new_tokens)
            fill(engine, batch, context, new_tokens)
            best = min(_timed(engine.step, time.process_time) for _ in range(16))
            panel.lines.setdefault(f"{batch} request{'s' if batch > 1 else ''}", []).append((context, best * 1e3))
    return panel


def against_running() -> Panel:
    panel = Panel("Scheduling: requests that run", "running", "CPU us a step")
    points: list[tuple[float, float]] = [(n, scheduler_us(n, 10, has_text=False)) for n in RUNNING]
    panel.lines["schedule + update"] = points
    return panel


def against_waiting() -> Panel:
    """64 run and leave no place, so that the waiting only wait."""
    panel = Panel("Scheduling: requests that wait", "waiting, behind 64 that run", "CPU us")
    for num_waiting in WAITING:
        step, add = _waiting_us(num_waiting)
        panel.lines.setdefault("schedule + update", []).append((num_waiting, step))
        panel.lines.setdefault("add + abort", []).append((num_waiting, add))
    return panel


def _waiting_us(num_waiting: int) -> tuple[float, float]:
    scheduler = running_scheduler(64, 1024, has_text=False)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    for i in range(num_waiting):
        scheduler.add_request(Request(f"w{i}", [1] * PROMPT_LEN, sampling))

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.update(plan, say_a(plan))
        scheduler.take_outputs()

    def add_and_abort() -> None:
        scheduler.add_request(Request("late", [1] * PROMPT_LEN, sampling))
        scheduler.abort("late")

    timings = [min(_timed(work, time.thread_time) for _ in range(200)) * 1e6 for work in (step, add_and_abort)]
    return timings[0], timings[1]


def _timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    work()
    return clock() - started_s


def draw(panels: Sequence[Panel], path: Path) -> None:
    """All panels in one file, two in a row."""
    import matplotlib

    matplotlib.use("Agg")
    # Letters as letters, and the same file for the same numbers.
    matplotlib.rcParams.update({"svg.hashsalt": "octavo", "svg.fonttype": "none"})
    from matplotlib import pyplot

    num_rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(num_rows, 2, figsize=(11, 4 * num_rows), squeeze=False)
    for panel, ax in zip(panels, axes.flat, strict=False):
        for name, points in panel.lines.items():
            ax.plot(*zip(*points, strict=True), marker="o", label=name)
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.is_log:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(bottom=0)
        ax.grid(visible=True, alpha=0.3)
        ax.legend()
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


PANELS: dict[str, Callable[[str], list[Panel]]] = {
    "streams": lambda model: [against_streams(model)],
    "context": lambda model: [against_context(model)],
    "scheduler": lambda _: [against_running(), against_waiting()],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="octavo-tiny", help="octavo-tiny, a .gguf file or a directory")
    parser.add_argument("--only", nargs="+", choices=list(PANELS), default=list(PANELS))
    parser.add_argument("--svg", type=Path, help="draw it there (or a .png)")
    options = parser.parse_args()
    panels = [panel for name in options.only for panel in PANELS[name](options.model)]
    for panel in panels:
        print_table(f"{panel.title}: {panel.y_label} against {panel.x_label}", panel.rows())
    print_table("", [load_line()])
    if options.svg:
        draw(panels, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
