"""Compile the kernels ahead of the first start: `python -m core.model.kernels CACHE_DIR [DTYPE ...]`.

What is compiled depends on the types of arrays and not on their sizes, so a model of the smallest sizes will do.
"""

import sys
from pathlib import Path

import numpy as np

from core.model import kernels
from core.model.config import ModelConfig
from core.model.numerics import Numerics, make_cache, make_model
from core.model.transformer import flat_batch
from core.model.weights import expected_shapes

SMALLEST = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32
)


def compile_for(dtype: str, cache_dir: Path) -> None:
    """Run one token through a model of that dtype, with the KV cache that goes with it."""
    numerics = Numerics("numba", dtype, "float32" if dtype == "float32" else "bfloat16")
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_shapes(SMALLEST).items()}
    model = make_model(numerics, SMALLEST, tensors, 16, num_threads=1, cache_dir=cache_dir)
    cache = make_cache(numerics, SMALLEST, 1, 16)
    model.forward(flat_batch([([0], 0, [0])], 16), cache, np.zeros(1, np.int64))


if __name__ == "__main__":
    directory, *dtypes = sys.argv[1:]
    kernels.load(Path(directory))
    for each in dtypes or ("float32", "bfloat16", "int8"):
        compile_for(each, Path(directory))
