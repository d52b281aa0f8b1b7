"""Stands in for the CUDA driver library, as far as green contexts go; functions have its names."""
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeDriver:
    """Functions of a driver with one GPU of `sms`; notes the calls. `fail` names one that fails."""

    def __init__(self, sms: int = 132, least: int = 8, major: int = 9, fail: str = "", lacks: str = "") -> None:
        self.sms, self.least, self.major, self.fail, self.lacks = sms, least, major, fail, lacks
        self.calls: list[str] = []
        self.current = 0
        self.chosen: list[int] = []
        # Of each context that was made, by its handle: the parts of the GPU; of each stream, its context.
        self.contexts: dict[int, list[int]] = {}
        self.streams: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.lacks or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self.fail:
                return 801
            act = getattr(type(self), f"do_{name}", None)
            if act is not None:
                act(self, *(getattr(arg, "_obj", arg) for arg in args))
            return 0

        return call

    def do_cuGetErrorName(self, code: int, text: Any) -> None:
        text.value = b"CUDA_ERROR_NOT_SUPPORTED"

    def do_cuCtxGetCurrent(self, context: Any) -> None:
        context.value = self.current

    def do_cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device.value = ordinal

    def do_cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context.value = 1

    def do_cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> None:
        value.value = self.major

    def do_cuDeviceGetDevResource(self, device: Any, resource: Any, kind: Any) -> None:
        resource.type, resource.count, resource.least, resource.alignment = kind.value, self.sms, self.least, self.least

    def do_cuDevSmResourceSplitByCount(
        self, parts: Any, groups: Any, whole: Any, rest: Any, flags: Any, size: Any
    ) -> None:
        groups.value = min(groups.value, whole.count // size.value)
        for index in range(groups.value):
            parts[index].count, parts[index].type = size.value, 1
            parts[index].padding[0] = index

    def do_cuDevResourceGenerateDesc(self, description: Any, parts: Any, count: Any) -> None:
        self.chosen = [parts[index].padding[0] for index in range(count.value)]
        description.value = 5

    def do_cuGreenCtxCreate(self, context: Any, description: Any, device: Any, flags: Any) -> None:
        assert (description.value, flags.value) == (5, 1)
        context.value = 6 + len(self.contexts)
        self.contexts[context.value + 1] = self.chosen

    def do_cuCtxFromGreenCtx(self, context: Any, of: Any) -> None:
        assert of.value + 1 in self.contexts
        context.value = of.value + 1

    def do_cuStreamCreate(self, stream: Any, flags: Any) -> None:
        assert flags.value == 1
        stream.value = 100 + len(self.streams)
        self.streams[stream.value] = self.current

    def do_cuCtxSetCurrent(self, context: Any) -> None:
        self.current = context.value
