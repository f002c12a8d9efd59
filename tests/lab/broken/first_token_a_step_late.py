"""Fault: the step that computes a prompt yields no token."""

from core import *  # noqa: F403
from core import ContinuousBatchingScheduler as CorrectScheduler


class ContinuousBatchingScheduler(CorrectScheduler):
    """Every request takes a step more than it has tokens."""

    def add(self, request_id, num_prompt_tokens, max_tokens):
        super().add(request_id, num_prompt_tokens, max_tokens + 1)
