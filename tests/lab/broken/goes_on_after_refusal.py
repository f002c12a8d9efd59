"""Fault: drafts behind a refused one are still counted when they are good by themselves."""

from core import *  # noqa: F403
from core import speculative_accept as correct_accept
from tests.lab.laws import ScriptedRng


def speculative_accept(draft_tokens, target_probs, draft_probs, rng):
    draws = [rng.random() for _ in range(len(draft_tokens) + 1)]
    _, bonus = correct_accept(draft_tokens, target_probs, draft_probs, ScriptedRng(draws))
    alone = [
        correct_accept(draft_tokens[[i]], target_probs[[i, -1]], draft_probs[[i]], ScriptedRng([draws[i], 0.5]))[0]
        for i in range(len(draft_tokens))
    ]
    return sum(alone), bonus
