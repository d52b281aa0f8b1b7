"""The process that loads a model's weights once and forks its engines: on CPU, where a model has one rank.

On CPU this shares all weights between the prefill and the decode engine, also those that oneDNN has packed into its own
memory: the children see the parent's pages until someone writes, and nobody does. An engine of both phases has them to
itself, but comes back from its parent much sooner when it has died.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from muxserve.forks.family import Control, ForkingParent, engine_log, file_name, temporary_files_in
from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.process import give_way, trim, words
from muxserve.spec import DECODE_NICENESS, UNIT_FILE, EnginePhase, UnitSpec, load

log = logging.getLogger(__name__)


def run_model_parent(unit_spec: UnitSpec, model: str, commands: socket.socket, control: Control) -> None:
    """Load `model`, then fork an engine per command `{"op": "fork", "phase": ...}` until `commands` closes. With
    `awaited` in the command requests wait for the engine."""
    try:
        loaded = _load(unit_spec, model, control)
    except Exception as error:
        log.exception("cannot load %s", model)
        for phase in unit_spec.model(model).engines:
            control.event("failed", kind="engine", model=model, phase=phase, error=words(error))
        raise
    config, executor, set_threads = loaded

    def fork(command: dict[str, Any]) -> None:
        phase: EnginePhase = command["phase"]
        awaited = "awaited" in command

        def child() -> None:
            from muxserve.engine.loop import run_engine
            from muxserve.engine.stage_clock import StageClocks
            from muxserve.vllm.args import engine_args

            commands.close()
            # When a model joined the unit, threads were divided anew.
            now = load(os.path.join(unit_spec.run_dir, UNIT_FILE))
            set_threads(now.model(model).threads)
            # The worker starts from it when it has warmed up.
            own = engine_args(now, model, phase)
            config.model_config.seed = own["seed"]
            config.scheduler_config.policy = own["scheduling_policy"]
            config.scheduler_config.scheduler_cls = own["scheduler_cls"]
            if now.simulated is not None and now.stages > 1:
                # Real ones are processes, of which another executor has the clocks.
                executor.clocks = StageClocks(now.stages)
                executor.driver_worker.worker.clocks = executor.clocks

            def up() -> None:
                control.event("up", kind="engine", model=model, phase=phase, pid=os.getpid())
                if now.decode_gives_way and phase != "prefill":
                    give_way(DECODE_NICENESS)

            detail = "binding to the pool" if awaited else "warming up"
            control.event("progress", kind="engine", model=model, phase=phase, detail=detail)
            try:
                run_engine(
                    now,
                    model,
                    phase,
                    config,
                    lambda _: executor,
                    up,
                    awaited=awaited,
                )
            except Exception as error:
                # Whoever hears of it looks at the log at once.
                log.exception("cannot run %s/%s", model, phase)
                control.event("failed", kind="engine", model=model, phase=phase, error=words(error))
                raise

        name = f"engine {model}/{phase}"
        pid = parent.fork(name, engine_log(unit_spec, model, phase), child)
        control.event("forked", kind="engine", model=model, phase=phase, pid=pid)

    parent = ForkingParent(
        Control(commands), control, fork, heartbeat=heartbeat_file(unit_spec.run_dir, f"model-{model}")
    )
    parent.run()


def log_file(unit_spec: UnitSpec, model: str) -> Path:
    """Where the model parent writes."""
    return unit_spec.log_dir / f"model-{file_name(model)}.log"


def _load(unit_spec: UnitSpec, model: str, control: Control) -> tuple[Any, Any, Callable[[int], None]]:
    """vLLM's configuration, an executor with the weights loaded, and torch's own way to set the number of threads,
    which vLLM's worker puts out of use."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from muxserve.engine.cpu import weight_files
    from muxserve.engine.support import refuse_unsupported
    from muxserve.vllm.args import config_of, engine_args
    from muxserve.vllm.file_identity import salt_block_hashes

    salt_block_hashes(unit_spec.model(model).path)
    engines = unit_spec.model(model).engines
    for phase in engines:
        control.event("progress", kind="engine", model=model, phase=phase, detail="loading weights")
    if unit_spec.simulated is None:
        # The disk reads them while vLLM is configured.
        weight_files.read_ahead(unit_spec.model(model).path)
    # No thread may exist before the fork, since it would not live on in the children: neither an OpenMP team, nor the
    # one that watches progress bars.
    tqdm.monitor_interval = 0
    set_threads = torch.set_num_threads
    set_threads(1)
    config = config_of(engine_args(unit_spec, model, engines[0]))
    with temporary_files_in(unit_spec.run_dir):
        executor = UniProcExecutor(config)
    if unit_spec.simulated is None:
        _end_groups()
    refuse_unsupported(executor, unit_spec.model(model), unit_spec.stages)
    trim()  # what its engines are forked with is theirs, too
    return config, executor, set_threads


def _end_groups() -> None:
    """End the process groups of this one process. vLLM makes a dozen, and each keeps a thread that wakes up a hundred
    times a second, for as long as the parent lives; a group of one has nobody to talk to. Each end waits for the next
    time that its thread wakes up, hence all at once."""
    import torch
    from vllm.distributed import parallel_state

    groups = [group for reference in parallel_state._groups.values() if (group := reference()) is not None]
    with ThreadPoolExecutor(len(groups)) as threads:
        list(threads.map(lambda group: group.destroy(), groups))
    torch.distributed.destroy_process_group()
