"""Steps that hold only some of an engine's requests: what the lease does not allow sits the step out.

A prompt is a request without a token from this engine; all others decode, also those that were adopted. vLLM's
scheduler knows no phases, so for one call of it the requests of the other phase are out of its sight: they keep their
blocks, cannot be preempted for what runs, and still count as running where room for more is looked for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


@contextmanager
def one_phase(scheduler: Scheduler, phase: Literal["prefill", "decode"], prompts: Container[str]) -> Iterator[None]:
    """Let `scheduler` see the requests of `phase` only; `prompts` are the ids of those without a first token."""
    prefill = phase == "prefill"
    in_sight: list[Request] = []
    held: list[Request] = []
    for request in scheduler.running:
        (in_sight if (request.request_id in prompts) is prefill else held).append(request)
    room, adopted, pause = scheduler.max_num_active_reqs, scheduler.kv_holding_waiting, scheduler._pause_state
    scheduler.running = in_sight
    scheduler.max_num_active_reqs = room - len(held)
    if prefill:
        # Whoever waits and holds blocks was adopted: its first step here is a decode step.
        scheduler.kv_holding_waiting = create_request_queue(SchedulingPolicy.FCFS)
    else:
        # Only these of the waiting requests are in sight.
        scheduler._pause_state = PauseState.PAUSED_NEW
    try:
        yield
    finally:
        scheduler.running = held + scheduler.running if prefill else scheduler.running + held
        scheduler.max_num_active_reqs = room
        scheduler.kv_holding_waiting = adopted
        scheduler._pause_state = pause


@contextmanager
def one_request(scheduler: Scheduler, request_id: str) -> Iterator[None]:
    """Let `scheduler` see that request only."""
    mine = [request for request in scheduler.running if request.request_id == request_id]
    held = [request for request in scheduler.running if request.request_id != request_id]
    room, waiting, adopted = scheduler.max_num_active_reqs, scheduler.waiting, scheduler.kv_holding_waiting
    scheduler.running = mine
    scheduler.max_num_active_reqs = room - len(held)
    scheduler.waiting = _taken_out(waiting, request_id)
    scheduler.kv_holding_waiting = _taken_out(adopted, request_id)
    try:
        yield
    finally:
        scheduler.running = held + scheduler.running
        scheduler.max_num_active_reqs = room
        for queue, left in ((waiting, scheduler.waiting), (adopted, scheduler.kv_holding_waiting)):
            for request in left:
                queue.prepend_request(request)
        scheduler.waiting, scheduler.kv_holding_waiting = waiting, adopted


def _taken_out(queue: RequestQueue, request_id: str) -> RequestQueue:
    """A queue of that request alone, if it is in `queue`, which has it no more."""
    alone = create_request_queue(SchedulingPolicy.FCFS)
    for request in [request for request in queue if request.request_id == request_id]:
        queue.remove_request(request)
        alone.add_request(request)
    return alone
