"""The server for other projects' tests, used as they use it."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from octavo.testing import ServerFailed, octavo_server

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_answers_scripts_and_faults_and_is_gone_afterwards():
    with octavo_server() as url:
        body = {"prompt": "x", "script": ["Hel", "lo"], "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        fault = httpx.post(f"{url}/v1/completions", json={**body, "fault": {"type": "error"}}, timeout=60)

    assert ("Hello", "injected_fault") == (answer.json()["choices"][0]["text"], fault.json()["error"]["code"])
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_flags_go_over():
    with octavo_server("--served-model-name", "my-model") as url:
        assert "my-model" == httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def test_a_server_that_does_not_come_up_says_why():
    with pytest.raises(ServerFailed, match="--max-num-seqs 0"), octavo_server("--max-num-seqs", "0"):
        pass


def test_a_server_that_a_test_has_killed_is_no_error_of_its_own():
    with octavo_server() as url:
        body = {"prompt": "x", "fault": {"type": "kill_engine"}}
        assert 503 == httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


A_PROJECT = """
import json
import urllib.request

import app  # the project's own, not Octavo's
import pytest


@pytest.fixture(scope="session")
def octavo_flags():
    return ["--served-model-name", "mine"]


def ask(url, **body):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_one(octavo_url):
    assert app.NAME == "a project"
    assert ask(octavo_url, prompt="x", script=["Hi"], max_tokens=5)["choices"][0]["text"] == "Hi"


def test_two(octavo_url):
    assert ask(octavo_url, prompt="x", max_tokens=1)["model"] == "mine"
"""


def run_pytest(project: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"PYTHONPATH": f"{project}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "octavo.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_a_project_with_a_package_called_app_uses_the_fixture(tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text('NAME = "a project"\n')
    (tmp_path / "test_project.py").write_text(A_PROJECT)
    result = run_pytest(tmp_path)

    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_the_ini_option_names_the_python_that_runs_the_server(tmp_path: Path):
    python = tmp_path / "venv" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/was_run\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\noctavo_python = venv/python\n")
    (tmp_path / "test_project.py").write_text("def test_one(octavo_url):\n    assert octavo_url\n")
    result = run_pytest(tmp_path)

    assert "1 passed" in result.stdout, result.stdout + result.stderr
    assert (tmp_path / "was_run").exists()


def test_pytest_finds_the_plugin_by_its_entry_point():
    """Under its module's name, so that whoever loads it with -p as well does not load it twice."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]

    assert {"octavo.pytest_plugin": "octavo.pytest_plugin"} == points
    assert import_module(points["octavo.pytest_plugin"]).octavo_url
