"""What scheduling needs to know, out of a deployment."""

from __future__ import annotations

from muxserve.deployment import Deployment, ModelDeployment
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.token_throttling import Throttle, prompt_tokens_ahead
from muxserve.scheduling.types import ModelProfile, PoolProfile


def model_profile(model: ModelDeployment, stages: int = 1) -> ModelProfile:
    """The profile of a model that is deployed on so many stages."""
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
        both=model.phases != "multiplexed",
        depth=stages,
        waiting_tokens=_waiting_tokens(model, stages),
    )


def _waiting_tokens(model: ModelDeployment, stages: int) -> int:
    """Prompt tokens that may be in an engine before they are computed."""
    given = model.batching
    throttle = None
    if given.policy == "throttled":
        throttle = Throttle(given.iterations, given.max_prefill, given.min_prefill, given.kv_threshold)
    return prompt_tokens_ahead(stages, model.max_num_batched_tokens, throttle)


def unit_ledger(deployment: Deployment) -> UnitLedger:
    """An empty ledger of the deployment's unit.

    Raises:
        ValueError: the deployment contradicts itself.
    """
    # The null page of a pool is never handed out.
    pools = [PoolProfile(pool.name, pool.num_pages - 1) for pool in deployment.pools]
    return UnitLedger([model_profile(model, deployment.stages) for model in deployment.models], pools)
