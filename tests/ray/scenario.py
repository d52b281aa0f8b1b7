"""What `test_units.py` runs, with Ray importable: units on real raylets, whose hosts are fakes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from muxserve.cluster.events import Down, Event, PartId, Ready, Up
from muxserve.cluster.ray.units import ActorPlace, RayUnits
from muxserve.cluster.remote_unit import RemoteUnit
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.net import sockets
from muxserve.wire import StateRequest
from tests.global_scheduler.support import entry
from tests.ray.cluster import nodes
from tests.support.patience import PATIENCE, until_ended

FAKE = [sys.executable, "-m", "tests.ray.fake_host"]
HEAD, ONE, OTHER = "127.0.0.2", "127.0.0.3", "127.0.0.4"


def planned(name: str, checkpoint: str, cores: int = 1) -> PlannedUnit:
    unit_spec = entry(name, ["m", "broken", "fatal"], run_dir="/nowhere/0123456789").unit_spec
    models = [msgspec.structs.replace(model, path=checkpoint) for model in unit_spec.models]
    return PlannedUnit(msgspec.structs.replace(unit_spec, models=models, cores=cores), ("m",))


def is_back(events: list[Event]) -> bool:
    return Up(PartId("host"), 0, 0.0) in events


async def until(wanted: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.05)


@contextmanager
def impatient(units: RayUnits) -> Iterator[None]:
    """Units for which there is no node are given up soon. Others may have to wait for one that is slow."""
    units._place_seconds, before = 3.0, units._place_seconds
    yield
    units._place_seconds = before


async def gave_up(work: Awaitable[object]) -> GaveUp:
    try:
        await work
    except GaveUp as failure:
        return failure
    raise AssertionError("it was done")


async def actor_of(unit: RemoteUnit) -> int:
    """The pid of its actor."""
    assert isinstance(unit._place, ActorPlace)
    return int((await unit._place.find()).life.split("-")[0])


async def scenario(address: str, kill: Callable[[str], None]) -> None:
    import ray

    checkpoint = tempfile.gettempdir()
    units = RayUnits(address, sockets.new_keys(), command=FAKE)
    events: dict[str, list[Event]] = {"u0": [], "u1": []}
    handles: dict[str, RemoteUnit] = {}
    for name in events:
        handles[name] = await units.start(planned(name, checkpoint), True, events[name].append)
    for name, handle in handles.items():
        await asyncio.wait_for(handle.ready.wait(), PATIENCE)
        assert handle.sized.is_set()
        assert any(isinstance(event, Ready) for event in events[name])
        shown = await handle.state()
        assert shown["unit"] == name
        # Ray's workers give way to all others; units may not, as far as that can be had.
        if os.getuid() == 0:
            assert shown["nice"] == os.getpriority(os.PRIO_PROCESS, 0)
        assert shown["arguments"][-4:] == ["--ends-with-input", "--migrates", "--serves", "m"], shown  # type: ignore[index]
    first, second = (handles[name].entry for name in ("u0", "u1"))
    assert first.remote
    assert first.serves == ["m"]
    hosts = [unit.unit_spec.listen.host for unit in (first, second) if unit.unit_spec.listen is not None]
    assert sorted(hosts) == [ONE, OTHER], "each unit has a node of its own"
    print("two units on two nodes")

    # ---------------------------------------------------------------- what a controller asks of a unit
    u0 = handles["u0"]
    await u0.tell(StateRequest())
    await u0.start_model("fatal-not")
    assert u0.entry.serves == ["m", "fatal-not"]
    await u0.stop_model("fatal-not")
    assert u0.entry.serves == ["m"]
    failure = await gave_up(u0.start_model("broken"))
    assert failure.part == PartId("engine", "broken", "decode")
    assert str(failure) == "no room"
    assert PartId("unit") in u0.parts
    assert PartId("migrator") in u0.parts
    print("commands and replies")

    # ---------------------------------------------------------------- what cannot be started
    large, elsewhere = planned("u2", checkpoint, cores=64), planned("u3", "/not/there")
    with impatient(units):
        assert "no node had room for 64 CPUs" in str(await gave_up(units.start(large, False, print)))
    assert "/not/there is no directory on node" in str(await gave_up(units.start(elsewhere, False, print)))
    print("refusals in words")

    # ---------------------------------------------------------------- an actor's process dies
    pid = await actor_of(u0)
    mark = len(events["u0"])
    os.kill(pid, signal.SIGKILL)
    await until(lambda: is_back(events["u0"][mark:]), "u0 is back")
    assert any(isinstance(event, Down) for event in events["u0"][mark:])
    assert u0.entry == first, "same node, same directory, same ports"
    assert (await u0.state())["unit"] == "u0"
    print("an actor that was killed is back at its addresses")

    # ---------------------------------------------------------------- a node dies
    mark = len(events["u0"])
    kill(hosts[0])
    await until(lambda: is_back(events["u0"][mark:]), "u0 is on the other node")
    moved = u0.entry
    assert moved.unit_spec.listen is not None
    assert moved.unit_spec.listen.host == hosts[1]
    assert moved.unit_address != first.unit_address
    assert (await u0.state())["unit"] == "u0"
    assert handles["u1"].entry == second
    print("the unit of a node that was killed is on the other one")

    # ---------------------------------------------------------------- a host fails
    waiting = asyncio.create_task(u0.wait())
    await gave_up(u0.start_model("fatal"))
    gone = await gave_up(asyncio.wait_for(waiting, PATIENCE))
    assert gone.part == PartId("engine", "fatal", "decode")
    assert str(gone) == "killed"
    path, tail = u0.log_tail_of(gone.part)
    assert tail == ("a", "b")
    assert str(path).startswith(hosts[1])
    print("a host that failed is told with its reason")

    # ---------------------------------------------------------------- ends
    await u0.stop()
    run_dir = Path(second.unit_spec.run_dir)
    assert run_dir.exists()
    await handles["u1"].stop()
    assert not run_dir.exists()
    from ray.util.placement_group import placement_group_table

    left = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    assert left == [], left
    again = await units.start(planned("u0", checkpoint), False, events["u0"].append)
    await asyncio.wait_for(again.ready.wait(), PATIENCE)
    again.kill()
    await again.stop()
    await units.close()
    assert not ray.is_initialized()
    print("stopped, started again, killed")


async def dies(address: str) -> None:
    """A controller that ends without a word."""
    units = RayUnits(address, sockets.new_keys(), command=FAKE)
    unit = await units.start(planned("u9", tempfile.gettempdir()), False, lambda _: None)
    await unit.ready.wait()
    print((await unit.state())["pid"], flush=True)
    os._exit(1)


def orphaned(address: str) -> None:
    """Units end with their controller, however that ends."""
    command = [sys.executable, "-m", "tests.ray.scenario", "--die", address]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * PATIENCE).stdout
    until_ended(int(said.split()[-1]), "the host of a unit whose controller has died")
    print("a controller that dies takes its units along")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mux-ray-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        with nodes(HEAD) as cluster:
            for host in (ONE, OTHER):
                cluster.add(host, 2)
            orphaned(cluster.address)
            asyncio.run(scenario(cluster.address, cluster.kill))


if __name__ == "__main__":
    began = time.monotonic()
    if "--die" in sys.argv:
        asyncio.run(dies(sys.argv[-1]))
    main()
    print(f"done in {time.monotonic() - began:.0f} s")
