"""What is said of quantised checkpoints before loading is what vLLM's methods can do."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

from muxserve.vllm.quantisation import SHAREABLE, unshareable


@pytest.mark.parametrize(
    "quantisation", ["fp8", "mxfp4", "gptq", "awq", "compressed-tensors W4A16", "modelopt FP8", ""]
)
def test_engines_share_what_they_can_make_anew(quantisation: str) -> None:
    assert unshareable(quantisation, {}) == ""


def test_every_method_of_vllm_is_judged() -> None:
    """A new one is refused until somebody has looked: what it keeps may be out of reach."""
    refused = {method for method in QUANTIZATION_METHODS if unshareable(method, {})}
    assert refused == {
        "auto_awq", "auto_gptq", "awq_marlin", "deepseek_v4_fp8", "experts_int8", "fbgemm_fp8", "fp8_per_block",
        "fp8_per_channel", "fp8_per_tensor", "fp_quant", "gpt_oss_mxfp4", "gptq_marlin", "humming", "inc",
        "int8_per_channel_weight_only", "moe_wna16", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
    }  # fmt: skip
    assert {*SHAREABLE} < {*QUANTIZATION_METHODS}


def test_quantising_while_loading_is_refused() -> None:
    assert "leave engine_args.quantization out" in unshareable("", {"quantization": "fp8"})
