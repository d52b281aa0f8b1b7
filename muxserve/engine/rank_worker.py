"""The worker process of one rank of an engine; see `muxserve.engine.ranks`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm.distributed import parallel_state
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from muxserve.engine import binding
from muxserve.engine.stage_clock import StageClock, StageClocks
from muxserve.net.process import die_with, set_title

log = logging.getLogger(__name__)

MOST_WORDS = 4096
# Both ends of the engine's channel to each rank, while the engine forks its workers.
channels: list[tuple[socket.socket, socket.socket]] = []
# How long each stage of a pipeline computes.
clocks: StageClocks | None = None


def unlink(buffer: Any) -> None:
    """Take the name of a message queue's shared memory away, so that it ends with its last user, also after a kill."""
    buffer.shared_memory.unlink()
    buffer.is_creator = False


class RankWorker(WorkerWrapperBase):
    """vLLM's wrapper of a worker in a process of its own, with what makes it part of an engine on the shared pool.

    A step runs between the two ends of `MemoryClient.writing`, as in an engine with one rank. The engine's own guard
    ends with the engine; a worker that has not died yet goes on writing behind a guard of its own.
    """

    # Counts what a stage of a pipeline computes.
    _clock: StageClock | None = None

    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        die_with(parent.pid)
        # Ctrl-C in a terminal reaches everyone; the controller decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The engine's temporary files belong to the run; compiled code is kept.
        tempfile.tempdir = None
        pairs, self._writing = list(channels), ExitStack()
        self._channel = pairs[self.global_rank][1]
        for rank, (theirs, ours) in enumerate(pairs):
            theirs.close()
            if rank != self.global_rank:
                ours.close()
        # The engine's connection to the memory manager: it ends when the last of us has ended.
        self._engines = binding.current()
        self._connection: int | None = None
        with self._telling():
            binding.bind_worker(all_kwargs[self.rpc_rank]["vllm_config"], self.global_rank)
            super().init_worker(all_kwargs)

    def init_device(self) -> None:
        with self._telling():
            super().init_device()
        self._unlink_queues()
        self._clock = self._clock_of_stage()

    def load_model(self) -> None:
        place = binding.current()
        set_title(f"worker {place.model.name}/{place.phase} rank {place.rank}")
        with self._telling():
            self.worker.load_model()

    def rebind_pool(self) -> None:
        """The memory manager has restarted: take the engine's new connection, map the pool anew, bind the layers."""
        _, descriptors, _, _ = socket.recv_fds(self._channel, 64, 1)
        if self._connection is not None:
            os.close(self._connection)
        (self._connection,) = descriptors
        binding.bind_worker(self.vllm_config, self.global_rank, anew=True)
        self.worker.rebind_pool()

    # ------------------------------------------------------------ a step

    def execute_model(self, scheduler_output: Any) -> Any:
        def run() -> Any:
            self._writing.enter_context(binding.current().client.writing())
            return super(RankWorker, self).execute_model(scheduler_output)

        output = self._step(run)
        if output is not None:
            self._writing.close()
        # Else it goes on: on a GPU, the step has run only when its tokens are there.
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return self._step(lambda: self.worker.sample_tokens(grammar_output))
        finally:
            self._writing.close()

    def _step(self, run: Callable[[], Any]) -> Any:
        try:
            with self._counting():
                output = run()
                # vLLM's second runner returns before the GPU has written the step's KV.
                return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output
        except Exception:
            # The other ranks wait for this one, and vLLM hears of a failure from one of them only.
            log.exception("a step failed; this worker ends, and with it the engine")
            os._exit(1)

    def _clock_of_stage(self) -> StageClock | None:
        """The clock of this stage, which stands still while it waits for another one; of ranks that split tensors of
        a stage the first has it."""
        if clocks is None or parallel_state.get_tensor_model_parallel_rank():
            return None
        group = parallel_state.get_pp_group()
        clock = clocks.clock(group.rank_in_group)
        # On CPU both return when the tensors are through.
        group.irecv_tensor_dict = clock.paused(group.irecv_tensor_dict)
        group.isend_tensor_dict = clock.paused(group.isend_tensor_dict)
        return clock

    @contextmanager
    def _counting(self) -> Iterator[None]:
        if self._clock is None:
            yield
            return
        self._clock.start()
        try:
            yield
        finally:
            self._clock.stop()

    def _unlink_queues(self) -> None:
        """Take the names of the queues between the ranks away: all who need them have them open."""
        for reference in parallel_state._groups.values():
            group = reference()
            queue = None if group is None else group.mq_broadcaster
            if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
                unlink(queue.buffer)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the engine in words why this worker cannot start."""
        try:
            yield
        except Exception as error:
            words = f"rank {self.global_rank}: {type(error).__name__}: {error}".splitlines()[0]
            self._channel.send(words.encode()[:MOST_WORDS])
            raise
