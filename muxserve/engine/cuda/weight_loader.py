"""vLLM's model loader that maps the weights which another process has loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_world_group
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.model_loader.weight_cache.ipc_loader import (
    IpcModelLoader,
    _materialize_remaining_meta_tensors,
)
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from muxserve.engine.cuda import mapped_weights
from muxserve.engine.cuda.weight_tensors import MappedTensor, WeightTensor, found_at, kept_by, mapped, processed
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.weight_wire import fetch, say
from muxserve.memory.errors import DeviceMemoryError
from muxserve.vllm.args import LOAD_FORMAT
from muxserve.vllm.weight_seam import weight_key

# How long weights may take to come up; engines are started after them, so they are there unless they are loaded anew.
WAIT_SECONDS = 120.0


def fingerprint(model_config: ModelConfig, cache_config: CacheConfig | None = None) -> dict[str, str]:
    """What makes weights fit: checkpoint, type, quantisation, this rank's part of tensors and layers, version of vLLM.
    To be taken before loading, which may change the configuration."""
    key = weight_key(model_config, cache_config)
    return {name: str(value) for name, value in dataclasses.asdict(key).items()}


class HeldWeightsLoader(IpcModelLoader):
    """Builds the model of tensors that lie in memory which another process has filled. It never loads from disk: a
    second copy of the weights is not in the unit's memory budget."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = load_config.model_loader_extra_config
        self._sockets: list[str] = list(extra["sockets"])
        self._seconds = float(extra.get("wait_seconds", WAIT_SECONDS))
        self._scalars: Mapping[str, float] = {}
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={"fallback": False}))

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        return 0  # an engine asks for no part of the GPU's memory, see `PooledGPUWorker`

    def download_model(self, model_config: ModelConfig) -> None:
        """Somebody else has the weights."""

    def _fetch_entries(
        self, model_config: ModelConfig, cache_config: CacheConfig | None = None, *_: object, is_reload: bool = False
    ) -> WeightCacheState:
        """vLLM 0.33 gives all its configurations, 0.32 the first."""
        # They are handed out by the rank among all, over every stage of a pipeline.
        path = self._sockets[get_world_group().rank_in_group]
        key = fingerprint(model_config, cache_config)
        found, descriptors = fetch(path, key, self._seconds)
        self._scalars = found.scalars
        memory = mapped_weights.MappedWeights(found, lambda: fetch(path, key, self._seconds))
        mapped_weights.note(memory)
        try:
            entries = mapped(found, self._device(), descriptors, memory.opener(self._device()))
        except DeviceMemoryError as error:
            # Nobody can map it: a GPU that was reset has lost it. Who keeps it has it loaded again.
            say(path, wire.WeightsLost(str(error)))
            raise
        return WeightCacheState(entries=entries, aliases=found.aliases, attrs={})

    def _build_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, state: WeightCacheState
    ) -> torch.nn.Module:
        """As vLLM's, which refuses what is `processed`; here this is made as vLLM makes it after loading, one module
        after the other, of zeros, and its tensors are replaced by those that were made of the weights."""
        device = self._device()
        with set_default_torch_dtype(model_config.dtype):
            with torch.device("meta"):
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            made = rebuild(model, state, self._scalars, device)
            others = {name: entry for name, entry in state.entries.items() if name not in made}
            aliases = {name: of for name, of in state.aliases.items() if name not in made}
            before = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
            self._apply_entries(model, state._replace(entries=others, aliases=aliases), device.index or 0)
            follow(model, before)
            with weights_already_processed(), as_held(model):
                process_weights_after_loading(model, model_config, device)
            _materialize_remaining_meta_tensors(model, device)
        return model.eval()

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.accelerator.current_device_index())


def follow(model: torch.nn.Module, before: Mapping[int, str]) -> None:
    """Have whoever was told of a parameter that `model` had `before` (names by identity) keep the one that it has now:
    attention its sinks, routers of experts what they add to scores."""
    for name, module in model.named_modules():
        for found in list(kept_by(name, module)):
            if id(found.value) in before:
                _put(found, model.get_parameter(before[id(found.value)]))


@contextlib.contextmanager
def as_held(model: torch.nn.Module) -> Iterator[None]:
    """What vLLM does after loading is done to modules of which nothing that it makes is held."""
    methods = [(module, module.quant_method) for module in model.modules() if processed(module)]
    # From the projection of latents vLLM makes the matrices that attention computes with.
    derived = [module for module in model.modules() if isinstance(module, MLAAttention) and hasattr(module, "W_UV")]
    for module, _ in methods:
        module.quant_method = None
    for module in derived:
        module.process_weights_after_loading = module.impl.process_weights_after_loading
    try:
        yield
    finally:
        for module in derived:
            del module.process_weights_after_loading
        for module, method in methods:
            module.quant_method = method


def rebuild(
    model: torch.nn.Module, state: WeightCacheState, scalars: Mapping[str, float], device: torch.device
) -> set[str]:
    """Make the modules of `model` that are `processed`, on meta, of what is held; returns the names that they took.

    What vLLM builds beside tensors (kernels, workspaces, views) comes out as it would after loading, since it is vLLM
    that builds it. So much memory is needed meanwhile as the largest of these modules takes, loaded and processed.

    Raises:
        RuntimeError: the model is not made of the same parts as the one that was loaded.
    """
    entries: Mapping[str, MappedTensor] = state.entries
    taken: set[str] = set()
    for name, module in model.named_modules():
        if not processed(module):
            continue
        with torch.device(device):
            for tensors in (module._parameters, module._buffers):
                for leaf, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        tensors[leaf] = materialize_meta_tensor(tensor).zero_()
            module.quant_method.process_weights_after_loading(module)
        seen: set[int] = set()
        for found in list(found_at(name, module)):
            taken.add(found.name)
            if not isinstance(found.value, torch.Tensor):
                if found.name not in scalars:
                    raise RuntimeError(_differs(found.name, "is not among the weights that are held"))
                _put(found, scalars[found.name])
                continue
            if id(found.value) in seen:
                continue
            seen.add(id(found.value))
            entry = entries.get(state.aliases.get(found.name, found.name))
            if entry is None:
                raise RuntimeError(_differs(found.name, "is not among the weights that are held"))
            ours, theirs = found.value, entry.tensor
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise RuntimeError(_differs(found.name, f"is {_form(ours)}, and {_form(theirs)} is held"))
            if ours.is_meta:
                # Made with the module, and untouched by its method.
                _put(found, theirs)
            else:
                # In place: views of it, and what kernels keep of it, are tensors of their own, with names of their own.
                ours.data = theirs
    missing = sorted(each for each, entry in entries.items() if entry.kind == "state" and each not in taken)
    if missing:
        raise RuntimeError(_differs(missing[0], "is held, and the engine has not made it"))
    return taken


def _put(found: WeightTensor, value: torch.Tensor | float) -> None:
    if isinstance(value, float) and value == found.value:
        return  # a setting rather than a finding, perhaps of an object that may not change
    if isinstance(found.owner, dict):
        found.owner[found.at] = value
    elif not isinstance(found.owner, list | tuple):
        setattr(found.owner, found.at, value)


def _differs(name: str, what: str) -> str:
    return f"the model is made of other parts than the one whose weights are held: {name} {what}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def register_loader() -> None:
    """Make the loader known to vLLM in this process."""
    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(HeldWeightsLoader)
