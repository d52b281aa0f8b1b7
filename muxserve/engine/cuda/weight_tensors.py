"""A model's tensors to the plain description that `weight_wire` carries, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from muxserve.engine.cuda import cuda_ipc
from muxserve.engine.cuda.weight_wire import Allocation, HeldTensor, Weights

# Buffers up to this many bytes are an engine's own: a model may write into them (scales, counters), and the model's
# other engine would see that. Larger ones are tables that nobody writes (rotary embeddings).
OWN_BUFFER_BYTES = 1 << 20

# From an address on a device to the allocation around it: its address, its size, its handle.
Export = Callable[[int], tuple[int, int, bytes]]
# From an allocation to its bytes here, uint8 [size].
Open = Callable[[Allocation], torch.Tensor]


def describe(
    model: torch.nn.Module, gpu: str, export: Export = cuda_ipc.export, shared_device: str = "cuda"
) -> Weights:
    """All parameters and buffers of `model`, those included that a checkpoint does not have (rotary tables).

    Args:
        gpu: UUID of the GPU that they are on.
        export: tells the allocation around an address.
        shared_device: tensors on devices of this type are shared, others sent by value.

    Raises:
        CudaIpcError: the memory cannot be shared.
    """
    allocations: list[Allocation] = []
    places: dict[int, int] = {}  # address of an allocation -> its index
    tensors: list[HeldTensor] = []
    aliases: dict[str, str] = {}
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
            allocations.append(Allocation("cuda", handle, size))
        return places[base], address - base

    def add(name: str, tensor: torch.Tensor, kind: Literal["param", "buffer"]) -> None:
        known = names.get(id(tensor))
        if known is not None:
            aliases[name] = known
            return
        names[id(tensor)] = name
        tensor = tensor.detach()
        if tensor.device.type != shared_device:
            tensor = tensor.contiguous()
        allocation, offset = place(tensor) if tensor.numel() else (-1, 0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(HeldTensor(name, kind, dtype, list(tensor.shape), list(tensor.stride()), allocation, offset))

    # Tied tensors come out under each of their names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        add(name, parameter, "param")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        add(name, buffer, "buffer")
    return Weights(gpu, allocations, tensors, aliases)


@dataclass(slots=True)
class MappedTensor:
    """A tensor in another process's memory, in the shape in which vLLM's IPC loader takes entries of its cache."""

    kind: str
    tensor: torch.Tensor

    def rebuild(self, device_index: int) -> torch.Tensor:
        return self.tensor


def mapped(weights: Weights, device: torch.device, open_allocation: Open | None = None) -> dict[str, MappedTensor]:
    """The tensors by name; only small buffers are copied. The memory stays mapped.

    Raises:
        CudaIpcError: the memory cannot be mapped.
    """
    opened = [(open_allocation or _opener(device))(allocation) for allocation in weights.allocations]
    return {held.name: MappedTensor(held.kind, _own(held, _tensor(held, opened, device))) for held in weights.tensors}


def _own(held: HeldTensor, tensor: torch.Tensor) -> torch.Tensor:
    small = tensor.numel() * tensor.itemsize <= OWN_BUFFER_BYTES
    return tensor.clone() if held.kind == "buffer" and small else tensor


def _opener(device: torch.device) -> Open:
    def open_allocation(allocation: Allocation) -> torch.Tensor:
        if allocation.kind == "bytes":
            return torch.frombuffer(bytearray(allocation.handle or b"\0"), dtype=torch.uint8)
        return cuda_ipc.as_bytes(cuda_ipc.open_handle(allocation.handle), allocation.size, device)

    return open_allocation


def _tensor(held: HeldTensor, opened: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, held.dtype)
    if held.allocation < 0:
        return torch.empty_strided(held.shape, held.stride, dtype=dtype, device=device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(held.shape, held.stride, strict=True))
    data = opened[held.allocation][held.offset : held.offset + span * dtype.itemsize]
    return data.view(dtype).as_strided(held.shape, held.stride)
