"""The weights that this process has mapped, whose memory it lets go of while its model sleeps, and maps again at the
same addresses: tensors, kernels and CUDA graphs that have been captured go on with them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import torch

from muxserve.engine.cuda.weight_tensors import Open, opener
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.weight_wire import Allocation, Weights
from muxserve.memory import _native
from muxserve.memory.device import DeviceMemory

# Asks for the weights once more: what they are now, and the descriptors of their exported memory.
Fetch = Callable[[], tuple[Weights, list[int]]]


class OtherWeightsError(RuntimeError):
    """What is handed out now does not lie as what was mapped before."""


class MappedWeights:
    """What one loading has mapped.

    Args:
        weights: as they were handed out; `fetch` asks for them again.
    """

    def __init__(self, weights: Weights, fetch: Fetch) -> None:
        self._weights = weights
        self._fetch = fetch
        # Mappings of exported memory, in the order of the allocations.
        self._mappings: list[_native.CudaMapping] = []

    def opener(self, device: torch.device) -> Open:
        """What opens the allocations of these weights; see `weight_tensors.mapped`."""
        others = opener(device)

        def open_allocation(allocation: Allocation, descriptor: int) -> torch.Tensor:
            if allocation.kind != "vmm":
                return others(allocation, descriptor)
            # For reading: a kernel that writes into what others compute with fails, rather than spoils their tokens.
            mapping = _native.CudaMapping(allocation.handle.decode(), descriptor, read_only=True)
            self._mappings.append(mapping)
            return torch.as_tensor(DeviceMemory(mapping, 1, allocation.size), device=device)[0]

        return open_allocation

    def release(self) -> None:
        """Let go of the memory. Nothing is to compute on it.

        Raises:
            muxserve.memory.errors.DeviceMemoryError: the driver refuses.
        """
        for mapping in self._mappings:
            mapping.unmap()

    def map_again(self) -> None:
        """Map the memory that holds the same weights now.

        Raises:
            OtherWeightsError: they lie in it in another way.
            muxserve.memory.errors.DeviceMemoryError: it cannot be mapped.
            TimeoutError: nobody hands them out.
            RuntimeError: other weights are handed out.
        """
        weights, descriptors = self._fetch()
        if _places(weights) != _places(self._weights):
            wire.close_all(descriptors)
            raise OtherWeightsError("the weights that are held now lie in their memory in another way than before")
        exported = [each for each in weights.allocations if each.kind == "vmm"]
        left = list(descriptors)
        try:
            for mapping, allocation in zip(self._mappings, exported, strict=True):
                mapping.map_again(allocation.handle.decode(), left.pop(0))
        finally:
            wire.close_all(left)


def _places(weights: Weights) -> tuple[object, ...]:
    """Where every tensor lies, whichever memory that is."""
    sizes = [(each.kind, each.size) for each in weights.allocations]
    return weights.gpu, sizes, weights.tensors, weights.aliases, weights.scalars


# All of this process, or of this rank.
_mapped: list[MappedWeights] = []


def note(mapped: MappedWeights) -> None:
    """Remember what has been mapped, for `release` and `map_again`."""
    _mapped.append(mapped)


def release(mapped: Iterable[MappedWeights] = _mapped) -> None:
    """Let go of the memory of all weights that this process has mapped, and of what torch keeps for later.

    Raises:
        muxserve.memory.errors.DeviceMemoryError: the driver refuses.
    """
    torch.accelerator.synchronize()
    for each in mapped:
        each.release()
    gc.collect()
    torch.accelerator.empty_cache()


def map_again(mapped: Sequence[MappedWeights] = _mapped) -> None:
    """Map them again where they were; see `MappedWeights.map_again`."""
    for each in mapped:
        each.map_again()
