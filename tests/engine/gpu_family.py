"""The warm parent of a unit on GPUs with everything that needs a GPU (or vLLM) left out: holders and engines tell
what they found and wait. Arguments as those of `muxserve.forks.warm_parent`."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from muxserve.engine.rest import REST, WAKE, RestOrders
from muxserve.spec import UnitSpec
from tests.support import warm_parent

SEEN = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def surroundings(unit_spec: UnitSpec) -> dict[str, Any]:
    environment = {name: os.environ[name] for name in SEEN if name in os.environ}
    return {"environment": environment, "pages": unit_spec.pools[0].num_pages}


def run_holder(unit_spec: UnitSpec, model: str, control: Any, copies: bool = False) -> None:
    source = "copied" if copies else "loaded"
    control.event(
        "up", kind="weights", model=model, phase="", pid=os.getpid(), source=source, **surroundings(unit_spec)
    )
    signal.pause()


def run_copier(file: str, control: Any, orders: socket.socket) -> None:
    while order := orders.recv(64):
        what, model = order.decode().split(" ")
        control.event("up", kind="weights", model=model, phase="", pid=os.getpid(), source=what)


def run_engine(unit_spec: UnitSpec, model: str, phase: str, progress: Any, up: Any, orders: RestOrders) -> None:
    if unit_spec.pools[0].num_pages == 13:
        raise ValueError("no such luck")
    progress(str(surroundings(unit_spec)))
    while True:
        up()
        while not orders.received(REST, 1000):
            pass
        orders.on_rest()
        while not orders.received(WAKE, 1000):
            pass


if __name__ == "__main__":
    warm_parent.main(run_holder, run_copier, run_engine)
