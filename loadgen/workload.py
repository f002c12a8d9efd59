"""What is sent: prompt number i is a function of the seed and i alone.

So a run may be longer, shorter or differently scheduled and still send the same prompts, and warm-up prompts,
drawn from another stream, never fill the server's prefix cache with what will be measured. Random prompts are
token ids rather than text, because text would be tokenized to another length than was asked for.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MEASURED_STREAM = 0
WARMUP_STREAM = 1


@dataclass(frozen=True)
class Prompt:
    """Text or token ids, and how many tokens to ask for."""

    content: str | tuple[int, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int | None:
        """None for text: how long it is, the server's tokenizer decides."""
        return None if isinstance(self.content, str) else len(self.content)


class InvalidDataset(Exception):
    """A file of prompts that cannot be read as one; the message names the line."""


PromptSource = Callable[[int], Prompt]


@dataclass(frozen=True)
class RandomPrompts:
    """Uniform ids in [0, vocab_size); lengths uniform in [len * (1 - ratio), len * (1 + ratio)], at least 1."""

    seed: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    vocab_size: int = 256
    stream: int = MEASURED_STREAM

    def __call__(self, index: int) -> Prompt:
        rng = np.random.default_rng((self.seed % 2**64, self.stream, index))
        num_input = self._draw_length(rng, self.input_len)
        num_output = self._draw_length(rng, self.output_len)
        ids = rng.integers(0, self.vocab_size, num_input)
        return Prompt(tuple(int(token) for token in ids), num_output)

    def _draw_length(self, rng: np.random.Generator, length: int) -> int:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = max(low, math.ceil(length * (1 + self.range_ratio)))
        return int(rng.integers(low, high + 1))


@dataclass(frozen=True)
class FixedPrompts:
    """Given prompts in order, from the start again when they run out."""

    prompts: tuple[Prompt, ...]

    def __call__(self, index: int) -> Prompt:
        return self.prompts[index % len(self.prompts)]


def read_prompts(path: Path, default_output_len: int) -> FixedPrompts:
    """A JSON Lines file of {"prompt": text or ids, "output_len": optional}.

    Raises:
        InvalidDataset: a line is something else, or there is none.
    """
    with path.open("rb") as lines:
        prompts = tuple(_parse_lines(lines, path.name, default_output_len))
    if not prompts:
        raise InvalidDataset(f"{path.name} holds no prompts")
    return FixedPrompts(prompts)


def _parse_lines(lines: Iterable[bytes], name: str, default_output_len: int) -> Iterable[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _parse_prompt(json.loads(line.decode("utf-8-sig")), default_output_len)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidDataset(f"{name}, line {number}: {error!r}") from error


def _parse_prompt(row: dict[str, Any], default_output_len: int) -> Prompt:
    content = row["prompt"]
    if not isinstance(content, str):
        content = tuple(_whole(token, "a token id") for token in content)
    if not content:
        raise ValueError("the prompt is empty")
    given = row.get("output_len")
    output_len = default_output_len if given is None else _whole(given, "output_len")
    if output_len < 1:
        raise ValueError(f"output_len must be at least 1, got {output_len}")
    return Prompt(content, output_len)


def _whole(value: Any, name: str) -> int:
    """As it stands in the file: to round it, or to read a text as a number, would measure something else."""
    if type(value) is not int:  # True is an int to isinstance
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value
