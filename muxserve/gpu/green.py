"""Green contexts through the CUDA driver library: a context with some of a GPU's SMs.

CUDA driver API, "Green Contexts" (CUDA 12.4 and later). PyTorch's own wrapper takes the first SMs of the GPU in every
process, so that engines in different processes would share the same ones and leave the others idle; here a context
begins where it is told to.

A thread can have several of which one is current. Memory, modules, events and handles of libraries are those of the
device's primary context in all of them; streams and what is captured from streams belong to one. Work of the default
stream goes to that of the current context, so that a switch needs nothing of those who launch; but what was launched
before and after it has no order of its own, and the switch waits for what was before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from muxserve.gpu.sm import SmRange

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, required
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_ADVICE = "use `mps: off`, or a driver of CUDA 12.4 or later"


class GreenContextError(RuntimeError):
    """No green context; the message says why and what to do."""


class _Resource(ctypes.Structure):
    """CUdevResource, 144 bytes: a type, padding, and what belongs to the type."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        # These two are zero before CUDA 13.
        ("least", ctypes.c_uint),
        ("alignment", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 36),
    )


assert ctypes.sizeof(_Resource) == 144


class Library(Protocol):
    """The driver library, as `ctypes.CDLL` has it: functions by name."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


@dataclass(frozen=True, slots=True)
class SmDivision:
    """A GPU of `total` SMs in equal `parts` of `size` SMs each."""

    total: int
    size: int
    parts: tuple[Any, ...]


class Driver:
    """Calls of the driver; every error is an exception in words."""

    def __init__(self, library: Library) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Driver:
        """The driver of this machine.

        Raises:
            GreenContextError: there is none.
        """
        name = os.environ.get("MUXSERVE_CUDA_DRIVER", "libcuda.so.1")
        try:
            driver = cls(ctypes.CDLL(name))
        except OSError as error:
            raise GreenContextError(f"the CUDA driver cannot be loaded: {error}") from None
        driver.call("cuInit", 0)
        return driver

    def call(self, name: str, *args: Any) -> None:
        """Call a function.

        Raises:
            GreenContextError: the driver does not have it, or it failed.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise GreenContextError(f"the CUDA driver has no {name}: {_ADVICE}") from None
        code = function(*args)
        if code:
            raise GreenContextError(f"{name} failed with {self._error(code)}: {_ADVICE}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{text.value.decode()} ({code})" if text.value else f"error {code}"


def device_of(driver: Driver, rank: int) -> int:
    """The GPU of the current context, or number `rank` of the visible ones, with its primary context active."""
    current = ctypes.c_void_p()
    driver.call("cuCtxGetCurrent", ctypes.byref(current))
    device = ctypes.c_int()
    if current.value:
        driver.call("cuCtxGetDevice", ctypes.byref(device))
    else:
        driver.call("cuDeviceGet", ctypes.byref(device), rank)
        # For good: the process keeps using it, and a green context needs it to be there.
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(current), device)
    return device.value


def divide(driver: Driver, device: int) -> SmDivision:
    """Divide the SMs of a GPU into the smallest equal parts that it allows.

    Their size is what the driver says, or what its documentation does for the architecture (Hopper and later: 8;
    before: 4). What is left over belongs to no part.

    Raises:
        GreenContextError: it cannot be divided.
    """
    whole = _Resource()
    driver.call("cuDeviceGetDevResource", ctypes.c_int(device), ctypes.byref(whole), ctypes.c_int(_SM))
    size = max(whole.least, whole.alignment)
    if not size:
        major = ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(major), ctypes.c_int(_MAJOR), ctypes.c_int(device))
        size = 8 if major.value >= 9 else 4
    groups = ctypes.c_uint(max(1, whole.count // size))
    parts = (_Resource * groups.value)()
    driver.call(
        "cuDevSmResourceSplitByCount",
        parts,
        ctypes.byref(groups),
        ctypes.byref(whole),
        None,
        ctypes.c_uint(0),
        ctypes.c_uint(size),
    )
    if groups.value < 2:
        raise GreenContextError(f"the {whole.count} SMs of this GPU cannot be divided: {_ADVICE}")
    return SmDivision(whole.count, parts[0].count, tuple(parts[: groups.value]))


@dataclass(frozen=True, slots=True)
class GreenContext:
    """A context of the thread with `sms` SMs, of all of the GPU the primary one; `handle` is its `CUcontext`."""

    driver: Driver
    handle: int
    sms: int

    def check(self) -> None:
        """Go on only if it is still current in this thread.

        A library that calls `cudaSetDevice` silently makes the whole GPU's context current again, and everything would
        be computed on everybody's SMs.

        Raises:
            GreenContextError: it is not.
        """
        current = ctypes.c_void_p()
        self.driver.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != self.handle:
            raise GreenContextError(
                f"the engine's green context of {self.sms} SMs is not current any more: some library has chosen the "
                "whole GPU's; use `mps: off`"
            )


class ContextSet:
    """Contexts of one thread, smallest first, of which one is current: the last, to begin with.

    Raises:
        GreenContextError: the driver refuses.
    """

    def __init__(self, driver: Driver, contexts: Sequence[GreenContext]) -> None:
        self.contexts = tuple(contexts)
        self._driver = driver
        self.current = len(self.contexts) - 1
        self._streams: dict[int, int] = {}
        driver.call("cuCtxSetCurrent", ctypes.c_void_p(self.contexts[self.current].handle))

    def check(self) -> None:
        """Go on only if the context that should be current is.

        Raises:
            GreenContextError: it is not.
        """
        self.contexts[self.current].check()

    def enter_again(self) -> None:
        """Make the context that should be current so again, when all that was launched on the device is done. For while
        an engine starts: libraries that compile or capture make the whole GPU's current, which in a step would put
        kernels out of order.

        Raises:
            GreenContextError: the driver refuses.
        """
        self._driver.call("cuCtxSynchronize")
        self._driver.call("cuCtxSetCurrent", ctypes.c_void_p(self.contexts[self.current].handle))
        self._driver.call("cuCtxSynchronize")

    def use(self, index: int) -> None:
        """Make that context current, when all that was launched in the present one is done.

        Raises:
            GreenContextError: the driver refuses, or something else has become current meanwhile.
        """
        if index == self.current:
            return
        self.check()
        self._driver.call("cuCtxSynchronize")
        self._driver.call("cuCtxSetCurrent", ctypes.c_void_p(self.contexts[index].handle))
        self.current = index

    def stream(self) -> int:
        """`CUstream` of the current context, beside its default stream: what is captured from it computes there,
        wherever it is replayed.

        Raises:
            GreenContextError: the driver refuses.
        """
        if self.current not in self._streams:
            stream = ctypes.c_void_p()
            self._driver.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
            assert stream.value is not None
            self._streams[self.current] = stream.value
        return self._streams[self.current]


def primary(driver: Driver, device: int, division: SmDivision) -> GreenContext:
    """The context with all SMs of the GPU.

    Raises:
        GreenContextError: the driver refuses.
    """
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    assert context.value is not None
    return GreenContext(driver, context.value, division.total)


def make_context(driver: Driver, device: int, division: SmDivision, where: SmRange) -> GreenContext:
    """Make a green context of the parts of `where`.

    Raises:
        GreenContextError: the driver refuses.
    """
    chosen = division.parts[where.first : where.first + where.count]
    parts = (_Resource * len(chosen))(*chosen)
    description, green, context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    # Parts of one context must come from one split.
    driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), parts, ctypes.c_uint(len(chosen)))
    driver.call(
        "cuGreenCtxCreate", ctypes.byref(green), description, ctypes.c_int(device), ctypes.c_uint(_DEFAULT_STREAM)
    )
    driver.call("cuCtxFromGreenCtx", ctypes.byref(context), green)
    assert context.value is not None
    return GreenContext(driver, context.value, len(chosen) * division.size)
