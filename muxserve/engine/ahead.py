"""Asynchronous scheduling: an engine's next step is scheduled before the tokens of the last one are back.

vLLM's `AsyncScheduler` counts a placeholder for each token that it has not seen; the runner knows the tokens and feeds
them into the next step. The queue of micro-batches (`engine.pipeline`) holds two with one stage: the one that computes,
and the one behind it. It fills while the lease has steps left, and drains at its end.

What a decision needs is never a placeholder. Prefill engines end a request with its first token, so they stay
synchronous, as does an engine of both phases under a lease to prefill. A preempted, detached or handed-over request
leaves with the tokens that have come back: vLLM preempts nobody who is in flight, and `Detach` waits until the request
no longer is. A request that ends by a token leaves one more in flight, which nobody hears of; its blocks are given back
when that step is through.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from muxserve.engine.scheduler import PhaseScheduler


class AheadScheduler(PhaseScheduler, AsyncScheduler):
    """`scheduler_cls` of engines that schedule asynchronously."""

    @property
    def in_turn(self) -> bool:
        """Under a lease to prefill, which is over for a prompt with its first token, and for one request alone."""
        return self.lease_phase == "prefill" or bool(self.alone)
