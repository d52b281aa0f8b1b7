"""CUDA memory of another process, by the driver's IPC calls.

torch can do this too, with a reference counter in shared memory for each consumer and with pickled arguments. Weights
are held until their holder ends, so nothing is to be counted, and a handle is 64 plain bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class CudaIpcError(RuntimeError):
    """A driver call failed; the message says which and why."""


def export(address: int) -> tuple[int, int, bytes]:
    """The allocation that `address` lies in: its address, its bytes, and a handle that maps it in another process.

    Raises:
        CudaIpcError: the memory cannot be shared.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return base.value, size.value, ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Map the memory behind `handle` for the rest of this process's life; returns its address here.

    Raises:
        CudaIpcError: the process that exported it is gone, or runs where this one cannot reach it.
    """
    if len(handle) != _HANDLE_BYTES:
        raise CudaIpcError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    address = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )
    return address.value


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
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ.get("MUXSERVE_CUDA_DRIVER", "libcuda.so.1"))


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        why = text.value.decode() if text.value else "unknown error"
        raise CudaIpcError(
            f"{name} failed with {status}: {why}. Weights are shared between processes through CUDA IPC; it needs "
            "memory of cudaMalloc (PYTORCH_CUDA_ALLOC_CONF without expandable_segments), the same user and, in "
            "containers, the same IPC and PID namespace; `muxserve doctor --gpu` finds a way that works here"
        )
