"""What auto means for which model, and that a wish which cannot be fulfilled says why."""

from dataclasses import replace

import pytest

from core.errors import InvalidRequest
from core.model.numerics import Numerics, make_cache, make_model, resolve
from tests.core.model.kernels.provider import CONFIG, TENSORS, packed_model
from tests.core.small_models import TARGET

SUITED, UNSUITED = CONFIG, TARGET  # TARGET's head_dim is 8


@pytest.mark.parametrize(
    ("kernels", "dtype", "kv_cache_dtype", "is_embedded", "expected"),
    [
        ("auto", "auto", "auto", False, Numerics("numba", "bfloat16", "bfloat16")),
        ("auto", "auto", "auto", True, Numerics("numpy", "float32", "float32")),
        ("auto", "float32", "auto", False, Numerics("numba", "float32", "float32")),
        ("auto", "int8", "auto", True, Numerics("numba", "int8", "bfloat16")),
        ("auto", "auto", "bfloat16", True, Numerics("numba", "float32", "bfloat16")),
        ("numba", "auto", "auto", True, Numerics("numba", "float32", "float32")),
        ("numba", "int8", "float32", False, Numerics("numba", "int8", "float32")),
        ("numpy", "auto", "auto", False, Numerics("numpy", "float32", "float32")),
    ],
)
def test_auto_becomes(kernels: str, dtype: str, kv_cache_dtype: str, is_embedded: bool, expected: Numerics) -> None:
    assert expected == resolve(kernels, dtype, kv_cache_dtype, [SUITED], 16, is_embedded=is_embedded)


def test_a_model_that_does_not_suit_the_kernels_runs_on_numpy() -> None:
    expected = Numerics("numpy", "float32", "float32")
    assert expected == resolve("auto", "auto", "auto", [UNSUITED], 16, is_embedded=False)
    assert expected == resolve("auto", "auto", "auto", [SUITED, UNSUITED], 16, is_embedded=False)
    assert expected == resolve("auto", "auto", "auto", [SUITED], 8, is_embedded=False)


@pytest.mark.parametrize(
    ("kernels", "dtype", "block_size", "message"),
    [
        ("numpy", "int8", 16, "kernels numpy compute in float32, not in int8"),
        ("numba", "auto", 8, "block_size is 8, a multiple of 16 is needed"),
        ("auto", "bfloat16", 8, "bfloat16 needs kernels numba: block_size is 8"),
        ("mkl", "auto", 16, "kernels is 'mkl', allowed are auto, numpy, numba"),
        ("auto", "float16", 16, "dtype is 'float16', allowed are auto, float32, bfloat16, int8"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled_says_why(kernels: str, dtype: str, block_size: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        resolve(kernels, dtype, "auto", [SUITED], block_size, is_embedded=False)


def test_a_width_that_is_no_whole_panel_is_named() -> None:
    with pytest.raises(InvalidRequest, match="model's intermediate_size is 48, a multiple of 32 is needed"):
        resolve("numba", "auto", "auto", [UNSUITED], 16, is_embedded=False)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_model_and_cache_are_of_the_provider_chosen(kernels: str) -> None:
    chosen = resolve(kernels, "float32", "auto", [SUITED], 16, is_embedded=False)
    model = make_model(chosen, CONFIG, TENSORS[CONFIG], 64, num_threads=1, cache_dir=None)
    cache = make_cache(chosen, replace(CONFIG), 2, 16)
    assert (kernels == "numba") == isinstance(model, packed_model.PackedTransformer)
    assert 16 == cache.block_size
