"""The warm parent of a unit on CPU whose engines schedule asynchronously if their model asks for it, as on GPUs.
Arguments as those of `muxserve.forks.warm_parent`."""

from __future__ import annotations

from typing import Any

from muxserve.forks import warm_parent
from muxserve.spec import EnginePhase, UnitSpec


def preload(device: str) -> None:
    warm_parent_preload(device)
    import torch
    import vllm.v1.executor.uniproc_executor as executors

    from muxserve.engine import loop
    from muxserve.engine.cpu.worker import HostWorker, PooledCPUModelRunner, PooledCPUWorker
    from muxserve.engine.private.cpu import PrivateCPUModelRunner, PrivateCPUWorker
    from muxserve.vllm import args
    from tests.engine import ahead_on_host

    class Pooled(ahead_on_host.AheadOnHost, PooledCPUModelRunner):
        """On the pool."""

    class Private(ahead_on_host.AheadOnHost, PrivateCPUModelRunner):
        """With a cache of its own."""

    ahead_on_host.allow()
    PooledCPUWorker.runner_class, PrivateCPUWorker.runner_class = Pooled, Private
    HostWorker.schedule_ahead = lambda worker: worker.model_runner.schedule_ahead()
    executors.UniProcExecutor = ahead_on_host.ThreadedExecutor
    run, use_grammars, set_threads = loop.run_engine, loop.use_grammars, torch.set_num_threads

    def run_engine(
        unit_spec: UnitSpec, model: str, phase: EnginePhase, config: Any, executor_of: Any, *more: Any, **named: Any
    ) -> None:
        ahead = args.engine_args(unit_spec, model, phase)["async_scheduling"]
        config.scheduler_config.async_scheduling = ahead
        if ahead:
            executor_of(config).begin_thread(lambda: set_threads(unit_spec.model(model).threads))
        run(unit_spec, model, phase, config, executor_of, *more, **named)

    def use_grammars_and_schedule_ahead(core: Any) -> None:
        use_grammars(core)
        if core.vllm_config.scheduler_config.async_scheduling:
            core.model_executor.collective_rpc("schedule_ahead")

    vars(loop).update(run_engine=run_engine, use_grammars=use_grammars_and_schedule_ahead)


if __name__ == "__main__":
    warm_parent_preload = warm_parent.preload
    vars(warm_parent).update(preload=preload)
    warm_parent.main()
