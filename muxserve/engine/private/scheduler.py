"""vLLM's own scheduler and KV cache under leases.

What is preempted waits in the engine and is computed again there, as in stock vLLM; so the unit scheduler counts seats
of such a model, and no pages.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from muxserve.engine.leased_scheduler import LeasedScheduler


class NoPool:
    """In place of `PooledBlockPool`."""

    def end_step(self) -> None:
        """There is nobody to tell."""


class PrivateScheduler(LeasedScheduler):
    """`scheduler_cls` of an engine with vLLM's own cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = NoPool()
        # Steps that were scheduled and whose output is not known yet, by identity.
        self._unfinished: dict[int, SchedulerOutput] = {}

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._deciding = True
        self.max_num_scheduled_tokens = self._allowed_tokens()
        prompts = self._unread()
        with self._in_sight(prompts):
            output = super().schedule(throttle_prefills)
        self._deciding = False
        self._tell_resumed(output)
        self._count_step(output, prompts)
        self._unfinished[id(output)] = output
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.num_scheduled_tokens:
            self._in_vain = False
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._tell_ended_grammars(outputs)
        self._tell_first_tokens(scheduler_output)
        del self._unfinished[id(scheduler_output)]
        return outputs

    def give_up_step(self) -> list[str]:
        """A step raised an exception: drop the requests that were in it, or in one in flight beside it. Nothing is in
        flight any more, and what the others have stays as it is. Returns the ids of those that were dropped."""
        steps = [*self._unfinished.values()]
        ids = list(self.requests if self._deciding else {each for step in steps for each in step.num_scheduled_tokens})
        for step in steps:
            # The runner may not have come to hear of them.
            self.finished_req_ids |= step.finished_req_ids
        self._deciding = False
        self._unfinished.clear()
        # vLLM has named their blocks for others to find before anybody wrote them.
        named = {
            block for request_id in ids for group in self.kv_cache_manager.get_block_ids(request_id) for block in group
        }
        self.processed_step_seq = self.sched_step_seq
        self._drain_deferred_frees()
        self._started.clear()
        self.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self.kv_cache_manager.evict_blocks(named)
        # Nobody knows which of the images in it the runner has computed.
        self.encoder_cache_manager.reset()
        self._in_vain = False
        return ids


class PrivateAheadScheduler(PrivateScheduler, AsyncScheduler):
    """The scheduler of engines that schedule a step before the tokens of the last one are back."""

    @property
    def in_turn(self) -> bool:
        """For one request alone."""
        return bool(self.alone)
