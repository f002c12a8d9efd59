"""What drives a scheduler in examples: to its end, and with a record of its plans."""

from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput


def drain(it: ContinuousBatchingScheduler, max_steps: int = 1000) -> int:
    for num_steps in range(max_steps):
        if not it.has_unfinished_requests:
            return num_steps
        it.step()
        it.check_invariants()
    raise AssertionError(f"unfinished after {max_steps} steps")


class Recorder:
    """Keeps the plans it counts; accepts every draft."""

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        return ModelRunnerOutput(
            {
                s.request_id: SampledTokens([0] * (s.num_draft_slots + 1), num_draft_tokens=s.num_draft_slots)
                for s in plan.scheduled
                if s.yields_token
            }
        )

    @property
    def shares(self) -> list[dict[str, tuple[int, int]]]:
        """(tokens, draft slots) by request, step by step."""
        return [{s.request_id: (s.num_tokens, s.num_draft_slots) for s in plan.scheduled} for plan in self.plans]
