"""The warm parent of a unit on GPUs as it is, with holders and engines that only tell what they found in their
environment. Arguments as those of `muxserve.forks.warm_parent`; needs neither vLLM nor a GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

from muxserve.engine.rest import RestOrders
from muxserve.spec import UnitSpec
from tests.support import warm_parent

SEEN = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
WEIGHTS = 1 << 30
MIB = 1 << 20


def found() -> str:
    return json.dumps({name: os.environ.get(name) for name in SEEN})


def run_holder(unit_spec: UnitSpec, model: str, control: Any, copies: bool = False) -> None:
    who = {"kind": "weights", "model": model, "phase": ""}
    control.event("progress", detail=found(), **who)
    for rank in range(unit_spec.ranks):
        figures = {"activation_bytes": 64 * MIB, "context_bytes": 300 * MIB, "graph_bytes": 32 * MIB}
        figures["engine_count"] = 2
        control.event("measured", kind="weights", model=model, rank=rank, weights_bytes=WEIGHTS, **figures)
    control.event("up", pid=os.getpid(), **who)
    signal.pause()


def run_copier(file: str, control: Any, orders: socket.socket) -> None:
    """Nothing sleeps there."""
    raise NotImplementedError


def run_engine(unit_spec: UnitSpec, model: str, phase: str, progress: Any, up: Any, orders: RestOrders) -> None:
    progress(found())
    up()
    signal.pause()


if __name__ == "__main__":
    warm_parent.main(run_holder, run_copier, run_engine)
