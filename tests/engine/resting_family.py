"""The warm parent of a unit on CPU whose engines are forked from it directly, as on GPUs, and can rest: what they
compute with is made useless meanwhile. Arguments as those of `muxserve.forks.warm_parent`."""

from __future__ import annotations

from typing import Any

from muxserve.forks import warm_parent


def parameters(worker: Any) -> list[Any]:
    """Those of the worker's model that hold numbers."""
    return [each for each in worker.model_runner.get_model().parameters() if each.is_floating_point()]


def release_weights(worker: Any) -> None:
    worker.kept = [each.detach().clone() for each in parameters(worker)]
    for each in parameters(worker):
        each.data.fill_(float("nan"))


def map_weights(worker: Any) -> None:
    for each, kept in zip(parameters(worker), worker.kept, strict=True):
        assert bool(each.isnan().all()), "nothing has touched it meanwhile"
        each.data.copy_(kept)


def preload(device: str) -> None:
    warm_parent_preload(device)
    from muxserve.engine.cpu.worker import PooledCPUWorker

    for method in (release_weights, map_weights):
        setattr(PooledCPUWorker, method.__name__, method)


if __name__ == "__main__":
    warm_parent_preload = warm_parent.preload
    vars(warm_parent).update(preload=preload, shares_by_forking=lambda unit_spec: False)
    warm_parent.main()
