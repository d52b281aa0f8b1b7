"""Fixed quotas: each model has its own, and those of models that are out of service are lent to the others."""

from __future__ import annotations

from muxserve.scheduling.state import PoolState
from muxserve.scheduling.types import QuotaChange


def lend(pool: PoolState) -> list[QuotaChange]:
    """The changes that bring the pool's quotas towards where they belong; nothing when they are there.

    That is each model's own quota and, in proportion to it, what retired models have no use for. What was lent comes
    back as soon as its borrowers do not hold it any more: no quota is lowered under what its model holds and needs to
    grow, so that nobody is preempted for it.
    """
    serving = [model for model in pool.models if not model.retired]
    own = sum(model.profile.quota_pages for model in serving)
    lent = sum(model.profile.quota_pages for model in pool.models if model.retired)
    targets = {
        model.name: model.profile.quota_pages + lent * model.profile.quota_pages // max(1, own) for model in serving
    }
    if all(model.quota == targets.get(model.name, 0) for model in pool.models):
        return []
    quotas: dict[str, int] = {}
    for model in pool.models:
        held = model.used + model.promised + model.in_engines * model.pages_per_block
        quotas[model.name] = min(model.quota, max(targets.get(model.name, 0), held))
    slack = pool.profile.pages - sum(quotas.values())
    for model in sorted(serving, key=lambda model: quotas[model.name] / max(1, targets[model.name])):
        raised = max(0, min(targets[model.name] - quotas[model.name], slack))
        quotas[model.name] += raised
        slack -= raised
    return [QuotaChange(model.name, quotas[model.name]) for model in pool.models if quotas[model.name] != model.quota]
