"""From nothing to the first token: start the server as a user does, ask at once, and stop the clock.

The clock starts before the process does and stops with the first streamed text; the client has its request ready and
tries until the port opens. The disk is warm after the first start, as it is on a machine where Octavo is used.

    python -m benchmarks.startup [--starts 5] [MODEL and flags of octavo serve]
"""

import argparse
import http.client
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import load_line, median_and_range, print_table

TARGET_S = 2.0
DEADLINE_S = 120.0
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 64, "stream": True})


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process to the open port and to the first token; CPU seconds of its whole life."""

    open_s: float
    first_token_s: float
    cpu_s: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float) -> None:
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.002)
        else:
            return
    raise SystemExit(f"the server did not start (exit code {process.poll()})")


def wait_for_first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
    response = connection.getresponse()
    while line := response.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            connection.close()
            return
    raise SystemExit(f"no token came, status {response.status}")


def start_once(flags: Sequence[str]) -> Start:
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port)]
    cpu_before_s, started_s = children_cpu_s(), time.monotonic()
    process = subprocess.Popen([*command, "--log-level", "warning", *flags])
    try:
        wait_for_port(port, process, started_s + DEADLINE_S)
        open_s = time.monotonic() - started_s
        wait_for_first_token(port)
        first_token_s = time.monotonic() - started_s
    finally:
        process.terminate()
        process.wait()
    return Start(open_s, first_token_s, children_cpu_s() - cpu_before_s)


def children_cpu_s() -> float:
    """CPU seconds of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    options, flags = parser.parse_known_args()
    starts = [start_once(flags) for _ in range(options.starts)]
    median = statistics.median(start.first_token_s for start in starts)
    rows = [
        ("starts", str(options.starts)),
        ("listening, median", median_and_range([start.open_s for start in starts], "s")),
        ("first streamed token, median", median_and_range([start.first_token_s for start in starts], "s")),
        ("CPU time until its end, median", median_and_range([start.cpu_s for start in starts], "s")),
        ("target", f"first token in {TARGET_S} s: {'met' if median <= TARGET_S else 'MISSED'}"),
        load_line(),
    ]
    print_table("Start-up: " + (" ".join(flags) or "embedded model"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
