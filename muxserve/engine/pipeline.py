"""The steps of an engine whose model may be cut into stages, with several micro-batches in flight.

vLLM's queue of micro-batches fills first and is emptied one by one: a step puts one in, takes one out, or both. With
one stage there is a queue of two with asynchronous scheduling (`engine.ahead`); else there is none, and a step is a
step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore

from muxserve.engine.leased_scheduler import LeasedScheduler
from muxserve.engine.stage_clock import NO_STAGES, StageClocks, StageSeconds


class PipelineStep(NamedTuple):
    """What a step did. `ran`: a micro-batch with tokens went in. `in_vain`: none did, and none is or was in flight."""

    outputs: Mapping[int, EngineCoreOutputs]
    ran: bool
    in_vain: bool


class StepPipeline:
    """Steps `core`; `writing` guards what is written into the pool (`MemoryClient.writing`)."""

    def __init__(self, core: EngineCore, writing: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        assert isinstance(core.scheduler, LeasedScheduler)
        self._core = core
        self._scheduler = core.scheduler
        self._writing = writing
        # Until the pipeline is empty: a stage may begin what it was granted long after the step that put it in has
        # returned, and must not find that a new memory manager has given the pages to others meanwhile.
        self._guard = contextlib.ExitStack()
        self._guarded = False
        self._clocks: StageClocks | None = getattr(core.model_executor, "clocks", None)
        if self._clocks is not None:
            # Not what stages computed to warm up.
            self._clocks.reset()
        if core.batch_queue is not None:
            self._scheduler.in_flight = core.batch_queue

    @property
    def busy(self) -> bool:
        """Micro-batches are in flight."""
        return bool(self._core.batch_queue)

    def step(self, may_begin: bool) -> PipelineStep:
        """Begin a micro-batch if `may_begin` and there is room for one, or wait for the first one in flight.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        if not self._guarded:
            self._guard.enter_context(self._writing())
            self._guarded = True
        working = self._working()
        in_turn = self._scheduler.in_turn
        try:
            self._scheduler.holding = not may_begin or (in_turn and self.busy)
            outputs, ran = self._core.step_fn()
            if in_turn and self.busy:
                self._scheduler.holding = True
                outputs, _ = self._core.step_fn()
        finally:
            if not self.busy:
                self._open()
        if self._clocks is not None:
            self._clocks.in_flight(self.busy)
        self._core.post_step(ran)
        return PipelineStep(outputs or {}, ran, not (ran or working))

    def forget(self) -> None:
        """Wait until nothing is in flight, whatever comes of it: workers answer in order, and must have answered before
        they are told to map a new pool."""
        while self._core.batch_queue:
            with contextlib.suppress(Exception):
                self._core.batch_queue.pop()[0].result()
        if self._clocks is not None:
            self._clocks.in_flight(False)
        self._open()

    def take_stages(self) -> StageSeconds:
        """The seconds of each stage since the last call; empty without a pipeline."""
        return NO_STAGES if self._clocks is None else self._clocks.take()

    def _working(self) -> bool:
        """Something with tokens is in flight: vLLM puts empty micro-batches into the queue as well."""
        return any(batch[1].total_num_scheduled_tokens for batch in self._core.batch_queue or ())

    def _open(self) -> None:
        self._guard.close()
        self._guarded = False
