"""Make the weights of `octavo-tiny`: a deep, narrow byte-level target and a one-layer draft.

In NumPy a decoding step costs kernel calls rather than parameters, so the target is deep and narrow and
the draft has a single layer: that alone makes a draft step several times cheaper. Both are Llama-architecture
models over bytes plus one end token, so the engine needs no second code path and no tokenizer file.

The target learns from the corpus; part of the stories stand in the chat form of `chat_template.jinja`, after a
request made up from their own nouns. The draft learns from the finished target: first the KL divergence, which has
useful gradients while the two are far apart, then the total variation distance, which is the very thing that
decides how many drafts are accepted (acceptance = sum over x of min(target(x), draft(x)) = 1 - TV).

Order, each resumable after a kill from its checkpoint beside `--work`:

    python tools/train_tiny.py target --corpus stories.txt --minutes 50
    python tools/train_tiny.py draft  --corpus stories.txt --minutes 8
    python tools/train_tiny.py heldout --corpus stories.txt      # tools/data/heldout.txt, tools/data/words.txt

torch is needed here and nowhere else in the project.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tiny_llama import DRAFT, TARGET, Llama, load_model, save_model
from tiny_text import END, END_LINE, Windows, make_documents, read_stories, to_tokens
from torch import nn
from torch.nn import functional

TOOLS = Path(__file__).resolve().parent
MODEL_DIR = TOOLS.parent / "core" / "model" / "tiny"
# The target's time: (until this share of it, rows, window). Longer windows cost more a token, so they come late.
PHASES = ((0.3, 16, 256), (0.92, 8, 512), (1.0, 2, 2048))
LONG_WINDOW = 2048  # from here on not compiled: it would not pay any more


class Together:
    """The gradients of all processes, averaged in shared memory.

    On a machine that others use too, one process per core beats one thread per core by far: processes wait for each
    other once a step, threads at every operator. Each process draws its own windows and takes the same step.
    """

    def __init__(self, num_processes: int, num_values: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.num_processes = num_processes
        self._values = torch.zeros(num_processes, num_values).share_memory_()
        self._barrier = context.Barrier(num_processes)

    def mean(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        """(N,) the mean over processes of their `values` (N,): the same bits for all."""
        self._values[rank, : len(values)] = values
        self._barrier.wait()
        mean = self._values[:, : len(values)].mean(0)
        self._barrier.wait()
        return mean


class Trainer:
    """Muon for the matrices of the layers, AdamW for the rest, both decayed linearly to zero.

    Progress is the larger of time spent over `minutes` and steps over `steps`, so a run fits its box on a busy
    machine and can still be repeated exactly by giving the number of steps it took.
    """

    def __init__(self, model: Llama, args: argparse.Namespace, name: str, *, rate: float) -> None:
        self.model, self.args, self.rate = model, args, args.rate or rate
        self.checkpoint = args.work / f"{name}.pt"
        named = list(model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and not n.startswith("embed")]
        others = [p for n, p in named if p.ndim != 2 or n.startswith("embed")]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.average = {n: p.detach().clone() for n, p in named}
        self.step, self.spent_s = 0, 0.0
        if self.checkpoint.exists():
            self._resume()
        self.seed = args.seed + self.step * args.processes + args.rank

    def _resume(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.average, self.step, self.spent_s = saved["average"], saved["step"], saved["spent_s"]
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "spent_s": self.spent_s,
        }
        torch.save(state, self.checkpoint.with_suffix(".new"))
        self.checkpoint.with_suffix(".new").replace(self.checkpoint)

    @property
    def progress(self) -> float:
        by_time = self.spent_s / (60 * self.args.minutes)
        return max(by_time, self.step / self.args.steps) if self.args.steps else by_time

    def run(self, loss_at: Callable[[float], torch.Tensor], *, until: float = 1.0) -> None:
        """Steps until `progress` reaches `until`; `loss_at(progress)` draws a batch and returns its loss."""
        recent: collections.deque[float] = collections.deque(maxlen=50)
        saved_at = time.monotonic()
        while self.progress < until:
            began = time.monotonic()
            recent.append(self._one_step(loss_at, began))
            if self.step % 50 == 0 and self.args.rank == 0:
                mean = sum(recent) / len(recent)
                print(f"step {self.step} progress {self.progress:.3f} loss {mean:.4f}", flush=True)
            if time.monotonic() - saved_at > 60 and self.args.rank == 0:
                self.save()
                saved_at = time.monotonic()
        if self.args.rank == 0:
            self.save()

    def _one_step(self, loss_at: Callable[[float], torch.Tensor], began: float) -> float:
        rate = self.rate * min((self.step + 1) / 50, max(1 - self.progress, 0.0))
        loss = loss_at(self.progress)
        loss.backward()
        self._share(began)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._follow()
        return loss.item()

    def _share(self, began: float) -> None:
        """Gradients, and the time this step took, become the mean over all processes."""
        weights = list(self.model.parameters())
        flat = torch.cat([w.grad.flatten() for w in weights] + [torch.tensor([time.monotonic() - began])])
        flat = self.args.together.mean(flat, self.args.rank)
        for weight, gradient in zip(weights, flat.split([w.numel() for w in weights] + [1])[:-1], strict=True):
            weight.grad.copy_(gradient.view_as(weight))
        self.spent_s += flat[-1].item()

    def _follow(self) -> None:
        """The average of the last hundred weights or so, which is what gets saved."""
        keep = min(0.98, self.step / (self.step + 10))
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                self.average[name].lerp_(weight, 1 - keep)


def gapped_positions(length: int, rng: random.Random) -> torch.Tensor:
    """(length,) positions, every other time with a leap somewhere, so that short windows teach far distances too.

    Without it a model trained at 256 positions writes rubbish at the 400th. Source: Zhu et al. 2023, PoSE,
    arXiv:2309.10400.
    """
    positions = torch.arange(length)
    if rng.random() < 0.5:
        longest = TARGET.max_positions - length
        positions[rng.randrange(1, length) :] += int(longest ** rng.random())
    return positions


def train_target(args: argparse.Namespace) -> None:
    stories, heldout = read_stories(args.corpus)
    model = Llama(TARGET)
    run = torch.compile(model, dynamic=False) if args.compile else model
    trainer = Trainer(model, args, "target", rate=5e-3)
    windows = Windows(stories, trainer.seed)

    gaps = random.Random(trainer.seed)

    def loss_of(rows: int, length: int) -> Callable[[float], torch.Tensor]:
        def loss_at(_progress: float) -> torch.Tensor:
            tokens, positions = windows.take(rows, length), gapped_positions(length, gaps)
            with torch.autocast("cpu", torch.bfloat16):
                logits = (run if length < LONG_WINDOW else model)(tokens[:, :-1], positions)
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        return loss_at

    for until, rows, length in PHASES:
        trainer.run(loss_of(rows, length), until=until)
    if args.rank == 0:
        save_model(trainer.average, TARGET, args.out / "target")
        report(args.out, heldout)


def teacher_logits(target: Llama, tokens: np.ndarray, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, float16 logits) for consecutive windows of `length`, eight at a time."""
    count = (len(tokens) - 1) // length
    rows = torch.from_numpy(tokens[: count * length]).view(count, length)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for part in rows.split(8):
            yield part, target(part, torch.arange(length)).half()


def train_draft(args: argparse.Namespace) -> None:
    """Distil; the target's logits are computed once and kept in memory (2 GB for a corpus of 4 MB)."""
    stories, heldout = read_stories(args.corpus)
    target = load_model(TARGET, args.out / "target")
    stream = to_tokens(make_documents(stories, random.Random(args.seed)))
    # Each process distils on a part of its own.
    stream = np.array_split(stream[: args.max_tokens or None], args.processes)[args.rank]
    parts = list(teacher_logits(target, stream, 512))
    tokens, logits = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    print(f"teacher: {tokens.numel()} positions", flush=True)
    model = Llama(DRAFT)
    run = torch.compile(model, dynamic=False) if args.compile else model
    trainer = Trainer(model, args, "draft", rate=5e-3)
    gaps = random.Random(trainer.seed)
    generator = torch.Generator().manual_seed(trainer.seed)

    def loss_at(progress: float) -> torch.Tensor:
        chosen = torch.randint(len(tokens), (8,), generator=generator)
        teacher = torch.softmax(logits[chosen].float(), -1)
        with torch.autocast("cpu", torch.bfloat16):
            student = run(tokens[chosen], gapped_positions(tokens.shape[1], gaps))
        if progress < 0.4:
            return -(teacher * torch.log_softmax(student.float(), -1)).sum(-1).mean()
        return (torch.softmax(student.float(), -1) - teacher).abs().sum(-1).mean() / 2

    trainer.run(loss_at)
    if args.rank == 0:
        save_model(trainer.average, DRAFT, args.out / "draft")
        report(args.out, heldout)


# ---------------------------------------------------------------------------------------------- reporting


def report(directory: Path, heldout: list[str]) -> None:
    """Bits per byte of the saved models on held-out stories, and the mean of sum min(target, draft)."""
    models = {
        name: load_model(shape, directory / name)
        for name, shape in (("target", TARGET), ("draft", DRAFT))
        if (directory / name / "model.safetensors").exists()
    }
    bits: collections.Counter[str] = collections.Counter()
    overlap, num_bytes, num_positions = 0.0, 0, 0
    for story in heldout:
        tokens = torch.from_numpy(np.concatenate(([END], to_tokens([story.encode()]))))[None]
        with torch.inference_mode():
            laws = {
                name: torch.softmax(model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1)), -1)[0]
                for name, model in models.items()
            }
        for name, law in laws.items():
            bits[name] -= float(law.gather(1, tokens[0, 1:, None]).log2().sum())
        if len(laws) == 2:
            overlap += float(torch.minimum(*laws.values()).sum())
        num_bytes += len(story)
        num_positions += tokens.shape[1] - 1
    for name in models:
        print(f"{name}: {bits[name] / num_bytes:.4f} bits per byte on {num_bytes} held-out bytes")
    if len(models) == 2:
        print(f"mean sum min(target, draft): {overlap / num_positions:.4f}")


def write_heldout(args: argparse.Namespace) -> None:
    """Committed data for tools/score_tiny.py: held-out stories up to 60 KB, and the words of the others."""
    stories, heldout = read_stories(args.corpus)
    data = TOOLS / "data"
    data.mkdir(exist_ok=True)
    kept, size = [], 0
    for story in heldout:
        entry = f"{story}\n{END_LINE}\n"
        if size + len(entry) <= 60_000:
            kept.append(entry)
            size += len(entry)
    (data / "heldout.txt").write_text("".join(kept), encoding="ascii")
    counts = collections.Counter(w for s in stories for w in set(re.findall(r"[a-z]+", s.lower())))
    # A word counts when at least three stories have it: misspellings and invented names mostly do not.
    words = sorted(word for word, count in counts.items() if count >= 3)
    (data / "words.txt").write_text("\n".join(words) + "\n", encoding="ascii")
    print(f"{len(kept)} held-out stories, {size} bytes; {len(words)} words")


def train(rank: int, args: argparse.Namespace) -> None:
    """One of the processes. All begin with the same weights and take the same steps on different windows."""
    args.rank = rank
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    {"target": train_target, "draft": train_draft}[args.what](args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("target", "draft", "heldout"))
    parser.add_argument("--corpus", type=Path, required=True, help="stories, each followed by a line <|end|>")
    parser.add_argument("--minutes", type=float, default=50, help="time box, over all resumptions")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps (0: the time box alone)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0, help="peak learning rate (0: the model's own)")
    parser.add_argument("--processes", type=int, default=2, help="one core each")
    parser.add_argument("--max-tokens", type=int, default=0, help="distil on so many positions only (0: all)")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a fifth faster, needs a C++ compiler")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory of target/ and draft/")
    parser.add_argument("--work", type=Path, default=Path(".train"), help="directory of checkpoints")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "heldout":
        write_heldout(args)
        return
    most_values = max(sum(w.numel() for w in Llama(shape).parameters()) for shape in (TARGET, DRAFT)) + 1
    args.together = Together(args.processes, most_values)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
