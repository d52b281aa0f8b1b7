"""vLLM's scheduler on the shared pool, with the two phases of a request in two processes, or in one after the other.

A prefill engine stops at a request's first token and hands its blocks over; a decode engine adopts them. The token
stays an output token on both sides. An engine of both phases keeps the request, and decodes it when its lease allows
that. One that decodes and runs out of pages gives the preempted request back instead of prefilling it again itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from muxserve.engine.binding import current
from muxserve.engine.block_pool import Filled, PooledBlockPool
from muxserve.engine.budget import BudgetedSteps
from muxserve.engine.leased_scheduler import LeasedScheduler, Leaving, RequestTokens, uncomputed
from muxserve.engine.snapshots import end_of_chunk
from muxserve.engine.states import StatefulBlocks

# What a step of vLLM's scheduler needs of the shared pool, found out before it is taken.
#
# It is reserved in one round trip for the whole batch, so that the scheduler finds what it asks for while it decides.


def takes_proposals(request: Request) -> bool:
    """Several of its tokens may be sampled in one step, with the same outcome: it takes the likeliest token, and has
    nothing that vLLM applies to the last token of a step only."""
    params = request.sampling_params
    return (
        params is not None
        and params.temperature == 0.0
        and not request.use_structured_output
        and not (params.min_tokens or params.logit_bias or params.thinking_token_budget)
    )


def demand_of_step(
    scheduler: Scheduler,
    held: Mapping[str, Sequence[KVCacheBlock]],
    found: Mapping[str, int],
    states: StatefulBlocks | None = None,
    most_entering: int = sys.maxsize,
) -> tuple[int, dict[str, list[bytes]]]:
    """Blocks that the next step of `scheduler` can take at most, beside those that its requests have (`held`, by id,
    and those of their `states`), and by prompt the hashes that it can use and whose cached blocks are not known.
    `found` says how many cached blocks prompts begin with, where that is known. At most `most_entering` waiting
    requests are looked at."""
    need, budget = 0, scheduler.max_num_scheduled_tokens
    size = scheduler.block_size
    for request in scheduler.running:
        tokens = min(uncomputed(request), budget)
        # One whose images must wait for the encoder leaves its part of the step to others.
        budget -= 0 if request.has_encoder_inputs else tokens
        need += max(0, -(-(request.num_computed_tokens + tokens) // size) - len(held[request.request_id]))
    lookups: dict[str, list[bytes]] = {}
    room = min(scheduler.max_num_active_reqs - len(scheduler.running), most_entering)
    waiting = (scheduler.waiting,) if scheduler.pause_state == PauseState.UNPAUSED else ()
    for queue in (scheduler.kv_holding_waiting, *waiting):
        for request in queue:
            if budget <= 0 or room <= 0:
                return need, lookups
            name, computed = request.request_id, request.num_computed_tokens
            blocks, known = len(held.get(name, ())), True
            if not computed and scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request):
                # The last token is computed again even when all its blocks are cached: its logits are needed.
                hashes = request.block_hashes[: (request.num_tokens - 1) // size]
                if name in found:
                    blocks = found[name]
                    computed = blocks * size
                elif hashes:
                    lookups[name] = hashes
                    known = False
            tokens = min(request.num_tokens - computed, budget)
            budget -= 0 if request.has_encoder_inputs else tokens
            room -= 1
            # Before it is known where the chunk begins, it can end anywhere up to the prompt's end.
            end = computed + tokens if known else request.num_tokens
            need += max(0, -(-end // size) - blocks)
            if states is not None and name not in states.states:
                need += states.state_blocks
    return need, lookups


class _Step(NamedTuple):
    """A step without an output yet, and the blocks that are full when it is through."""

    output: SchedulerOutput
    filled: Filled


class PhaseScheduler(LeasedScheduler):
    """`scheduler_cls` of an engine on the shared pool. After each step the engine loop takes `prefilled`, `started` and
    `preempted`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        stock = manager.block_pool
        self.pool = PooledBlockPool(
            stock.num_gpu_blocks, self.cache_config.enable_prefix_caching, stock.hash_block_size, current()
        )
        coordinator = manager.coordinator
        state_blocks = current().model.state_blocks
        self._states: StatefulBlocks | None = None
        if state_blocks:
            self._states = StatefulBlocks(coordinator.single_type_managers[0], self.pool, state_blocks)
            coordinator.single_type_managers = (self._states,)
            # Chunks of prompts end where snapshots of states are kept (`_mamba_block_aligned_split`).
            self.need_mamba_block_aligned_split = self.pool.enable_caching
        if current().model.zeroed:
            self.needs_kv_cache_zeroing = True
            for each in coordinator.single_type_managers:
                each._record_new_block_ids = True
        for holder in (manager, coordinator, *coordinator.single_type_managers):
            holder.block_pool = self.pool
        # A model that keeps no KV has none, and its requests hold no blocks.
        self._blocks_of: Any
        (self._blocks_of,) = coordinator.single_type_managers or (None,)
        if self._blocks_of is not None:
            self._blocks_of._null_block = self.pool.null_block
        # Tokens that the layers with a window see, where pages behind it are given back; else 0. By
        # request id: how many of its first blocks have been given back.
        self._window: int = current().model.window if current().model.windowed_layers else 0
        self._behind: dict[str, int] = {}
        self._prefilled: list[Leaving] = []
        self._preempted: list[RequestTokens] = []
        # With several micro-batches in flight a stage may still write the blocks of a request that has ended; vLLM then
        # gives them back when the last micro-batch that has it is through.
        self.defer_block_free = self.vllm_config.max_concurrent_batches > 1
        # Steps that were scheduled and whose output is not known yet, by the identity of what vLLM made.
        self._unfinished: dict[int, _Step] = {}
        # Tokens that may be proposed for each sequence.
        self._proposals: int = self.vllm_config.num_speculative_tokens

    # ------------------------------------------------------------ requests coming and going

    def adopt(self, request: Request, blocks: list[KVCacheBlock], computed_tokens: int, foreign: bool = False) -> None:
        """Give `request`, not yet added, blocks that hold the KV of its first `computed_tokens` tokens.

        `foreign` blocks were filled in another unit: nobody has published them here, so that its first step does.
        """
        if self._states is not None:
            blocks = self._states.adopt(request.request_id, blocks)
        self._blocks_of.req_to_blocks[request.request_id] = blocks
        # What is behind a window may not have been copied: nobody else is to find it.
        known = self._behind_window(computed_tokens) if foreign else computed_tokens // self.block_size
        self._blocks_of.num_cached_block[request.request_id] = known
        request.num_computed_tokens = computed_tokens

    def disown(self, request_id: str) -> None:
        """vLLM does not take the request after all: forget the blocks that it adopted, which stay the caller's."""
        self._blocks_of.pop_blocks_for_free(request_id)

    def _behind_window(self, computed_tokens: int) -> int:
        """How many blocks of a request with the KV of so many tokens no later token sees in layers with a window."""
        return max(0, computed_tokens - self._window + 1) // self.block_size if self._window else 0

    def _leave_window(self, request: Request) -> None:
        """Give back the pages of `request` that are behind the window; of what is in flight, nothing is."""
        known = self._behind.get(request.request_id, 0)
        behind = self._behind_window(request.num_computed_tokens - request.num_in_flight_tokens)
        if behind > known:
            self.pool.behind_window(self._blocks_of.req_to_blocks[request.request_id][known:behind])
            self._behind[request.request_id] = behind

    def running_blocks(self, request_id: str) -> tuple[list[int], int] | None:
        """Ids of the blocks of a running request, those of its state first, and of how many tokens the others hold the
        KV; None if it does not decode, or has gaps in its blocks (which this pool does not make). What is in flight is
        not counted."""
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING or request_id in self._prompts:
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        blocks = self._blocks_of.req_to_blocks[request_id]
        if self._proposals:
            # Behind them may be one for proposals that were rejected.
            blocks = blocks[: -(-computed // self.block_size)]
        if self._states is not None:
            blocks = [*self._states.states[request_id], *blocks]
        if any(block.is_null for block in blocks):
            return None
        return [block.block_id for block in blocks], computed

    def detach(self, request_id: str) -> Leaving:
        """Take a running request that is not in flight out of the batch, between two steps, with blocks and tokens as
        they are.

        Raises:
            KeyError: there is no such request.
            ValueError: it is not running.
        """
        request = self.requests[request_id]
        self.running.remove(request)
        gone = self._taken(request)
        self._drop(request)
        return gone

    def take_prefilled(self) -> list[Leaving]:
        """Requests whose prefill ended in the last step, and which are no longer here."""
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    def take_preempted(self) -> list[RequestTokens]:
        """Requests that the last step could not find pages for."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def give_up_step(self) -> list[str]:
        """A step raised an exception: drop the requests that were in it, or in one in flight beside it, and what these
        were to tell. Nothing is in flight any more.

        What the others have stays as it is. Returns the ids of those that were dropped.
        """
        steps = [step.output for step in self._unfinished.values()]
        ids = list(self.requests if self._deciding else {each for step in steps for each in step.num_scheduled_tokens})
        for step in steps:
            # The runner may not have come to hear of them.
            self.finished_req_ids |= step.finished_req_ids
        self._deciding = False
        self._unfinished.clear()
        self.pool.take_filled()
        # Nobody has written the snapshots that were to be kept.
        self.pool.unpin()
        # Whoever was to be given back when a step is through.
        self.processed_step_seq = self.sched_step_seq
        self._drain_deferred_frees()
        for leaving in self._prefilled:
            self.pool.free_blocks(leaving.blocks)
        self._prefilled.clear()
        self._started.clear()
        self._preempted.clear()
        self.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        # Nobody knows which of the images in it the runner has computed.
        self.encoder_cache_manager.reset()
        self._in_vain = False
        return ids

    def forget_all(self) -> list[str]:
        """Drop every request and hold without telling the memory manager, which is gone. Returns their ids."""
        ids = list(self.requests)
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.encoder_cache_manager.reset()
        # Nothing is in flight any more, and nobody wants the blocks back that a micro-batch was still to fill.
        self.deferred_frees.clear()
        self.processed_step_seq = self.sched_step_seq
        self._unfinished.clear()
        self.pool.forget()
        self._prefilled.clear()
        self._started.clear()
        self._preempted.clear()
        return ids

    # ------------------------------------------------------------ vLLM's step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._deciding = True
        most = self._allowed_tokens()
        if self.budget is not None and self.lease_phase == "both" and not self.alone:
            most = min(most, self._budgeted(self.budget))
        self.max_num_scheduled_tokens = most
        prompts = self._unread()
        with self._in_sight(prompts):
            if self._blocks_of is not None:
                self._reserve(self._blocks_of.req_to_blocks)
                self._let_one_in()
            # vLLM would fill up a request's first step here with tokens that stand for proposals, and compute them.
            self.num_spec_tokens = 0
            try:
                output = super().schedule(throttle_prefills)
            finally:
                self.num_spec_tokens = self._proposals
        if self._proposals:
            wanted = any(takes_proposals(self.requests[each]) for each in output.num_scheduled_tokens)
            output.num_spec_tokens_to_schedule = self._proposals if wanted else 0
        self._deciding = False
        # The blocks of requests that were preempted since then belong to others by now.
        zeroed = output.new_block_ids_to_zero
        if zeroed:
            output.new_block_ids_to_zero = [each for each in zeroed if self.pool.blocks[each].ref_cnt]
        if self._states is not None:
            computed = (self.requests[each] for each in output.num_scheduled_tokens if each in prompts)
            kept = self._states.keep(computed) if self.pool.enable_caching else []
            self._states.tell(output, self.requests, kept)
        self._tell_resumed(output)
        self._count_step(output, prompts)
        self._unfinished[id(output)] = _Step(output, self.pool.take_filled())
        if self.budget is not None:
            self.budget.scheduled(output.num_scheduled_tokens, self.current_step)
        return output

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """How many tokens of a chunk are computed in this step: up to where a snapshot is kept."""
        assert self._states is not None
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return end_of_chunk(start, start + num_new_tokens, self._states.stops(request)) - start

    def _reserve(self, held: Mapping[str, Sequence[KVCacheBlock]]) -> None:
        """Get what the next step can take. The more of a prompt is cached, the more prompts fit into the step, and what
        is cached of those has to be known as well: vLLM would compute them from their beginning.

        What is found is held during the step. It may be all that the model is to have, so that there are no blocks for
        any of the prompts to go on. After a step in vain only what runs is looked at, or else the first that waits.
        """
        entering = sys.maxsize if not self._in_vain else 0 if self.running else 1
        if self._states is not None and self.pool.enable_caching:
            self._reserve_behind_snapshots(held, self._states, entering)
            return
        found: dict[str, int] = {}
        while True:
            need, lookups = demand_of_step(self, held, found, self._states, entering)
            self.pool.begin_step(need, list(lookups.values()))
            hits = {name: self.pool.cached_blocks(hashes) for name, hashes in lookups.items()}
            if not any(hits.values()):
                break
            found |= hits
        if self._proposals and self.pool.get_num_free_blocks() < need:
            # Nobody is to give pages back for tokens that may be rejected.
            for request in self.running:
                request.spec_token_ids = []

    def _reserve_behind_snapshots(
        self, held: Mapping[str, Sequence[KVCacheBlock]], states: StatefulBlocks, entering: int
    ) -> None:
        """The same for prompts that can begin behind a snapshot only."""
        found: dict[str, int] = {}
        while True:
            need, lookups = demand_of_step(self, held, found, states, entering)
            if not lookups:
                break
            known = self.pool.begin_behind_snapshots([*lookups.values()], states.state_blocks)
            for name, (begins, cached) in zip(lookups, known, strict=True):
                found[name] = begins
                if cached > begins:
                    states.junctions[name] = cached
        self.pool.begin_step(need)
        if any(found.values()) and self.pool.get_num_free_blocks() < need:
            # A snapshot and the states that it is copied to are both there for a step. Whoever has pages for one of
            # them only would wait for ever; it has enough to compute its prompt from the beginning.
            self.pool.unpin()
            need, _ = demand_of_step(self, held, dict.fromkeys(found, 0), states, entering)
            self.pool.begin_step(need)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            request = self.requests.get(request_id)
            if request is not None and request.spec_token_ids and not takes_proposals(request):
                request.spec_token_ids = []

    def _let_one_in(self) -> None:
        """Preempt requests that wait with adopted blocks until the first of them finds the pages that it needs.

        vLLM preempts only what runs. If nothing runs, nobody here gives pages back any more, while those that wait may
        hold all that there are: each would wait for the others, for ever.
        """
        if self.running or self.max_num_active_reqs <= 0:
            return
        while ready := [r for r in self.kv_holding_waiting if r.status == RequestStatus.WAITING]:
            held = len(self._blocks_of.req_to_blocks[ready[0].request_id])
            if -(-ready[0].num_tokens // self.block_size) - held <= self.pool.get_num_free_blocks():
                return
            victim = max(ready, key=lambda r: (r.priority, r.arrival_time))
            self.kv_holding_waiting.remove_request(victim)
            self._free_request_blocks(victim)
            self.pool.exchange()
            self._give_back(victim)

    def _budgeted(self, budget: BudgetedSteps) -> int:
        free = 1.0 - self.pool.get_usage()
        # vLLM counts the step before it makes it.
        step = self.current_step + 1
        return budget.tokens(self.running, len(self.kv_holding_waiting), self.waiting, self._prompts, free, step)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.pool.publish(self._unfinished[id(scheduler_output)].filled)
        if scheduler_output.num_scheduled_tokens:
            self._in_vain = False
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # Blocks whose last token is known only now: what computed their KV is through.
        self.pool.publish(self.pool.take_filled())
        self._tell_ended_grammars(outputs)
        if self._window:
            for request_id in scheduler_output.num_scheduled_tokens:
                if (live := self.requests.get(request_id)) is not None:
                    self._leave_window(live)
        self._tell_first_tokens(scheduler_output)
        del self._unfinished[id(scheduler_output)]
        return outputs

    def _first_token(self, request: Request) -> None:
        if self.phase == "prefill":
            self._prefilled.append(self._taken(request))
            self.running.remove(request)
            self._drop(request)
            return
        super()._first_token(request)

    def _taken(self, request: Request) -> Leaving:
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        if self._proposals:
            used = -(-request.num_computed_tokens // self.block_size)
            self.pool.free_blocks(blocks[used:])
            blocks = blocks[:used]
        return Leaving(
            request_id=request.request_id,
            blocks=blocks,
            computed_tokens=request.num_computed_tokens,
            output_tokens=list(request.output_token_ids),
        )

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self.pool.exchange()
        if self.phase != "prefill":
            self.waiting.remove_request(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """A request whose blocks are freed is to be prefilled again."""
        self._preempted.append(RequestTokens(request.request_id, list(request.output_token_ids)))
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget a live request whose blocks are taken care of; the runner is told with the next step."""
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        self.finished_req_ids.add(request.request_id)
        self.requests.pop(request.request_id)
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._behind.pop(request_id, None)
        if self._states is not None:
            self._states.junctions.pop(request_id, None)
        if self.budget is not None:
            self.budget.forget(request_id)
