"""Who is suspect and who hangs, on a virtual clock; heartbeats; and the controller over processes that only pretend."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from muxserve.cluster.events import Down, PartId, Recovered, Suspected
from muxserve.cluster.health import Health
from muxserve.cluster.watch import Watch
from muxserve.cluster.watchdog import Finding, Liveness, Sign, Watchdog
from muxserve.net.heartbeat import Heartbeat, HeartbeatReader, heartbeat_file
from muxserve.spec import Suspect, WatchdogRules, load_fleet
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, alive, fake_unit_spec, running
from tests.support.patience import eventually

PERIOD = 0.25
RULES = WatchdogRules(suspect=3, hung=10)
WELL, SUSPECT, HUNG = Liveness.WELL, Liveness.SUSPECT, Liveness.HUNG


class World:
    """Processes whose loops come round at every look, but for those that are stopped."""

    def __init__(self, *names: str, on: dict[str, tuple[str, ...]] | None = None, begun: bool = True) -> None:
        self.now = 1000.0
        self.dog: Watchdog[str] = Watchdog(RULES, PERIOD)
        self.beats = dict.fromkeys(names, 0)
        self.stopped: set[str] = set()
        self.computing: set[str] = set()
        self.states = dict.fromkeys(names, WELL)
        self.at: dict[tuple[str, Liveness], float] = {}
        for name in names:
            self.dog.watch(name, (on or {}).get(name, ()), begun)

    def run(self, seconds: float, step: float = PERIOD) -> None:
        end = self.now + seconds
        while self.now < end:
            self.look(step)

    def look(self, after: float) -> None:
        self.now += after
        for name in self.beats.keys() - self.stopped:
            self.beats[name] += 1
        signs = {name: Sign(beats, name in self.computing) for name, beats in self.beats.items()}
        for finding in self.dog.look(self.now, signs):
            self.found(finding)

    def found(self, finding: Finding[str]) -> None:
        self.states[finding.name] = finding.state
        self.at[finding.name, finding.state] = self.now


def test_a_stopped_process_is_suspect_then_hung() -> None:
    world = World("engine", "other")
    world.run(5)
    world.stopped.add("engine")
    began = world.now
    world.run(12)
    assert world.states == {"engine": HUNG, "other": WELL}
    assert 3 < world.at["engine", SUSPECT] - began < 4
    assert 10 < world.at["engine", HUNG] - began < 11


def test_one_that_goes_on_is_suspected_no_more() -> None:
    world = World("engine")
    world.run(5)
    world.stopped.add("engine")
    world.run(5)
    assert world.states["engine"] is SUSPECT
    world.stopped.clear()
    world.run(1)
    assert world.states["engine"] is WELL


def test_who_waits_for_a_process_that_hangs_is_not_to_blame() -> None:
    world = World("engine", "unit", "memory", on={"engine": ("memory",), "unit": ("memory",)})
    world.run(5)
    # Not at the same moment: they find out when they ask it for something.
    world.stopped.add("memory")
    world.run(0.5)
    world.stopped |= {"engine", "unit"}
    world.run(11)
    assert world.states == {"engine": WELL, "unit": WELL, "memory": HUNG}
    # It was killed; the next one is there, and they have some time to find that out.
    world.dog.forget("memory")
    world.dog.watch("memory")
    world.stopped.discard("memory")
    world.run(2.5)
    assert world.states["engine"] is WELL
    world.run(1)
    assert world.states["engine"] is SUSPECT  # it hangs for a reason of its own
    world.run(8)
    assert world.states["engine"] is HUNG


@pytest.mark.parametrize("pause", [30.0, 3600.0])
def test_a_pause_of_the_machine_is_nobodys_fault(pause: float) -> None:
    world = World("engine", "memory")
    world.run(5)
    world.stopped |= {"engine", "memory"}
    world.run(2)
    world.look(pause)  # nobody ran: neither they nor the watcher
    assert set(world.states.values()) == {WELL}
    world.run(2.5)
    assert set(world.states.values()) == {WELL}
    world.stopped.clear()
    world.run(20)
    assert not world.at


def test_a_watcher_that_hardly_runs_counts_little() -> None:
    world = World("engine")
    world.run(5)
    world.stopped.add("engine")
    world.run(15, step=1.5)  # of each look's 1.5 s half a second counts
    assert world.states["engine"] is SUSPECT


def test_long_steps_that_compute_are_no_hang() -> None:
    world = World("engine")
    world.run(5)
    world.stopped.add("engine")
    world.computing.add("engine")
    world.run(15)
    assert not world.at
    world.run(50)
    assert world.states["engine"] is HUNG  # for ever is too long for anybody


def test_a_step_is_too_long_only_if_it_is_much_longer_than_any_before() -> None:
    world = World("engine")
    world.run(5)
    for _ in range(3):
        world.stopped.add("engine")
        world.run(5)
        world.stopped.clear()
        world.run(1)
    world.at.clear()
    world.stopped.add("engine")
    world.run(9)
    assert not world.at
    world.run(3)
    assert world.states["engine"] is SUSPECT
    world.run(5)
    assert world.states["engine"] is HUNG


def test_nobody_is_judged_before_its_first_beat() -> None:
    world = World("model", begun=False)
    world.stopped.add("model")
    world.run(60)
    assert not world.at
    world.stopped.clear()
    world.run(1)
    world.stopped.add("model")
    world.run(11)
    assert world.states["model"] is HUNG


def test_hung_is_said_once() -> None:
    world = World("engine")
    world.run(1)
    world.stopped.add("engine")
    world.run(11)
    world.at.clear()
    world.run(30)
    assert not world.at


# ---------------------------------------------------------------- heartbeats


def test_beats_are_read_by_others_and_outlive_the_writer(tmp_path: Path) -> None:
    path = heartbeat_file(tmp_path, "engine-org/name-decode")
    reader = HeartbeatReader(path)
    assert reader.beats() is None
    first = Heartbeat(path)
    seen = reader.beats()
    first.beat()
    assert seen is not None
    assert reader.beats() == seen + 1
    first.close()
    # Who comes next does not begin with a number that was there.
    Heartbeat(path).beat()
    assert reader.beats() == seen + 3


def test_a_disk_that_is_full_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    Heartbeat(heartbeat_file(tmp_path, "unit")).beat()
    assert "nobody will notice" in caplog.text


# ---------------------------------------------------------------- what the fleet is told


@pytest.mark.parametrize(("stopped", "state"), [(False, WELL), (True, HUNG)])
def test_an_engine_that_computes_in_vain_because_a_rank_is_stopped_hangs(
    stopped: bool, state: Liveness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine asks for its ranks' answers without a pause, so it looks busy; a long step of them is no hang."""
    engine = PartId("engine", "arithmetic", "both")
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    now = [1000.0]
    beat = Heartbeat(heartbeat_file(tmp_path, engine.file_name))
    found: list[Liveness] = []
    try:
        if stopped:
            os.kill(rank, signal.SIGSTOP)
            eventually(lambda: Path(f"/proc/{rank}/stat").read_text().split()[2] == "T", "stopped")
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        watch = Watch(RULES, str(tmp_path))
        watch.begin(engine, process.pid, lambda finding: found.append(finding.state))
        for _ in range(int(15 / PERIOD)):
            watch.look()
            now[0] += PERIOD
    finally:
        monkeypatch.undo()
        for pid in (rank, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        beat.close()
    assert [WELL, *found][-1] is state


def test_health_names_suspects_and_counts_hangs() -> None:
    health = Health()
    engine, unit, warm = PartId("engine", "one", "decode"), PartId("unit"), PartId("warm_parent")
    assert health.note(Suspected(engine, 3.2), "u0", {"one", "two"})
    assert health.note(Suspected(unit, 3.2), "u1", {"one", "two"})
    assert health.note(Suspected(warm, 3.2), "u1", {"one", "two"})
    assert health.suspects == (
        Suspect("engine one/decode", "u0", ("one",)),
        Suspect("unit scheduler", "u1", ("one", "two")),
        Suspect("warm parent", "u1", ()),
    )
    assert not health.note(Recovered(engine), "u1")
    assert health.note(Recovered(engine), "u0")
    assert health.note(Down(unit, "hung", 0.0, hung=True), "u1")
    assert not health.note(Down(unit, "died", 0.0), "u1")
    health.forget("u1")
    assert health.suspects == ()
    assert health.hangs == {"unit": 1}


# ---------------------------------------------------------------- the controller

T = TypeVar("T", Suspected, Recovered)
QUICK = WatchdogRules(suspect=0.5, hung=2.0)
# Whoever is suspected is not killed while the test looks.
PATIENT = WatchdogRules(suspect=1.0, hung=600.0)
WARM, UNIT, VLLM = PartId("warm_parent"), PartId("unit"), PartId("vllm")
ENGINE = PartId("engine", "one", "decode")


@pytest.fixture
async def watched(run_dir: RunDir, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    rules: WatchdogRules = request.param
    unit_spec = msgspec.structs.replace(fake_unit_spec(run_dir.path), watchdog=rules)
    fleet = Fleet(run_dir, [unit_spec], watchdog=rules)
    fleet.tell("beat")
    async for each in running(fleet):
        yield each


@pytest.fixture
async def unwatched(run_dir: RunDir) -> AsyncIterator[Fleet]:
    unit_spec = msgspec.structs.replace(fake_unit_spec(run_dir.path), watchdog=None)
    async for each in running(Fleet(run_dir, [unit_spec], watchdog=None)):
        yield each


def said(fleet: Fleet, kind: type[T], part: PartId) -> list[T]:
    return [event for event in fleet.events if isinstance(event, kind) and event.part == part]


@pytest.mark.parametrize("watched", [PATIENT], indirect=True, ids=[""])
async def test_a_pause_costs_work_and_no_life(watched: Fleet) -> None:
    fleet = watched
    await fleet.serving()
    path = fleet.controller.fleet.file
    os.kill(fleet.pid(ENGINE), signal.SIGSTOP)
    await fleet.until(lambda: bool(said(fleet, Suspected, ENGINE)))
    assert load_fleet(path).is_suspect("u0", "one")
    assert not load_fleet(path).is_suspect("u0", "two")
    os.kill(fleet.pid(ENGINE), signal.SIGCONT)
    await fleet.until(lambda: bool(said(fleet, Recovered, ENGINE)))
    await fleet.until(lambda: not load_fleet(path).suspects)
    await fleet.until(lambda: fleet.journal().count("u0 got EngineSuspect one") >= 2)
    assert not any(isinstance(event, Down) for event in fleet.events)


@pytest.mark.parametrize("watched", [QUICK], indirect=True, ids=[""])
async def test_a_stopped_process_is_reported_killed_and_started_again(watched: Fleet) -> None:
    fleet = watched
    await fleet.serving()
    for victim in (ENGINE, UNIT, WARM, VLLM):
        before = fleet.pid(victim)
        os.kill(before, signal.SIGSTOP)
        await fleet.until(lambda: any(event.hung for event in fleet.downs(victim)))  # noqa: B023
        assert not alive(before)
        assert said(fleet, Suspected, victim)
        assert not said(fleet, Recovered, victim)
        (down, *_) = [event for event in fleet.downs(victim) if event.hung]
        assert "no sign of life" in down.reason
        await fleet.until(lambda: alive(fleet.pid(victim)) and fleet.host.up("one"))  # noqa: B023
    await fleet.until(lambda: not load_fleet(fleet.controller.fleet.file).suspects)
    told = load_fleet(fleet.controller.fleet.file)
    assert told.hangs == {"engine": 1, "unit": 1, "warm_parent": 1, "vllm": 1}


@pytest.mark.parametrize("watched", [QUICK], indirect=True, ids=[""])
async def test_a_spare_that_was_stopped_is_replaced(watched: Fleet) -> None:
    await watched.serving()
    before = await watched.spare()
    # Who has never beaten is not watched.
    await watched.until(heartbeat_file(watched.run_dir.path, "spare").exists)
    os.kill(before, signal.SIGSTOP)
    after = await watched.spare(but=before)
    assert not alive(before)
    assert alive(after)
    assert watched.ups(VLLM) == 1


@pytest.mark.parametrize("watched", [PATIENT], indirect=True, ids=[""])
async def test_what_is_not_served_any_more_is_not_suspected_any_more(watched: Fleet) -> None:
    fleet = watched
    await fleet.serving()
    os.kill(fleet.pid(ENGINE), signal.SIGSTOP)
    await fleet.until(lambda: bool(said(fleet, Suspected, ENGINE)))
    stopped = asyncio.create_task(fleet.host.stop_model("one"))
    await fleet.until(lambda: bool(said(fleet, Recovered, ENGINE)))
    os.kill(fleet.pid(ENGINE), signal.SIGCONT)
    await stopped
    await fleet.until(lambda: not load_fleet(fleet.controller.fleet.file).suspects)


async def test_nobody_is_watched_where_that_is_switched_off(unwatched: Fleet) -> None:
    unwatched.tell("beat")
    await unwatched.serving()
    os.kill(unwatched.pid(UNIT), signal.SIGSTOP)
    for _ in range(20):
        unwatched.host._hangs.look()
    assert not any(isinstance(event, Suspected | Down) for event in unwatched.events)
    os.kill(unwatched.pid(UNIT), signal.SIGCONT)
