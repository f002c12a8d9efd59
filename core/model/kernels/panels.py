"""Weights into panels, compiled: a real model has a hundred million of them, and they are packed at every start."""

import numpy as np
from numba import njit

from core.model.kernels.elementwise import bfloat16
from core.model.kernels.packing import PANEL


@njit(error_model="numpy", cache=True)
def fill_bfloat16(words, weight):
    """words (P, K / 2, PANEL) uint32 from weight (N, K) float32."""
    for row in range(weight.shape[0]):
        panel, column = row // PANEL, row % PANEL
        for i in range(weight.shape[1] // 2):
            low, high = bfloat16(weight[row, 2 * i]), bfloat16(weight[row, 2 * i + 1])
            words[panel, i, column] = low | (high << np.uint32(16))


@njit(error_model="numpy", cache=True)
def fill(words, weight_words):
    """words (P, W, PANEL) from rows of words, (N, W), of the same dtype."""
    for row in range(weight_words.shape[0]):
        panel, column = row // PANEL, row % PANEL
        for i in range(weight_words.shape[1]):
            words[panel, i, column] = weight_words[row, i]
