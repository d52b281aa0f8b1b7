"""Stands in for `cuda.bindings.driver`, as far as green contexts go; functions have its names and answer as they do."""
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 801


class FakeDriver:
    """Functions of a driver with one GPU of `sms`; notes the calls. `fail` names one that fails, `lacks` one that the
    driver does not have."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75)

    def __init__(self, sms: int = 132, least: int = 8, major: int = 9, fail: str = "", lacks: str = "") -> None:
        self.sms, self.least, self.major, self.fail, self.lacks = sms, least, major, fail, lacks
        self.calls: list[str] = []
        self.current = 0
        self.chosen: list[int] = []
        # The parts of the GPU of each context, by its handle; the context of each stream.
        self.contexts: dict[int, list[int]] = {}
        self.streams: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            if name == self.lacks:
                raise RuntimeError(f'Function "{name}" not found')
            self.calls.append(name)
            if name == self.fail:
                return (NOT_SUPPORTED, None)
            act = getattr(type(self), f"do_{name}", None)
            return (0,) if act is None else (0, *act(self, *args))

        return call

    def do_cuGetErrorName(self, code: int) -> tuple[bytes]:
        return (b"CUDA_ERROR_NOT_SUPPORTED",)

    def do_cuGetErrorString(self, code: int) -> tuple[bytes]:
        return (b"operation not supported",)

    def do_cuCtxGetCurrent(self) -> tuple[int]:
        return (self.current,)

    def do_cuCtxGetDevice(self) -> tuple[int]:
        return (0,)

    def do_cuDeviceGet(self, ordinal: int) -> tuple[int]:
        return (ordinal,)

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        return (1,)

    def do_cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:
        return (self.major,)

    def do_cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any]:
        sm = SimpleNamespace(smCount=self.sms)
        if self.least:  # bindings before CUDA 13 do not have these
            sm.minSmPartitionSize = sm.smCoscheduledAlignment = self.least
        return (SimpleNamespace(type=kind, sm=sm),)

    def do_cuDevSmResourceSplitByCount(
        self, groups: int, whole: Any, flags: int, size: int
    ) -> tuple[list[Any], int, Any]:
        count = min(groups, whole.sm.smCount // size)
        parts = [SimpleNamespace(index=index, sm=SimpleNamespace(smCount=size)) for index in range(count)]
        return parts, count, SimpleNamespace()

    def do_cuDevResourceGenerateDesc(self, parts: list[Any], count: int) -> tuple[int]:
        assert len(parts) == count
        self.chosen = [part.index for part in parts]
        return (5,)

    def do_cuGreenCtxCreate(self, description: int, device: int, flags: int) -> tuple[int]:
        assert (description, flags) == (5, 1)
        green = 6 + len(self.contexts)
        self.contexts[green + 1] = self.chosen
        return (green,)

    def do_cuCtxFromGreenCtx(self, green: int) -> tuple[int]:
        assert green + 1 in self.contexts
        return (green + 1,)

    def do_cuStreamCreate(self, flags: int) -> tuple[int]:
        assert flags == 1
        stream = 100 + len(self.streams)
        self.streams[stream] = self.current
        return (stream,)

    def do_cuCtxSetCurrent(self, context: int) -> tuple[()]:
        self.current = context
        return ()
