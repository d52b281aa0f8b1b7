"""The unit scheduler process: `python -m muxserve.unit.scheduler --unit-spec PATH`.

A ZeroMQ ROUTER and a loop around `UnitExecutor`: it takes in every message that is there, decides once, and sends. An
arrival to an idle unit is granted in the same pass of the loop.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time

from muxserve import spec
from muxserve.gpu.watch import GpuWatch
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.process import Signals
from muxserve.net.server import RouterLoop, ServerProgram
from muxserve.scheduling.policies import make_policy
from muxserve.spec import UnitSpec
from muxserve.unit.executor import UnitExecutor
from muxserve.unit.memory import MemoryLink

log = logging.getLogger("muxserve.unit")


class UnitScheduler:
    """The socket and the loop. `path` has the unit's spec, which is read again when models join.

    Raises:
        zmq.ZMQError: the unit's address cannot be bound.
        NetworkError: it is to be reached from other machines, and cannot be.
        ValueError: the unit's spec contradicts itself.
    """

    def __init__(self, unit_spec: UnitSpec, path: str, signals: Signals) -> None:
        epoch = secrets.token_hex(8)
        listen, keys = unit_spec.listen, unit_spec.keys
        # The gateways of this machine ask for its GPUs themselves.
        gpus = GpuWatch(unit_spec).states if unit_spec.gpu is not None and listen is not None else None
        policy, memory = make_policy(unit_spec.policy, unit_spec.share_steps), MemoryLink(unit_spec)
        now = time.monotonic()
        self._executor = UnitExecutor(unit_spec, policy, memory, epoch, now, gpus, lambda: spec.load(path))
        self._loop = RouterLoop(
            signals,
            heartbeat_file(unit_spec.run_dir, "unit"),
            unit_spec.unit_address,
            (listen.host, listen.unit_port, keys) if listen is not None and keys is not None else None,
        )
        log.info("unit %s, policy %s, epoch %s", unit_spec.unit, unit_spec.policy, epoch)

    def run(self) -> None:
        """Serve until SIGTERM."""
        executor, loop = self._executor, self._loop
        while loop.wait(executor.wakeup(time.monotonic())) is not None:
            # One moment for the whole pass: what is granted in the pass in which it became possible has not waited.
            now = time.monotonic()
            for peer, message in loop.messages():
                loop.inbox.handle(message, peer, executor.handle, peer, message, now)
            for peer, answer in executor.tick(now):
                loop.send(peer, answer)

    def close(self) -> None:
        """Close the socket."""
        self._loop.close()


PROGRAM = ServerProgram(
    module="muxserve.unit.scheduler",
    description="The unit scheduler.",
    option="unit-spec",
    what="a unit's spec",
    load=spec.load,
    address=lambda unit_spec: unit_spec.unit_address,
    make=lambda unit_spec, path, signals: UnitScheduler(unit_spec, path, signals),
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
