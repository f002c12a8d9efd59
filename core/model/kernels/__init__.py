"""Compiled kernels: one pass over the model as one call without Python's lock, on all the threads there are.

The way of an operand: `packing` lays it out, `simd` and `lanes` are the vector instructions, `products` and `attention`
walk over tiles, `step` puts the phases in order, `claims` and `team` share them between threads, `packed_model` and
`packed_cache` look to the rest of core like `Transformer` and `KVCache`, the reference that tests hold these to.
docs/kernels.md says why they are built this way and what was measured. Numba is imported only when `load` is called.
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType


def load(cache_dir: Path | None) -> ModuleType:
    """The module `packed_model`, with compiled code kept below `cache_dir` (None: where Numba keeps it).

    Numba looks at the date of one file only to see whether its kept code is stale; so the code of each state of this
    package lies in a folder of its own.
    """
    import numba

    if cache_dir is not None:
        sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        state = hashlib.sha256(sources + numba.__version__.encode()).hexdigest()[:16]
        numba.config.CACHE_DIR = str(writable(cache_dir / "kernels" / state))
    from core.model.kernels import compiling, packed_model  # noqa: F401

    return packed_model


def writable(wanted: Path) -> Path:
    """The folder, or where it cannot be written another one with what is in it, for as long as the process lives."""
    with contextlib.suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True)
    if os.access(wanted, os.W_OK):
        return wanted
    instead = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
    atexit.register(shutil.rmtree, instead, ignore_errors=True)
    if wanted.is_dir():  # compiled ahead, on a file system that cannot be written: Numba wants to be able to
        shutil.copytree(wanted, instead, dirs_exist_ok=True)
    return instead
