"""Where compiled code is kept, and compiling it ahead of the first start."""

import subprocess
import sys
from pathlib import Path

from app.settings import Settings
from core.model import kernels


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


def test_compiling_ahead_leaves_code_for_the_dtypes_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "core.model.kernels", str(tmp_path), "float32"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    assert list(tmp_path.glob("kernels/*/**/*.nbc"))
