"""The actor of a unit, without Ray: what it does on its node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.cluster.events import Failed, Ready
from muxserve.cluster.host_link import ReadState, StartModel
from muxserve.cluster.ray.actor import UnitActor
from muxserve.cluster.ray.units import wished
from muxserve.net import sockets
from muxserve.net.heartbeat import HeartbeatReader, heartbeat_file
from muxserve.spec import SimulatedSpec, UnitSpec, WatchdogRules
from tests.cluster.host_client import HostClient
from tests.global_scheduler.support import entry
from tests.support.patience import PATIENCE

HERE = "127.0.0.1"
FAKE = [sys.executable, "-m", "tests.ray.fake_host"]


def unit(tmp_path: Path, name: str = "u3") -> bytes:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    unit_spec = entry(name, ["m"], run_dir="/nowhere/0123456789").unit_spec
    models = [msgspec.structs.replace(model, path=str(checkpoint)) for model in unit_spec.models]
    return msgspec.json.encode(msgspec.structs.replace(unit_spec, models=models, keys=sockets.new_keys()))


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, since paths of sockets are."""
    with tempfile.TemporaryDirectory(prefix="mux-ray-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "muxserve"


@pytest.fixture
def made(base: Path) -> Iterator[list[UnitActor]]:
    actors: list[UnitActor] = []
    yield actors
    for actor in actors:
        actor.stop(1.0)


def deployed(actor: UnitActor) -> UnitSpec:
    place = actor.place()
    assert place["problem"] == ""
    return msgspec.json.decode(place["unit_spec"], type=UnitSpec)


def until_ended(actor: UnitActor, status: int) -> dict[str, Any]:
    """How the host is, once it has ended with that status."""
    end = time.monotonic() + PATIENCE
    while (watched := actor.watch(0.5))["ended"] is None:
        assert time.monotonic() < end, watched
    assert watched["ended"] == status, watched
    return watched


@pytest.fixture
def follow() -> Iterator[Callable[[UnitActor], HostClient]]:
    """Connects to the host of an actor."""
    clients: list[HostClient] = []

    def begin(actor: UnitActor) -> HostClient:
        clients.append(HostClient(deployed(actor)))
        return clients[-1]

    yield begin
    for client in clients:
        client.close()


async def test_it_starts_a_host_in_a_directory_and_on_ports_of_its_node(
    base: Path, made: list[UnitActor], tmp_path: Path, follow: Callable[[UnitActor], HostClient]
) -> None:
    made.append(UnitActor(unit(tmp_path), ["--serves", "m"], HERE, FAKE))
    here = deployed(made[0])
    assert here.listen is not None
    assert here.listen.host == HERE
    assert len({here.listen.unit_port, here.listen.migrator_port, here.listen.host_port}) == 3
    assert here.keys is not None
    assert Path(here.run_dir).parent == base
    assert "u3" in Path(here.run_dir).name
    host = follow(made[0])
    await host.until(Ready)
    state = await host.state(ReadState())
    assert state["unit"] == "u3"
    assert state["arguments"][-2:] == ["--serves", "m"]
    assert "started" in (here.log_dir / "host.log").read_text()
    assert made[0].watch(0.01) == {"life": made[0].place()["life"], "ended": None, "hung": ""}


async def test_who_has_other_keys_is_not_let_in(base: Path, made: list[UnitActor], tmp_path: Path) -> None:
    made.append(UnitActor(unit(tmp_path), [], HERE, FAKE))
    here = deployed(made[0])
    assert here.listen is not None
    assert here.keys is not None
    address = sockets.tcp_address(HERE, here.listen.host_port)
    await asyncio.to_thread(sockets.probe, address, here.keys, PATIENCE)
    with pytest.raises(sockets.NetworkError, match="not of this fleet"):
        await asyncio.to_thread(sockets.probe, address, sockets.new_keys(), PATIENCE)


async def test_it_ends_the_host_in_order_and_takes_its_directory_away(
    base: Path, made: list[UnitActor], tmp_path: Path, follow: Callable[[UnitActor], HostClient]
) -> None:
    made.append(UnitActor(unit(tmp_path), [], HERE, FAKE))
    here = deployed(made[0])
    await follow(made[0]).until(Ready)
    made[0].stop()
    until_ended(made[0], 0)
    assert not Path(here.run_dir).exists()


async def test_a_host_that_fails_is_told_with_its_last_words(
    base: Path, made: list[UnitActor], tmp_path: Path, follow: Callable[[UnitActor], HostClient]
) -> None:
    made.append(UnitActor(unit(tmp_path), [], HERE, FAKE))
    host = follow(made[0])
    await host.until(Ready)
    failing = asyncio.create_task(host.ask(StartModel("fatal")))
    assert (await host.until(Failed)).tail == ("a", "b")
    await asyncio.to_thread(until_ended, made[0], 4)
    failing.cancel()


async def test_the_next_life_waits_for_the_host_of_the_last_and_takes_up_its_ports(
    base: Path, made: list[UnitActor], tmp_path: Path, follow: Callable[[UnitActor], HostClient]
) -> None:
    text = unit(tmp_path)
    first = UnitActor(text, [], HERE, FAKE)
    made.append(first)
    before = deployed(first)
    (Path(before.run_dir) / "left.sock").touch()
    await follow(first).until(Ready)
    # As when the actor's process dies: the host's input ends, and with it the host.
    assert first._process is not None
    assert first._process.stdin is not None
    first._process.stdin.close()
    second = await asyncio.to_thread(UnitActor, text, [], HERE, FAKE)
    made.append(second)
    after = deployed(second)
    assert (after.listen, after.run_dir) == (before.listen, before.run_dir)
    assert not (Path(after.run_dir) / "left.sock").exists()
    assert second.place()["life"] != first.place()["life"]
    await follow(second).until(Ready)
    until_ended(first, 0)


def test_ports_that_others_have_taken_since_are_not_taken_up(base: Path, made: list[UnitActor], tmp_path: Path) -> None:
    text = unit(tmp_path)
    first = UnitActor(text, [], HERE, FAKE)
    made.append(first)
    before = deployed(first)
    assert before.listen is not None
    assert first._process is not None
    os.kill(first._process.pid, signal.SIGKILL)
    until_ended(first, -9)
    with socket.socket() as other:
        other.bind((HERE, before.listen.unit_port))
        other.listen()
        second = UnitActor(text, [], HERE, FAKE)
        made.append(second)
    after = deployed(second)
    assert after.listen is not None
    assert after.listen.unit_port != before.listen.unit_port


def test_simulated_units_of_a_fleet_share_the_nodes_cpu(base: Path, tmp_path: Path, made: list[UnitActor]) -> None:
    profile = tmp_path / "costs.json"
    profile.write_text("{}")

    def simulated(name: str) -> bytes:
        unit_spec = msgspec.json.decode(unit(tmp_path, name), type=UnitSpec)
        return msgspec.json.encode(msgspec.structs.replace(unit_spec, simulated=SimulatedSpec("CPU", str(profile))))

    made += [UnitActor(simulated(name), [], HERE, FAKE) for name in ("u1", "u2")]
    files = {deployed(actor).shared_device for actor in made}
    assert files == {base / "01234567-device"}
    (file,) = files
    file.touch()
    made[0].stop(1.0)
    assert file.exists()
    made[1].stop(1.0)
    assert not file.exists()
    profile.unlink()
    problem = UnitActor(simulated("u3"), [], HERE, FAKE).place()["problem"]
    assert problem.startswith(f"{profile} is no file on node ")


def test_a_checkpoint_that_the_node_does_not_have_is_told_in_words(base: Path, tmp_path: Path) -> None:
    text = unit(tmp_path)
    (tmp_path / "checkpoint").rmdir()
    actor = UnitActor(text, [], HERE, FAKE)
    problem = actor.place()["problem"]
    assert problem.startswith(f"m: {tmp_path}/checkpoint is no directory on node ")
    assert "same path on every node" in problem
    assert actor.watch(1.0)["ended"] == 2
    actor.stop()


def test_an_address_that_is_not_of_this_node_is_told_in_words(base: Path, tmp_path: Path) -> None:
    problem = UnitActor(unit(tmp_path), [], "192.0.2.77", FAKE).place()["problem"]
    assert "192.0.2.77" in problem


def cpus(**nodes: float) -> dict[str, dict[str, float]]:
    return {node: {"CPU": count} for node, count in nodes.items()}


def test_units_are_spread_over_nodes_or_packed_as_far_as_there_is_room() -> None:
    rooms, taken = cpus(a=2, b=4, c=8), cpus(b=4)
    assert wished(rooms, taken, {"CPU": 2}, "spread") == "c"
    assert wished(rooms, taken, {"CPU": 2}, "pack") == "b"
    assert wished(rooms, taken, {"CPU": 6}, "pack") == "c"
    assert wished(rooms, {}, {"CPU": 1}, "pack") == "a"
    assert wished(rooms, cpus(a=1, b=1, c=1), {"CPU": 3}, "spread") == "c"
    assert wished(rooms, taken, {"CPU": 9}, "spread") == ""


def test_units_on_gpus_go_by_gpus() -> None:
    rooms = {"a": {"CPU": 64.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 4.0}, "c": {"CPU": 8.0, "GPU": 2.0}}
    need = {"CPU": 2.0, "GPU": 2.0}
    assert wished(rooms, {}, need, "spread") == "b"
    assert wished(rooms, {}, need, "pack") == "c"
    assert wished(rooms, {"b": {"CPU": 2.0, "GPU": 2.0}}, need, "pack") == "b"
    assert wished(rooms, {}, {"CPU": 16.0, "GPU": 2.0}, "spread") == ""


BEATING = """
import sys, time
from pathlib import Path
from muxserve.net.heartbeat import Heartbeat, heartbeat_file
heart = Heartbeat(heartbeat_file(Path(sys.argv[sys.argv.index("--unit-spec") + 1]).parent, "host"))
while True:
    heart.beat()
    time.sleep(0.02)
"""


def test_a_host_that_hangs_is_killed(base: Path, made: list[UnitActor], tmp_path: Path) -> None:
    wanted = msgspec.json.decode(unit(tmp_path), type=UnitSpec)
    quick = msgspec.structs.replace(wanted, watchdog=WatchdogRules(suspect=0.5, hung=2.0))
    actor = UnitActor(msgspec.json.encode(quick), [], host=HERE, command=[sys.executable, "-c", BEATING])
    made.append(actor)
    reader = HeartbeatReader(heartbeat_file(deployed(actor).run_dir, "host"))
    end = time.monotonic() + PATIENCE
    while (reader.beats() or 0) < 50:  # it has been seen to beat
        assert time.monotonic() < end
        time.sleep(0.05)
    assert actor._process is not None
    actor._process.send_signal(signal.SIGSTOP)
    assert "no sign of life" in until_ended(actor, -signal.SIGKILL)["hung"]
