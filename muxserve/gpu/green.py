"""Green contexts: a context of the CUDA driver with some of a GPU's SMs.

CUDA driver API, "Green Contexts" (CUDA 12.4 and later). PyTorch's own wrapper takes the first SMs of the GPU in every
process, so that engines in different processes would share the same ones and leave the others idle; here a context
begins where it is told to.

A thread can have several of which one is current. Memory, modules, events and handles of libraries are those of the
device's primary context in all of them; streams and what is captured from streams belong to one. Work of the default
stream goes to that of the current context, so that a switch needs nothing of those who launch; but work that
was launched before and after it has no order of its own, and the switch waits for the earlier work.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muxserve.gpu.driver import Driver, DriverError
from muxserve.gpu.sm import SmRange, has_share, sm_range, step_range
from muxserve.spec import UnitSpec

log = logging.getLogger(__name__)

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ADVICE = "use `mps: off`, or a driver of CUDA 12.4 or later"


class GreenContextError(RuntimeError):
    """No green context; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class SmDivision:
    """A GPU of `total` SMs in equal `parts` of `size` SMs each."""

    total: int
    size: int
    parts: tuple[Any, ...]


def _call(driver: Driver, name: str, *arguments: Any) -> Any:
    """Raises GreenContextError: see `Driver.call`."""
    try:
        return driver.call(name, *arguments)
    except DriverError as error:
        raise GreenContextError(f"{error}: {_ADVICE}") from None


def load() -> Driver:
    """The driver of this machine.

    Raises:
        GreenContextError: there is none.
    """
    try:
        return Driver.load()
    except DriverError as error:
        raise GreenContextError(f"{error}: {_ADVICE}") from None


def enter(unit_spec: UnitSpec, model: str, phase: str, rank: int = 0) -> ContextSet | None:
    """With `sm_sharing: green_contexts`, make this engine's green contexts, and the largest current in this thread.

    There is one with the engine's share; where shares change from lease to lease, one for each size that they can have.
    To be called in the thread that launches kernels, before anything makes a stream there: streams belong to the
    context that was current when they were made. The GPU is that of the current context; without one, that of `rank`
    among the visible GPUs. The contexts live as long as the process.

    Returns:
        The contexts, smallest first; None if the unit's spec shares in another way.

    Raises:
        GreenContextError: the driver has no green contexts, or refuses these; with what to do.
    """
    if unit_spec.gpu is None or unit_spec.gpu.sm_sharing != "green_contexts":
        return None
    if not has_share(unit_spec, model, phase):
        return None
    driver = load()
    device = device_of(driver, rank)
    division = divide(driver, device)
    parts, steps = len(division.parts), unit_spec.share_steps
    if steps:
        ranges = [step_range(phase, step, steps, parts) for step in range(1, steps)]
    else:
        ranges = [sm_range(unit_spec, model, phase, parts)]
    made = [make_context(driver, device, division, where) for where in ranges]
    for where, context in zip(ranges, made, strict=True):
        log.info("%s/%s computes on %d of %d SMs, parts %d to %d of %d", model, phase, context.sms, division.total,
                 where.first, where.first + where.count - 1, parts)  # fmt: skip
    if steps:
        made.append(primary(driver, device, division))
    return ContextSet(driver, made)


def device_of(driver: Driver, rank: int) -> int:
    """The GPU of the current context, or number `rank` of the visible ones, with its primary context active."""
    if int(_call(driver, "cuCtxGetCurrent")):
        return int(_call(driver, "cuCtxGetDevice"))
    device = int(_call(driver, "cuDeviceGet", rank))
    # For good: the process keeps using it, and a green context needs it to be there.
    _call(driver, "cuDevicePrimaryCtxRetain", device)
    return device


def divide(driver: Driver, device: int) -> SmDivision:
    """Divide the SMs of a GPU into the smallest equal parts that it allows.

    Their size is what the driver says, or what its documentation does for the architecture (Hopper and later: 8;
    before: 4). What is left over belongs to no part.

    Raises:
        GreenContextError: it cannot be divided.
    """
    api = driver.api
    whole = _call(driver, "cuDeviceGetDevResource", device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    total = int(whole.sm.smCount)
    # Drivers and bindings before CUDA 13 do not have these two.
    size = max(int(getattr(whole.sm, name, 0)) for name in ("minSmPartitionSize", "smCoscheduledAlignment"))
    if not size:
        major = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        size = 8 if int(_call(driver, "cuDeviceGetAttribute", major, device)) >= 9 else 4
    parts, count, _ = _call(driver, "cuDevSmResourceSplitByCount", max(1, total // size), whole, 0, size)
    if count < 2:
        raise GreenContextError(f"the {total} SMs of this GPU cannot be divided: {_ADVICE}")
    return SmDivision(total, int(parts[0].sm.smCount), tuple(parts[:count]))


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
        if int(_call(self.driver, "cuCtxGetCurrent")) != self.handle:
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
        _call(driver, "cuCtxSetCurrent", self.contexts[self.current].handle)

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
        _call(self._driver, "cuCtxSynchronize")
        _call(self._driver, "cuCtxSetCurrent", self.contexts[self.current].handle)
        _call(self._driver, "cuCtxSynchronize")

    def use(self, index: int) -> None:
        """Make that context current, when all that was launched in the present one is done.

        Raises:
            GreenContextError: the driver refuses, or something else has become current meanwhile.
        """
        if index == self.current:
            return
        self.check()
        _call(self._driver, "cuCtxSynchronize")
        _call(self._driver, "cuCtxSetCurrent", self.contexts[index].handle)
        self.current = index

    def stream(self) -> int:
        """`CUstream` of the current context, beside its default stream: what is captured from it computes there,
        wherever it is replayed.

        Raises:
            GreenContextError: the driver refuses.
        """
        if self.current not in self._streams:
            self._streams[self.current] = int(_call(self._driver, "cuStreamCreate", _NON_BLOCKING))
        return self._streams[self.current]


def primary(driver: Driver, device: int, division: SmDivision) -> GreenContext:
    """The context with all SMs of the GPU.

    Raises:
        GreenContextError: the driver refuses.
    """
    context = _call(driver, "cuDevicePrimaryCtxRetain", device)
    return GreenContext(driver, int(context), division.total)


def make_context(driver: Driver, device: int, division: SmDivision, where: SmRange) -> GreenContext:
    """Make a green context of the parts of `where`.

    Raises:
        GreenContextError: the driver refuses.
    """
    # Parts of one context must come from one split.
    chosen = list(division.parts[where.first : where.first + where.count])
    description = _call(driver, "cuDevResourceGenerateDesc", chosen, len(chosen))
    # The one flag that is required.
    flag = driver.api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = _call(driver, "cuGreenCtxCreate", description, device, flag)
    context = _call(driver, "cuCtxFromGreenCtx", green)
    return GreenContext(driver, int(context), len(chosen) * division.size)
