"""What the migrator must know of a model."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.deployment import Deployment


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`layout` is equal where KV can be exchanged (`Deployment.layout`); `block_bytes` are those of one rank."""

    layout: str
    block_bytes: int
    block_tokens: int


def shapes_of(deployment: Deployment) -> dict[str, ModelShape]:
    """Of each model of the unit."""
    return {
        model.name: ModelShape(
            deployment.layout(model.name),
            model.pages_per_block * deployment.pool(model.pool).page_bytes,
            model.block_tokens,
        )
        for model in deployment.models
    }
