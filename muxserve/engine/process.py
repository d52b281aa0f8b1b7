"""An engine process: bound to the pool, warmed up, then in its loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from muxserve.engine.binding import Binding, bind, current
from muxserve.engine.grammars import use_grammars
from muxserve.engine.loop import EngineLoop
from muxserve.engine.probe import probe
from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from muxserve.spec.unit import EnginePhase

log = logging.getLogger(__name__)


def run_engine(
    unit_spec: UnitSpec,
    model: str,
    phase: EnginePhase,
    config: VllmConfig,
    executor_of: Callable[[VllmConfig], Executor],
    on_up: Callable[[], None],
) -> None:
    """Bind to the pool, warm up, call `on_up`, serve until told to stop.

    `executor_of` makes the executor, or has one with the model loaded: on CPU the process then shares the memory of the
    weights with the model's other engine until one of them writes, and neither does.
    """
    deployed = unit_spec.model(model)
    client = MemoryClient(unit_spec.memory_socket, f"{model}/{phase}")
    binding = Binding(deployed, phase, client, client.map(model))
    bind(binding)
    core = EngineCore(config, executor_of, log_stats=True)
    use_grammars(core)
    warm_up(core)
    loop = EngineLoop(unit_spec, binding, core)
    on_up()
    loop.run()
    client.close()


def warm_up(core: EngineCore) -> None:
    """Run one short request through prefill and decode: the first steps of a process are slow."""
    began = time.monotonic()
    probe(core, 4, lambda: current().client.writing())
    log.info("warmed up in %.2f s", time.monotonic() - began)
