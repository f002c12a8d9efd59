"""Octavo beside every peer that the options name: Markdown with the medians, the ratio of each pair, versions, flags.

The work: prompts of 128 token ids, 128 new tokens, greedy, the end of sequence ignored, all sent at once, prefill
included, speculation off; over HTTP with streaming for servers, in process for libraries. Beside it the first token of
a 512-token prompt, the time from start to first answer, and resident memory after the largest batch.

Ours and a peer take turns (ours, peer, ours, peer, ...), and while one works the other is stopped; so what disturbs
the machine disturbs both. A ratio is that of a pair; the table has the median of the pairs' ratios.

    python -m tools.export_hf smollm2 build/smollm2
    python -m tools.export_hf smollm2 build/smollm2.Q8_0.gguf --dtype q8_0
    python -m benchmarks.peers --hf-model build/smollm2 --vllm-python VENV/bin/python \\
        --llama-server PATH --gguf build/smollm2.Q8_0.gguf [--engines vllm llama] [--streams 1 8] [--repeats 3]

Every path may also stand in the environment: VLLM_PYTHON, LLAMA_SERVER, OPENVINO_PYTHON, TRANSFORMERS_PYTHON, HF_MODEL.
"""

import argparse
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.peers.client import EngineFailed
from benchmarks.peers.compare import Comparison, measure_alone, measure_pair
from benchmarks.peers.engines import PEERS, octavo
from benchmarks.peers.report import write_report

EVERY = list(PEERS)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = parser.add_argument_group("what is where")
    paths.add_argument("--model", default="smollm2", help="what ours serves")
    paths.add_argument("--hf-model", default=os.environ.get("HF_MODEL"), help="the same as a Hugging Face folder")
    paths.add_argument("--gguf", nargs="+", default=[], help="the same for llama.cpp, each file a peer")
    paths.add_argument("--openvino-model", nargs="+", default=[], help="the same for OpenVINO (GGUF), each a peer")
    for name in ("vllm-python", "llama-server", "openvino-python", "transformers-python"):
        paths.add_argument(f"--{name}", default=os.environ.get(name.replace("-", "_").upper()))
    flags = parser.add_argument_group("further flags")
    flags.add_argument("--ours", action="append", help="flags of ours; repeat it for several of ours; '' for none")
    flags.add_argument("--vllm-args", default="")
    flags.add_argument("--vllm-preload", default="", help="libraries for LD_PRELOAD, as vLLM's manual advises")
    flags.add_argument("--llama-args", default="")
    parser.add_argument("--engines", nargs="*", choices=EVERY, default=EVERY, help="peers to run, of those found")
    parser.add_argument(
        "--alone", action="store_true", help="the peers (or, with --engines alone, ours) without a pair"
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs, each figure")
    parser.add_argument("--no-first-token", action="store_true")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go; default: a temporary folder")
    parser.add_argument("--lock", type=Path, nargs="*", help="files to lock (flock) while measuring")
    parser.add_argument("--output", type=Path, help="file for the Markdown, beside the terminal")
    options = parser.parse_args(arguments)
    options.ours = options.ours or [""]
    return options


@contextmanager
def locked(paths: Sequence[Path] | None) -> Iterator[None]:
    """Nobody else who asks for these files' locks measures, or works, meanwhile. They are taken in their order."""
    with ExitStack() as stack:
        for path in paths or ():
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def compare_all(options: argparse.Namespace, logs: Path) -> Iterator[Comparison]:
    """Every one of ours with every peer, one pair of engines at a time."""
    peers = [peer for name in options.engines for peer in PEERS[name](options, logs)]
    if options.alone:
        engines = peers or [octavo(options, logs, flags) for flags in options.ours]
        for engine in engines:
            yield measure_alone(engine, options, lambda: locked(options.lock))
        return
    for flags in options.ours:
        for peer in peers:
            yield measure_pair(octavo(options, logs, flags), peer, options, lambda: locked(options.lock))


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives us
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        done = []
        try:
            for comparison in compare_all(options, logs):
                done.append(comparison)
                print(write_report([comparison]), flush=True)
        except EngineFailed as error:
            print(error, file=sys.stderr)
            return 1
    if options.output:
        options.output.write_text(write_report(done), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
