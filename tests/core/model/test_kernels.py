"""Where compiled code is kept, and compiling it ahead of the first start."""

import os
import subprocess
import sys
from pathlib import Path

from app.settings import Settings
from core.model import kernels

ROOT = Path(__file__).resolve().parents[3]


def test_code_is_kept_in_a_folder_of_its_own_for_each_state_of_the_package() -> None:
    provider = kernels.load(Settings().cache_dir)
    folder = next((Settings().cache_dir / "kernels").iterdir())
    assert 16 == len(folder.name)
    assert "PackedTransformer" in vars(provider)


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(tmp_path: Path) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file")
    folder = kernels.writable(in_the_way / "kernels")
    assert folder.is_dir()
    assert in_the_way not in folder.parents


def test_what_replaces_it_is_gone_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    (tmp_path / "temporary").mkdir()
    code = "import sys, pathlib; from core.model import kernels; print(kernels.writable(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path / "cache" / "kernels")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    result = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert result.stdout.startswith(f"{tmp_path}/temporary/octavo-kernels-")
    assert [] == list((tmp_path / "temporary").iterdir())


COMPILE = """
import logging, pathlib, sys
from core.model import kernels
from core.model.kernels.__main__ import compile_for
logging.basicConfig(level="INFO")
kernels.load(pathlib.Path(sys.argv[1]))
compile_for("float32", pathlib.Path(sys.argv[1]))
"""


def test_compiling_is_said_once_where_code_of_the_dtype_is_not_there(tmp_path: Path) -> None:
    """Not by whether there is a folder: another dtype may have made it."""
    load = "import pathlib, sys; from core.model import kernels; kernels.load(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", load, str(tmp_path)], check=True, cwd=ROOT)
    assert list(tmp_path.glob("kernels/*"))
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    said = [subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stderr for _ in range(2)]

    assert [1, 0] == [text.count("compiling kernels for this machine") for text in said]


def test_compiling_ahead_leaves_code_for_the_dtypes_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "core.model.kernels", str(tmp_path), "float32"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert list(tmp_path.glob("kernels/*/**/*.nbc"))
