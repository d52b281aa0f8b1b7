"""The controller over real processes that only pretend: start, deaths, restarts, drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from muxserve.cluster import fleet_starts
from muxserve.cluster.controller import EXIT_FORCED, EXIT_OK, EXIT_START
from muxserve.cluster.events import Draining, Event, Failed, PartId, Progress, Ready, Starting, Stopping, Up
from muxserve.cluster.restarts import RestartPolicy
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.spec import ResidencySpec
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import ROOT, Fleet, alive, fake_unit_spec, running
from tests.support.patience import PATIENCE

MEMORY, WARM, UNIT = PartId("memory"), PartId("warm_parent"), PartId("unit")
VLLM, GATEWAY = PartId("vllm"), PartId("gateway")
ENGINES = [PartId("engine", model, phase) for model in ("one", "two") for phase in ("prefill", "decode")]
ALL = [VLLM, MEMORY, WARM, UNIT, GATEWAY, *ENGINES]


def index(events: list[Event], kind: type, part: PartId) -> int:
    return next(i for i, event in enumerate(events) if isinstance(event, kind) and event.part == part)


def zombies() -> list[int]:
    """Ended children of this process that nobody has collected."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


async def test_everything_comes_up_in_order_and_goes_down_in_order(fleet: Fleet) -> None:
    events = fleet.events
    assert {event.part for event in events if isinstance(event, Up)} == set(ALL)
    assert isinstance(events[-1], Ready)
    for engine in ENGINES:
        assert index(events, Starting, engine) > index(events, Up, MEMORY)
        assert index(events, Starting, engine) > index(events, Up, WARM)
        assert Progress(engine, "loading weights") in events
    pids = fleet.pids()
    assert len(set(pids)) == len(ALL)
    assert all(map(alive, pids))

    stops = await fleet.stops()
    assert any(isinstance(event, Draining) for event in events)
    assert stops[:2] == ["gateway-0", "unit"]
    assert sorted(stops[2:6]) == ["one-decode", "one-prefill", "two-decode", "two-prefill"]
    assert stops[6:] == ["warm", "memory", "vllm"]
    assert not zombies()


@pytest.mark.parametrize("victim", [MEMORY, UNIT, GATEWAY, ENGINES[0]], ids=str)
async def test_a_killed_part_comes_back_alone(fleet: Fleet, victim: PartId) -> None:
    before = {part: fleet.pid(part) for part in ALL}
    os.kill(before[victim], signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(victim) == 2)
    assert fleet.pid(victim) != before[victim]
    assert alive(fleet.pid(victim))
    for part in ALL:
        assert fleet.ups(part) == (2 if part == victim else 1)
    down = fleet.downs()[0]
    assert down.part == victim
    assert "SIGKILL" in down.reason


async def test_the_gateway_outlives_the_warm_parent_but_engines_do_not(fleet: Fleet) -> None:
    before = {part: fleet.pid(part) for part in ALL}
    os.kill(before[WARM], signal.SIGKILL)
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in [WARM, *ENGINES]))
    assert alive(before[GATEWAY])
    assert alive(before[VLLM])
    for part in ENGINES:
        await fleet.until(lambda part=part: not alive(before[part]))
    await fleet.until(lambda: not zombies())
    # The unit scheduler is told that they ended, and not that they failed.
    await fleet.until(lambda: "u0 lost one/prefill: nothing" in fleet.journal())
    await fleet.stops()


async def test_everything_outlives_what_imported_vllm(fleet: Fleet) -> None:
    before = {part: fleet.pid(part) for part in ALL}
    os.kill(before[VLLM], signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(VLLM) == 2)
    assert all(fleet.ups(part) == 1 and alive(before[part]) for part in ALL if part != VLLM)
    await fleet.until(lambda: not zombies())
    # The new one forks what dies, and the end of the old one's children is noticed all the same.
    for victim in (GATEWAY, WARM):
        os.kill(before[victim], signal.SIGKILL)
    again = [GATEWAY, WARM, *ENGINES]
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in again))
    assert "SIGKILL" in fleet.downs(WARM)[-1].reason
    await fleet.until(lambda: not zombies())
    await fleet.stops()


async def test_engines_that_died_with_the_warm_parent_are_not_blamed(fleet: Fleet) -> None:
    for part in fleet.host.parts.values():
        deaths = 100 if part.id == WARM else 2
        part.policy = RestartPolicy(max_deaths=deaths, delays=(0.01,))
    for count in (2, 3, 4):
        os.kill(fleet.pid(WARM), signal.SIGKILL)
        await fleet.until(lambda count=count: all(fleet.ups(part) == count for part in [WARM, *ENGINES]))
    assert {down.reason for down in fleet.downs(*ENGINES)} == {"ended with the process that it was forked from"}


async def test_the_unit_is_told_who_died(fleet: Fleet) -> None:
    os.kill(fleet.pid(ENGINES[2]), signal.SIGKILL)
    await fleet.until(lambda: "u0 got EngineDown two" in fleet.journal())
    os.kill(fleet.pid(GATEWAY), signal.SIGKILL)
    await fleet.until(lambda: "u0 got GatewayDown 0" in fleet.journal())
    await fleet.until(lambda: fleet.ups(GATEWAY) == 2 and fleet.ups(ENGINES[2]) == 2)


@pytest.mark.parametrize(
    ("file", "part", "words"),
    [
        ("fail-gateway-0", GATEWAY, "the weights are of cheese"),
        ("fail-vllm", VLLM, "no vLLM here"),
        ("fail-warm", WARM, "no room here"),
        ("die-memory", MEMORY, "exited with status 7"),
    ],
)
async def test_a_start_that_fails_ends_everything(idle_fleet: Fleet, file: str, part: PartId, words: str) -> None:
    idle_fleet.tell(file)
    assert await idle_fleet.start() == EXIT_START
    assert idle_fleet.failed.part == part
    assert "cannot start" in idle_fleet.failed.message
    assert words in idle_fleet.failed.message
    assert not any(map(alive, idle_fleet.pids()))


TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no rope of that kind\n'


@pytest.mark.parametrize(
    ("file", "log", "part", "words"),
    [
        ("fail-one-prefill", "", ENGINES[0], "the weights are of cheese"),
        ("die-two-decode", TRACEBACK, ENGINES[3], "exited with status 9; ValueError: no rope of that kind"),
    ],
)
async def test_a_model_that_cannot_be_started_at_first_is_degraded_alone(
    idle_fleet: Fleet, file: str, log: str, part: PartId, words: str
) -> None:
    broken = idle_fleet.tell(file, log)
    await idle_fleet.serving()
    degraded = {part.model: f"{part} cannot start: {words}"}
    await idle_fleet.until(lambda: idle_fleet.host.degraded == degraded)
    await idle_fleet.until(lambda: f"u0 has degraded {part.model}: {degraded[part.model]}" in idle_fleet.journal())
    other = "two" if part.model == "one" else "one"
    assert all(idle_fleet.ups(engine) == 1 for engine in ENGINES if engine.model == other)
    assert idle_fleet.ups(part) == 0
    # It is tried again, and serves when it can.
    broken.unlink()
    await idle_fleet.until(lambda: idle_fleet.host.up(part.model))
    assert not idle_fleet.host.degraded


async def test_a_model_that_gateways_cannot_offer_is_told(idle_fleet: Fleet) -> None:
    idle_fleet.tell("refuse-two")
    await idle_fleet.serving()
    assert idle_fleet.details(GATEWAY) == ["note: two is not offered: its tokenizer is of cheese"]


async def test_the_only_model_that_is_awake_may_fail_where_others_sleep(idle_fleet: Fleet) -> None:
    idle_fleet.planned[0] = dataclasses.replace(idle_fleet.planned[0], serves=("one",))
    idle_fleet.tell("fail-one-prefill")
    await idle_fleet.serving()
    await idle_fleet.until(lambda: list(idle_fleet.host.degraded) == ["one"])
    await idle_fleet.host.start_model("two")
    assert idle_fleet.host.up("two")


async def test_a_fleet_none_of_whose_models_can_be_started_ends(idle_fleet: Fleet) -> None:
    idle_fleet.tell("fail-one-prefill")
    idle_fleet.tell("fail-two-decode")
    assert await idle_fleet.start() == EXIT_START
    failed = idle_fleet.failed
    assert failed.part in (ENGINES[0], ENGINES[3])
    assert failed.message == f"{failed.part} cannot start: the weights are of cheese"
    # What the other one could not be started for was said before.
    assert "the weights are of cheese" in [down.reason for down in idle_fleet.downs() if down.part != failed.part]
    assert not any(map(alive, idle_fleet.pids()))


async def test_the_log_of_what_failed_is_shown(idle_fleet: Fleet) -> None:
    idle_fleet.tell("die-unit")
    assert await idle_fleet.start() == EXIT_START
    failed = idle_fleet.failed
    assert (failed.part, failed.message) == (UNIT, "unit scheduler cannot start: exited with status 7")
    assert failed.log == str(idle_fleet.logs() / "unit.log")
    assert failed.tail[-1] == "unit dies because the test says so"


async def test_a_unit_whose_part_keeps_dying_is_started_again_as_a_whole(fleet: Fleet) -> None:
    broken = fleet.tell("die-unit")
    os.kill(fleet.pid(UNIT), signal.SIGKILL)
    await fleet.down(PartId("host", unit="u0"))
    assert len(fleet.downs(UNIT)) >= 4
    assert fleet.ups(GATEWAY) == 1
    broken.unlink()
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in (UNIT, *ENGINES)))
    assert not any(isinstance(event, Failed) for event in fleet.events)
    await fleet.stops()


async def test_a_model_that_cannot_be_started_any_more_is_degraded_and_comes_back(fleet: Fleet) -> None:
    broken = fleet.tell("fail-one-decode")
    os.kill(fleet.pid(ENGINES[1]), signal.SIGKILL)
    degraded = {"one": "engine one/decode cannot start: the weights are of cheese"}
    await fleet.until(lambda: len(fleet.downs(ENGINES[1])) > 10)
    counts = [down.failed_starts for down in fleet.downs(ENGINES[1])]
    # A death of unknown cause counts half.
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] >= 5
    assert fleet.host.degraded == degraded
    # Nothing else was touched by that.
    assert all(fleet.ups(part) == 1 for part in ALL if part != ENGINES[1])
    await fleet.until(lambda: f"u0 has degraded one: {degraded['one']}" in fleet.journal())
    # A new unit scheduler hears of it, too.
    told = sum("has degraded one" in line for line in fleet.journal())
    os.kill(fleet.pid(UNIT), signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(UNIT) == 2)
    await fleet.until(lambda: sum("has degraded one" in line for line in fleet.journal()) > told)
    broken.unlink()
    await fleet.until(lambda: fleet.ups(ENGINES[1]) == 2)
    assert not fleet.host.degraded


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "kill"), (signal.SIGSEGV, "crash")])
async def test_the_unit_scheduler_hears_whether_an_engine_was_killed_or_crashed(
    fleet: Fleet, number: int, cause: str
) -> None:
    os.kill(fleet.pid(ENGINES[0]), number)
    await fleet.until(lambda: fleet.ups(ENGINES[0]) == 2)
    await fleet.until(lambda: f"u0 lost one/prefill: {cause}" in fleet.journal())


@pytest.fixture
async def sleeping(run_dir: RunDir) -> AsyncIterator[Fleet]:
    """A fleet in which memory decides which models are awake."""
    models = {name: WakeCosts(1 << 20) for name in ("one", "two")}
    residency = ResidencySpec(ResidencyRules(1 << 40), models)
    async for each in running(Fleet(run_dir, [fake_unit_spec(run_dir.path)], residency={"u0": residency})):
        each.tell("no-spare")
        each.tell("no-spare-of-a-unit")
        yield each


async def test_what_imported_vllm_comes_back_when_it_is_needed_where_memory_decides(sleeping: Fleet) -> None:
    def waits() -> int:
        return sum("when a process is to be forked" in detail for detail in sleeping.details(VLLM))

    await sleeping.serving()
    for number, victim in enumerate((GATEWAY, WARM), start=1):
        os.kill(sleeping.pid(VLLM), signal.SIGKILL)
        await sleeping.until(lambda number=number: waits() == number)  # type: ignore[misc]
        assert sleeping.ups(VLLM) == number
        os.kill(sleeping.pid(victim), signal.SIGKILL)
        await sleeping.until(lambda victim=victim: sleeping.ups(victim) == 2)  # type: ignore[misc]
        assert sleeping.ups(VLLM) == number + 1
    await sleeping.until(lambda: not zombies())


def taken(fleet: Fleet) -> int:
    """How often a spare took the place of what had imported vLLM."""
    return fleet.journal().count("the spare vllm serves")


async def test_a_spare_vllm_takes_the_place_of_one_that_died(fleet: Fleet) -> None:
    for number in (1, 2):
        await fleet.spare()
        os.kill(fleet.pid(VLLM), signal.SIGKILL)
        await fleet.until(lambda number=number: fleet.ups(VLLM) == number + 1)  # type: ignore[misc]
        assert taken(fleet) == number
        await fleet.until(lambda: not zombies())
    # It forks what dies, and its own end is noticed; so is that of a spare which nobody needed.
    for victim in (GATEWAY, WARM):
        os.kill(fleet.pid(victim), signal.SIGKILL)
        await fleet.until(lambda victim=victim: fleet.ups(victim) == 2)  # type: ignore[misc]
    before = await fleet.spare()
    os.kill(before, signal.SIGKILL)
    spare = await fleet.spare(but=before)
    assert fleet.ups(VLLM) == 3
    await fleet.until(lambda: not zombies())
    # Both at once: a unit forks another one, which forks like those before it.
    for pid in (spare, fleet.pid(VLLM)):
        os.kill(pid, signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(VLLM) == 4)
    assert taken(fleet) == 2
    assert fleet.journal().count("the spare of a unit serves") == 1
    spare = await fleet.spare(but=spare)
    os.kill(fleet.pid(WARM), signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(WARM) == 3)
    await fleet.until(lambda: not zombies())
    # And where no unit can: it is imported again.
    fleet.tell("no-spare-of-a-unit")
    for pid in (spare, fleet.pid(VLLM)):
        os.kill(pid, signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(VLLM) == 5)
    assert taken(fleet) == 2
    assert fleet.journal().count("the spare of a unit serves") == 1
    spare = await fleet.spare(but=spare)
    await fleet.stops()
    assert not alive(spare)
    assert not zombies()


async def test_a_spare_vllm_that_hangs_is_given_up(idle_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_starts, "_SPARE_READY_SECONDS", 0.1)
    await idle_fleet.serving()
    spare = await idle_fleet.spare()
    os.kill(spare, signal.SIGSTOP)
    os.kill(idle_fleet.pid(VLLM), signal.SIGKILL)
    await idle_fleet.until(lambda: idle_fleet.ups(VLLM) == 2)
    assert taken(idle_fleet) == 0
    await idle_fleet.until(lambda: not alive(spare) and not zombies())
    await idle_fleet.spare(but=spare)


async def test_a_gateway_and_a_vllm_that_keep_dying_are_started_again(fleet: Fleet) -> None:
    broken = [fleet.tell("die-gateway-0"), fleet.tell("die-vllm")]
    for part in (VLLM, GATEWAY):
        os.kill(fleet.pid(part), signal.SIGKILL)
    await fleet.until(lambda: len(fleet.downs(VLLM)) > 6)
    broken[1].unlink()
    await fleet.until(lambda: len(fleet.downs(GATEWAY)) > 6)
    broken[0].unlink()
    await fleet.until(lambda: fleet.ups(GATEWAY) == 2)
    assert all(fleet.ups(part) == 1 for part in (UNIT, *ENGINES))


async def test_drain_waits_and_still_restarts_what_requests_need(fleet: Fleet) -> None:
    slow = fleet.tell("slow-gateway")
    fleet.controller.stop()
    await fleet.until(lambda: any(isinstance(event, Draining) for event in fleet.events))
    os.kill(fleet.pid(ENGINES[0]), signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(ENGINES[0]) == 2)
    assert not any(isinstance(event, Stopping) for event in fleet.events)
    slow.unlink()
    assert await fleet.task == EXIT_OK
    assert "stop gateway-0" in fleet.journal()


async def test_a_second_stop_does_not_wait(fleet: Fleet) -> None:
    fleet.tell("slow-gateway")
    fleet.controller.stop()
    await fleet.until(lambda: any(isinstance(event, Draining) for event in fleet.events))
    fleet.controller.stop()
    async with asyncio.timeout(PATIENCE):
        assert await fleet.task == EXIT_FORCED
    journal = fleet.journal()
    assert "stop memory" in journal  # it has shared memory to remove
    assert "stop gateway-0" not in journal
    assert not any(alive(pid) for pid in fleet.pids())


async def test_stop_during_the_start(idle_fleet: Fleet) -> None:
    idle_fleet.start()
    await idle_fleet.until(lambda: bool(idle_fleet.events))
    idle_fleet.controller.stop()
    async with asyncio.timeout(PATIENCE):
        assert await idle_fleet.task == EXIT_OK
    assert not any(alive(pid) for pid in idle_fleet.pids())


HOST = """
import asyncio, sys
from pathlib import Path
from muxserve.cluster.events import Ready, Up
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, fake_unit_spec
run_dir = RunDir(Path(sys.argv[1]))
fleet = Fleet(run_dir, [fake_unit_spec(run_dir.path)])
def emit(event):
    if isinstance(event, (Ready, Up)):
        print(getattr(event, "pid", "ready"), flush=True)
fleet.controller._tell_user = emit
print(run_dir.path, flush=True)
asyncio.run(fleet.controller.run())
"""


async def test_nothing_outlives_a_killed_controller(idle_fleet: Fleet) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(idle_fleet.run_dir.base)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert host.stdout is not None
    run_dir = Path(host.stdout.readline().strip())
    pids = [int(line) for line in iter(host.stdout.readline, "ready\n")]
    assert len(pids) == len(ALL)
    host.kill()
    host.wait()
    try:
        await idle_fleet.until(lambda: not any(alive(pid) for pid in pids))
    except TimeoutError:
        left = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids if alive(pid)]
        pytest.fail(f"still there: {left}; journal: {idle_fleet.journal()}")
    assert "gateway-0 lost its controller" in (run_dir / "journal").read_text()
