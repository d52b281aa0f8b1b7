"""Which quantised checkpoints engines can serve: on a CPU what vLLM's kernels compute, on a GPU what engines can share.

An engine on a GPU builds its model around weights in the form that the holder's loading has left them in (packed,
transposed, with scales of their own). vLLM marks the methods that can do that (`supports_pre_processed_weights`) and
refuses the others, but only when the weights have been loaded; this says the same from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

# By vLLM's `quant_method`; of ModelOpt's checkpoints by `quant_algo`, too.
SHAREABLE = ("fp8", "mxfp4")
SHAREABLE_MODELOPT = ("NVFP4", "W4A16_NVFP4", "MXFP8")
_MODELOPT = "modelopt"
_INSTEAD = (
    "give a checkpoint that is not quantised, one in FP8 (`quant_method: fp8`) or MXFP4, or one of ModelOpt in NVFP4 "
    "or MXFP8"
)

# Those whose kernels on a CPU take activations of 16 bits only.
_HALF_ON_CPU = ("compressed-tensors", "awq", "gptq")


def uncomputable(quantisation: str, dtype: str) -> str:
    """Why a CPU cannot compute a model in `dtype`; empty if it can.

    Args:
        quantisation: as for `unshareable`.
    """
    if dtype != "float32" or not quantisation.startswith(_HALF_ON_CPU):
        return ""
    return (
        f"weights quantised by {quantisation} are computed in 16 bits on a CPU, not in float32: "
        "give `dtype: bfloat16` (or float16)"
    )


def unshareable(quantisation: str, engine_args: Mapping[str, object]) -> str:
    """Why engines cannot share a model's weights; empty if they can.

    Args:
        quantisation: `quant_method` of the checkpoint, for ModelOpt with its `quant_algo` after a space; empty without.
        engine_args: the model's own options of vLLM.
    """
    method, _, algorithm = quantisation.partition(" ")
    if not method:
        asked = next((name for name in ("quantization", "quantization_config") if engine_args.get(name)), None)
        if asked is None:
            return ""
        why = "weights that vLLM quantises while it loads them cannot be shared by engines on a GPU"
        return f"{why}: leave engine_args.{asked} out, or {_INSTEAD}"
    if method in SHAREABLE or (method.startswith(_MODELOPT) and algorithm.upper() in SHAREABLE_MODELOPT):
        return ""
    return f"weights quantised by {quantisation} cannot be shared by engines on a GPU: {_INSTEAD}"
