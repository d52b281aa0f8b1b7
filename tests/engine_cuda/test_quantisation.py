"""What is said of quantised checkpoints before loading is what vLLM says after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, modelopt, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.online import fp8 as online

from muxserve.vllm.quantisation import unshareable


@pytest.mark.parametrize(
    ("quantisation", "methods"),
    [
        ("fp8", [fp8.Fp8LinearMethod, fp8.Fp8MoEMethod]),
        ("mxfp4", [mxfp4.Mxfp4MoEMethod]),
        ("gptq", [auto_gptq.AutoGPTQLinearMethod, auto_gptq.AutoGPTQMoEMethod]),
        ("awq", [auto_awq.AutoAWQLinearMethod, auto_awq.AutoAWQMarlinLinearMethod, auto_awq.AutoAWQMoEMethod]),
        ("compressed-tensors", [compressed_tensors.CompressedTensorsLinearMethod]),
        ("modelopt FP8", [modelopt.ModelOptFp8MoEMethod]),
        ("modelopt NVFP4", [modelopt.ModelOptNvFp4FusedMoE]),
        ("", [online.Fp8PerTensorOnlineLinearMethod, online.Fp8PerBlockOnlineLinearMethod]),
    ],
)
def test_as_vllm_s_methods_declare(quantisation: str, methods: list[type]) -> None:
    taken = {bool(method.supports_pre_processed_weights) for method in methods}  # type: ignore[attr-defined]
    engine_args = {} if quantisation else {"quantization": "fp8"}
    assert taken == {not unshareable(quantisation, engine_args)}


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"])
def test_as_modelopt_s_linear_method_says_of_an_algorithm(algorithm: str) -> None:
    weight = modelopt.kNvfp4Static if algorithm == "NVFP4" else modelopt.kFp8StaticTensorSym
    method = SimpleNamespace(spec=SimpleNamespace(weight=weight), kernel=None)
    taken = modelopt.ModelOptLinearMethod.supports_pre_processed_weights.fget(method)
    assert taken is not bool(unshareable(f"modelopt {algorithm}", {}))


def test_every_algorithm_of_modelopt_is_judged() -> None:
    """A new one is refused until somebody has looked."""
    assert {*modelopt.QUANT_ALGOS} == {
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
    }  # fmt: skip
