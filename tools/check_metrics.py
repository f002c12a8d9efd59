"""Scrape a live server as Prometheus would, and hold what comes to `promtool check metrics` and to the requests made.

    .venv/bin/python -m tools.check_metrics      needs promtool (Debian: prometheus)

Two kinds of objection are known and stay, since the names are vLLM's: a colon in a name, and the one histogram that
ends in `_total`. Any other fails. Between two scrapes the counters must move by exactly the tokens of the requests.
"""

import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

COLON = re.compile(r"^(vllm|octavo):\w+ metric names should not contain ':'$")
TOTAL = re.compile(r'^vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix$')
BODY = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "ignore_eos": True}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class CheckFailed(Exception):
    """What is wrong with the metrics, in words."""


def call(port: int, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str, str]:
    """Status, content type and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"} if body else {}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, response.getheader("content-type", ""), response.read().decode()
    finally:
        connection.close()


def is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        return call(port, "GET", "/health")[0] == 200
    return False


@contextlib.contextmanager
def server(*flags: str) -> Iterator[int]:
    """A server on a free port, for as long as the block runs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"the server did not become healthy (exit {process.poll()})")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def scrape(port: int) -> str:
    status, content_type, text = call(port, "GET", "/metrics")
    if status != 200 or not content_type.startswith("text/plain; version=0.0.4"):
        raise CheckFailed(f"/metrics answered {status} {content_type!r}; want 200 and text/plain; version=0.0.4")
    return text


def objections(text: str) -> list[str]:
    """What promtool says of an exposition, line by line."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def unknown_objections(lines: list[str]) -> list[str]:
    return [line for line in lines if not COLON.match(line) and not TOTAL.match(line)]


def check_form(text: str) -> None:
    """Only the known objections, and really those: silence would mean that promtool did not look."""
    lines = objections(text)
    if unknown := unknown_objections(lines):
        raise CheckFailed("promtool objects to more than is known:\n  " + "\n  ".join(unknown))
    if not any(COLON.match(line) for line in lines) or not any(TOTAL.match(line) for line in lines):
        raise CheckFailed(f"promtool does not raise the known objections, but {lines}")
    print(f"promtool: {len(lines)} objections, all known")


def read(text: str) -> Series:
    """Every sample by name and labels, as the Prometheus client parses it."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    series = {(s.name, tuple(sorted(s.labels.items()))): float(s.value) for s in samples}
    if len(series) != len(samples):
        raise CheckFailed("a series occurs twice in one scrape")
    return series


def total(series: Series, name: str) -> float:
    values = [value for (found, _), value in series.items() if found == name]
    if not values:
        raise CheckFailed(f"there is no series {name}")
    return sum(values)


def check_counts(before: Series, after: Series, usages: list[dict[str, int]]) -> None:
    """The counters moved by what the answers' `usage` says, and all blocks came back."""
    expected = {
        "vllm:prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "vllm:generation_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        "vllm:request_success_total": len(usages),
    }
    for name, value in expected.items():
        if (moved := total(after, name) - total(before, name)) != value:
            raise CheckFailed(f"{name} moved by {moved}, the requests had {value}")
    blocks, free = total(after, "octavo:kv_blocks"), total(after, "octavo:kv_blocks_free")
    if free != blocks or free + total(after, "octavo:kv_blocks_used") != blocks:
        raise CheckFailed(f"{free} of {blocks} blocks are free with nothing running")
    print(f"counters: {expected}; {free:.0f} of {blocks:.0f} blocks free")


def check_acceptance(before: Series, after: Series) -> None:
    """The embedded draft was at work: some of its tokens were accepted, and the gauge says how many."""
    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    accepted, drafted = (total(after, name) - total(before, name) for name in names)
    rate = total(after, "octavo:spec_decode_acceptance_rate")
    if not 0 < accepted <= drafted or not 0 < rate <= 1:
        raise CheckFailed(f"{accepted} of {drafted} draft tokens accepted, and the gauge says {rate}")
    print(f"acceptance: {accepted:.0f} of {drafted:.0f} draft tokens, gauge {rate:.3f}")


def complete(port: int, prompt: str) -> dict[str, int]:
    status, _, text = call(port, "POST", "/v1/completions", {**BODY, "prompt": prompt})
    if status != 200:
        raise CheckFailed(f"/v1/completions answered {status}: {text[:200]}")
    usage: dict[str, int] = json.loads(text)["usage"]
    return usage


def check(port: int) -> None:
    first = scrape(port)
    check_form(first)
    usages = [complete(port, prompt) for prompt in ("Once upon a time", "The little dog", "One day, a girl")]
    second = scrape(port)
    check_form(second)
    check_counts(read(first), read(second), usages)
    check_acceptance(read(first), read(second))


def main() -> int:
    if not shutil.which("promtool"):
        print("promtool is missing; Debian has it in the package prometheus", file=sys.stderr)
        return 2
    try:
        with server(*sys.argv[1:]) as port:
            check(port)
    except CheckFailed as error:
        print(f"metrics check failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
