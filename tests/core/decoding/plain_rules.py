"""The acceptance rules as papers print them, a request at a time, and the well-known ways of getting them wrong."""

import numpy as np

from tests.oracle import Doubles, Ints


def plain_rule(
    draft_RK: Ints, target_RKV: Doubles, draft_RKV: Doubles, uniforms_RK: Doubles, *, broken: str = ""
) -> tuple[Ints, Ints]:
    """Leviathan's algorithm 1, a request at a time; `broken` names a well-known way of getting it wrong."""
    results = [
        _plain_step(*arrays, broken=broken) for arrays in zip(draft_RK, target_RKV, draft_RKV, uniforms_RK, strict=True)
    ]
    return np.array([num for num, _ in results]), np.array([token for _, token in results])


def _plain_step(
    draft_K: Ints, target_KV: Doubles, draft_KV: Doubles, uniforms_K: Doubles, *, broken: str
) -> tuple[int, int]:
    for i, token in enumerate(draft_K):
        target, drafted = target_KV[i, token], draft_KV[i, token]
        if broken == "ratio turned round":
            target, drafted = drafted, target
        if uniforms_K[i] * drafted >= target:
            residual_V = np.maximum(target_KV[i] - draft_KV[i], 0)
            if broken == "residual from the target" or not residual_V.any():
                residual_V = target_KV[i]
            return i, _inverted(residual_V, uniforms_K[-1])
    law_V = draft_KV[-1] if broken == "bonus from the draft" else target_KV[len(draft_K)]
    return len(draft_K), _inverted(law_V, uniforms_K[-1])


def plain_block_rule(
    draft_RK: Ints, target_RKV: Doubles, draft_RKV: Doubles, uniforms_RK: Doubles, *, broken: str = ""
) -> tuple[Ints, Ints]:
    """Sun's algorithm 2, a request at a time, from the longest run down; `broken` as above."""
    results = [
        _plain_block_step(*arrays, broken=broken)
        for arrays in zip(draft_RK, target_RKV, draft_RKV, uniforms_RK, strict=True)
    ]
    return np.array([num for num, _ in results]), np.array([token for _, token in results])


def _plain_block_step(
    draft_K: Ints, target_KV: Doubles, draft_KV: Doubles, uniforms_K: Doubles, *, broken: str
) -> tuple[int, int]:
    swapped = broken == "ratio turned round"
    laws = (draft_KV, target_KV[:-1]) if swapped else (target_KV[:-1], draft_KV)
    weights = [1.0]
    for i, token in enumerate(draft_K):
        target, drafted = laws[0][i, token], laws[1][i, token]
        weights.append(min(weights[-1] * target / drafted, 1.0) if drafted else 1.0)
    last = len(draft_K)
    if not last or uniforms_K[last - 1] < weights[last]:
        return last, _inverted(draft_KV[-1] if broken == "bonus from the draft" else target_KV[-1], uniforms_K[-1])
    for i in range(last - 1, -1, -1):
        weight = 1.0 if broken == "weight forgotten" else weights[i]
        residual_V = np.maximum(weight * target_KV[i] - draft_KV[i], 0)
        mass = float(np.maximum(weights[i] * target_KV[i] - draft_KV[i], 0).sum())
        whole = {"mass without 1 - p": mass, "mass alone": 1.0}.get(broken, mass + 1 - weights[i])
        if i == 0 or (mass > 0 and uniforms_K[i - 1] * whole < mass):
            if broken == "residual from the target" or not residual_V.any():
                residual_V = target_KV[i]
            return i, _inverted(residual_V, uniforms_K[-1])
    raise AssertionError("nothing is accepted at the latest with i = 0")


def _inverted(weights_V: Doubles, uniform: float) -> int:
    sums_V = weights_V.cumsum()
    return int(np.searchsorted(sums_V, uniform * sums_V[-1], side="right").clip(0, np.flatnonzero(weights_V)[-1]))
