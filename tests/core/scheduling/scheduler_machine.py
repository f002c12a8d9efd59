"""The scheduler, its blocks and its second tier against decoding one request at a time.

Requests of one or several samples come, leave, step and fail at random, alike or not, for one tenant or another, on
pools and budgets so small that they preempt each other all the time; victims are swapped out or not as it happens, and
the prefix cache is reset at any time. `CheckedRunner` moves blocks as the plan says and reads every KV slot back;
outputs must be those of `decode_alone`. What a step may do besides is said in `StepChecks`.
"""

import logging
from collections import Counter
from random import Random
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import InvalidRequest
from core.memory.block_manager import BlockManager
from core.memory.host_tier import HostTier
from core.request import FinishReason, Request, RequestStatus
from core.scheduling.queues import family_size
from core.scheduling.scheduler import ContinuousBatchingScheduler, StepReport
from core.step import ModelRunnerOutput, SchedulerOutput
from tests.builders import family
from tests.core.scheduling.checked_runner import EOS, VOCAB_SIZE, CheckedRunner, Stage, decode_alone
from tests.core.scheduling.step_checks import RandomDrafts, StepChecks

MAX_UNFINISHED = 8
TENANTS = ("", "", "tenant")
COMMON_BEGINNING = [Random(7).randrange(VOCAB_SIZE) for _ in range(12)]
seeds = st.integers(0, 2**16)
chances = st.sampled_from([0.0, 0.5, 0.9, 1.0])
picks = st.integers(0, 59)  # one of those that are there, counted modulo


def has_requests(machine: "SchedulerMachine") -> bool:
    return bool(machine.unfinished)


class SchedulerMachine(RuleBasedStateMachine, StepChecks):
    scheduler_class: ClassVar[type[ContinuousBatchingScheduler]] = ContinuousBatchingScheduler
    manager_class: ClassVar[type[BlockManager]] = BlockManager
    tier_class: ClassVar[type[HostTier]] = HostTier

    @initialize(
        max_batch=st.sampled_from([4, 3, 2, 1]),
        num_slots=st.integers(6, 14),
        block_size=st.sampled_from([2, 1, 3, 2, 1, 4]),
        token_limit=st.sampled_from([None, 3, 5, 2, 7, 1]),
        max_model_len=st.none() | st.integers(4, 12),
        shares_prefixes=st.sampled_from([True, True, False]),
        num_tier_slots=st.sampled_from([5, 3, 1, 0]),
        has_draft_model=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        max_batch: int,
        num_slots: int,
        block_size: int,
        token_limit: int | None,
        max_model_len: int | None,
        shares_prefixes: bool,
        num_tier_slots: int,
        has_draft_model: bool,
    ) -> None:
        logging.disable(logging.ERROR)  # steps raise here all the time, and each is logged with its plan
        num_blocks = max(3, num_slots // block_size)
        self.num_blocks, self.block_size, self.max_batch = num_blocks, block_size, max_batch
        self.token_limit, self.max_model_len, self.shares_prefixes = token_limit, max_model_len, shares_prefixes
        self.manager = self.manager_class(num_blocks, block_size)
        self.groups: dict[str, str] = {}  # who may share blocks with whom
        self.runner = CheckedRunner(
            num_blocks,
            block_size,
            num_tier_slots=num_tier_slots,
            groups=self.groups,
            has_draft_model=has_draft_model,
        )
        self.drafts = RandomDrafts(uses_draft_model=has_draft_model)
        self.swaps = Random(0)
        self.scheduler = self.scheduler_class(
            max_batch,
            self.manager,
            execute=self.execute,
            max_num_batched_tokens=token_limit,
            max_model_len=max_model_len,
            enable_prefix_caching=shares_prefixes,
            tier=self.tier_class(num_tier_slots) if num_tier_slots else None,
            swaps=lambda num_tokens, num_blocks: self.swaps.random() < 0.8,
            drafting=self.drafts,
        )
        self.unfinished: dict[str, Request] = {}  # in order of age
        self.oracle: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.num_added = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """While a plan is carried out, the sources of its copies are held, and so is all that anybody reads."""
        if not self.runner.plans:
            self.manager.check_invariants([source for source, _ in plan.block_copies])
        return self.runner(plan)

    # What there is

    def pick(self, number: int) -> str:
        return list(self.unfinished)[number % len(self.unfinished)]

    def family_of(self, name: str) -> set[str]:
        """Who fails together: a request and its unborn siblings."""
        for r in self.unfinished.values():
            names = {member.request_id for member in (r, *r.siblings)}
            if name in names and (r.request_id == name or len(names) > 1):
                return names
        return {name}

    # What users do

    @precondition(lambda self: len(self.unfinished) < MAX_UNFINISHED)
    @rule(
        num_prompt=st.integers(1, 9),
        num_common=st.sampled_from([9, 0, 4, 9]),
        max_tokens=st.integers(1, 9),
        num_drafts=st.integers(0, 3),
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from(TENANTS),
        num_alike=st.sampled_from([1, 3, 2]),
        seed=seeds,
    )
    def add(
        self,
        num_prompt: int,
        num_common: int,
        max_tokens: int,
        num_drafts: int,
        num_samples: int,
        tenant: str,
        num_alike: int,
        seed: int,
    ) -> None:
        for i in range(num_alike):
            # Every other one without drafts, so that blocks are shared of which the draft model knows nothing.
            self.add_one(num_prompt, num_common, max_tokens, num_drafts if i % 2 else 0, num_samples, tenant, seed)

    def add_one(
        self,
        num_prompt: int,
        num_common: int,
        max_tokens: int,
        num_drafts: int,
        num_samples: int,
        tenant: str,
        seed: int,
    ) -> None:
        if self.max_model_len is not None:
            num_prompt = min(num_prompt, self.max_model_len - 1)
        random = Random(seed)
        prompt = [*COMMON_BEGINNING[:num_common], *(random.randrange(VOCAB_SIZE) for _ in range(num_prompt))]
        prompt = prompt[:num_prompt]
        self.num_added += 1
        new = family(f"r{self.num_added}", num_samples, prompt, max_tokens, eos={EOS}, num_drafts=num_drafts)
        members = [new, *new.siblings]
        for member in members:
            # Without prefix caching each has its hashes to itself, for the second tier, as the engine does it.
            member.cache_salt = (tenant if self.shares_prefixes else member.request_id).encode()
            self.groups[member.request_id] = tenant if self.shares_prefixes else new.request_id
        if num_samples > self.max_batch:
            with pytest.raises(InvalidRequest, match=f"n is {num_samples}, at most {self.max_batch} run at once"):
                self.scheduler.add_request(new)
            return
        if self.ceiling(num_prompt + max_tokens - 1) > self.num_blocks:
            with pytest.raises(InvalidRequest, match=f"{num_prompt} prompt tokens and max_tokens {max_tokens} need"):
                self.scheduler.add_request(new)
            return
        self.scheduler.add_request(new)
        room = max_tokens if self.max_model_len is None else min(max_tokens, self.max_model_len - num_prompt)
        for member in members:
            self.unfinished[member.request_id] = member
            self.oracle[member.request_id] = decode_alone(prompt, room, member.choice)
            self.said[member.request_id] = []

    @precondition(has_requests)
    @rule(number=picks)
    def abort(self, number: int) -> None:
        """Of a family, whoever it is: those that are left go on, born or not."""
        gone = self.unfinished.pop(self.pick(number))
        self.scheduler.abort(gone.request_id)
        assert FinishReason.ABORT is gone.finish_reason
        assert gone.output_token_ids == self.oracle[gone.request_id][: gone.num_output_tokens]

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        running = [member.request_id for r in self.running() for member in (r, *r.siblings)]
        self.runner.reset_at, self.runner.undisturbed = self.runner.num_plans, set(running)

    @rule(seed=seeds, chance=chances, num_steps=st.integers(1, 4))
    def step(self, seed: int, chance: float, num_steps: int) -> None:
        for i in range(num_steps):
            self.step_and_check(seed + i, chance)
            self.check_all()

    @precondition(has_requests)
    @rule(seed=seeds, chance=chances, stage=st.sampled_from(Stage))
    def step_that_raises(self, seed: int, chance: float, stage: Stage) -> None:
        """This step, or the next that moves blocks. Nobody is to blame: it must be as if nothing had happened."""
        self.runner.fails_once_at = stage
        self.step_and_check(seed, chance)

    @precondition(has_requests)
    @rule(seed=seeds, chance=chances, number=picks)
    def step_with_a_culprit(self, seed: int, chance: float, number: int) -> None:
        self.runner.fails_once_at = None  # two failures at once would leave nobody to blame
        self.runner.culprit = self.pick(number)
        self.step_and_check(seed, chance)
        self.runner.culprit = None

    def step_and_check(self, seed: int, chance: float) -> None:
        self.runner.random, self.runner.chance_of_good_draft = Random(seed), chance
        self.swaps, self.drafts.random = Random(seed), Random(seed)
        self.runner.plans.clear()
        self.remember()
        self.to_fail = self.family_of(self.runner.culprit) if self.runner.culprit else set()
        report = self.scheduler.step()
        if not self.runner.plans:
            assert not self.unfinished, "requests wait and nothing is done"
            assert ([], [], 0) == report
            return
        plan = self.runner.plans[0]
        self.check_plan(plan)
        self.check_preemptions(plan)
        self.check_admissions(plan)
        self.check_who_waits(plan)
        self.take_outputs(plan, report)

    def take_outputs(self, plan: SchedulerOutput, report: StepReport) -> None:
        outputs = self.scheduler.take_outputs()
        assert [s.request_id for s in plan.scheduled] == report.scheduled
        assert len({output.request_id for output in outputs}) == len(outputs)
        assert {output.request_id for output in outputs if output.is_finished} == set(report.finished)
        for output in outputs:
            name = output.request_id
            self.said[name] += [token.token_id for token in output.tokens]
            assert self.said[name] == self.oracle[name][: len(self.said[name])]
            assert len(self.said[name]) == output.num_generated_tokens
        for s in plan.scheduled:
            assert s.request.is_finished or s.end <= s.request.num_computed_tokens, "scheduled and not advanced"
        for output in outputs:
            name = output.request_id
            if output.is_finished:
                self.check_end(self.unfinished.pop(name), output.error)
        self.runner.undisturbed -= set(plan.preempted)

    def check_end(self, ended: Request, error: str | None) -> None:
        name = ended.request_id
        assert RequestStatus.FINISHED is ended.status
        if error is not None:
            assert name in self.to_fail
            assert ("RuntimeError: the runner fails", FinishReason.ERROR) == (error, ended.finish_reason)
            return
        assert self.oracle[name] == self.said[name]
        by_eos = self.said[name][-1] == EOS
        assert (FinishReason.STOP if by_eos else FinishReason.LENGTH) is ended.finish_reason

    # What holds after each of them

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_invariants()

    @invariant()
    def blocks_are_exactly_those_of_the_running(self) -> None:
        """Spans manager and scheduler: each running request has the blocks of its computed tokens, nobody else any."""
        running = self.running()
        assert sum(map(family_size, running)) == self.scheduler.num_running <= self.max_batch
        assert sum(map(family_size, self.waiting())) == self.scheduler.num_waiting
        tables = [self.manager.block_table(r.request_id) for r in running]
        assert [self.ceiling(r.num_computed_tokens) for r in running] == [len(table) for table in tables]
        references = Counter(block for table in tables for block in table)
        assert len(references) == self.manager.pool.num_used_blocks
        assert all(self.manager.pool.ref_count(block) == num for block, num in references.items())

    @invariant()
    def whoever_shares_a_block_has_the_same_tokens_in_it(self) -> None:
        """And before it, under the same salt: the block's contents are a function of salt and prefix."""
        contents: dict[int, tuple[str, list[int]]] = {}
        for r in self.running():
            group, computed = self.groups[r.request_id], r.token_ids[: r.num_computed_tokens]
            for i, block in enumerate(self.manager.block_table(r.request_id)):
                own = computed[: (i + 1) * self.block_size]
                other_group, others = contents.setdefault(block, (group, own))
                shorter = min(len(own), len(others))
                assert (group, own[:shorter]) == (other_group, others[:shorter])
                contents[block] = (group, max(own, others, key=len))

    @invariant()
    def waste_stays_behind_the_last_token(self) -> None:
        """T1.1: fewer than a block's slots for each last block, shared or not; and no slot is lost elsewhere."""
        filled: dict[int, int] = {}
        for r in self.running():
            table = self.manager.block_table(r.request_id)
            for i, block in enumerate(table):
                fill = min(self.block_size, r.num_computed_tokens - i * self.block_size)
                filled[block] = max(fill, filled.get(block, 0))
        wasted = [self.block_size - fill for fill in filled.values()]
        last_blocks = {self.manager.block_table(r.request_id)[-1] for r in self.running()}
        assert sum(wasted) == self.manager.num_wasted_slots() <= (self.block_size - 1) * len(last_blocks)

    def check_all(self) -> None:
        self.books_balance()
        self.blocks_are_exactly_those_of_the_running()
        self.whoever_shares_a_block_has_the_same_tokens_in_it()
        self.waste_stays_behind_the_last_token()

    def teardown(self) -> None:
        try:
            if hasattr(self, "scheduler"):
                self.drain()
        finally:
            logging.disable(logging.NOTSET)

    def drain(self) -> None:
        """The oldest gets on in every step, so all end within so many steps as they have tokens, one after another."""
        most = sum(r.num_prompt_tokens + r.max_tokens for r in self.unfinished.values())
        for _ in range(most):
            if not self.unfinished:
                break
            self.step_and_check(0, 0.7)
            self.check_all()
        assert not self.unfinished
        assert self.num_blocks == self.manager.num_free_blocks
