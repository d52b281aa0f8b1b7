"""Which models have a cache of vLLM's own instead of pages of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muxserve.config import Fleet, Model
from muxserve.costs.architecture import ModelArchitecture
from muxserve.vllm.args import NGRAM
from placement.demand import Demand

# What a model with a cache of its own does without.
LOST = (
    "its memory is not lent to other models, other engines do not find its prefixes, its requests do not move, and are "
    "computed again after a death"
)


def private_because(model: Model, architecture: ModelArchitecture) -> str:
    """Why the model has a cache of its own; empty if it keeps its KV in the pool, as far as that can hold it."""
    if model.kv == "pool" or (model.kv == "auto" and not architecture.causal):
        return ""
    if model.kv == "private":
        return architecture.private or "the fleet file asks for it"
    return architecture.private or _drafts(model)


def has_one_engine(model: Model, architecture: ModelArchitecture) -> bool:
    """Whether a model of the fleet has one engine of both phases, where no plan says more of its engines. One that
    answers with vectors has an engine for prefill alone."""
    if architecture.pooling:
        return False
    return model.shape == "one" or bool(private_because(model, architecture))


def with_shapes(fleet: Fleet, demands: Sequence[Demand]) -> list[Demand]:
    """The demands of models of the fleet, with the engines that these have where no plan says more of them."""
    models = [fleet.model(each.name) for each in demands]
    one = [has_one_engine(model, each.architecture) for model, each in zip(models, demands, strict=True)]
    return [replace(each, shape="one" if alone else "split") for each, alone in zip(demands, one, strict=True)]


def unpooled(model: Model, architecture: ModelArchitecture) -> str:
    """Why the pool cannot hold what a model keeps that is to be in it; empty if it can."""
    reason = architecture.private or _drafts(model)
    if model.kv != "pool" or not reason:
        return ""
    return f"the pool cannot hold what {architecture.name} keeps: {reason}; leave `kv` out, or set it to private"


def _drafts(model: Model) -> str:
    """Whose proposals the model takes, if those of another model or of layers of its own."""
    asked = model.engine_args.get("speculative_config")
    if not isinstance(asked, dict) or asked.get("method") == NGRAM:
        return ""
    return "the KV of a model, or layers, that propose tokens has no place in the pool"
