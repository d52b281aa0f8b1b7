"""What scheduling needs to know, out of a deployment."""

from __future__ import annotations

from muxserve.deployment import Deployment, ModelDeployment
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.types import ModelProfile, PoolProfile


def model_profile(model: ModelDeployment) -> ModelProfile:
    """The profile of a deployed model."""
    return ModelProfile(
        name=model.name,
        pool=model.pool,
        rate=model.rate,
        layers=model.layers,
        kv_heads=model.kv_heads,
        block_tokens=model.block_tokens,
        quota_pages=model.quota_pages,
        floor_pages=model.floor_pages,
        prefill_share=model.prefill_share,
        decode_share=model.decode_share,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
    )


def unit_ledger(deployment: Deployment) -> UnitLedger:
    """An empty ledger of the deployment's unit.

    Raises:
        ValueError: the deployment contradicts itself.
    """
    # The null page of a pool is never handed out.
    pools = [PoolProfile(pool.name, pool.num_pages - 1) for pool in deployment.pools]
    return UnitLedger([model_profile(model) for model in deployment.models], pools)
