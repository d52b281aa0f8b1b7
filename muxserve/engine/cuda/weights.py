"""Weights once per GPU: a process that loads them, and the loader with which engines map them.

    holder (one per model, forked from the warm parent; ends when the weights are kept)
      └── rank 0, rank 1, ...: a shard in exported memory of one GPU; descriptors and places go to the controller,
          which hands them out on a Unix socket. Or, where memory cannot be exported: in its own memory, with a socket
          of its own that hands out CUDA IPC handles

vLLM's own weight cache (`model_loader/weight_cache`) does the latter for one model and one user of it per GPU. Its
part that makes a model of mapped tensors is used, and what it refuses (most ways to quantise) is added; its daemon and
its wire are not: messages are pickled, sockets are named by GPU, and an engine may load a copy of its own from disk,
which a unit has no memory for.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

from vllm.config import ModelConfig

from muxserve.spec import UnitSpec
from muxserve.vllm.args import LOAD_FORMAT


def register_loader() -> None:
    """Make the loader known to vLLM in this process."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from muxserve.engine.cuda.weight_loader import HeldWeightsLoader

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(HeldWeightsLoader)


def run_holder(unit_spec: UnitSpec, model: str, control: Any, copies: bool = False) -> None:
    """Load the weights of `model` on each GPU of the unit, measure, have them kept or hand them out; until this process
    is killed. `copies`: have them kept in the host's memory, too.

    Reports `measured` for each rank and then `up` on `control`, with `kept`; `failed` with the reason if it cannot.
    """
    from muxserve.engine.cuda.weight_holder import run

    run(unit_spec, model, control, copies)


def run_copier(file: str, control: Any, orders: socket.socket) -> None:
    """Copy weights of models back to each GPU of the unit, whose spec is in `file`, from the host's memory, and have
    them kept, whenever `orders` say so; until these end.

    Reports `up` on `control` for each model; `failed` with the reason if it cannot, and ends.
    """
    from muxserve.engine.cuda.weight_copier import run

    run(file, control, orders)


def fingerprint(model_config: ModelConfig) -> dict[str, str]:
    """What makes weights fit: checkpoint, type, quantisation, this rank's part of tensors and layers, version of vLLM.
    To be taken before loading, which may change the configuration."""
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey

    tensors, layers = get_tp_group(), get_pp_group()
    key = WeightCacheKey.from_model_config(
        model_config,
        tp_size=tensors.world_size,
        tp_rank=tensors.rank_in_group,
        pp_size=layers.world_size,
        pp_rank=layers.rank_in_group,
    )
    return {name: str(value) for name, value in dataclasses.asdict(key).items()}
