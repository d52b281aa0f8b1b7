"""CUDA memory of another process, by the driver's IPC calls.

torch can do this too, with a reference counter in shared memory for each consumer and with pickled arguments. Weights
are held until their holder ends, so nothing is to be counted, and a handle is 64 plain bytes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from muxserve.gpu.driver import Driver, DriverError

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CudaIpcError(RuntimeError):
    """A driver call failed; the message says which and why."""


def export(address: int) -> tuple[int, int, bytes]:
    """The allocation that `address` lies in: its address, its bytes, and a handle that maps it in another process.

    Raises:
        CudaIpcError: the memory cannot be shared.
    """
    base, size = _call("cuMemGetAddressRange", address)
    handle = _call("cuIpcGetMemHandle", base)
    # The bindings give the place of its bytes only.
    return int(base), int(size), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Map the memory behind `handle` for the rest of this process's life; returns its address here.

    Raises:
        CudaIpcError: the process that exported it is gone, or runs where this one cannot reach it.
    """
    if len(handle) != _HANDLE_BYTES:
        raise CudaIpcError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    taken = _driver().api.CUipcMemHandle()
    ctypes.memmove(taken.getPtr(), handle, _HANDLE_BYTES)
    return int(_call("cuIpcOpenMemHandle", taken, _LAZY_ENABLE_PEER_ACCESS))


class _DeviceBytes:
    """Device memory as torch takes it in."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
        }


def as_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] at `address`; nothing is copied."""
    return torch.as_tensor(_DeviceBytes(address, size), device=device)


@functools.cache
def _driver() -> Driver:
    try:
        return Driver.load()
    except DriverError as error:
        raise CudaIpcError(str(error)) from None


def _call(name: str, *arguments: Any) -> Any:
    try:
        return _driver().call(name, *arguments)
    except DriverError as error:
        raise CudaIpcError(
            f"{error}. Weights are shared between processes through CUDA IPC; it needs "
            "memory of cudaMalloc (PYTORCH_CUDA_ALLOC_CONF without expandable_segments), the same user and, in "
            "containers, the same IPC and PID namespace; `muxserve doctor --gpu` finds a way that works here"
        ) from None
