"""vLLM's scheduler under leases: what a step may hold, whom it begins with, and what is told of it.

Where the KV of requests lies is a subclass's business: in the shared pool (`PhaseScheduler`), or in vLLM's own cache
(`PrivateScheduler`).
"""

from __future__ import annotations

import time
from collections.abc import Container, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from muxserve.costs.steps import StepBatch
from muxserve.engine.batch_counter import BatchCounter
from muxserve.engine.budget import BudgetedSteps
from muxserve.engine.grammars import NOTHING_LEFT, EngineGrammars
from muxserve.engine.in_sight import one_phase, one_request
from muxserve.engine.runner import RESUMED_OUTPUT
from muxserve.spec.unit import EnginePhase
from muxserve.vllm.engine_seam import fail_for_grammar


def uncomputed(request: Request) -> int:
    """Tokens of a running request that no step has computed or computes now, proposed ones among them; those that are
    sampled in a step in flight count, although nobody here knows them yet."""
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens


def may_need_another(request: Request) -> bool:
    """It may go on behind the tokens in flight: with these it has not got all that it may have. vLLM's scheduler asks
    the same."""
    unseen = request.num_output_placeholders
    return not unseen or request.num_output_tokens + unseen < request.max_tokens


# vLLM sends its statistics with every step; the front end only counts them, so a few times a second is enough.
STATS_INTERVAL_SECONDS = 0.1


@dataclass(slots=True)
class Leaving:
    """A request that leaves an engine with its KV: blocks (held by nobody but the caller now) and tokens so far."""

    request_id: str
    blocks: list[KVCacheBlock]
    computed_tokens: int
    output_tokens: list[int]


@dataclass(slots=True)
class RequestTokens:
    """A request and everything that it has generated so far."""

    request_id: str
    output_tokens: list[int]


class LeasedScheduler(Scheduler):
    """Base of `scheduler_cls` of engines. What it says of requests that move, or are handed over or back, holds where
    nothing of theirs is shared.

    `phase` is what the engine is for, and `both` while it warms up; `lease_phase` what an engine of both may do in its
    next steps. After each step the engine loop takes `started`. While `alone` names a request, steps hold nothing else.
    """

    # Where blocks come from; the engine loop tells it that a step has ended.
    pool: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.phase: EnginePhase = "both"
        self.lease_phase: EnginePhase = "both"
        self.alone = ""
        # A step is being scheduled.
        self._deciding = False
        self.step_tokens = 0
        self.last_scheduled_tokens = 0
        self.last_prefill_tokens = 0
        self.last_batch: StepBatch | None = None
        self._batches = BatchCounter()
        self._most_tokens: int = self.max_num_scheduled_tokens
        # Requests without a token from this engine, and how many output tokens they came with.
        self._prompts: dict[str, int] = {}
        self._started: list[RequestTokens] = []
        # Statistics are sent from then on, monotonic seconds; whether steps since the last ones sent have some, and
        # what became of their proposals.
        self._stats_due = 0.0
        self._untold = False
        self._untold_proposals: SpecDecodingStats | None = None
        # No micro-batch may begin; set before each step, and once the queue of those in flight.
        self.holding = False
        self.in_flight: Sized = ()
        self._in_vain = False
        # What the next micro-batch may hold is decided by it, if there is one.
        self.budget: BudgetedSteps | None = None

    @property
    def in_turn(self) -> bool:
        """Although several may be in flight, the next step must end before another one begins."""
        return False

    def become(self, phase: EnginePhase) -> None:
        """The engine has warmed up and is for `phase` from now on."""
        self.phase = phase
        if phase == "both":
            # Victims are chosen by level, but what waits stays in the unit scheduler's order.
            self.waiting = create_request_queue(SchedulingPolicy.FCFS)
            self.kv_holding_waiting = create_request_queue(SchedulingPolicy.FCFS)
        self._started.clear()

    # ------------------------------------------------------------ requests coming and going

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._in_vain = False
        if not request.num_computed_tokens:
            self._prompts[request.request_id] = request.num_output_tokens

    def has_work(self) -> bool:
        """There are requests of the phase that the lease allows."""
        if self.alone:
            return self.alone in self.requests
        if self.lease_phase == "prefill":
            return bool(self._prompts)
        if self.lease_phase == "decode":
            return len(self.requests) > len(self._prompts)
        return self.has_unfinished_requests()

    def has_requests(self) -> bool:
        """Another micro-batch may begin. vLLM's batch queue makes one of whatever is there, even an empty one, before
        it waits for one to come out; not while all that could go on is in flight already."""
        if self.holding:
            return False
        if not self.in_flight:
            return super().has_requests()
        return not self._in_vain and self._has_ready()

    def _has_ready(self) -> bool:
        """Some request of the lease's phase is in no micro-batch."""
        if self.alone:
            return False
        phase, prompts = self.lease_phase, self._unread()
        if len(self.running) < self.max_num_active_reqs and (
            (phase != "decode" and self.waiting) or (phase != "prefill" and self.kv_holding_waiting)
        ):
            return True
        return any(
            uncomputed(request) > 0
            and may_need_another(request)
            and (phase == "both" or (request.request_id in prompts) is (phase == "prefill"))
            for request in self.running
        )

    def resume(self, request: Request, output_tokens: list[int]) -> None:
        """Give `request`, not yet added, the tokens it generated elsewhere; its prompt statistics were told there."""
        request.append_output_token_ids(list(output_tokens))
        request.prefill_stats = None

    def held(self) -> set[str]:
        """Ids of the requests that it goes on with."""
        return {r.request_id for queue in (self.running, self.waiting, self.kv_holding_waiting) for r in queue}

    def running_blocks(self, request_id: str) -> tuple[list[int], int] | None:
        """Ids of the blocks of a running request that can move, and of how many tokens they hold the KV; None: it
        stays here."""
        return None

    def is_in_flight(self, request_id: str) -> bool:
        """A micro-batch with that request has gone into the pipeline and has not come out yet."""
        request = self.requests.get(request_id)
        return request is not None and request.num_in_flight_tokens > 0

    def take_prefilled(self) -> list[Leaving]:
        """Requests whose prefill ended in the last step, and which are no longer here."""
        return []

    def take_preempted(self) -> list[RequestTokens]:
        """Requests that the last step could not find pages for."""
        return []

    def take_started(self) -> list[RequestTokens]:
        """Requests whose prefill ended in the last step, and which stay to decode."""
        started, self._started = self._started, []
        return started

    # ------------------------------------------------------------ a step

    def _allowed_tokens(self) -> int:
        """Tokens of the next step at most. A prompt that cannot be computed in chunks would never fit into fewer than
        the engine's own limit."""
        bounded = self.step_tokens and self.scheduler_config.enable_chunked_prefill
        return min(self.step_tokens, self._most_tokens) if bounded else self._most_tokens

    def _unread(self) -> set[str]:
        """Ids of those whose prompts are not through. Others without a token from this engine have it in flight, and
        decode next."""
        return {each for each in self._prompts if not self.requests[each].num_output_placeholders}

    def _in_sight(self, prompts: Container[str]) -> AbstractContextManager[None]:
        if self.alone:
            return one_request(self, self.alone)
        return one_phase(self, self.lease_phase, prompts) if self.lease_phase != "both" else nullcontext()

    def _tell_resumed(self, output: SchedulerOutput) -> None:
        """Say in `output` which tokens requests that are new to the runner have already."""
        for data in output.scheduled_new_reqs:
            request = self.requests[data.req_id]
            if request.num_output_tokens:
                setattr(data, RESUMED_OUTPUT, list(request.output_token_ids))

    def _count_step(self, output: SchedulerOutput, prompts: Container[str]) -> None:
        """What the step just scheduled consists of; `prompts` were not through before it."""
        tokens = output.num_scheduled_tokens
        self.last_scheduled_tokens = output.total_num_scheduled_tokens
        self.last_prefill_tokens = sum(count for request_id, count in tokens.items() if request_id in prompts)
        self.last_batch = self._batches.count(tokens, self.last_scheduled_tokens, self.requests, prompts)
        self._in_vain = not tokens

    def _tell_first_tokens(self, scheduler_output: SchedulerOutput) -> None:
        ran = [request_id for request_id in self._prompts if request_id in scheduler_output.num_scheduled_tokens]
        for request_id in ran:
            request = self.requests[request_id]
            if request.num_output_tokens > self._prompts[request_id]:
                self._first_token(request)

    def _first_token(self, request: Request) -> None:
        del self._prompts[request.request_id]
        if self.phase == "both":
            self._started.append(RequestTokens(request.request_id, list(request.output_token_ids)))

    def _forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        if isinstance(self.structured_output_manager, EngineGrammars):
            self.structured_output_manager.forget(request_id)

    def _tell_ended_grammars(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """A request whose grammar and other constraints left no token has what it has, and a reason; vLLM tells of an
        error, together with the token that was sampled of none."""
        grammars = self.structured_output_manager
        if not isinstance(grammars, EngineGrammars) or not grammars.ended:
            return
        for batch in outputs.values():
            for output in batch.outputs:
                reason = grammars.ended.get(output.request_id)
                if reason is not None and output.finish_reason is FinishReason.ERROR:
                    output.stop_reason = reason
                    output.new_token_ids = []
                    output.new_logprobs = None
                    if reason is NOTHING_LEFT:
                        output.finish_reason = FinishReason.STOP
        grammars.ended.clear()

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._forget(request.request_id)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waited = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready = super()._handle_blocked_waiting_request(request)
        # The grammar is new in this process: lead it over the tokens that exist already.
        if waited and ready and request.num_output_tokens:
            ready = self.structured_output_manager.accept_tokens(request, list(request.output_token_ids))
            if not ready:
                fail_for_grammar(self, request, "The grammar does not hold the tokens that the request has.")
        return ready

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        # Counted on from steps whose statistics were not sent.
        found = super().make_spec_decoding_stats(spec_decoding_stats or self._untold_proposals, *args, **kwargs)
        self._untold_proposals = found or self._untold_proposals
        return found

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        now = time.monotonic()
        if now < self._stats_due:
            self._untold = True
            return None
        self._stats_due = now + STATS_INTERVAL_SECONDS
        return self._all_stats(*args, **kwargs)

    def take_untold(self) -> SchedulerStats | None:
        """The statistics of steps that came too soon after others to send theirs; None without any."""
        return self._all_stats() if self._untold else None

    def _all_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        proposals, self._untold_proposals, self._untold = self._untold_proposals, None, False
        return super().make_stats(proposals, *args, **kwargs)
