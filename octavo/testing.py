"""A server for the tests of other projects: `with octavo_server() as url`.

It is the server of `octavo serve`, in a process of its own on a free port, with the embedded model, scripts and faults;
nothing of it is imported here, so what the tests import does not get into the server. Installed, though, Octavo brings
the top-level packages app, core and loadgen: a project that has one of these names installs Octavo in an environment of
its own, gives that one's interpreter as `python` (or pytest's ini option `octavo_python`), and needs a copy of this
folder only.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent  # where the server's packages lie, beside this one or installed
FLAGS = ("--enable-scripts", "--enable-fault-injection", "--shutdown-timeout", "1")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.02


class ServerFailed(RuntimeError):
    """The server ended, or did not begin, for the reasons that its log gives."""


@contextmanager
def octavo_server(*flags: str, python: str = sys.executable) -> Iterator[str]:
    """A server for as long as the block runs; gives its address, `http://127.0.0.1:PORT`.

    Args:
        flags: of `octavo serve`, behind those of `FLAGS`, for example "--max-num-seqs", "4".
        python: runs the server, where Octavo, or what it needs, is installed elsewhere than the tests.

    Raises:
        ServerFailed: it did not come up; the message has its log.
    """
    # -P and a path of its own: a project may well have a package called app.
    command = [python, "-P", "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0", *FLAGS, *flags]
    environment = {**clean_environment(), "PYTHONPATH": str(HOME)}
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        log = Path(directory) / "server.log"
        with running(command, log, environment=environment) as process:
            yield url_of(process, log)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # held up by a stall, say; it is killed
                process.wait(STOP_TIMEOUT_S)


def clean_environment() -> dict[str, str]:
    """Without the settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}


@contextmanager
def running(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str], directory: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`; whatever happens, it is gone in the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens, as its log says once it does."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (match := re.search(r"listening on (https?://[^\s\"]+)", log.read_text())) is None:
        if process.poll() is not None:
            raise ServerFailed(f"octavo ended with exit code {process.returncode}\n{log.read_text()}")
        if time.monotonic() > deadline_s:
            raise ServerFailed(f"octavo is not up after {START_TIMEOUT_S:.0f} s\n{log.read_text()}")
        time.sleep(_POLL_S)
    return match[1]
