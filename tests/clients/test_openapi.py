"""schemathesis against our own document: for whatever fits it, or nearly, the answer is one that it names."""

import os
import subprocess
import sys
from pathlib import Path

from octavo.testing import octavo_server

HERE = Path(__file__).resolve().parent
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
)


def test_no_answer_is_outside_of_the_document(tmp_path: Path):
    """No 5xx, no status, type or body that is not documented, nothing taken that the document forbids."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    flags = ("--max-model-len", "96", "--no-enable-fault-injection")  # which a fuzzer would find, and stall everybody
    with octavo_server(*flags, python=python) as url:
        command = [str(Path(sys.executable).with_name("st")), "run", f"{url}/openapi.json"]
        options = ["--checks", ",".join(CHECKS), "--max-examples", "50", "--generation-deterministic", "--no-color"]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}
        done = subprocess.run(
            [*command, *options], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert 0 == done.returncode, done.stdout[-20_000:] + done.stderr
