"""OpenAI's client for Node; the checks are in openai.mjs."""

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_openai_for_node(v1: str):
    done = subprocess.run(["node", "openai.mjs", v1], cwd=HERE, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert 6 == done.stdout.count("ok ")
