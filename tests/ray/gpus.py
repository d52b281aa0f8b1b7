"""What `test_gpus.py` runs, with Ray importable: units on GPUs on real raylets that are told to have some. NVML and the
MPS programs are fakes, one set for each node; so are the processes that need a driver."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from muxserve.cli.doctor import doctor_nodes
from muxserve.cli.output import console
from muxserve.cluster.events import Event, PartId, Progress, Up
from muxserve.cluster.ray.cluster import gpus_for
from muxserve.cluster.ray.units import RayUnits
from muxserve.cluster.remote_unit import RemoteUnit
from muxserve.cluster.units import PlannedUnit
from muxserve.config import Fleet, parse_fleet
from muxserve.gpu import mps
from muxserve.net import sockets
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.unit_specs import planned_unit
from muxserve.spec import UnitEntry
from placement import Machine
from tests.gpu_control.fake_nvml import GIB
from tests.ray.cluster import Nodes, nodes
from tests.ray.gpu_family import WEIGHTS
from tests.ray.scenario import actor_of, gave_up, impatient, is_back, until
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
HOST = [sys.executable, "-m", "tests.ray.gpu_unit_host"]
HEAD, ONE, OTHER, THIRD = "127.0.2.2", "127.0.2.3", "127.0.2.4", "127.0.2.5"
MODEL = "arithmetic"
MPS, WARM = PartId("mps"), PartId("warm_parent")
SETTLE_SECONDS = PATIENCE


class Node:
    """The fakes of one node, and what its MPS programs have noted."""

    def __init__(self, directory: Path, host: str, kind: str, gib: int) -> None:
        self.host, self.kind, self.directory = host, kind, directory / host
        self.directory.mkdir()
        self.uuids = [f"GPU-{host}-{number}" for number in range(2)]
        self.memory = gib * GIB
        self.gpus = [{"name": f"NVIDIA {kind}", "uuid": uuid, "total": self.memory, "used": GIB} for uuid in self.uuids]
        control = self.directory / mps.CONTROL
        script = ROOT / "tests" / "gpu_control" / "fake_mps_control.py"
        control.write_text(f'#!/bin/sh\nexec {sys.executable} {shlex.quote(str(script))} "$@"\n')
        control.chmod(0o755)

    def start(self, cluster: Nodes) -> None:
        environment = {
            "FAKE_GPUS": json.dumps(self.gpus),
            "FAKE_MPS": str(self.directory),
            "PATH": f"{self.directory}:{os.environ['PATH']}",
        }
        resources = {f"accelerator_type:{self.kind}": 1.0}
        cluster.add(self.host, 4, num_gpus=2, resources=resources, env_vars=environment)

    def journal(self) -> list[str]:
        file = self.directory / "journal"
        return file.read_text().splitlines() if file.exists() else []

    def daemons(self) -> list[str]:
        """The GPUs of each daemon that was started."""
        return [line.split()[1] for line in self.journal() if line.startswith("daemon")]

    def pids(self, what: str) -> list[int]:
        """Process numbers of daemons (`pid`) or servers (`server`), in order of their starts."""
        return [int(line.split()[1]) for line in self.journal() if line.startswith(f"{what} ")]

    def tell(self, name: str) -> None:
        (self.directory / name).touch()


def fleet_of(address: str, keys: str = "gpus: 4, gpu_type: A10, sm_sharing: mps") -> Fleet:
    text = (
        f'cluster: {{{keys}, cores: 1, launcher: ray, ray: {{address: "{address}"}}}}\n'
        f"models:\n"
        f"  - {{name: {MODEL}, path: models/{MODEL}, rate: 4, replicas: 2, engines: split,\n"
        "     sm: {prefill: 0.7, decode: 0.3}}\n"
    )
    return parse_fleet(text, "fleet.yaml", ROOT / "configs", {})


def planned(fleet: Fleet, base: Path) -> list[PlannedUnit]:
    """What `muxserve deploy` would start, with a third unit of the same kind."""
    planner = FleetPlanner(fleet, Machine(4, 16 * GIB, 4 * GIB), gpus_for(fleet))
    plans = planner.at_start()
    assert [plan.name for plan in plans] == ["u0", "u1"], plans
    plans.append(replace(plans[1], name="u2"))
    return [planned_unit(plan, str(base / "0123456789")) for plan in plans]


def environments(events: list[Event]) -> dict[str, dict[str, Any]]:
    """What processes found, by the part's words."""
    said = [(str(e.part), e.detail) for e in events if isinstance(e, Progress) and e.detail.startswith("{")]
    return {part: json.loads(detail) for part, detail in said}


def pid_of(events: list[Event], part: PartId) -> int:
    return [event.pid for event in events if isinstance(event, Up) and event.part == part][-1]


def where(entry: UnitEntry) -> str:
    assert entry.unit_spec.listen is not None
    return entry.unit_spec.listen.host


def lives(pid: int) -> bool:
    """Whether it runs. Whoever has adopted it may not have taken note of its end yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Story:
    """Units, their events, and the nodes that they are on."""

    def __init__(self, cluster: Nodes, at: dict[str, Node], base: Path) -> None:
        self.cluster, self.at = cluster, at
        self.units = RayUnits(cluster.address, sockets.new_keys(), command=HOST)
        self.planned = planned(fleet_of(cluster.address), base)
        self.events: dict[str, list[Event]] = {unit.name: [] for unit in self.planned}

    async def start(self, unit: PlannedUnit) -> RemoteUnit:
        handle = await self.units.start(unit, True, self.events[unit.name].append)
        waiting = asyncio.create_task(handle.wait())
        ready = asyncio.create_task(handle.ready.wait())
        await asyncio.wait({waiting, ready}, timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), (waiting, self.events[unit.name])
        waiting.cancel()
        return handle

    def check(self, handle: RemoteUnit, mark: int = 0) -> Node:
        """Its processes are on GPUs of its node, under an MPS server of its own; returns the node."""
        unit_spec = handle.entry.unit_spec
        node, gpu = self.at[where(handle.entry)], unit_spec.gpu
        assert gpu is not None
        assert gpu.sm_sharing == "mps"
        assert sorted(gpu.uuids) == node.uuids
        assert node.daemons()[-1] == ",".join(gpu.uuids), node.journal()
        found = environments(self.events[unit_spec.unit][mark:])
        pipe = str(unit_spec.mps_dir / "pipe")
        share = {f"weights of {MODEL}": None, f"engine {MODEL}/prefill": "70", f"engine {MODEL}/decode": "30"}
        assert found == {
            part: {
                "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuids),
                "CUDA_MPS_PIPE_DIRECTORY": pipe,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage,
            }
            for part, percentage in share.items()
        }, found
        # What was measured there decides, and not what was planned here.
        (pool,) = unit_spec.pools
        size = pool.num_pages * pool.page_bytes
        assert 0 < 0.92 * node.memory - WEIGHTS - size < 4 * GIB, size
        return node


def examined(address: str) -> None:
    """`muxserve doctor` sees the GPUs of each node."""
    console.width = 200
    with console.capture() as shown:
        able = doctor_nodes(address) == 0
    said = shown.get()
    assert able, said
    for host, kind in ((ONE, "A10"), (OTHER, "A10"), (THIRD, "L40S")):
        assert f"{host} (" in said, said
        assert f"NVIDIA {kind}, " in said
    assert said.count("4 CPUs, 2 GPUs for units") == 3
    assert "units can be served on 3 nodes" in said
    print("every node is examined")


async def story(cluster: Nodes, at: dict[str, Node], base: Path) -> None:
    told = Story(cluster, at, base)
    first, second, third = told.planned
    assert first.gpu is not None
    assert {gpu.name for gpu in first.gpu.unit.gpus} == {"NVIDIA A10"}
    u0, u1 = await asyncio.gather(told.start(first), told.start(second))
    one, other = told.check(u0), told.check(u1)
    assert {one.host, other.host} == {ONE, OTHER}
    print("two units, each on the GPUs of a node")

    # The third node has two, but of another type.
    with impatient(told.units):
        said = str(await gave_up(told.units.start(third, False, lambda _: None)))
    assert "no node had room for 1 CPU and 2 GPUs (A10)" in said, said
    print("GPUs of another type are not taken")

    # ---------------------------------------------------------------- everything is killed at once but the MPS server
    events = told.events["u0"]
    mark, entry = len(events), u0.entry
    (server,), daemon, warm = one.pids("server")[-1:], one.pids("pid")[-1], pid_of(events, WARM)
    actor = await actor_of(u0)
    host = psutil.Process(pid_of(events, MPS)).ppid()
    assert lives(server)
    for pid in (pid_of(events, MPS), host, daemon, actor):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: is_back(events[mark:]), "u0 is back", SETTLE_SECONDS)
    await until(lambda: not lives(server) and not lives(warm), "what was left has ended")
    assert u0.entry.unit_address == entry.unit_address
    await until(lambda: u0.up(MODEL), "u0 serves", SETTLE_SECONDS)
    assert told.check(u0, mark) is one
    assert len(one.daemons()) > 2
    print("a killed unit is back with an MPS server of its own, and the old one is gone")

    # ---------------------------------------------------------------- a node whose MPS does not work
    run_dir, daemons = Path(u1.entry.unit_spec.run_dir), other.pids("pid")
    await u1.stop()
    assert not run_dir.exists()
    await until(lambda: not any(lives(pid) for pid in [*daemons, *other.pids("server")]), "its MPS has ended")
    assert other.journal()[-1] == "quit -t 5"
    print("a unit that is stopped leaves no MPS server")
    other.tell("broken")
    mark = len(told.events["u1"])
    u1 = await told.start(second)
    gpu = u1.entry.unit_spec.gpu
    assert gpu is not None
    assert (sorted(gpu.uuids), gpu.sm_sharing) == (other.uuids, "off")
    notes = [e.detail for e in told.events["u1"][mark:] if isinstance(e, Progress) and e.part.kind == "host"]
    assert any("without MPS: " in note and "no GPU is fit for MPS" in note for note in notes), notes
    assert PartId("mps") not in u1.parts
    found = environments(told.events["u1"][mark:])
    assert {each["CUDA_MPS_PIPE_DIRECTORY"] for each in found.values()} == {None}
    print("where MPS does not work engines alternate")

    # ---------------------------------------------------------------- a node dies
    await u1.stop()
    (other.directory / "broken").unlink()
    mark = len(events)
    cluster.kill(one.host)
    await until(lambda: is_back(events[mark:]), "u0 is on the other node", SETTLE_SECONDS)
    await until(lambda: u0.up(MODEL), "u0 serves there", SETTLE_SECONDS)
    assert told.check(u0, mark) is other
    print("the unit of a node that was killed has the GPUs of the other one")
    await u0.stop()
    await told.units.close()
    ours = [pid for node in at.values() for pid in [*node.pids("pid"), *node.pids("server")]]
    await until(lambda: not any(map(lives, ours)), "all MPS has ended")
    print("nothing is left")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mux-gpus-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        fakes = str(Path(__file__).with_name("fake_pynvml"))
        os.environ["PYTHONPATH"] = os.pathsep.join([fakes, os.environ.get("PYTHONPATH", "")])
        kinds = {ONE: ("A10", 23), OTHER: ("A10", 23), THIRD: ("L40S", 45)}
        at = {host: Node(Path(directory), host, *kind) for host, kind in kinds.items()}
        with nodes(HEAD) as cluster:
            for node in at.values():
                node.start(cluster)
            examined(cluster.address)
            asyncio.run(story(cluster, at, Path(directory)))


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"done in {time.monotonic() - began:.0f} s")
