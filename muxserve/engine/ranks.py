"""An engine whose model is split over several ranks: one worker process per rank, forked from the engine.

    engine (EngineCore, scheduler, memory manager's client)
      ├── worker of rank 0 ── its shard, the pool of rank 0
      └── worker of rank 1 ── its shard, the pool of rank 1

vLLM's `MultiprocExecutor` does this; what is added here is that the engine and its workers live and die as one:

* A worker dies with its engine, by the kernel's hand. Until then it holds the engine's connection to the memory
  manager, so that the manager takes the engine's blocks back only when none of its workers can write into them.
* An engine dies with any of its workers, at once: the others wait for it in a collective operation.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from multiprocessing.connection import wait
from typing import Any

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.system_utils import get_mp_context
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from muxserve.engine import rank_worker
from muxserve.engine.binding import connection_to, place_of
from muxserve.engine.stage_clock import StageClocks
from muxserve.gpu.environment import refuse_cuda

log = logging.getLogger(__name__)

# How long a process looks again and again for a message of the other side before it sleeps. vLLM's second would keep
# the workers of every engine of the unit busy between its leases.
SPIN_SECONDS = {"cpu": 0.0, "cuda": 0.002}
# Until that many messages have come it is vLLM's second: the first may overtake the subscription to what wakes a
# sleeper.
_FIRST_MESSAGES = 4


class RankedExecutor(MultiprocExecutor):
    """Executor of an engine with several ranks; the process must have bound itself before, and not touched CUDA."""

    def _init_executor(self) -> None:
        unit_spec, _, _ = place_of(self.vllm_config)
        self._memory_socket = unit_spec.memory_socket
        refuse_cuda()
        # vLLM asks for processes that start from nothing on CPU; ours have nothing yet that a fork could break.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if get_mp_context().get_start_method() != "fork":
            raise RuntimeError(
                "this process cannot fork its workers (in a Ray actor, NUMA binding asked for, or Windows' Linux)"
            )
        multiproc_executor.WorkerWrapperBase = rank_worker.RankWorker
        _Patience.spin_seconds = SPIN_SECONDS[unit_spec.device]
        shm_broadcast.SpinCondition = _Patience
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(unit_spec.ranks)]
        # On a GPU the host's clock says when kernels are launched, not when they run.
        counted = unit_spec.stages > 1 and unit_spec.device == "cpu"
        self.clocks = rank_worker.clocks = StageClocks(unit_spec.stages) if counted else None
        self._channels = [ours for ours, _ in pairs]
        rank_worker.channels = pairs
        try:
            super()._init_executor()
        except Exception as error:
            words = self._first_words()
            if words:
                raise RuntimeError(words) from error
            raise
        finally:
            rank_worker.channels = []
            for _, theirs in pairs:
                theirs.close()
        self._unlink_queues()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "rebind_pool":
            for channel in self._channels:
                socket.send_fds(channel, [b"connection"], [connection_to(self._memory_socket)])
        return super().collective_rpc(method, *args, **kwargs)

    def start_worker_monitor(self, inline: bool = False) -> None:
        """End this process when one of its workers ends."""
        workers = {worker.proc.sentinel: worker for worker in self.workers}

        def watch() -> None:
            died = workers[wait(list(workers))[0]]
            died.proc.join()
            log.error("the worker of rank %d ended (%s); so does its engine", died.rank, _how(died.proc.exitcode))
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="workers").start()

    def _first_words(self) -> str:
        """Why a worker could not start, as it said itself."""
        for channel in self._channels:
            channel.setblocking(False)
            try:
                words = channel.recv(rank_worker.MOST_WORDS)
            except OSError:
                continue
            if words:
                return words.decode(errors="replace")
        return ""

    def _unlink_queues(self) -> None:
        """Take the names of the queues between engine and workers away: all who need them have them open."""
        for queue in (self.rpc_broadcast_mq, *self.response_mqs):
            if queue is not None:
                rank_worker.unlink(queue.buffer)


class _Patience(shm_broadcast.SpinCondition):
    """How vLLM's message queues wait."""

    spin_seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._messages = 0

    def record_read(self) -> None:
        super().record_read()
        self._messages += 1
        if self._messages == _FIRST_MESSAGES:
            self.busy_loop_s = self.spin_seconds

    def notify(self) -> None:
        # The socket takes one message at a time, and drops the next one unless it has heard that the first is through.
        # It listens only a thousand times a second, or when asked; a reader that missed it would sleep for seconds.
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        super().notify()


def _how(exitcode: int | None) -> str:
    return f"killed by signal {-exitcode}" if exitcode is not None and exitcode < 0 else f"exit code {exitcode}"
