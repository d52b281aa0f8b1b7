"""LoRA adapters of a model: what their files say, and the room that engines keep for them."""

from __future__ import annotations

import os
from pathlib import Path

from muxserve.config.checkpoint_files import CheckpointError, opened, read_json, tensors_of
from muxserve.config.schema import Model
from muxserve.spec import AdapterSlots

# What vLLM's engines can be made for (`vllm.config.lora.MaxLoRARanks`).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_LEAST_RANK, _MOST_SLOTS = 16, 8


class AdapterError(ValueError):
    """An adapter cannot be served; the message says why."""


def rank_of(directory: str | Path) -> int:
    """The rank of the adapter in that directory.

    Raises:
        AdapterError: it is none, or one that vLLM does not serve.
    """
    file = Path(directory) / "adapter_config.json"
    if not os.path.lexists(file):
        raise AdapterError(f"{directory} has no adapter_config.json; give the directory of a LoRA adapter")
    try:
        config = read_json(file)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    kind, rank = config.get("peft_type"), config.get("r")
    if kind != "LORA" or type(rank) is not int or rank < 1:
        raise AdapterError(f"{file} describes no LoRA adapter (`peft_type: LORA` with a rank `r`)")
    if rank > RANKS[-1]:
        raise AdapterError(f"{directory} has rank {rank}; vLLM serves ranks up to {RANKS[-1]}")
    for key, words in (("use_dora", "DoRA"), ("modules_to_save", "whole modules beside the adapter's")):
        if config.get(key):
            raise AdapterError(f"{file} has `{key}`; vLLM does not serve {words}")
    _check_weights(Path(directory))
    return rank


def _check_weights(directory: Path) -> None:
    weights, pickled = directory / "adapter_model.safetensors", directory / "adapter_model.bin"
    try:
        if os.path.lexists(weights):
            tensors_of(weights)
        elif os.path.lexists(pickled):
            with opened(pickled):
                pass
        else:
            raise AdapterError(f"{directory} has no adapter_model.safetensors")
    except CheckpointError as error:
        raise AdapterError(str(error)) from None


def slots_of(model: Model) -> AdapterSlots | None:
    """The room that the engines of a model keep for adapters; None where the fleet file says nothing of them.

    As many of them can be in one step as there are at the start (up to 8, 2 at least), of ranks up to the largest
    (16 at least), unless `engine_args` say otherwise: more can be added, and take turns.

    Raises:
        AdapterError: one of them cannot be served.
    """
    if model.adapters is None:
        return None
    count, rank = model.engine_args.get("max_loras"), model.engine_args.get("max_lora_rank")
    largest = max([_LEAST_RANK, *map(rank_of, model.adapters.values())])
    return AdapterSlots(
        count if isinstance(count, int) else max(2, min(_MOST_SLOTS, len(model.adapters))),
        rank if isinstance(rank, int) else next(each for each in RANKS if each >= largest),
    )


def check_rank(directory: str, slots: AdapterSlots) -> None:
    """Whether engines with that room can serve an adapter.

    Raises:
        AdapterError: they cannot, or it is none.
    """
    rank = rank_of(directory)
    if rank > slots.rank:
        raise AdapterError(
            f"{directory} has rank {rank}, and the model's engines were started for ranks up to {slots.rank}; set "
            "`engine_args: {max_lora_rank: ...}` in the fleet file"
        )
