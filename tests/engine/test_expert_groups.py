"""A mixture of experts whose config.json has no groups is served as one of one group."""

from __future__ import annotations

from transformers import DeepseekV2Config

from muxserve.vllm.args import frontend_args
from muxserve.vllm.expert_groups import OneGroup
from tests.support.unit_specs import model_spec


def test_null_is_one_group() -> None:
    config = OneGroup({"max_position_embeddings": 128})(DeepseekV2Config(n_group=None, topk_group=None))
    assert (config.n_group, config.topk_group, config.max_position_embeddings) == (1, 1, 128)


def test_groups_stay() -> None:
    config = OneGroup({})(DeepseekV2Config(n_group=8, topk_group=3))
    assert (config.n_group, config.topk_group) == (8, 3)


def test_only_models_with_latent_attention_are_looked_at() -> None:
    assert "hf_overrides" not in frontend_args(model_spec("m"))
    assert isinstance(frontend_args(model_spec("m", latent=576))["hf_overrides"], OneGroup)
