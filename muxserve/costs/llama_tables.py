"""Reader of the step times that MuxServe's authors published with their placement code.

A JSON object: model -> devices -> SM percentage -> batch -> prompt length -> `{"prefill": ms, "decoding": ms}`, for
LLaMA 7B to 65B in float16 on A100-80GB; -1 is a cell that was not measured. `batch` prompts of that length make the
prefill step; in the decode step `batch` sequences have that much context each.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from muxserve.costs.latency import CostError
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel

DEVICE, DTYPE = "A100-80GB", "float16"


def _llama(layers: int, heads: int, hidden: int, intermediate: int) -> ProfiledModel:
    return ProfiledModel(layers, heads, heads, 128, hidden, intermediate, 32000)


# Touvron et al., LLaMA: Open and Efficient Foundation Language Models (2023), table 2; the widths of the MLPs are
# those of its released checkpoints (2/3 of 4 times the hidden size, rounded up to a multiple of 256).
LLAMAS = {
    "llama-7b": _llama(32, 32, 4096, 11008),
    "llama-13b": _llama(40, 40, 5120, 13824),
    "llama-30b": _llama(60, 52, 6656, 17920),
    "llama-65b": _llama(80, 64, 8192, 22016),
}


class _Cell(msgspec.Struct):
    prefill: float
    decoding: float


_Tables = dict[str, dict[int, dict[int, dict[int, dict[int, _Cell]]]]]


def read_llama_tables(path: str | os.PathLike[str]) -> Profile:
    """The file as a profile, cells that were not measured left out.

    Raises:
        CostError: it cannot be read, is something else, or has a model that is not a LLaMA.
    """
    try:
        tables = msgspec.json.decode(Path(path).read_bytes(), type=_Tables)
    except OSError as error:
        raise CostError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CostError(f"{path}: is not a table of step times by model, devices, SM percentage: {error}") from None
    engines = []
    for model, by_devices in sorted(tables.items()):
        if model not in LLAMAS:
            raise CostError(f"{path}: has model {model!r}; known are {', '.join(LLAMAS)}")
        for tp, by_share in sorted(by_devices.items()):
            for percent, by_batch in sorted(by_share.items()):
                cells = [(b, n, cell) for b, by_length in sorted(by_batch.items()) for n, cell in by_length.items()]
                engines.append(
                    EngineProfile(
                        model,
                        LLAMAS[model],
                        DEVICE,
                        DTYPE,
                        tp,
                        percent / 100,
                        [PrefillCell(b, n, 0, cell.prefill / 1e3) for b, n, cell in cells if cell.prefill > 0],
                        [DecodeCell(b, n, cell.decoding / 1e3) for b, n, cell in cells if cell.decoding > 0],
                    )
                )
    return Profile(about="MuxServe's published step times of LLaMA on A100-80GB", engines=engines)
