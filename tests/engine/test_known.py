"""What is read from vLLM's and Transformers' sources is what they know."""

from __future__ import annotations

import dataclasses

import pytest

from muxserve.costs.language_models import LANGUAGE_MODELS, SEEING
from muxserve.vllm import known


def test_options() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {name for name in declared if not name.startswith("_")} <= known.options()


def test_architectures_and_model_types() -> None:
    from transformers import CONFIG_MAPPING
    from vllm.model_executor.models import ModelRegistry

    assert set(ModelRegistry.models) <= known.architectures()
    assert set(CONFIG_MAPPING) <= known.model_types()
    assert "LlamaForCausalLN" not in known.architectures()
    assert "lama" not in known.model_types()


def test_quantisations() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert set(QUANTIZATION_METHODS) <= known.quantisations()
    assert "awk" not in known.quantisations()


def test_rope_types() -> None:
    assert {"default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", "mrope"} <= known.rope_types()
    assert "yarm" not in known.rope_types()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"architectures": ["X", "LlamaForCausalLM"], "model_type": "llama"}, None),
        ({"architectures": ["FooForCausalLM"]}, ("architectures", "FooForCausalLM")),
        ({"model_type": "foo"}, ("model_type", "foo")),
        ({"quantization_config": {"quant_method": "FP8"}}, None),
        ({"quantization_config": {"quant_method": "magic"}}, ("quant_method", "magic")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, ("rope_type", "linaer")),
        ({"rope_parameters": {"full_attention": {"rope_type": "magic"}}}, ("rope_type", "magic")),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}}, None),
        ({"architectures": None, "model_type": None, "rope_scaling": None}, None),
    ],
)
def test_what_is_not_known(config: dict[str, object], found: tuple[str, str] | None) -> None:
    unknown = known.unknown(config)
    assert (None if unknown is None else unknown[:2]) == found


def test_what_is_served_is_known() -> None:
    for model in (*LANGUAGE_MODELS.values(), *SEEING.values()):
        assert known.unknown({"architectures": [model.architecture], "model_type": model.model_type}) is None
