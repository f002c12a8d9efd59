"""Say how well `octavo-tiny` writes, by numbers that nobody picked: fixed prompts, fixed seeds, held-out text.

Two kinds of measure. Of text that the engine generates: how many of its words are words, how many of its sentences
begin and end as sentences do, how much it repeats itself; the same measures of held-out stories stand beside, since
even those do not reach 100 %. Of held-out text that neither model saw: bits per byte, and the mean over positions of
sum over x of min(target(x), draft(x)), which is the share of drafts that speculation keeps at temperature 1.

The words are those of `tools/data/words.txt` (in at least three stories of the corpus), the held-out stories
`tools/data/heldout.txt`; `tools/train_tiny.py heldout` makes both. Prints a table; exits 1 if a floor is missed.

    python tools/score_tiny.py
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from core import EngineConfig, NewRequest, SamplingParams, load_engine  # noqa: E402
from core.model import tiny  # noqa: E402
from core.model.kv_cache import KVCache  # noqa: E402
from core.model.transformer import Transformer, flat_batch  # noqa: E402
from core.model.weights import load_model_files  # noqa: E402

Floats = NDArray[np.float32]
DATA = ROOT / "tools" / "data"
END = 256
BLOCK_SIZE = 16
MAX_STORY_LEN = 4096
END_LINE = "<|end|>"
OPENINGS = (
    "Once upon a time",
    "One day, a little girl",
    "There was a small dog who",
    "The cat sat",
    "In a village by the sea,",
    "A long time ago, a king",
    "The old man",
    "It was a cold night, and",
    "Tom and Lily",
    "The bird flew",
    "Every morning, the farmer",
    "A boy found a key",
    "Deep in the forest",
    '"Where are you going?" asked',
)
QUESTIONS = (
    "Tell me a story about a cat and a ball.",
    "Write a short story about a king.",
    "Can you tell me a story with a boat and a fish in it?",
    "Hello!",
    "What is the capital of France?",
    "Please write a story about a tree.",
)
SEEDS = (1, 2)
# What must hold; docs/tiny.md has what was measured.
FLOORS = {"words in the list": 0.95, "sentences well formed": 0.85, "sum min(target, draft)": 0.6}


# ------------------------------------------------------------------------------------------- generated text


@dataclass(frozen=True)
class Text:
    """A text and whether it came to its own end, rather than to the limit of tokens."""

    text: str
    is_complete: bool


def prompts() -> list[str]:
    template = ImmutableSandboxedEnvironment().from_string(tiny.chat_template())
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [*OPENINGS, *(template.render(messages=m, add_generation_prompt=True) for m in chats)]


def generate(*, max_tokens: int, temperature: float) -> list[Text]:
    """Every prompt with every seed, through the engine; a plain prompt's text includes the prompt."""
    engine = load_engine(EngineConfig(max_num_seqs=64))
    texts: dict[str, str] = {}
    is_complete: dict[str, bool] = {}
    for number, prompt in enumerate(prompts()):
        for seed in SEEDS:
            request_id = f"{number}-{seed}"
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
            engine.add(NewRequest(request_id=request_id, prompt_token_ids=tuple(prompt.encode()), params=params))
            texts[request_id] = prompt if prompt in OPENINGS else ""
    while engine.has_unfinished_requests:
        for output in engine.step():
            texts[output.request_id] += output.text
            if output.finish_reason is not None:
                is_complete[output.request_id] = output.finish_reason.value == "stop"
    return [Text(text, is_complete[request_id]) for request_id, text in texts.items()]


def words_of(text: Text) -> list[str]:
    """Runs of letters in lower case; the last one of a cut text may be half a word and is left out."""
    words: list[str] = re.findall(r"[a-z]+", text.text.lower())
    return words if text.is_complete or not text.text[-1:].isalpha() else words[:-1]


def sentences_of(text: Text) -> list[str]:
    """Pieces that end after .!? (and a closing quote) or at a line's end; a cut text's last one is left out."""
    pieces = re.split(r"(?<=[.!?])\s+|(?<=[.!?]\")\s+|\n+", text.text.strip())
    pieces = [piece for piece in pieces if piece]
    return pieces if text.is_complete or text.text.rstrip()[-1:] in ".!?" else pieces[:-1]


def is_well_formed(sentence: str) -> bool:
    """Begins with a capital or an opening quote, ends in .!?" and has 2 to 60 words."""
    shape = re.fullmatch(r"[A-Z\"'(].*(?:[.!?][\"')]?|[.!?,]\")", sentence)
    return shape is not None and 2 <= len(sentence.split()) <= 60


def num_repeated(words: list[str]) -> tuple[int, int]:
    """(four-word runs that the text had before, four-word runs)."""
    runs = list(zip(*(words[i:] for i in range(4)), strict=False))
    return len(runs) - len(set(runs)), len(runs)


def score_texts(texts: list[Text], vocabulary: set[str]) -> dict[str, float]:
    words = [words_of(text) for text in texts]
    flat = [word for part in words for word in part]
    sentences = [sentence for text in texts for sentence in sentences_of(text)]
    repeats = [num_repeated(part) for part in words]
    return {
        "words": len(flat),
        "words in the list": sum(word in vocabulary for word in flat) / len(flat),
        "sentences": len(sentences),
        "sentences well formed": sum(map(is_well_formed, sentences)) / len(sentences),
        "four-word runs repeated": sum(r for r, _ in repeats) / sum(n for _, n in repeats),
        "ended by themselves": sum(text.is_complete for text in texts) / len(texts),
    }


# ------------------------------------------------------------------------------------------- held-out text


class Reader:
    """A model that reads one text at a time and says the law of every next token."""

    def __init__(self, directory: Path) -> None:
        weights = load_model_files(directory)
        self._model = Transformer(weights.config, weights.tensors, MAX_STORY_LEN)
        self._cache = KVCache(weights.config, MAX_STORY_LEN // BLOCK_SIZE, BLOCK_SIZE)

    def laws(self, tokens: list[int]) -> Floats:
        """(T, V): row i is the law of the token after the first i + 1. Read in pieces, as the server would."""
        table = range(MAX_STORY_LEN // BLOCK_SIZE)
        parts = []
        for start in range(0, len(tokens), 256):
            piece = tokens[start : start + 256]
            batch = flat_batch([(piece, start, table)], BLOCK_SIZE)
            parts.append(self._model.forward(batch, self._cache, np.arange(len(piece))))
        logits_TV = np.concatenate(parts)
        weights_TV = np.exp(logits_TV - logits_TV.max(axis=1, keepdims=True))
        return weights_TV / weights_TV.sum(axis=1, keepdims=True)


def score_heldout(stories: Iterable[str]) -> dict[str, float]:
    """Each story by itself between two end tokens; the end counts as a token to foretell, not as a byte."""
    models = {"target": Reader(tiny.TARGET_DIR), "draft": Reader(tiny.DRAFT_DIR)}
    bits, overlap = dict.fromkeys(models, 0.0), 0.0
    num_bytes = num_positions = 0
    for story in stories:
        tokens = [END, *story.encode(), END]
        laws = {name: model.laws(tokens[:-1]) for name, model in models.items()}
        for name, law_TV in laws.items():
            bits[name] -= float(np.log2(law_TV[np.arange(len(tokens) - 1), tokens[1:]]).sum())
        overlap += float(np.minimum(laws["target"], laws["draft"]).sum())
        num_bytes += len(story)
        num_positions += len(tokens) - 1
    scores = {f"bits per byte, {name}": total / num_bytes for name, total in bits.items()}
    return {**scores, "sum min(target, draft)": overlap / num_positions}


# ------------------------------------------------------------------------------------------- the table


def print_table(generated: dict[str, float], reference: dict[str, float], heldout: dict[str, float]) -> None:
    print(f"{'':28}{'generated':>12}{'held-out':>12}{'floor':>8}")
    for name, value in generated.items():
        show: Callable[[float], str] = (lambda v: f"{v:.0f}") if value > 1 else (lambda v: f"{v:.3f}")
        print(f"{name:28}{show(value):>12}{show(reference[name]):>12}{FLOORS.get(name, ''):>8}")
    for name, value in heldout.items():
        print(f"{name:28}{'':12}{value:12.3f}{FLOORS.get(name, ''):>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--show", type=int, default=0, help="print the first so many texts too")
    args = parser.parse_args()
    vocabulary = set((DATA / "words.txt").read_text(encoding="ascii").split())
    stories = [s.strip() for s in (DATA / "heldout.txt").read_text(encoding="ascii").split(END_LINE) if s.strip()]
    began = time.monotonic()
    texts = generate(max_tokens=args.max_tokens, temperature=args.temperature)
    for text in texts[: args.show]:
        print(f"{text.text}\n{'-' * 40}")
    print(f"{len(texts)} texts in {time.monotonic() - began:.1f} s")
    cut = [Text(story[: args.max_tokens], len(story) <= args.max_tokens) for story in stories]
    generated, heldout = score_texts(texts, vocabulary), score_heldout(stories)
    print_table(generated, score_texts(cut, vocabulary), heldout)
    missed = [name for name, floor in FLOORS.items() if {**generated, **heldout}[name] < floor]
    sys.exit(f"below the floor: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
