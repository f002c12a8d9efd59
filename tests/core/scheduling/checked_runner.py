"""An `execute` with a KV cache of its own, which reads every slot of a request's context back before it uses it.

A slot holds a token and a number that names all the tokens before it and whose prefixes they are, as real keys and
values depend on them; the second tier has slots too, and so has a draft model. Plans are done as the real runner does
them: stores, copies, loads, then everybody's context is read, then computed, then read again. The model is a pure
function of all previous tokens and the choice, so one wrong slot, one token computed twice or not at all, shows as a
wrong answer; and the runner looks itself, and raises. Drafts are right or wrong at random.

It can fail as real ones do, once for a whole step or whenever one request is in the plan, at any stage: what it was
writing then holds nonsense.
"""

import enum
import zlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from core.errors import InvariantViolation
from core.request import Request
from core.step import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 12
EOS = VOCAB_SIZE - 1


class Slot(NamedTuple):
    """One token's key and value. `prefix` names its owner's group and all tokens up to it; `step`: when it was made."""

    token: int
    prefix: int
    step: int


UNWRITTEN = Slot(-1, -1, -1)


class Stage(enum.IntEnum):
    """How far a step comes before it fails."""

    START, STORES, COPIES, LOADS, COMPUTING, END = range(6)


def next_token(tokens: Sequence[int], choice: int = 0) -> int:
    """What the model says behind these tokens."""
    return zlib.crc32(bytes(tokens), choice) % VOCAB_SIZE


def decode_alone(prompt: Sequence[int], max_tokens: int, choice: int = 0) -> list[int]:
    """The output of one request that has the model to itself: the oracle."""
    output: list[int] = []
    while len(output) < max_tokens and EOS not in output:
        output.append(next_token([*prompt, *output], choice))
    return output


def prefixes(group: str, tokens: Sequence[int]) -> list[int]:
    """The number that each token's slot must hold."""
    numbers, number = [], zlib.crc32(group.encode())
    for token in tokens:
        number = zlib.crc32(bytes([token]), number)
        numbers.append(number)
    return numbers


class Memory:
    """The blocks of one model and its second tier, as lists of slots."""

    def __init__(self, num_blocks: int, num_tier_slots: int, block_size: int) -> None:
        self.slots = [UNWRITTEN] * (num_blocks * block_size)
        self.tier = [[UNWRITTEN] * block_size for _ in range(num_tier_slots)]
        self._size = block_size

    def block(self, block: int) -> list[Slot]:
        return self.slots[block * self._size : (block + 1) * self._size]

    def fill(self, block: int, contents: Sequence[Slot]) -> None:
        self.slots[block * self._size : (block + 1) * self._size] = contents


class CheckedRunner:
    """Counts its own faults as InvariantViolation, which no scheduler may swallow.

    Args:
        groups: by request id, who may share prefixes with whom; all the rest with each other.
        has_draft_model: drafts need the draft model's KV of all that is before them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_tier_slots: int = 0,
        groups: Mapping[str, str] | None = None,
        has_draft_model: bool = False,
    ) -> None:
        self.has_draft_model = has_draft_model
        self.block_size = block_size
        self.target = Memory(num_blocks, num_tier_slots, block_size)
        self.draft = Memory(num_blocks, num_tier_slots, block_size)
        self.groups = groups if groups is not None else {}
        self.random = Random(0)
        self.chance_of_good_draft = 1.0
        self.fails_once_at: Stage | None = None
        self.culprit: str | None = None
        self.plans: list[SchedulerOutput] = []
        self.num_plans = 0
        self.reset_at = 0  # only `undisturbed` requests may read what was written before this plan
        self.undisturbed: set[str] = set()

    @property
    def slots(self) -> list[Slot]:
        return self.target.slots

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        self.num_plans += 1
        is_to_blame = any(self.culprit in [r.request_id for r in self._family(s)] for s in plan.scheduled)
        stage = self._stage(plan, is_to_blame)
        self._move(plan, stage)
        self._check_that_nobody_shares_a_written_slot(plan)
        for scheduled in plan.scheduled:
            self._read(scheduled, scheduled.request.token_ids[: scheduled.start])
            self._check_that_it_is_not_from_before_the_reset(scheduled)
        result = self._compute(plan, stage)
        if stage is Stage.END:
            self._fail()
        return result

    def _family(self, scheduled: ScheduledRequest) -> Sequence[Request]:
        return scheduled.yielding_requests or (scheduled.request,)

    def _stage(self, plan: SchedulerOutput, is_to_blame: bool) -> Stage | None:
        """Where this step fails, None if it does not. To fail in the midst of a move, it waits for a plan with one."""
        if is_to_blame:
            return Stage(self.random.randrange(len(Stage)))
        moves = {Stage.STORES: plan.tier_stores, Stage.COPIES: plan.block_copies, Stage.LOADS: plan.tier_loads}
        if self.fails_once_at in moves and not moves[self.fails_once_at]:
            return None
        stage, self.fails_once_at = self.fails_once_at, None
        return stage

    def _fail(self) -> None:
        raise RuntimeError("the runner fails")

    # Blocks move

    def _move(self, plan: SchedulerOutput, stage: Stage | None) -> None:
        if stage is Stage.START:
            self._fail()
        for memory in (self.target, self.draft):
            for block, slot in plan.tier_stores:
                memory.tier[slot] = self._nonsense() if stage is Stage.STORES else memory.block(block)
        if stage is Stage.STORES:
            self._fail()
        for memory in (self.target, self.draft):
            for source, destination in plan.block_copies:
                memory.fill(destination, self._nonsense() if stage is Stage.COPIES else memory.block(source))
        if stage is Stage.COPIES:
            self._fail()
        for memory in (self.target, self.draft):
            for slot, block in plan.tier_loads:
                memory.fill(block, self._nonsense() if stage is Stage.LOADS else memory.tier[slot])
        if stage is Stage.LOADS:
            self._fail()

    def _nonsense(self) -> list[Slot]:
        return [UNWRITTEN] * self.block_size

    # Slots are written and read

    def _slot(self, scheduled: ScheduledRequest, position: int) -> int:
        block = scheduled.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _check_that_nobody_shares_a_written_slot(self, plan: SchedulerOutput) -> None:
        written = [
            self._slot(s, position) for s in plan.scheduled for position in range(s.start, s.end + s.num_draft_slots)
        ]
        if len(set(written)) != len(written):
            raise InvariantViolation("a slot is written twice in one step")

    def _compute(self, plan: SchedulerOutput, stage: Stage | None) -> ModelRunnerOutput:
        sampled: dict[str, SampledTokens] = {}
        draft_computed: dict[str, int] = {}
        for number, scheduled in enumerate(plan.scheduled):
            if stage is Stage.COMPUTING and 2 * number >= len(plan.scheduled):
                self._fail()
            drafts = self._draft(scheduled)
            self._run(scheduled, drafts)
            if scheduled.num_draft_catch_up:
                draft_computed[scheduled.request_id] = self._follow(scheduled, drafts)
            for member in scheduled.yielding_requests:
                sampled[member.request_id] = self._accept(member, drafts)
        if stage is Stage.COMPUTING and not plan.scheduled:
            self._fail()
        return ModelRunnerOutput(sampled, draft_computed)

    def _run(self, scheduled: ScheduledRequest, drafts: Sequence[int]) -> None:
        tokens = [*scheduled.request.token_ids[: scheduled.end], *drafts]
        self._write(self.target, scheduled, tokens, scheduled.start)
        self._read(scheduled, tokens)

    def _follow(self, scheduled: ScheduledRequest, drafts: Sequence[int]) -> int:
        """The draft model catches up and runs over its own tokens but the last; says of how many it has KV now."""
        done = scheduled.request.num_draft_computed_tokens
        known = scheduled.request.token_ids[: done + scheduled.num_draft_catch_up]
        if not self.has_draft_model or len(known) > scheduled.end:
            raise InvariantViolation(f"{scheduled.request_id}: there is nothing to catch up on")
        tokens = [*known, *drafts[:-1]]
        self._check(self.draft, scheduled, tokens[:done])
        self._write(self.draft, scheduled, tokens, done)
        return len(tokens)

    def _write(self, memory: Memory, scheduled: ScheduledRequest, tokens: Sequence[int], start: int) -> None:
        numbers = prefixes(self._group(scheduled), tokens)
        for position in range(start, len(tokens)):
            slot = Slot(tokens[position], numbers[position], self.num_plans)
            memory.slots[self._slot(scheduled, position)] = slot

    def _read(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> None:
        self._check(self.target, scheduled, tokens)

    def _check(self, memory: Memory, scheduled: ScheduledRequest, tokens: Sequence[int]) -> None:
        wanted = list(zip(tokens, prefixes(self._group(scheduled), tokens), strict=True))
        found = [memory.slots[self._slot(scheduled, position)] for position in range(len(tokens))]
        if [slot[:2] for slot in found] != wanted:
            raise InvariantViolation(
                f"{scheduled.request_id} reads {[slot.token for slot in found]}, its tokens are {list(tokens)};"
                f" not its own are {[i for i, slot in enumerate(found) if slot[:2] != wanted[i]]}"
            )

    def _group(self, scheduled: ScheduledRequest) -> str:
        return self.groups.get(scheduled.request_id, "")

    def _check_that_it_is_not_from_before_the_reset(self, scheduled: ScheduledRequest) -> None:
        steps = [self.slots[self._slot(scheduled, position)].step for position in range(scheduled.start)]
        if scheduled.request_id not in self.undisturbed and any(step <= self.reset_at for step in steps):
            raise InvariantViolation(f"{scheduled.request_id} reads what the reset should have hidden")

    # Tokens

    def _draft(self, scheduled: ScheduledRequest) -> list[int]:
        if scheduled.num_draft_slots and not scheduled.yields_token:
            raise InvariantViolation(f"{scheduled.request_id} has draft slots in the middle of its prompt")
        request, drafts = scheduled.request, list[int]()
        if scheduled.num_draft_slots and self.has_draft_model and self._draft_end(scheduled) != scheduled.end:
            raise InvariantViolation(f"{scheduled.request_id} drafts behind tokens that the draft model has not seen")
        for _ in range(scheduled.num_draft_slots):
            good = next_token([*request.token_ids, *drafts], request.choice)
            is_good = self.random.random() < self.chance_of_good_draft
            drafts.append(good if is_good else (good + 1) % VOCAB_SIZE)
        return drafts

    @staticmethod
    def _draft_end(scheduled: ScheduledRequest) -> int:
        return scheduled.request.num_draft_computed_tokens + scheduled.num_draft_catch_up

    @staticmethod
    def _accept(request: Request, drafts: Sequence[int]) -> SampledTokens:
        emitted: list[int] = []
        for draft in [*drafts, None]:
            emitted.append(next_token([*request.token_ids, *emitted], request.choice))
            if emitted[-1] != draft:
                break
        return SampledTokens(emitted, num_draft_tokens=len(drafts))
