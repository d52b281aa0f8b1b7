"""Linear layers that are packed as soon as they have been read.

vLLM reads a checkpoint into the parameters of all layers, and then has oneDNN pack one layer after the other into
memory of its own. So all weights are written into fresh memory twice, and making that memory takes the kernel longer
than copying. Here the weights of linear layers lie, while they are read, in a few buffers that the layers use one after
the other. When the last value of a layer is there it is packed, by vLLM, and the next layer gets its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

# Whether this process packs when all has been read, as vLLM does.
left_to_vllm = False


class _Buffers:
    """Memory that layers use one after the other."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """As much as `like` takes, of what is free, or new."""
        fitting = [each for each in self._free if each.nbytes >= like.nbytes]
        if not fitting:
            return torch.empty(like.nbytes, dtype=torch.uint8)
        found = min(fitting, key=lambda each: each.nbytes)
        self._free = [each for each in self._free if each is not found]
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Nobody uses it any more."""
        self._free.append(buffer)


class _Layer:
    """A linear layer while it is read."""

    def __init__(self, layer: Module, buffers: _Buffers) -> None:
        self._layer = layer
        self._buffers = buffers
        self._buffer: torch.Tensor | None = None
        self._weight: Parameter = layer.weight
        self._missing = sum(each.numel() for each in layer.parameters(recurse=False))
        self._read: set[object] = set()
        self._packed = False
        self._loaders: list[tuple[Any, Callable[..., Any]]] = []
        for parameter in layer.parameters(recurse=False):
            own: Any = parameter
            self._loaders.append((own, own.weight_loader))
            own.weight_loader = self._loader_of(own, own.weight_loader)

    def _loader_of(self, parameter: Parameter, load: Callable[..., Any]) -> Callable[..., Any]:
        def loader(target: Parameter, loaded: torch.Tensor, *part: Any, **named: Any) -> Any:
            if self._packed:
                return None  # a checkpoint that has it twice
            if parameter is self._weight and self._buffer is None:
                self._buffer = self._buffers.take(parameter.data)
                self._lay(self._buffer)
            told = load(target, loaded, *part, **named)
            which = id(parameter), part, tuple(named.items())
            if which not in self._read:
                self._read.add(which)
                self._missing -= loaded.numel()
            if not self._missing:
                self._pack()
            return told

        return loader

    def _lay(self, buffer: torch.Tensor) -> None:
        own = self._weight.data
        self._weight.data = buffer[: own.nbytes].view(own.dtype).view(own.shape)

    def _pack(self) -> None:
        self._packed = True
        self._layer.quant_method.process_weights_after_loading(self._layer)
        assert self._buffer is not None, "a weight that has been read has a buffer"
        if self._layer.weight is not self._weight:
            # A checkpoint that has it twice finds the packed one.
            packed: Any = self._layer.weight
            packed.weight_loader = _nothing
            # The packed weights are a copy.
            self._weight.data = torch.empty(0, dtype=self._weight.dtype)
            self._buffers.give(self._buffer)
        self._buffer = None

    def end(self) -> None:
        """The checkpoint has been read; what has not been packed is vLLM's to pack."""
        for parameter, loader in self._loaders:
            parameter.weight_loader = loader


def _nothing(*_: Any, **__: Any) -> None:
    """The weight is there."""


def _followed(model: Module) -> Iterator[Module]:
    """The layers that vLLM packs as they are in the checkpoint, into memory that is not theirs. vLLM has other kernels
    for convolutions and on Zen, and computes with the weights themselves of what it does not pack."""
    seen: set[int] = set()
    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)) is not UnquantizedLinearMethod:
            continue
        parameters = list(layer.parameters(recurse=False))
        weight = getattr(layer, "weight", None)
        plain = isinstance(weight, Parameter) and weight.ndim == 2 and not weight.is_meta and weight.is_contiguous()
        ours = all(hasattr(each, "weight_loader") and id(each) not in seen for each in parameters)
        seen.update(id(each) for each in parameters)
        if plain and ours and not getattr(layer, "_cpu_skip_gemm_dispatch", False):
            yield layer


@contextmanager
def packed_when_read(model: Module) -> Iterator[None]:
    """Layers of `model` that are read meanwhile are packed one by one."""
    buffers = _Buffers()
    layers = [_Layer(layer, buffers) for layer in _followed(model)]
    try:
        yield
    finally:
        for layer in layers:
            layer.end()


def register() -> None:
    """Have vLLM's loader of checkpoints pack so, where a layer is not split."""
    load = DefaultModelLoader.load_weights

    def load_weights(self: DefaultModelLoader, model: Module, model_config: ModelConfig) -> None:
        if left_to_vllm or get_tensor_model_parallel_world_size() > 1 or current_platform.is_zen_cpu():
            load(self, model, model_config)
            return
        with packed_when_read(model):
            load(self, model, model_config)

    DefaultModelLoader.load_weights = load_weights
