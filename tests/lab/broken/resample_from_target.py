"""Fault: a refused draft is replaced from the target, not from what the draft left of it."""

from core import *  # noqa: F403
from core import speculative_accept as correct_accept
from tests.lab.laws import ScriptedRng, token_from


def speculative_accept(draft_tokens, target_probs, draft_probs, rng):
    draws = [rng.random() for _ in range(len(draft_tokens) + 1)]
    num_accepted, _ = correct_accept(draft_tokens, target_probs, draft_probs, ScriptedRng(draws))
    return num_accepted, token_from(correct_accept, target_probs[num_accepted], draws[-1])
