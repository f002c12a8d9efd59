"""An `execute` with a KV cache of token ids, which reads every slot of a request's context back before it uses it.

Its model is a pure function of all previous tokens, so one wrong slot, one token computed twice or not at all, shows
as a wrong answer; and it looks itself, and raises. Drafts are right or wrong at random. It can fail as real ones do:
once for a whole step, or whenever one request is in the plan, with some of the step's KV already written.
"""

import zlib
from collections.abc import Sequence
from random import Random

from core.errors import InvariantViolation
from core.step import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 12
EOS = VOCAB_SIZE - 1
UNWRITTEN = -1


def next_token(tokens: Sequence[int]) -> int:
    """What the model says behind these tokens."""
    return zlib.crc32(bytes(tokens)) % VOCAB_SIZE


def decode_alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The output of one request that has the model to itself: the oracle."""
    output: list[int] = []
    while len(output) < max_tokens and EOS not in output:
        output.append(next_token([*prompt, *output]))
    return output


class CheckedRunner:
    """Counts its own faults as InvariantViolation, which no scheduler may swallow."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [UNWRITTEN] * (num_blocks * block_size)
        self.random = Random(0)
        self.chance_of_good_draft = 1.0
        self.fails_once = False
        self.culprit: str | None = None
        self.plans: list[SchedulerOutput] = []

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        for source, destination in plan.block_copies:
            self._block(destination, self.slots[source * self.block_size : (source + 1) * self.block_size])
        self._check_that_nobody_shares_a_written_slot(plan)
        sampled = {s.request_id: tokens for s in plan.scheduled if (tokens := self._run(s)) is not None}
        if self.fails_once:
            self.fails_once = False
            raise RuntimeError("the step fails")
        if any(s.request_id == self.culprit for s in plan.scheduled):
            raise RuntimeError("a request fails")
        return ModelRunnerOutput(sampled)

    def _block(self, block: int, contents: Sequence[int]) -> None:
        self.slots[block * self.block_size : (block + 1) * self.block_size] = contents

    def _slot(self, scheduled: ScheduledRequest, position: int) -> int:
        block = scheduled.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _check_that_nobody_shares_a_written_slot(self, plan: SchedulerOutput) -> None:
        written = [
            self._slot(s, position) for s in plan.scheduled for position in range(s.start, s.end + s.num_draft_slots)
        ]
        if len(set(written)) != len(written):
            raise InvariantViolation("a slot is written twice in one step")

    def _run(self, scheduled: ScheduledRequest) -> SampledTokens | None:
        tokens = list(scheduled.request.token_ids)
        for position in range(scheduled.start, scheduled.end):
            self.slots[self._slot(scheduled, position)] = tokens[position]
        if not scheduled.yields_token:
            if scheduled.num_draft_slots:
                raise InvariantViolation(f"{scheduled.request_id} has draft slots in the middle of its prompt")
            self._read_back(scheduled, tokens[: scheduled.end])
            return None
        drafts = self._draft(tokens, scheduled.num_draft_slots)
        for offset, draft in enumerate(drafts):
            self.slots[self._slot(scheduled, scheduled.end + offset)] = draft
        self._read_back(scheduled, tokens + drafts)
        return self._accept(tokens, drafts)

    def _read_back(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> None:
        found = [self.slots[self._slot(scheduled, position)] for position in range(len(tokens))]
        if found != list(tokens):
            raise InvariantViolation(f"{scheduled.request_id} reads {found}, its tokens are {list(tokens)}")

    def _draft(self, tokens: Sequence[int], num_slots: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(num_slots):
            good = next_token([*tokens, *drafts])
            is_good = self.random.random() < self.chance_of_good_draft
            drafts.append(good if is_good else (good + 1) % VOCAB_SIZE)
        return drafts

    @staticmethod
    def _accept(tokens: list[int], drafts: list[int]) -> SampledTokens:
        emitted: list[int] = []
        for draft in [*drafts, None]:
            emitted.append(next_token([*tokens, *emitted]))
            if emitted[-1] != draft:
                break
        return SampledTokens(emitted, num_draft_tokens=len(drafts))
