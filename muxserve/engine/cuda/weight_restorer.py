"""The process that copies the weights of a model that has slept back to the GPUs of its unit, from where the controller
keeps them in the host's memory. It takes the place of a holder: nothing is read from disk, processed or measured again.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from muxserve.engine.cuda.weight_memory import on_gpu, restored
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.weight_wire import fetch_copy, say
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.process import words
from muxserve.spec import UnitSpec

log = logging.getLogger(__name__)


def run(unit_spec: UnitSpec, model: str, control: Any) -> None:
    """See `weights.run_restorer`."""
    from muxserve.gpu import environment

    try:
        # Outside MPS, as a holder.
        environment.prepare(unit_spec, model, "weights")
        control.event("progress", kind="weights", model=model, phase="", detail="copying weights back")
        assert unit_spec.gpu is not None
        # Each GPU has a link of its own.
        with ThreadPoolExecutor(unit_spec.ranks) as ranks:
            list(ranks.map(lambda rank: restore(unit_spec, model, rank), range(unit_spec.ranks)))
    except Exception as error:
        log.exception("cannot copy the weights of %s back", model)
        control.event("failed", kind="weights", model=model, phase="", error=words(error))
        raise
    heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, f"weights-{model}"))
    control.event("up", kind="weights", model=model, phase="", pid=os.getpid(), kept=True)
    while True:
        heartbeat.beat()
        time.sleep(PERIOD_SECONDS)


def restore(unit_spec: UnitSpec, model: str, rank: int) -> None:
    """Copy the weights of one rank back, and have them kept.

    Raises:
        OSError: nobody keeps a copy any more.
        muxserve.memory.errors.DeviceMemoryError: there is not enough memory, or it cannot be exported.
    """
    path = unit_spec.weights_socket(model, rank)
    copy, files = fetch_copy(path)
    try:
        assert unit_spec.gpu is not None
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        weights, pieces = restored(copy.weights, files, on_gpu(unit_spec.gpu.uuids[rank], device))
        torch.cuda.synchronize(device)
        say(path, wire.Keep(copy.fingerprint, weights), [piece.descriptor for piece in pieces])
    finally:
        wire.close_all(files)
