"""What a common system prompt saves: prompt tokens computed and KV blocks used, with prefix sharing and without.

100 requests begin with the same 512 tokens and go on differently. They arrive together, or one primes the cache and
the others follow together. Scheduler and block manager do what they always do, only no model is run; a step may be as
long as it likes, so that all run at once and hold their blocks at once. Everything printed is a count: it is the same
on every machine.

    python -m benchmarks.prefix_sharing [--requests 100] [--system-tokens 512] [--svg docs/prefix-sharing.svg]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import print_table
from core import ByteTokenizer, Engine, EngineConfig, NewRequest, SamplingParams, blocks_needed
from core.model.config import ModelConfig
from core.step import ModelRunnerOutput, SchedulerOutput, count_only

BLOCK_SIZE = 16
SUFFIX_TOKENS = (8, 40)  # shortest and longest
OUTPUT_TOKENS = 32
SIZES = ModelConfig(
    vocab_size=257,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=8192,
)
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """Counts of one run; `blocks_by_step[i]` are in use after step i."""

    num_computed_tokens: int
    blocks_by_step: tuple[int, ...]

    @property
    def peak_blocks(self) -> int:
        return max(self.blocks_by_step)


def make_prompts(num_requests: int, num_system_tokens: int) -> list[tuple[int, ...]]:
    """Prompts with a common beginning; what follows it differs from its first token on."""
    rng = np.random.default_rng(0)
    system = rng.integers(1, 256, num_system_tokens).tolist()
    low, high = SUFFIX_TOKENS
    lengths = rng.integers(low, high + 1, num_requests).tolist()
    return [(*system, i % 256, i // 256, *([7] * (length - 2))) for i, length in enumerate(lengths)]


def run(prompts: Prompts, *, shares: bool, num_priming: int, max_num_batched_tokens: int | None = None) -> Outcome:
    """Let the first `num_priming` prompts finish, then add the others all at once. No limit: a step takes them all."""
    longest = blocks_needed(max(map(len, prompts)) + OUTPUT_TOKENS, BLOCK_SIZE)
    num_computed = 0

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal num_computed
        num_computed += sum(max(0, min(s.end, s.request.num_prompt_tokens) - s.start) for s in plan.scheduled)
        return count_only(plan)

    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_kv_blocks=len(prompts) * longest,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=max_num_batched_tokens or sum(map(len, prompts)),
        enable_prefix_caching=shares,
    )
    engine = Engine(config, SIZES, ByteTokenizer(), execute)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    numbered, blocks_by_step = list(enumerate(prompts)), []
    for part in (numbered[:num_priming], numbered[num_priming:]):
        for number, prompt in part:
            engine.add(NewRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished_requests:
            engine.step()
            blocks_by_step.append(engine.stats.kv_blocks_used)
    return Outcome(num_computed, tuple(blocks_by_step))


def report(prompts: Prompts, num_system_tokens: int) -> tuple[Outcome, Outcome]:
    """Prints the counts; returns those without sharing, and with it when all arrive together."""
    without = run(prompts, shares=False, num_priming=0)
    together, primed = (run(prompts, shares=True, num_priming=number) for number in (0, 1))
    num_suffix = sum(map(len, prompts)) - num_system_tokens * len(prompts)
    rows = [("", "  computed   blocks at most")]
    outcomes = {"no sharing": without, "one primes, then all others": primed, "all together": together}
    for name, outcome in outcomes.items():
        rows.append((name, f"{outcome.num_computed_tokens:10,} {outcome.peak_blocks:12,}"))
    rows += [
        ("once the system prompt + suffixes", f"{num_system_tokens + num_suffix:10,}"),
        (
            "saved, all together",
            f"{_saved(without.num_computed_tokens, together.num_computed_tokens):>10}"
            f" {_saved(without.peak_blocks, together.peak_blocks):>12}",
        ),
    ]
    print_table(
        f"{len(prompts)} requests with a system prompt of {num_system_tokens} tokens: prompt tokens, KV blocks", rows
    )
    return without, together


def _saved(without: int, shared: int) -> str:
    return f"{1 - shared / without:.1%}"


# The picture

WIDTH, LEFT, BAR, GAP = 720, 150, 22, 8
COLOURS = {"no sharing": "#b0b7c3", "shared": "#2f6fb3"}


def draw(without: Outcome, shared: Outcome, title: str) -> str:
    """Bars for both counts, and the blocks in use over the steps, as SVG."""
    parts = [_text(16, 28, title, size=16)]
    parts += _bars(52, "prompt tokens computed", without.num_computed_tokens, shared.num_computed_tokens)
    parts += _bars(142, "KV blocks at most", without.peak_blocks, shared.peak_blocks)
    parts += _lines(236, 150, without.blocks_by_step, shared.blocks_by_step)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 440" font-family="sans-serif">'
        f'<rect width="{WIDTH}" height="440" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="#222">{text}</text>'


def _bars(top: int, name: str, without: int, shared: int) -> list[str]:
    """A pair of bars to one scale, each with its number behind it."""
    parts = [_text(16, top + 12, name)]
    for i, (label, value) in enumerate(zip(COLOURS, (without, shared), strict=True)):
        y, length = top + 20 + i * (BAR + GAP), (WIDTH - LEFT - 90) * value / without
        parts += [
            _text(LEFT - 8, y + 16, label, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[label]}"/>',
            _text(LEFT + length + 8, y + 16, f"{value:,}"),
        ]
    return parts


def _lines(top: int, height: int, without: Sequence[int], shared: Sequence[int]) -> list[str]:
    """Both runs' blocks in use over their steps, on common axes."""
    most, num_steps, right = max(without), max(len(without), len(shared)), WIDTH - 30
    bottom = top + 26 + height
    parts = [
        _text(16, top + 12, "KV blocks in use, step by step"),
        f'<path d="M{LEFT} {top + 26}V{bottom}H{right}" fill="none" stroke="#888"/>',
        _text(LEFT - 8, top + 34, f"{most:,}", anchor="end"),
        _text(LEFT - 8, bottom, "0", anchor="end"),
        _text(right, bottom + 16, f"step {num_steps}", anchor="end"),
    ]
    for colour, values in zip(COLOURS.values(), (without, shared), strict=True):
        points = " ".join(
            f"{LEFT + (right - LEFT) * (i + 1) / num_steps:.1f},{bottom - height * value / most:.1f}"
            for i, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--svg", type=Path, help="draw it there")
    options = parser.parse_args()
    without, together = report(make_prompts(options.requests, options.system_tokens), options.system_tokens)
    if options.svg:
        title = (
            f"{options.requests} requests that begin with the same {options.system_tokens} tokens, arriving together"
        )
        options.svg.write_text(draw(without, together, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
