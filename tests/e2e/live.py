"""A server as users have it: a process of its own, talked to over HTTP alone, its log in a file.

Everything that waits does so by asking again until a deadline; nothing depends on how fast the machine is.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.testing import clean_environment, running, url_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
POLL_S = 0.02
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics: every sample by its name and labels."""

    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name with at least these labels; KeyError if there are none."""
        values = [value for (found, of), value in self.samples.items() if found == name and labels.items() <= set(of)]
        if not values:
            raise KeyError(f"{name} {labels}")
        return sum(values)


def parse(text: str) -> Scrape:
    """Reads an exposition as a scraper would. A series that occurs twice is an error."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_key = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(samples) == len(by_key), "a series occurs twice"
    return Scrape(by_key)


class LiveServer:
    """One running server process."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S)

    @cached_property
    def document(self) -> Any:
        """Its OpenAPI document."""
        return self.http.get("/openapi.json").raise_for_status().json()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a POST that must succeed."""
        response = self.http.post(path, json=body)
        assert 200 == response.status_code, response.text
        return response.json()

    def complete(self, **body: Any) -> Any:
        return self.post("/v1/completions", body)

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The chunks of a streamed answer, which must end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert 200 == response.status_code
        assert "data: [DONE]" == lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def scrape(self) -> Scrape:
        return parse(self.http.get("/metrics").text)

    def wait_for(self, is_so: Callable[[Scrape], bool]) -> Scrape:
        """The first scrape of which `is_so` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so(scrape := self.scrape()):
            assert time.monotonic() < deadline, f"not in {DEADLINE_S} s\n{self.log}"
            time.sleep(POLL_S)
        return scrape

    def wait_until_idle(self) -> Scrape:
        """The scrape when nothing runs or waits any more."""
        return self.wait_for(lambda s: 0 == s.total("vllm:num_requests_running") + s.total("vllm:num_requests_waiting"))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Waits for the process to end."""
        return self.process.wait(DEADLINE_S)


@contextmanager
def serving(directory: Path, *flags: str, module: str = "app") -> Iterator[LiveServer]:
    """A server on a free port for as long as the block runs; if it still runs then, it must end well on SIGTERM."""
    log = directory / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with running(command, log, environment=clean_environment(), directory=ROOT) as process:
        server = LiveServer(process, url_of(process, log), log)
        with server.http:
            yield server
            if process.poll() is None:
                server.terminate()
                assert 0 == server.exit_code(), server.log


async def data_lines(client: httpx.AsyncClient, body: Any, started: asyncio.Event) -> list[str]:
    """The data lines of one streamed completion; `started` is set with the first."""
    lines = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
                started.set()
    return lines


def joined(chunks: Sequence[Any], choice: int = 0) -> str:
    """The text of one choice of a streamed completion or chat answer."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
