"""The command line: flags for every setting, one line for a mistake, and what each command prints."""

import asyncio
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import cli
from app.settings import Settings, flag_of

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`python -m app` in its own process, without the variables of whoever runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["serve", "info"])
def test_every_setting_is_a_flag_and_names_its_variable(command: str):
    text = CliRunner(env={"COLUMNS": "300"}).invoke(cli, [command, "--help"]).output

    missing = [n for n in Settings.model_fields if flag_of(n) not in text or f"[OCTAVO_{n.upper()}]" not in text]
    assert [] == missing


def test_the_version_is_told():
    assert f"octavo {importlib.metadata.version('octavo')}\n" == run("--version").stdout


def test_all_commands_are_listed():
    result = run("--help")

    assert 0 == result.returncode
    assert [] == [name for name in ("serve", "pull", "bench", "info") if f"  {name} " not in result.stdout]


def test_bench_is_the_load_generators_own_command():
    result = run("bench", "--help")

    assert 0 == result.returncode
    assert "--request-rate" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("serve", "--port", "x"), {}, "octavo: --port x: "),
        (("serve",), {"OCTAVO_BLOCK_SIZE": "none"}, "octavo: OCTAVO_BLOCK_SIZE none: "),
        (("serve", "--speculative-config", "{"), {}, "octavo: --speculative-config {: "),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(arguments: tuple[str, ...], variables: dict[str, str], said: str):
    result = run(*arguments, **variables)

    assert (2, "") == (result.returncode, result.stdout)
    assert result.stderr.startswith(said)
    assert 1 == result.stderr.count("\n")


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1():
    for command in ("serve", "info"):
        result = run(command, "no-such-model")

        assert 1 == result.returncode
        assert "octavo: there is no model no-such-model" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_port_in_use_is_one_line_and_exit_code_1_before_the_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", "no-such-model", "--host", "127.0.0.1", "--port", str(port))

    assert (1, "") == (result.returncode, result.stdout)
    assert f"octavo: port {port} is in use, --port names another\n" == result.stderr


def test_serving_imports_no_more_than_it_needs():
    code = "import sys, app.cli, app.factory, app.server; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    slow = {"jinja2", "httpx", "rich.progress", "tokenizers", "safetensors", "gguf", "loadgen", "huggingface_hub"}
    assert set() == slow & set(result.stdout.split())


@pytest.mark.e2e
async def test_a_server_says_where_it_listens_and_ends_well_on_sigterm():
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0", "--enable-scripts"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    lines = []
    while not lines or "listening on" not in lines[-1]:
        lines.append((await process.stderr.readline()).decode())
    body = {"prompt": "p", "stream": True, "max_tokens": 300, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=lines[-1].split()[-1]) as client,
        client.stream("POST", "/v1/completions", json=body, timeout=60) as response,
    ):
        events = response.aiter_lines()
        await anext(events)
        process.send_signal(signal.SIGTERM)
        rest = [line async for line in events if line]
    await process.communicate()

    assert any("KV cache size: " in line for line in lines)
    assert '"finish_reason":"length"' in rest[-2]
    assert "data: [DONE]" == rest[-1]
    assert 0 == process.returncode
