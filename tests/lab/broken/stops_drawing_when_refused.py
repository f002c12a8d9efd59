"""Fault: no number is drawn for drafts behind the first refusal, so the next step's draws depend on this one."""

from core import *  # noqa: F403
from core import speculative_accept as correct_accept
from tests.lab.laws import ScriptedRng


def speculative_accept(draft_tokens, target_probs, draft_probs, rng):
    draws = []
    for i in range(len(draft_tokens)):
        draws.append(rng.random())
        rest = [0.5] * (len(draft_tokens) - i)
        if correct_accept(draft_tokens, target_probs, draft_probs, ScriptedRng(draws + rest))[0] <= i:
            break
    draws += [0.5] * (len(draft_tokens) - len(draws)) + [rng.random()]
    return correct_accept(draft_tokens, target_probs, draft_probs, ScriptedRng(draws))
