"""Fault: after full acceptance the bonus token comes from the law of the last draft, not of the token after it."""

from core import *  # noqa: F403
from core import speculative_accept as correct_accept
from tests.lab.laws import ScriptedRng, token_from


def speculative_accept(draft_tokens, target_probs, draft_probs, rng):
    draws = [rng.random() for _ in range(len(draft_tokens) + 1)]
    num_accepted, bonus = correct_accept(draft_tokens, target_probs, draft_probs, ScriptedRng(draws))
    if 0 < num_accepted == len(draft_tokens):
        bonus = token_from(correct_accept, target_probs[num_accepted - 1], draws[-1])
    return num_accepted, bonus
