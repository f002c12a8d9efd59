"""The command line with a model that runs out of memory in its tenth step: `python -m tests.e2e.dying_server serve`."""

from app.cli import main
from core.model_runner import ModelRunner
from core.step import ModelRunnerOutput, SchedulerOutput

LAST_STEP = 9


class ForgetfulRunner:
    """Stands in for a machine without memory left, which cannot be had in a test."""

    compute = ModelRunner.__call__

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.step > LAST_STEP:
            raise MemoryError("no memory left")
        return ForgetfulRunner.compute(self, plan)  # type: ignore[arg-type]


if __name__ == "__main__":
    ModelRunner.__call__ = ForgetfulRunner.__call__  # type: ignore[assignment, method-assign]
    main()
