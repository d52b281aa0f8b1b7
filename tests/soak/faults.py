"""Faults of processes and of the machine: killed, stopped, disks full, descriptors few."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.soak.clients import flood
from tests.soak.parts import CONTROLLER, ENGINE, GATEWAY, Part
from tests.soak.world import Kind, Strike, Struck, World

# Restarted by someone; the gateway apart, whose streams end with it.
RESTARTED = (
    ENGINE,
    "model parent",
    "warm parent",
    "unit scheduler",
    "memory manager",
    "migrator",
    "global scheduler",
    "vLLM parent",
    "spare vLLM parent",
    "rank worker",
    "spare grammar compiler",
)
_PAUSE_SECONDS = 5.0
_SPARE_DESCRIPTORS = 3


def _kill(parts: list[Part]) -> list[Part]:
    killed = []
    for part in parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.send(signal.SIGKILL)
            killed.append(part)
    return killed


def kill_one(kind: str) -> Strike:
    async def strike(world: World) -> Struck:
        part, since = world.choose(kind), time.monotonic()
        return Struck(f"killed {part}", _kill([part]), since)

    return strike


async def kill_two(world: World) -> Struck:
    """Two at the same moment."""
    found, since = world.parts(*RESTARTED), time.monotonic()
    killed = _kill(world.rng.sample(found, 2))
    return Struck(f"killed {' and '.join(map(str, killed))}", killed, since)


async def kill_one_after_the_other(world: World) -> Struck:
    """One every two seconds: eight of them."""
    killed: list[Part] = []
    for _ in range(8):
        with contextlib.suppress(LookupError):
            killed += _kill([world.choose(*RESTARTED)])
        await asyncio.sleep(2)
    return Struck(f"killed {', '.join(map(str, killed))}, one every 2 s", killed)


async def kill_unit(world: World) -> Struck:
    """Everything of a unit that can be told by its directory."""
    units = sorted({part.name.split()[-1] for part in world.parts("unit scheduler")})
    unit = world.rng.choice(units)
    since = time.monotonic()
    killed = _kill([part for part in world.parts(*RESTARTED) if part.name.split()[-1] == unit])
    return Struck(f"killed all of {unit}: {', '.join(map(str, killed))}", killed, since)


def pause_one(kind: str) -> Strike:
    """Stopped for five seconds: it may go on afterwards, or have been replaced."""

    async def strike(world: World) -> Struck:
        part = world.choose(kind)
        with contextlib.suppress(psutil.NoSuchProcess):
            part.send(signal.SIGSTOP)
            await asyncio.sleep(_PAUSE_SECONDS)
            part.send(signal.SIGCONT)
        return Struck(f"stopped {part} for {_PAUSE_SECONDS:g} s")

    return strike


def stop_one(kind: str) -> Strike:
    """Stopped for good: it must be found and replaced."""

    async def strike(world: World) -> Struck:
        part, since = world.choose(kind), time.monotonic()
        part.send(signal.SIGSTOP)
        return Struck(f"stopped {part} for good", [part], since)

    return strike


async def pause_all(world: World) -> Struck:
    """The whole fleet stands still for five seconds, as when its machine does: nobody is to be replaced for that."""
    found = world.parts(CONTROLLER, GATEWAY, *RESTARTED)
    for number, wait in ((signal.SIGSTOP, _PAUSE_SECONDS), (signal.SIGCONT, 0.0)):
        for part in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                part.send(number)
        await asyncio.sleep(wait)
    return Struck(f"stopped all {len(found)} processes for {_PAUSE_SECONDS:g} s", untouched=found)


def fill(where: Callable[[World], Path], name: str) -> Strike:
    """A file system without a free byte for five seconds, in half of the cases with a death meanwhile."""

    async def strike(world: World) -> Struck:
        killed: list[Part] = []
        with _full(where(world)) as mib:
            await asyncio.sleep(_PAUSE_SECONDS / 2)
            if world.rng.random() < 0.5:
                killed = _kill([world.choose(*RESTARTED)])
            await asyncio.sleep(_PAUSE_SECONDS / 2)
        words = f"; killed {killed[0]} meanwhile" if killed else ""
        return Struck(f"filled {name} with {mib} MiB for {_PAUSE_SECONDS:g} s{words}", killed)

    return strike


@contextmanager
def _full(directory: Path) -> Iterator[int]:
    path = directory / "filler"
    try:
        written = 0
        with open(path, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        written += file.write(bytes(size))
        yield written >> 20
    finally:
        path.unlink(missing_ok=True)


def few_descriptors(kind: str) -> Strike:
    """Three more open files than it has, for five seconds: with a flood at the gateway, with a death elsewhere."""

    async def strike(world: World) -> Struck:
        part, killed = world.choose(kind), list[Part]()
        pid = part.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + _SPARE_DESCRIPTORS, before[1]))
        try:
            if kind == GATEWAY:
                words = await flood(world, 200, _PAUSE_SECONDS)
            else:
                await asyncio.sleep(_PAUSE_SECONDS / 2)
                killed = _kill([world.choose(ENGINE)])
                await asyncio.sleep(_PAUSE_SECONDS / 2)
                words = f"killed {killed[0]}" if killed else "nobody was killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        return Struck(f"{part} had {_SPARE_DESCRIPTORS} descriptors left for {_PAUSE_SECONDS:g} s; {words}", killed)

    return strike


KINDS = (
    *(Kind(f"kills/{kind}", kill_one(kind), kind) for kind in RESTARTED),
    Kind("kills/gateway", kill_one(GATEWAY), GATEWAY, breaks_streams=True),
    Kind("kills/two at once", kill_two),
    Kind("kills/one every 2 s", kill_one_after_the_other),
    Kind("kills/parts of a unit", kill_unit),
    *(Kind(f"stops/{kind} for 5 s", pause_one(kind), kind) for kind in (*RESTARTED, CONTROLLER)),
    Kind(f"stops/{GATEWAY} for 5 s", pause_one(GATEWAY), GATEWAY, breaks_streams=True),
    *(Kind(f"stops/{kind} for good", stop_one(kind), kind) for kind in RESTARTED),
    Kind(f"stops/{GATEWAY} for good", stop_one(GATEWAY), GATEWAY, breaks_streams=True),
    Kind("stops/whole fleet for 5 s", pause_all),
    Kind("disk/run directory full", fill(lambda world: world.place.run, "the run directory")),
    Kind("disk/shared memory full", fill(lambda world: world.shared_memory, "shared memory")),
    Kind("descriptors/gateway in a flood", few_descriptors(GATEWAY), GATEWAY),
    *(
        Kind(f"descriptors/{kind}", few_descriptors(kind), kind)
        for kind in (CONTROLLER, "unit scheduler", "memory manager", "global scheduler", "model parent")
    ),
)
