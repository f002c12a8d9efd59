"""What `octavo-tiny` reads while it learns: stories, half of them as the answer in a chat.

The corpus has no requests, so they are made up from each story's own nouns. One story in fifty is held out, by a hash
of its text, so that a longer corpus keeps the same ones out. No model in here, and no files but the corpus.
"""

from __future__ import annotations

import collections
import random
import re
import zlib
from pathlib import Path

import numpy as np
import torch

END = 256
END_LINE = "<|end|>"
HELDOUT_ONE_IN = 50

# A noun, near enough: what follows an article (and perhaps an adjective) and ends a noun phrase.
NOUN = re.compile(
    r"\b(?:a|an|the)\s+(?:[a-z]+\s+)?([a-z]{3,12})(?=[.,!?]|\s(?:was|is|and|in|on|who|named|called|that|with|had|of|to|at)\b)"
)
REQUESTS_TWO = (
    "Tell me a story about a {0} and a {1}.",
    "Write a short story about a {0} and a {1}.",
    "Write a short, simple story for young children about a {0} and a {1}.",
    "Can you tell me a story with a {0} and a {1} in it?",
    "I would like a story about a {0} who finds a {1}.",
)
REQUESTS_ONE = (
    "Tell me a story about a {0}.",
    "Please write a story about a {0}.",
    "A story about the {0}, please.",
    "What do you know about the {0}?",
    "{0}",
)
REQUESTS_ANY = ("Tell me a story.", "Hello!", "Hi there, how are you?", "Write something.", "Who are you?", "What now?")
SYSTEM = ("You tell stories.", "You are a helpful assistant.", "You are a kind storyteller. Use easy words.")


def read_stories(path: Path) -> tuple[list[str], list[str]]:
    """(training, held-out) stories; which is which depends on a story's text alone, not on its place."""
    text = path.read_text(encoding="ascii")
    stories = [story.strip() for story in text.split(END_LINE) if story.strip()]
    heldout = [s for s in stories if zlib.crc32(s.encode()) % HELDOUT_ONE_IN == 0]
    return [s for s in stories if zlib.crc32(s.encode()) % HELDOUT_ONE_IN], heldout


def make_request(story: str, rng: random.Random) -> str:
    """What a user might have typed to be told this story."""
    counts = collections.Counter(NOUN.findall(story))
    nouns = [noun for noun, _ in counts.most_common(4)]
    rng.shuffle(nouns)
    if len(nouns) >= 2 and rng.random() < 0.5:
        return rng.choice(REQUESTS_TWO).format(*nouns)
    if nouns and rng.random() < 0.8:
        return rng.choice(REQUESTS_ONE).format(nouns[0])
    return rng.choice(REQUESTS_ANY)


def make_documents(stories: list[str], rng: random.Random) -> list[bytes]:
    """One epoch: every story once, half of them plain and half as the answer in a chat."""
    order = rng.sample(stories, len(stories))
    documents: list[bytes] = []
    while order:
        story = order.pop()
        if rng.random() < 0.5:
            documents.append(story.encode())
            continue
        lines = [rng.choice(SYSTEM) + "\n"] if rng.random() < 0.2 else []
        if order and len(story) < 600 and rng.random() < 0.3:
            lines.append(f"User: {make_request(story, rng)}\nAssistant: {story}\n")
            story = order.pop()
        lines.append(f"User: {make_request(story, rng)}\nAssistant: {story}")
        documents.append("".join(lines).encode())
    return documents


def to_tokens(documents: list[bytes]) -> np.ndarray:
    """Documents one after another, each closed by the end token: (T,) int64."""
    end = np.array([END], dtype=np.int64)
    return np.concatenate([p for d in documents for p in (np.frombuffer(d, np.uint8).astype(np.int64), end)])


class Windows:
    """Random windows of an endless stream of epochs; a third begin where a document does.

    A prompt stands at position 0 with nothing before it, so the model must have seen documents begin there.
    """

    def __init__(self, stories: list[str], seed: int) -> None:
        self._stories, self._rng, self._left = stories, random.Random(seed), 0
        self._tokens = self._starts = np.empty(0, np.int64)

    def take(self, rows: int, length: int) -> torch.Tensor:
        """(rows, length + 1) token ids."""
        if self._left <= 0:
            self._tokens = to_tokens(make_documents(self._stories, self._rng))
            self._starts = np.concatenate(([0], np.flatnonzero(self._tokens == END)[:-1] + 1))
            self._left = len(self._tokens)
        self._left -= rows * length
        limit = len(self._tokens) - length - 1
        starts = [self._start() % limit for _ in range(rows)]
        return torch.from_numpy(np.stack([self._tokens[s : s + length + 1] for s in starts]))

    def _start(self) -> int:
        if self._rng.random() < 1 / 3:
            return int(self._rng.choice(self._starts))
        return self._rng.randrange(len(self._tokens))
