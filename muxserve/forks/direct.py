"""An engine forked from the warm parent directly, which brings its model up itself: on GPUs, and where it has several
ranks. On a GPU its weights are mapped from their holder; on CPU each rank loads its shard. On a GPU it may stay while
its model sleeps (`muxserve.engine.rest`).
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from muxserve.engine.rest import RestOrders
from muxserve.forks.family import Control, temporary_files_in
from muxserve.net.process import words
from muxserve.spec import UnitSpec
from muxserve.spec.unit import EnginePhase

log = logging.getLogger(__name__)


def run_direct_engine(
    unit_spec: UnitSpec, model: str, phase: EnginePhase, control: Control, orders: socket.socket
) -> None:
    """Bring the engine up and serve until told to stop; reports `up`, or `failed` with the reason. It rests when
    `orders` say so, which they do on GPUs only, reports `rests`, and `up` again when it is back."""

    def event(name: str, **more: Any) -> None:
        control.event(name, kind="engine", model=model, phase=phase, **more)

    def progress(detail: str) -> None:
        event("progress", detail=detail)

    def up() -> None:
        event("up", pid=os.getpid())

    try:
        if unit_spec.device == "cuda":
            from muxserve.gpu import environment

            # Read by the driver when CUDA is touched for the first time.
            environment.prepare(unit_spec, model, phase)
        _run(unit_spec, model, phase, progress, up, RestOrders(orders, lambda: event("rests")))
    except Exception as error:
        log.exception("cannot run %s/%s", model, phase)
        event("failed", error=words(error))
        raise


def _run(unit_spec: UnitSpec, model: str, phase: EnginePhase, progress: Any, up: Any, orders: RestOrders) -> None:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from muxserve.engine.loop import run_engine
    from muxserve.engine.ranks import RankedExecutor
    from muxserve.engine.support import refuse_unsupported
    from muxserve.vllm.args import config_of, engine_args
    from muxserve.vllm.file_identity import salt_block_hashes

    # The workers of several ranks are forked from here: no team of threads may exist.
    torch.set_num_threads(1)
    config = config_of(engine_args(unit_spec, model, phase))
    salt_block_hashes(unit_spec.model(model).path)

    def executor_of(config: VllmConfig) -> Executor:
        progress("loading weights")
        with temporary_files_in(unit_spec.run_dir):
            executor = (UniProcExecutor if unit_spec.ranks == 1 else RankedExecutor)(config)
        refuse_unsupported(executor, unit_spec.model(model), unit_spec.stages)
        progress("warming up")
        return executor

    run_engine(unit_spec, model, phase, config, executor_of, up, orders=orders)
