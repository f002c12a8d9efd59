"""Which engines there are, by what the options name, and with which flags each is run.

All get the same two cores, 64 places, KV for the same 40,960 tokens, no speculation, and prompts of which no part was
seen before. Variables that only our own machine's BLAS needs are taken away for all alike.
"""

import importlib.metadata
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.peers.processes import Command, DrivenEngine, Engine, HttpEngine

DRIVERS = Path(__file__).parent / "drivers"
MAX_STREAMS = 64
KV_TOKENS = 40_960
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 23_040  # SmolLM2-135M in two bytes
# Whatever restricts our BLAS on this machine would restrict theirs.
CLEAN: dict[str, str | None] = {"OPENBLAS_CORETYPE": None, "OPENBLAS_L2_SIZE": None, "OMP_NUM_THREADS": None}


def octavo(options: Namespace, logs: Path, flags: str) -> Engine:
    """Ours, with further flags of `octavo serve`."""
    name = f"Octavo {flags}".strip()
    return octavo_server(name, options.model, ["--speculative-config", "null", *flags.split()], logs)


def octavo_server(name: str, model: str, flags: Sequence[str], logs: Path) -> HttpEngine:
    arguments = [
        *(sys.executable, "-m", "app", "serve", model, "--host", "127.0.0.1", "--port", "{port}"),
        *("--max-num-seqs", str(MAX_STREAMS), "--num-kv-blocks", str(KV_TOKENS // BLOCK_SIZE)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--log-level", "warning"),
        *flags,
    ]
    version = f"octavo {importlib.metadata.version('octavo')}, NumPy {importlib.metadata.version('numpy')}"
    return HttpEngine(name, Command(arguments, CLEAN), _log(logs, name), model=model, versions=version)


def vllm(options: Namespace, logs: Path) -> Iterator[Engine]:
    """vLLM for CPU, on the model as a Hugging Face folder."""
    if options.vllm_python and options.hf_model:
        yield vllm_server("vLLM for CPU, bf16", options, logs, options.hf_model, options.vllm_args.split())


def vllm_server(name: str, options: Namespace, logs: Path, model: str, flags: Sequence[str]) -> HttpEngine:
    """It would keep one core for its HTTP side, were the threads not bound."""
    env = {
        **CLEAN,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 46,000 tokens
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if options.vllm_preload:
        env["LD_PRELOAD"] = options.vllm_preload
    arguments = [
        *(options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}"),
        *("--model", model, "--served-model-name", "m", "--dtype", "bfloat16"),
        *("--max-num-seqs", str(MAX_STREAMS), "--max-model-len", str(MAX_MODEL_LEN)),
        *flags,
    ]
    versions = _versions_there(options.vllm_python, "vllm", "torch")
    return HttpEngine(name, Command(arguments, env), _log(logs, name), model="m", versions=versions)


def llama_server(options: Namespace, logs: Path) -> Iterator[Engine]:
    """llama.cpp's server, once for each GGUF file."""
    if not options.llama_server:
        return
    shown = subprocess.run([options.llama_server, "--version"], capture_output=True, text=True, env={}, check=False)
    version = next(
        (line for line in (shown.stdout + shown.stderr).splitlines() if "version" in line), "unknown version"
    )
    for file in options.gguf:
        # Its context is divided among the slots.
        arguments = [
            *(options.llama_server, "--model", file, "--host", "127.0.0.1", "--port", "{port}"),
            *("--parallel", str(MAX_STREAMS), "--ctx-size", str(KV_TOKENS), "--threads", "2"),
            *("--batch-size", "2048", "--ubatch-size", "512"),
            *options.llama_args.split(),
        ]
        kind = Path(file).stem.rpartition(".")[2]
        log = logs / f"llama-{kind}.log"
        command = Command(arguments, CLEAN)
        yield HttpEngine(f"llama.cpp server, {kind}", command, log, model="m", versions=f"llama.cpp {version}")


def openvino(options: Namespace, logs: Path) -> Iterator[Engine]:
    """OpenVINO GenAI's continuous batching, in process."""
    if not options.openvino_python:
        return
    for file in options.openvino_model:
        arguments = [
            options.openvino_python,
            str(DRIVERS / "drive_openvino.py"),
            file,
            str(MAX_STREAMS),
            str(KV_TOKENS),
        ]
        kind = Path(file).stem.rpartition(".")[2]
        yield DrivenEngine(f"OpenVINO GenAI, {kind}, in process", Command(arguments, CLEAN), logs / "openvino.log")


def transformers(options: Namespace, logs: Path) -> Iterator[Engine]:
    """Transformers over a static batch, in process."""
    if not options.transformers_python or not options.hf_model:
        return
    arguments = [options.transformers_python, str(DRIVERS / "drive_transformers.py"), options.hf_model, "bfloat16"]
    yield DrivenEngine("transformers, bf16, static batch, in process", Command(arguments, CLEAN), logs / "hf.log")


PEERS: dict[str, Callable[[Namespace, Path], Iterator[Engine]]] = {
    "vllm": vllm,
    "llama": llama_server,
    "openvino": openvino,
    "transformers": transformers,
}


def _log(logs: Path, name: str) -> Path:
    return logs / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log"


def _versions_there(python: str, *packages: str) -> str:
    script = "import importlib.metadata as m, sys; print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
    return subprocess.run([python, "-c", script, *packages], capture_output=True, text=True, check=True).stdout.strip()
