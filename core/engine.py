"""The one object the service talks to: add, abort, step. It joins scheduler and runner, and keeps the books.

One thread at a time may touch it; only `check`, `stats`, `progress` and what never changes may be read from others.
What goes in (`NewRequest`) and what comes out (`RequestOutput`) is plain data, so that a process may stand between.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.block_hash import encode_salt
from core.config import EngineConfig
from core.decoding.constraints import GrammarCompiler
from core.errors import EngineDead, InvalidRequest
from core.limits import Limits
from core.memory.block_hold import BlockHold
from core.memory.block_manager import BlockManager
from core.memory.host_tier import HostTier
from core.memory.prefix_ghost import PrefixGhost
from core.model.config import ModelConfig
from core.pace import Progress, StepPace
from core.request import NewRequest, Request, RequestOutput
from core.sampling_params import SamplingParams, StructuredOutput
from core.scheduling.draft_controller import draft_policy
from core.scheduling.preemption import CostModel, always_swap
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.scripted import RequestScript, ScriptedRunner
from core.stats import EngineStats, StatsGatherer
from core.step import Execute, ModelRunnerOutput, SchedulerOutput
from core.tokenizer import IncrementalDetokenizer, Tokenizer

logger = logging.getLogger(__name__)

MAX_PREDICTED_DRAFTS = 8  # a step, where a request brings a prediction: they cost rows and no draft model


@dataclass(frozen=True, slots=True)
class _Executed:
    """A plan that was computed, and who got tokens by it: a request with siblings, for each of `plan.scheduled`."""

    plan: SchedulerOutput
    result: ModelRunnerOutput
    yielding: list[tuple[Request, ...]]

    def num_drafted(self, request_id: str) -> int:
        sampled = self.result.sampled.get(request_id)
        return 0 if sampled is None else sampled.num_draft_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt tokens computed plus tokens emitted (what a stop cut off was not). Asked after the update."""
        computed = sum(max(0, min(s.end, s.request.num_prompt_tokens) - s.start) for s in self.plan.scheduled)
        pairs = zip(self.plan.scheduled, self.yielding, strict=True)
        return computed + sum(member.num_tokens - s.end for s, family in pairs for member in family)


class Engine:
    """A model being served.

    Args:
        config: limits; `num_kv_blocks` must be set by now.
        model_config: the model's sizes.
        tokenizer: its vocabulary.
        execute: computes plans (`ModelRunner`).
        clock: seconds, monotonic; the same that `NewRequest.arrival_s` was read from.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        execute: Execute,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        # Files may name an end that the model has no row for; it will never say it.
        self._eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if i < model_config.vocab_size)
        self._limits = Limits(config, model_config)
        self.num_kv_blocks = self._limits.num_kv_blocks
        self.max_model_len = self._limits.max_model_len
        self._cost = CostModel()
        self._tier = HostTier(config.num_tier_slots) if config.num_tier_slots else None
        self._ghost = PrefixGhost(config.block_size, self.num_kv_blocks) if config.enable_prefix_caching else None
        self._runner: Execute = ScriptedRunner(execute) if config.enable_scripts else execute
        self._grammars = GrammarCompiler(tokenizer)
        self.clock = clock
        self._drafting = draft_policy(config.speculative)
        self._block_manager = BlockManager(self.num_kv_blocks, config.block_size)
        self._hold = BlockHold(self._block_manager)
        self._scheduler = ContinuousBatchingScheduler(
            config.max_num_seqs,
            self._block_manager,
            execute=self._execute,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            tier=self._tier,
            ghost=self._ghost,
            drafting=self._drafting,
            swaps=self._cost.prefers_swap if config.preemption_mode == "auto" else always_swap,
        )
        self._num_drafts = config.speculative.num_speculative_tokens if config.speculative else 0
        self._seeds = np.random.default_rng(config.seed % 2**64)  # a seed may be negative, as a request's may
        self._gatherer = StatsGatherer(
            self.max_model_len, self._num_drafts, has_prefix_cache=config.enable_prefix_caching
        )
        self._pace = StepPace()
        self.progress = Progress(clock())
        self._executed: list[_Executed] = []  # in the step under way
        self._planned: dict[str, Request] = {}  # in the step under way, who may say something
        self._is_dead = False
        self.stats: EngineStats = self._snapshot()

    # Requests

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Hold a request to this model's limits. Changes nothing; any thread may call it.

        Returns:
            The parameters with `max_tokens` set: what was asked, or the room that the context leaves.

        Raises:
            InvalidRequest: ids outside the vocabulary, an empty prompt, too many log-probabilities, a structured output
                that cannot be honoured.
            ContextLengthExceeded: prompt and output do not fit the context.
        """
        self._limits.check(prompt_token_ids, params)
        if params.structured_output is not None:
            self.compile(params.structured_output)
        return self._limits.fit(len(prompt_token_ids), params)

    def compile(self, wanted: StructuredOutput) -> None:
        """Make a structured output ready, so that `check` and `add` find it. May take long; any thread may call it.

        Raises:
            InvalidRequest: it cannot be honoured.
        """
        self._grammars.compile(wanted)

    def add(self, new: NewRequest) -> None:
        """Take a request.

        Raises:
            EngineDead: the engine has ended.
            DuplicateRequest: its id is in use.
            InvalidRequest: it fails `check`, or brings a script where scripts are off.
        """
        self._raise_if_dead()
        params = self.check(new.prompt_token_ids, new.params)
        self._limits.check_ids("prediction", new.prediction_token_ids)
        if new.script is not None and not self.config.enable_scripts:
            raise InvalidRequest("script is taken only by a server started with --enable-scripts", "script")
        siblings = [
            self._request(new, request_id, new.choice + i, params) for i, request_id in enumerate(new.sibling_ids, 1)
        ]
        self._scheduler.add_request(self._request(new, new.request_id, new.choice, params, siblings))
        self._refresh()

    def _request(
        self, new: NewRequest, request_id: str, choice: int, params: SamplingParams, siblings: Sequence[Request] = ()
    ) -> Request:
        script = RequestScript(new.script, self.tokenizer) if new.script is not None else None
        # A script's author knows what it says.
        wanted = params.structured_output if script is None else None
        # What a script computes is no KV of its tokens: nobody else may take it for that.
        salt = {**new.cache_salt, "script": ""} if script else dict(new.cache_salt)
        if not self.config.enable_prefix_caching:
            salt["request"] = request_id  # its blocks are for nobody but itself, back from the second tier
        request = Request(
            request_id,
            new.prompt_token_ids,
            params,
            choice=choice,
            seed=params.seed if params.seed is not None else int(self._seeds.integers(2**63)),
            eos_token_ids=self._eos_token_ids,
            decoder=IncrementalDetokenizer(
                script or self.tokenizer,
                shows_special=not params.skip_special_tokens,
                behind=new.prompt_token_ids,
            ),
            script=script,
            constraint=None if wanted is None else self._grammars.compile(wanted).constraint(),
            cache_salt=encode_salt(salt),
            siblings=siblings,
            arrival_s=new.arrival_s,
            prediction=new.prediction_token_ids,
        )
        # Drafts would come to where no token is left before the text does, if it ever does.
        asked = 0 if params.may_run_dry else params.speculative_tokens
        request.num_speculative_tokens = _at_most(self._num_drafts, asked)
        request.num_predicted_tokens = _at_most(MAX_PREDICTED_DRAFTS if request.prediction else 0, asked)
        return request

    def reset_prefix_cache(self) -> None:
        """No request will hit what has been computed so far. Those that run are not disturbed."""
        self._scheduler.reset_prefix_cache()
        self._refresh()

    def hold_free_blocks(self) -> None:
        """From now on nobody gets a block but the oldest request, which goes on; for tests of a full pool."""
        self._hold.turn_on()
        self._refresh()

    def release_held_blocks(self) -> None:
        """All as before; if no blocks are held, nothing."""
        self._hold.turn_off()
        self._refresh()

    def abort(self, request_id: str) -> None:
        """End a request at once and free its blocks; an id that is not (or no longer) there is ignored."""
        request = self._scheduler.find(request_id)
        if request is None:
            return
        if request.siblings:
            self._gatherer.on_hand_down(request, request.siblings[0])
        self._scheduler.abort(request_id)
        self._gatherer.on_finish(request, self.clock())
        self._refresh()

    @property
    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_unfinished_requests

    # Steps

    def step(self) -> list[RequestOutput]:
        """One step of the scheduler; what it added to each request, at most one output a request.

        A request whose computation raised ends with FinishReason.ERROR, alone.

        Raises:
            EngineDead: the engine had ended before.
            InvariantViolation, MemoryError, and anything unforeseen: it ends now; nothing can be added or stepped any
                more, for the books may have been left half written.
        """
        self._raise_if_dead()
        self._executed.clear()
        self._planned.clear()
        started_s = self.clock()
        try:
            self._scheduler.step()
        except BaseException:
            self._is_dead = True
            raise
        outputs = self._scheduler.take_outputs()
        self._gather(outputs)
        if len(self._executed) == 1:  # in steps that had to be repeated times say nothing
            (executed,) = self._executed
            self._drafting.observe(executed.plan, executed.result, self.clock() - started_s)
        self._refresh()
        return outputs

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started_s = self.clock()
        for scheduled in plan.scheduled:
            self._planned.update((r.request_id, r) for r in (scheduled.request, *scheduled.request.siblings))
        self.progress = Progress(started_s, plan.num_tokens, self._pace.longest_s(plan.num_tokens))
        try:
            result = self._runner(plan)
        finally:
            self.progress = Progress(self.clock())
        self._measure(plan, result, self.progress.at_s - started_s)
        if not plan.scheduled:  # blocks moved again after a step that raised; nothing was computed
            return result
        self._gatherer.on_step(plan, started_s)
        self._executed.append(_Executed(plan, result, [s.yielding_requests for s in plan.scheduled]))
        return result

    def _measure(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        num_moved = len(plan.tier_stores) + len(plan.tier_loads)
        if num_moved:
            self._cost.observe_copies(num_moved, result.tier_seconds)
        if plan.num_tokens:
            self._pace.observe(plan.num_tokens, seconds)
            self._cost.observe_step(plan.num_tokens, seconds - result.tier_seconds)

    def _gather(self, outputs: Sequence[RequestOutput]) -> None:
        now_s = self.clock()
        for executed in self._executed:
            self._gatherer.on_iteration(executed.num_tokens)
            drafted = [(s, n) for s in executed.plan.scheduled if (n := executed.num_drafted(s.request_id))]
            self._gatherer.on_drafts(
                [n for _, n in drafted],
                # What a stop cut off was not emitted, and the last token is never a draft's merit.
                [s.request.num_tokens - s.end - 1 for s, _ in drafted],
            )
            self._gatherer.drafts.on_passes(executed.result.draft_passes)
            self._gatherer.drafts.on_bounds(list(executed.result.sampled.values()))
        for output in outputs:
            output.times = self._gatherer.on_output(self._planned[output.request_id], output, now_s)

    def describe_kv(self) -> dict[str, Any]:
        """Block tables, reference counts and hashes as they are now, as JSON's types. Engine thread only."""
        manager, pool = self._block_manager, self._block_manager.pool
        requests = [
            {
                "request_id": request.request_id,
                "status": request.status.value,
                "num_tokens": request.num_tokens,
                "num_computed_tokens": request.num_computed_tokens,
                "block_table": manager.block_table(request.request_id) if manager.holds(request.request_id) else [],
            }
            for request in self._scheduler.unfinished_requests()
        ]
        hashes = {block: pool.hash_of(block) for block in range(pool.num_blocks)}
        blocks = [
            {
                "block": block,
                "ref_count": pool.ref_count(block),
                "hash": block_hash.hex() if isinstance(block_hash, bytes) else None,
            }
            for block, block_hash in hashes.items()
            if pool.ref_count(block) or block_hash is not None
        ]
        return {
            "block_size": manager.block_size,
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free_blocks,
            "requests": requests,
            "blocks": blocks,
        }

    def _raise_if_dead(self) -> None:
        if self._is_dead:
            raise EngineDead("the engine has ended after a fault")

    def _refresh(self) -> None:
        """After whatever has changed who holds blocks."""
        if self._hold.is_on:
            self._hold.renew(self._scheduler.unfinished_requests())
        self.stats = self._snapshot()

    def _snapshot(self) -> EngineStats:
        pool = self._block_manager.pool
        return self._gatherer.snapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_deferred=self._scheduler.num_deferred,
            kv_blocks=pool.num_blocks,
            kv_blocks_free=pool.num_free_blocks,
            kv_blocks_cached=pool.num_cached_blocks,
            kv_blocks_used=pool.num_used_blocks,
            kv_blocks_shared=pool.num_shared_blocks,
            kv_slots_wasted=self._block_manager.num_wasted_slots(),
            draft_outlook=self._drafting.outlook,
            swap_slots_used=self._tier.num_used_slots if self._tier else 0,
            infinite_hit_rate=self._ghost.infinite_hit_rate if self._ghost else 0.0,
            doubled_hit_rate=self._ghost.doubled_hit_rate if self._ghost else 0.0,
            hit_rate_error=self._ghost.standard_error if self._ghost else 0.0,
            num_preemptions=self._scheduler.num_preemptions,
            num_recomputed_tokens=self._scheduler.num_recomputed_tokens,
        )


def _at_most(limit: int, asked: int | None) -> int:
    return limit if asked is None else min(limit, asked)
