"""Quantised versions of a quickstart model, as compressed-tensors has them.

    python configs/models/quantise.py                  # atlas, into configs/models/atlas-int8 and atlas-int4
    python configs/models/quantise.py frontdesk --out /some/folder

`int8` is W8A8: weights with a scale per output channel, activations quantised per token while serving. `int4` is W4A16:
weights with a scale per group of 32, eight in a 32-bit word. Embeddings and LM head stay in bfloat16. Weights are
rounded to the nearest value; of several scales each channel or group takes the one with the least squared error. There
is no chance in it and no calibration, so the same checkpoint comes out everywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

GROUP = 32
# How far below the largest weight a scale may saturate.
_SHRINK = [1.0 - step / 40 for step in range(16)]

Tensors = dict[str, torch.Tensor]


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [rows, columns] as whole numbers of `bits` bits, and the scale [rows, 1] in bfloat16 of each row."""
    top = 2 ** (bits - 1) - 1
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8)
    best_scale = best = error = None
    for shrink in _SHRINK:
        scale = (largest * shrink / top).to(torch.bfloat16).float()
        whole = (weight / scale).round().clamp(-top - 1, top)
        # In 64 bits, so that the order in which a machine sums up decides nothing.
        loss = (whole * scale - weight).double().square().sum(dim=1, keepdim=True)
        if error is None or best is None or best_scale is None:
            best, best_scale, error = whole, scale, loss
        else:
            better = loss < error
            best, best_scale = torch.where(better, whole, best), torch.where(better, scale, best_scale)
            error = torch.minimum(loss, error)
    assert best is not None
    assert best_scale is not None
    return best.to(torch.int8), best_scale.to(torch.bfloat16)


def int8(name: str, weight: torch.Tensor) -> Tensors:
    """Tensors of a linear layer with a scale per output channel; `weight` is [outputs, inputs]."""
    whole, scale = rounded(weight, 8)
    return {f"{name}.weight": whole, f"{name}.weight_scale": scale}


def int4(name: str, weight: torch.Tensor) -> Tensors:
    """Tensors of a linear layer with a scale per group of inputs; `weight` is [outputs, inputs]."""
    outputs, inputs = weight.shape
    whole, scale = rounded(weight.reshape(-1, GROUP), 4)
    return {
        f"{name}.weight_packed": pack_to_int32(whole.view(outputs, inputs), 4).contiguous(),
        f"{name}.weight_scale": scale.view(outputs, inputs // GROUP),
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }


def _scheme(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **more}


SCHEMES: dict[str, tuple[str, dict[str, Any], Callable[[str, torch.Tensor], Tensors]]] = {
    "int8": (
        "int-quantized",
        {"weights": _scheme(8, strategy="channel"), "input_activations": _scheme(8, strategy="token", dynamic=True)},
        int8,
    ),
    "int4": (
        "pack-quantized",
        {"weights": _scheme(4, strategy="group", group_size=GROUP), "input_activations": None},
        int4,
    ),
}


def quantise(source: Path, target: Path, scheme: str) -> int:
    """Write `source` quantised by `scheme` into `target`; bytes of its weights."""
    form, group, convert = SCHEMES[scheme]
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            shutil.copyfile(file, target / file.name)
    tensors: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.endswith("_proj"):
            tensors |= convert(layer, tensor.float())
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], **group, "output_activations": None}},
    }
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (target / "model.safetensors").chmod(0o644)
    return (target / "model.safetensors").stat().st_size


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Make quantised versions of a quickstart model.")
    parser.add_argument("name", nargs="?", default="atlas")
    parser.add_argument("--out", type=Path, default=here, help="where the checkpoints go")
    options = parser.parse_args(arguments)
    if not (here / options.name / "model.safetensors").is_file():
        parser.error(f"there is no model {options.name!r} in {here}")
    for scheme in SCHEMES:
        target = options.out / f"{options.name}-{scheme}"
        size = quantise(here / options.name, target, scheme)
        print(f"{target}: {size / 1e6:.2f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
