"""A model's tensors to the plain description that `weight_wire` carries, and back."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from muxserve.engine.cuda import cuda_ipc
from muxserve.gpu.weight_wire import Allocation, HeldTensor, Weights

# Buffers up to this many bytes are an engine's own: a model may write into them (scales, counters, locks of kernels),
# and the model's other engine would see that. Larger ones are tables that nobody writes (rotary embeddings).
OWN_BUFFER_BYTES = 1 << 20

# From an address on a device to the allocation around it: its address, its size, its handle.
Export = Callable[[int], tuple[int, int, bytes]]
# From an allocation, and its descriptor or -1, to its bytes here, uint8 [size].
Open = Callable[[Allocation, int], torch.Tensor]


class WeightTensor(NamedTuple):
    """A tensor of a model, or a number that belongs to its weights, `at` an attribute of `owner`."""

    name: str
    kind: Literal["param", "buffer", "state"]
    value: torch.Tensor | float
    owner: Any
    at: str


def processed(module: torch.nn.Module) -> bool:
    """Whether vLLM makes what `module` computes with of what was loaded (packs, transposes, derives), and can only do
    so itself: in each engine, on memory of its own, before that is replaced by what another process holds."""
    method = getattr(module, "quant_method", None)
    return isinstance(method, QuantizeMethodBase) and not _takes_processed(method)


def _takes_processed(method: QuantizeMethodBase) -> bool:
    if _PROMISE in vars(method):
        return method.supports_pre_processed_weights
    for each in type(method).__mro__:
        if _PROMISE in vars(each):
            return method.supports_pre_processed_weights
        if "process_weights_after_loading" in vars(each):
            break  # the promise is of a class that processes otherwise
    return False


_PROMISE = "supports_pre_processed_weights"


def found_in(model: torch.nn.Module) -> Iterator[WeightTensor]:
    """All tensors of `model`: parameters and buffers, those included that a checkpoint does not have (rotary tables),
    and of modules that are `processed` what hangs on them and on their quantisation method; tied ones under each name.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        yield from found_at(name, module)


def found_at(name: str, module: torch.nn.Module) -> Iterator[WeightTensor]:
    """Those of one module, without its children."""
    prefix = name and f"{name}."
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield WeightTensor(prefix + leaf, "param", parameter, module, leaf)
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            yield WeightTensor(prefix + leaf, "buffer", buffer, module, leaf)
    if processed(module):
        seen = {id(module)}
        others = _OF_ATTENTION if isinstance(module, AttentionLayerBase) else ()
        for leaf, value in [*vars(module).items(), *module._modules.items()]:
            if leaf in _OF_MODULES or leaf in others:
                continue
            if leaf == "quant_method" or not isinstance(value, torch.nn.Module):
                yield from _state(f"{name}:{leaf}", value, module, leaf, seen)


def kept_by(name: str, module: torch.nn.Module) -> Iterator[WeightTensor]:
    """Tensors that objects of one module keep (its implementation of attention, its router of experts), some of which
    are parameters that the module, or another one, has told them of."""
    seen = {id(module)}
    for leaf, value in vars(module).items():
        if leaf not in _OF_MODULES:
            yield from _state(f"{name}:{leaf}", value, module, leaf, seen)


_OF_MODULES = vars(torch.nn.Module())
# Attributes that are made for the cache, whatever the weights are.
_OF_ATTENTION = ("kv_cache", "impl")


def _state(name: str, value: Any, owner: Any, at: str, seen: set[int]) -> Iterator[WeightTensor]:
    """What is reached from `value` through vLLM's own objects and plain containers."""
    if isinstance(value, torch.Tensor) or type(value) is float:
        yield WeightTensor(name, "state", value, owner, at)
        return
    inside: Sequence[tuple[str, Any]]
    if isinstance(value, dict):
        inside = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(str(index), each) for index, each in enumerate(value)]
    elif _holds_state(value):
        attributes = {**getattr(value, "_parameters", {}), **getattr(value, "_buffers", {}), **vars(value)}
        inside = [(key, each) for key, each in attributes.items() if key not in _OF_MODULES]
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, each in inside:
        # A module below is found by its own name.
        if not isinstance(each, torch.nn.Module):
            yield from _state(f"{name}.{key}", each, value, key, seen)


def _holds_state(value: Any) -> bool:
    home = type(value).__module__
    whose = home.startswith(("vllm.", "muxserve.engine.")) and not home.startswith("vllm.config")
    ours = isinstance(value, QuantizeMethodBase) or whose
    plain = isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType | QuantizationConfig)
    return ours and hasattr(value, "__dict__") and not plain


def describe(
    model: torch.nn.Module,
    gpu: str,
    export: Export = cuda_ipc.export,
    shared_device: str = "cuda",
    kind: Literal["cuda", "vmm"] = "cuda",
) -> Weights:
    """What `found_in` finds in a model whose weights are loaded.

    Args:
        gpu: UUID of the GPU that they are on.
        export: tells the allocation around an address.
        shared_device: tensors on devices of this type are shared, others sent by value.
        kind: of the handles of `export`. Descriptors of exported memory are not said here.

    Raises:
        CudaIpcError: the memory cannot be shared.
    """
    allocations: list[Allocation] = []
    places: dict[int, int] = {}  # address of an allocation -> its index
    tensors: list[HeldTensor] = []
    aliases: dict[str, str] = {}
    scalars: dict[str, float] = {}
    names: dict[int, str] = {}

    def place(tensor: torch.Tensor) -> tuple[int, int]:
        if tensor.device.type != shared_device:
            payload = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            allocations.append(Allocation("bytes", payload, len(payload)))
            return len(allocations) - 1, 0
        address = tensor.data_ptr()
        base, size, handle = export(address)
        if base not in places:
            places[base] = len(allocations)
            allocations.append(Allocation(kind, handle, size))
        return places[base], address - base

    for found in found_in(model):
        tensor = found.value
        if not isinstance(tensor, torch.Tensor):
            scalars[found.name] = tensor
            continue
        known = names.get(id(tensor))
        if known is not None:
            aliases[found.name] = known
            continue
        if tensor.is_meta:
            continue
        names[id(tensor)] = found.name
        tensor = tensor.detach()
        if tensor.device.type != shared_device:
            tensor = tensor.contiguous()
        try:
            allocation, offset = place(tensor) if tensor.numel() else (-1, 0)
        except LookupError as error:
            raise LookupError(f"{found.name}: {error}") from None
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, stride = list(tensor.shape), list(tensor.stride())
        tensors.append(HeldTensor(found.name, found.kind, dtype, shape, stride, allocation, offset))
    return Weights(gpu, allocations, tensors, aliases, scalars)


@dataclass(slots=True)
class MappedTensor:
    """A tensor in another process's memory, in the shape in which vLLM's IPC loader takes entries of its cache."""

    kind: str
    tensor: torch.Tensor

    def rebuild(self, device_index: int) -> torch.Tensor:
        return self.tensor


def mapped(
    weights: Weights, device: torch.device, descriptors: Sequence[int] = (), open_allocation: Open | None = None
) -> dict[str, MappedTensor]:
    """The tensors by name; only what is small and no parameter is copied. The memory stays mapped.

    Args:
        descriptors: of exported memory, in the order of the allocations; they are closed.
        open_allocation: None: `opener`, which opens no exported memory.

    Raises:
        CudaIpcError: the memory cannot be mapped.
        muxserve.memory.errors.DeviceMemoryError: the same of exported memory.
    """
    fds = iter(descriptors)
    opens = open_allocation or opener(device)
    opened = [opens(each, next(fds) if each.kind == "vmm" else -1) for each in weights.allocations]
    return {held.name: MappedTensor(held.kind, _own(held, _tensor(held, opened, device))) for held in weights.tensors}


def _own(held: HeldTensor, tensor: torch.Tensor) -> torch.Tensor:
    small = tensor.numel() * tensor.itemsize <= OWN_BUFFER_BYTES
    return tensor.clone() if held.kind != "param" and small else tensor


def opener(device: torch.device) -> Open:
    """What opens allocations of any kind but exported memory, of which `MappedWeights` takes care."""

    def open_allocation(allocation: Allocation, descriptor: int) -> torch.Tensor:
        if allocation.kind == "bytes":
            return torch.frombuffer(bytearray(allocation.handle or b"\0"), dtype=torch.uint8)
        if allocation.kind == "cuda":
            return cuda_ipc.as_bytes(cuda_ipc.open_handle(allocation.handle), allocation.size, device)
        raise ValueError(f"memory of the kind {allocation.kind!r} is not mapped here")

    return open_allocation


def _tensor(held: HeldTensor, opened: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, held.dtype)
    if held.allocation < 0:
        return torch.empty_strided(held.shape, held.stride, dtype=dtype, device=device)
    return placed(opened[held.allocation], held.offset, dtype, held.shape, held.stride)


def placed(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor at `offset` bytes of `memory`, uint8 [size]; `stride` is in elements."""
    span = span_of(shape, stride)
    return memory[offset : offset + span * dtype.itemsize].view(dtype).as_strided(shape, stride)


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first of a tensor to its last, at least one of each; both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
