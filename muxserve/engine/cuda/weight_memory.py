"""A model's weights in GPU memory that outlives the process which has loaded them.

torch allocates with `cudaMalloc`, whose memory ends with its process. So what was loaded and processed is moved,
tensor by tensor, into memory of the driver's virtual memory management, of which every piece is a file descriptor. (A
pluggable allocator under the loading itself would spare the move, but keep what processing has left behind: holes of
freed tensors in torch's segments. Moved, weights lie close together, and weigh what their tensors do.)
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from muxserve.engine.cuda.weight_tensors import found_in, placed, span_of
from muxserve.gpu.weight_wire import Allocation, Weights
from muxserve.memory import _native
from muxserve.memory.device import DeviceMemory

# Weights of one piece, unless a tensor is larger: what is needed at most beside all weights while they are moved.
PIECE_BYTES = 1 << 30
# As of torch's own allocator; kernels rely on it.
_ALIGNMENT = 512
_GRANULARITY = 2 << 20

# The tensors in one piece of torch's memory, and which of its bytes they cover.
_Group = tuple[list[torch.Tensor], int, int]


class Piece(NamedTuple):
    """A piece of exported memory: what tells it from any other, its descriptor, and its bytes here, uint8 [size]."""

    handle: str
    descriptor: int
    memory: torch.Tensor


# Makes a piece of so many bytes.
Allocate = Callable[[int], Piece]


class ExportedWeights:
    """The memory that a model's tensors have been moved to.

    Args:
        allocate: makes pieces of memory.
        device: type of the devices whose tensors are moved.
    """

    def __init__(self, allocate: Allocate, device: str = "cuda") -> None:
        self._allocate = allocate
        self._device = device
        self._pieces: list[Piece] = []

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.memory.numel() for piece in self._pieces)

    @property
    def descriptors(self) -> dict[bytes, int]:
        """By handle."""
        return {piece.handle.encode(): piece.descriptor for piece in self._pieces}

    def move(self, model: torch.nn.Module) -> None:
        """Take in the tensors of `model` that are not here yet, and give their memory back.

        Raises:
            muxserve.memory.errors.DeviceMemoryError: there is not enough, or it cannot be exported.
        """
        waiting: list[_Group] = []
        size = 0
        for group in self._groups(model):
            _, start, end = group
            if waiting and size + end - start > PIECE_BYTES:
                self._fill(waiting, size)
                waiting, size = [], 0
            waiting.append(group)
            size += _aligned(end - start)
        if waiting:
            self._fill(waiting, size)

    def copied(self) -> dict[bytes, int]:
        """Files in the host's memory with the bytes of all pieces, by handle; the descriptors are the caller's.

        Raises:
            OSError: there is not enough memory.
        """
        files: dict[bytes, int] = {}
        try:
            for piece in self._pieces:
                file = os.memfd_create("weights", os.MFD_CLOEXEC)
                files[piece.handle.encode()] = file
                os.posix_fallocate(file, 0, piece.memory.numel())
                in_file(file, piece.memory.numel()).copy_(piece.memory)
        except BaseException:
            for file in files.values():
                os.close(file)
            raise
        return files

    def export(self, address: int) -> tuple[int, int, bytes]:
        """The piece that `address` lies in: its address, its bytes, its handle.

        Raises:
            LookupError: in none.
        """
        piece = self._piece_of(address)
        if piece is None:
            raise LookupError(f"a tensor at {address:#x} has not been moved")
        return piece.memory.data_ptr(), piece.memory.numel(), piece.handle.encode()

    def _piece_of(self, address: int) -> Piece | None:
        for piece in self._pieces:
            base = piece.memory.data_ptr()
            if base <= address < base + piece.memory.numel():
                return piece
        return None

    def _groups(self, model: torch.nn.Module) -> list[_Group]:
        """Tensors that share memory stay together, whatever they see of it."""
        groups: dict[int, _Group] = {}
        for found in found_in(model):
            tensor = found.value
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device or not tensor.numel():
                continue
            if self._piece_of(tensor.data_ptr()) is not None:
                continue
            base = tensor.untyped_storage().data_ptr()
            start = tensor.data_ptr() - base
            end = start + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
            members, first, last = groups.get(base, ([], start, end))
            if not any(tensor is each for each in members):
                members.append(tensor)
            groups[base] = members, min(first, start), max(last, end)
        return list(groups.values())

    def _fill(self, groups: list[_Group], size: int) -> None:
        piece = self._allocate(-(-size // _GRANULARITY) * _GRANULARITY)
        self._pieces.append(piece)
        at = 0
        while groups:
            members, start, end = groups.pop()
            # By bytes, since nothing need be known of what lies between.
            storage = members[0].untyped_storage()
            base = storage.data_ptr()
            whole = torch.empty(0, dtype=torch.uint8, device=members[0].device).set_(storage)
            piece.memory[at : at + end - start].copy_(whole[start:end])
            del whole, storage
            for tensor in members:
                offset = at + tensor.data_ptr() - base - start
                tensor.data = placed(piece.memory, offset, tensor.dtype, tensor.shape, tensor.stride())
            at += _aligned(end - start)
            del members, tensor
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()


def in_file(file: int, size: int) -> torch.Tensor:
    """The bytes of a file in memory, uint8 [size]; not copied."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def restored(weights: Weights, copies: Sequence[torch.Tensor], allocate: Allocate) -> tuple[Weights, list[Piece]]:
    """Weights that were in pieces of exported memory, in new ones.

    Args:
        weights: as they were.
        copies: the bytes of each piece, in the host's memory.
        allocate: makes pieces of memory.

    Returns:
        The weights as they are now, and their pieces.

    Raises:
        muxserve.memory.errors.DeviceMemoryError: there is not enough, or it cannot be exported.
    """
    pieces: list[Piece] = []
    allocations: list[Allocation] = []
    for each in weights.allocations:
        if each.kind == "vmm":
            piece = allocate(each.size)
            piece.memory[: each.size].copy_(copies[len(pieces)], non_blocking=True)
            pieces.append(piece)
            each = msgspec.structs.replace(each, handle=piece.handle.encode())
        allocations.append(each)
    return msgspec.structs.replace(weights, allocations=allocations), pieces


def on_gpu(uuid: str, device: torch.device) -> Allocate:
    """Pieces of the memory of a GPU."""

    def allocate(size: int) -> Piece:
        exported = _native.ExportedMemory(uuid, size)
        mapping = _native.CudaMapping(exported.handle, os.dup(exported.descriptor))
        memory = torch.as_tensor(DeviceMemory(mapping, 1, size), device=device)[0]
        return Piece(exported.handle, os.dup(exported.descriptor), memory)

    return allocate


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
