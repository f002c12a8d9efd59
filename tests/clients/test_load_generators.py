"""Other people's load generators run to their end against the server, and count what it counts."""

import csv
import json
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 6


def test_guidellm_completes_a_run(url: str, tmp_path: Path):
    data, report = tmp_path / "prompts.csv", tmp_path / "report.json"
    with data.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "output_tokens_count"])
        rows.writerows([f"Tale number {number}", 8] for number in range(NUM_REQUESTS))
    command = [sys.executable, "-m", "guidellm", "benchmark", "run", "--target", url, "--model", "octavo-tiny"]
    options = ["--rate-type", "concurrent", "--rate", "2", "--max-requests", str(NUM_REQUESTS)]
    files = ["--data", str(data), "--output-path", str(report), "--disable-progress"]
    done = subprocess.run([*command, *options, *files], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert NUM_REQUESTS == benchmark["run_stats"]["requests_made"]["successful"]
    assert [8] * NUM_REQUESTS == [request["output_tokens"] for request in benchmark["requests"]["successful"]]
