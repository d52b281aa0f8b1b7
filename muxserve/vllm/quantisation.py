"""Which quantised checkpoints engines can serve: on a CPU what vLLM's kernels compute, on a GPU what engines can share.

An engine on a GPU maps weights in the form that another process's loading has left them in (packed, transposed, with
scales of their own), and makes what vLLM's kernels keep beside them itself, as `engine/cuda/weight_loader.py` tells.
That reaches plain tensors and numbers; methods that keep other things are refused, and those that nobody has looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

# By `quant_method` of a checkpoint; ModelOpt has several.
SHAREABLE = ("fp8", "mxfp4", "awq", "gptq", "compressed-tensors")
_MODELOPT = "modelopt"
_INSTEAD = f"give a checkpoint that is not quantised, or one in {', '.join(SHAREABLE)} or by {_MODELOPT}"

# Those whose kernels on a CPU take activations of 16 bits only.
_HALF_ON_CPU = ("compressed-tensors", "awq", "gptq")
# Those that keep several weights in an integer, and activations in 16 bits.
_PACKED = ("awq", "gptq")


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


def beyond_cores(quantisation: str, avx512: bool, amx: bool) -> str:
    """Why this machine's CPU cannot compute a model in any type; empty if it can.

    Args:
        quantisation: as for `unshareable`.
        avx512: the CPU has vectors of 512 bits. vLLM's kernels for other CPUs lack some operations.
        amx: the CPU has matrix instructions (AMX).
    """
    if not amx and quantisation.startswith("mxfp4"):
        what, needed = "experts in MXFP4", "AMX"
    elif not avx512 and (quantisation.startswith(_PACKED) or quantisation.endswith("A16")):
        what, needed = f"weights quantised by {quantisation}", "AVX-512"
    else:
        return ""
    return (
        f"vLLM computes {what} only on CPUs with {needed}, which this machine has not: give a checkpoint that is "
        "not quantised, or serve the model on a machine that has it"
    )


def unshareable(quantisation: str, engine_args: Mapping[str, object]) -> str:
    """Why engines cannot share a model's weights; empty if they can.

    Args:
        quantisation: `quant_method` of the checkpoint, and perhaps more after a space; empty without.
        engine_args: the model's own options of vLLM.
    """
    method = quantisation.partition(" ")[0]
    if not method:
        asked = next((name for name in ("quantization", "quantization_config") if engine_args.get(name)), None)
        if asked is None:
            return ""
        why = "weights that vLLM quantises while it loads them cannot be shared by engines on a GPU"
        return f"{why}: leave engine_args.{asked} out, or {_INSTEAD}"
    if method in SHAREABLE or method.startswith(_MODELOPT):
        return ""
    return f"weights quantised by {quantisation} cannot be shared by engines on a GPU: {_INSTEAD}"
