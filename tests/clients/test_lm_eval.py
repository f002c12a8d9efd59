"""lm-eval scores a task through the server (echo, log-probabilities, token ids); its numbers are the oracle's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}


@pytest.mark.parametrize("batch_size", ["1", "3"])
@pytest.mark.parametrize("options", ["", ",tokenized_requests=False", ",num_concurrent=4"])
def test_log_likelihoods_are_those_of_the_plain_model(v1: str, tmp_path: Path, options: str, batch_size: str):
    """Prompts as ids and as texts, one by one, in lists, and several at once."""
    model_args = f"model=octavo-tiny,base_url={v1}/completions,tokenizer_backend=remote,max_length=512{options}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model_args]
    task = ["--tasks", "octavo_endings", "--include_path", str(DATA), "--batch_size", batch_size]
    files = ["--log_samples", "--output_path", str(tmp_path)]
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, *task, *files], cwd=DATA, env=environment, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr

    found = list(_scores(tmp_path))
    expected = _oracle_scores([texts for texts, _ in found])
    assert 12 == len(found)
    for (texts, (loglikelihood, is_greedy)), (logprob, is_likeliest) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(loglikelihood, abs=1e-3), texts
        assert is_likeliest == is_greedy, texts


def _scores(directory: Path) -> Iterator[tuple[list[str], tuple[float, bool]]]:
    """((context, continuation), (log-likelihood, is greedy)) of every request, from lm-eval's log."""
    (log,) = directory.rglob("samples_octavo_endings_*.jsonl")
    for sample in map(json.loads, log.read_text().splitlines()):
        for arguments, ((loglikelihood, is_greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            yield list(arguments.values()), (float(loglikelihood), str(is_greedy) == "True")


def _oracle_scores(pairs: list[list[str]]) -> Any:
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    command = [python, "-m", "tests.clients.oracle_scores"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(pairs), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
