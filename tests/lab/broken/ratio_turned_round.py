"""Fault: drafts are accepted with min(1, draft / target)."""

import numpy as np

from core import *  # noqa: F403
from core import speculative_accept as correct_accept
from tests.lab.laws import ScriptedRng, token_from


def speculative_accept(draft_tokens, target_probs, draft_probs, rng):
    draws = [rng.random() for _ in range(len(draft_tokens) + 1)]
    turned_round = np.vstack([draft_probs, target_probs[-1:]])
    num_accepted, bonus = correct_accept(draft_tokens, turned_round, target_probs[:-1], ScriptedRng(draws))
    if num_accepted < len(draft_tokens):  # the residual is the right one: only the ratio is at fault
        residual = np.maximum(target_probs[num_accepted] - draft_probs[num_accepted], 0)
        bonus = token_from(correct_accept, residual / residual.sum(), draws[-1])
    return num_accepted, bonus
