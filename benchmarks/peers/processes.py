"""Engines as processes: started, given work, stopped from running while it is another's turn, and ended.

Two kinds, one interface: a server that is asked over HTTP, and a library in a driver process that is asked by JSON
lines. Both have every process they start in a session of their own, so that signals and memory are those of all.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.peers.client import EngineFailed, Outcome, Work, run_over_http

START_DEADLINE_S = 400.0
END_DEADLINE_S = 20.0
POLL_S = 0.005
FIRST_WORK = Work([[1, 2, 3, 4]], 1)


@dataclass(frozen=True)
class Command:
    """How to start an engine. `{port}` in an argument becomes a free port; None in `env` takes a variable away."""

    arguments: Sequence[str]
    env: Mapping[str, str | None] = field(default_factory=dict)

    def shown(self) -> str:
        """Without directories, which are nobody's business but this machine's."""
        env = [f"{name}={value}" for name, value in self.env.items() if value is not None]
        arguments = [
            argument.rpartition("/")[2] if argument.startswith("/") else argument for argument in self.arguments
        ]
        return " ".join([*(part.rpartition("/")[2] if "/" in part else part for part in env), *arguments])


class Engine(Protocol):
    """One engine under test."""

    name: str
    command: Command
    versions: str
    start_s: float

    def start(self) -> None:
        """Start it, and wait for its first answer; sets `start_s` and `versions`. Raises EngineFailed."""

    def run(self, work: Work) -> Outcome:
        """Do the work. Raises EngineFailed."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def memory_bytes(self) -> int: ...

    def stop(self) -> None: ...


class _Process:
    """A process with all that it starts, in one session."""

    _talks = False  # what it prints is read; else it goes to the log

    def __init__(self, name: str, command: Command, log: Path) -> None:
        self.name = name
        self.command = command
        self.versions = ""
        self.start_s = 0.0
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def _spawn(self, port: int = 0) -> subprocess.Popen[str]:
        env = {**os.environ, **{k: v for k, v in self.command.env.items() if v is not None}}
        for name in (name for name, value in self.command.env.items() if value is None):
            env.pop(name, None)
        arguments = [argument.replace("{port}", str(port)) for argument in self.command.arguments]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                arguments,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._talks else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _fail_if_ended(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-15:]
            raise EngineFailed("\n".join([f"{self.name} ended with code {code}", *lines]))

    def _signal(self, number: int) -> None:
        assert self._process is not None
        for pid in self._pids():
            os.kill(pid, number)

    def _pids(self) -> list[int]:
        """All processes of the session; a server may put its workers into groups of their own."""
        assert self._process is not None
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) == self._process.pid
        ]

    def pause(self) -> None:
        """Not even an idle loop of it runs until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Resident memory, what several processes share counted once."""
        return sum(map(_proportional_bytes, self._pids()))

    def stop(self) -> None:
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)


class HttpEngine(_Process):
    """A server with OpenAI's completions."""

    def __init__(self, name: str, command: Command, log: Path, *, model: str, versions: str) -> None:
        super().__init__(name, command, log)
        self._model = model
        self._known_versions = versions
        self.port = 0

    def start(self) -> None:
        self.port = free_port()
        started_s = time.perf_counter()
        self._spawn(port=self.port)
        self._wait_for_answer(started_s + START_DEADLINE_S)
        self.start_s = time.perf_counter() - started_s
        self.versions = self._known_versions

    def _wait_for_answer(self, deadline_s: float) -> None:
        """A server may listen, and say 503, while it still loads."""
        while time.perf_counter() < deadline_s:
            self._fail_if_ended()
            try:
                self.run(FIRST_WORK)
            except (OSError, EngineFailed):
                time.sleep(POLL_S)
            else:
                return
        raise EngineFailed(f"{self.name} did not answer in {START_DEADLINE_S} s")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Work) -> Outcome:
        return run_over_http("127.0.0.1", self.port, self._model, work)


class AttachedServer:
    """A server that somebody else has started, and will end."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url.rstrip("/")
        with urllib.request.urlopen(f"{self.url}/v1/models") as answer:
            self._model = str(json.load(answer)["data"][0]["id"])

    def run(self, work: Work) -> Outcome:
        address = urllib.parse.urlsplit(self.url)
        return run_over_http(address.hostname or "127.0.0.1", address.port or 80, self._model, work)


class DrivenEngine(_Process):
    """A library, in a driver process of `benchmarks.peers.drivers`."""

    _talks = True

    def start(self) -> None:
        started_s = time.perf_counter()
        self._spawn()
        self.versions = str(self._read()["versions"])
        self.start_s = time.perf_counter() - started_s

    def _read(self) -> dict[str, object]:
        """The next JSON line; libraries print what they like in between."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                value: dict[str, object] = json.loads(line)
                return value
        self._process.wait()
        self._fail_if_ended()
        raise EngineFailed(f"{self.name} said nothing more")

    def run(self, work: Work) -> Outcome:
        assert self._process is not None
        assert self._process.stdin is not None
        question = {"prompts": [list(prompt) for prompt in work.prompts], "num_new_tokens": work.num_new_tokens}
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return Outcome(**self._read())  # type: ignore[arg-type]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all its threads, in the kernel and outside."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
