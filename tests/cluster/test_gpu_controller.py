"""The order of things on GPUs, over real processes that only pretend: MPS, weights, sizing, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from muxserve.cluster import gpu_starts
from muxserve.cluster.controller import EXIT_START
from muxserve.cluster.events import Down, PartId, Progress, Starting, Up
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.budget import WAITING, Needs
from muxserve.gpu.unit import GpuMemory
from muxserve.gpu.weight_wire import fetch, say
from muxserve.memory import server
from muxserve.spec import RestingSpec, UnitSpec, load, load_fleet
from tests.cluster.conftest import Fleet, RunDir, alive, gpu_unit_spec, serving
from tests.cluster.test_controller import ENGINES, GATEWAY, MEMORY, UNIT, VLLM, WARM, index

MPS = PartId("mps")
HOLDERS = [PartId("weights", "one"), PartId("weights", "two")]
ALL = [VLLM, MPS, MEMORY, WARM, UNIT, GATEWAY, *HOLDERS, *ENGINES]


async def test_mps_then_weights_then_sizing_then_the_rest(gpu_fleet: Fleet) -> None:
    events = gpu_fleet.events
    assert {event.part for event in events if isinstance(event, Up)} == set(ALL)
    assert index(events, Starting, WARM) > index(events, Up, MPS)
    said = "KV pool of 62.5 MiB on each GPU"
    sized = next(i for i, event in enumerate(events) if isinstance(event, Progress) and said in event.detail)
    for holder in HOLDERS:
        assert index(events, Up, WARM) < index(events, Starting, holder)
        assert index(events, Up, holder) < sized
    for part in (MEMORY, UNIT, GATEWAY, *ENGINES):
        assert index(events, Starting, part) > sized
    for engine in ENGINES:
        assert index(events, Starting, engine) > index(events, Up, MEMORY)

    (asked,) = gpu_fleet.plan.asked
    assert [(needs.model, needs.rank) for needs in asked] == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert {(needs.weights_bytes, needs.measured) for needs in asked} == {(100, True)}
    (entry,) = gpu_fleet.controller.fleet.units
    assert entry.unit_spec.pools[0].num_pages == 1000
    assert gpu_fleet.controller.fleet.models == entry.unit_spec.models
    assert load(gpu_fleet.run_dir.path / "u0" / "unit.json") == entry.unit_spec
    assert load_fleet(gpu_fleet.controller.fleet.file) == gpu_fleet.controller.fleet
    assert "memory has 1000 pages" in gpu_fleet.journal()

    stops = await gpu_fleet.stops()
    assert stops[:2] == ["gateway-0", "unit"]
    assert sorted(stops[6:8]) == ["one-weights", "two-weights"]
    assert stops[8:] == ["warm", "memory", "mps", "vllm"]


async def test_the_engines_of_a_dead_holder_start_after_it(gpu_fleet: Fleet) -> None:
    before = {part: gpu_fleet.pid(part) for part in ALL}
    os.kill(before[HOLDERS[0]], signal.SIGKILL)
    again = [HOLDERS[0], *ENGINES[:2]]
    await gpu_fleet.until(lambda: all(gpu_fleet.ups(part) == 2 for part in again))
    assert all(gpu_fleet.ups(part) == 1 for part in ALL if part not in again)
    ups = [event.part for event in gpu_fleet.events if isinstance(event, Up)][len(ALL) :]
    assert ups[0] == HOLDERS[0]
    reasons = {down.part: down.reason for down in gpu_fleet.downs()}
    assert "SIGKILL" in reasons.pop(HOLDERS[0])
    assert reasons == dict.fromkeys(ENGINES[:2], "ended with the process that held its weights")
    assert "u0 got EngineDown one" in gpu_fleet.journal()
    assert len(gpu_fleet.plan.asked) == 1  # pools stay as they are


async def kept(fleet: Fleet, model: str, rank: int = 0) -> bytes:
    """What engines of a model are given of its weights."""
    path = fleet.controller.fleet.units[0].unit_spec.weights_socket(model, rank)

    def ask() -> bytes:
        _, (fd,) = fetch(path, {"rank": str(rank)}, 0)
        try:
            return os.pread(fd, 100, 0)
        finally:
            os.close(fd)

    return await asyncio.to_thread(ask)


@pytest.fixture
async def keeping_fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    async for each in serving(keeping(run_dir)):
        yield each


async def test_weights_stay_when_who_has_loaded_them_is_gone(keeping_fleet: Fleet) -> None:
    """Nothing but memory is left on the GPUs; no death of anybody takes it along."""
    fleet = keeping_fleet
    assert not any(alive(event.pid) for event in fleet.events if isinstance(event, Up) and event.part in HOLDERS)
    assert [await kept(fleet, "one", rank) for rank in (0, 1)] == [b"one", b"one"]
    for rounds, part in ((2, MPS), (3, WARM)):
        os.kill(fleet.pid(part), signal.SIGKILL)
        await fleet.until(lambda rounds=rounds: all(fleet.ups(each) == rounds for each in ENGINES))
        assert all(fleet.ups(part) == 1 for part in HOLDERS)
        assert await kept(fleet, "two") == b"two"
    assert len(fleet.plan.asked) == 1


def keeping(run_dir: RunDir, *sleeping: str, **more: Any) -> Fleet:
    """On GPUs that can export memory, so that weights outlive who has loaded them; these models sleep at first. `more`
    is of the unit's spec."""
    (run_dir.path / "keep-weights").touch()
    needs = [Needs(model, rank, 700, 10, 0, 0) for model in sleeping for rank in (0, 1)]
    return Fleet(run_dir, [msgspec.structs.replace(gpu_unit_spec(run_dir.path), **more)], sleeping=needs)


@pytest.fixture
async def sleeping_fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    """Memory decides whether the second model is awake."""
    async for each in serving(keeping(run_dir, "two", host_copies=2000)):
        yield each


def gpu_memory(fleet: Fleet) -> GpuMemory:
    memory = fleet.host.gpu_memory()
    assert memory is not None
    return memory


def sources(fleet: Fleet) -> list[str]:
    """What those did that filled in the weights of the second model."""
    return [detail for detail in fleet.details(HOLDERS[1]) if detail in ("loading weights", "copying weights back")]


async def test_a_model_that_sleeps_is_loaded_when_it_is_woken(sleeping_fleet: Fleet) -> None:
    """And nothing of it is left on the GPUs when it sleeps again."""
    fleet = sleeping_fleet
    host = fleet.host
    assert {part.model for part in host.parts if part.model} == {"one"}
    # Pools are made beside what never sleeps; `GpuPlan` adds the largest of the others.
    (asked,) = fleet.plan.asked
    assert {needs.model for needs in asked} == {"one"}
    assert gpu_memory(fleet).models == {"one": 100}

    fleet.plan.busy = 3  # what slept for it is not free at once
    await host.start_model("two")
    assert host.up("two")
    assert fleet.plan.busy == 0
    assert fleet.plan.joining[-1] == ("two", {"one"}, True)
    assert await kept(fleet, "two") == b"two"
    assert gpu_memory(fleet).models == {"one": 100, "two": 100}, "as measured, no longer as estimated"

    await host.stop_model("two")
    assert {part.model for part in host.parts if part.model} == {"one"}
    with pytest.raises(OSError, match="nobody handed weights out"):
        await kept(fleet, "two")
    assert gpu_memory(fleet).models == {"one": 100}

    # Its files are read once, and its needs are known.
    await host.start_model("two")
    assert await kept(fleet, "two", 1) == b"two"
    assert sources(fleet) == ["loading weights", "copying weights back"]
    assert gpu_memory(fleet).models == {"one": 100, "two": 100}
    # A model that never sleeps has no copy.
    path = host.unit_spec.weights_socket("one", 0)
    with pytest.raises(RuntimeError, match="there is no copy of the weights"):
        await asyncio.to_thread(wire.fetch_copy, path)


async def test_weights_that_the_gpu_has_lost_are_copied_back(sleeping_fleet: Fleet) -> None:
    fleet = sleeping_fleet
    await fleet.host.start_model("two")
    path = fleet.host.unit_spec.weights_socket("two", 1)
    await asyncio.to_thread(say, path, wire.WeightsLost("the GPU was reset"))
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in (HOLDERS[1], *ENGINES[2:])))
    assert sources(fleet) == ["loading weights", "copying weights back"]


async def test_a_copy_that_cannot_be_copied_back_is_not_tried_again(sleeping_fleet: Fleet) -> None:
    fleet = sleeping_fleet
    await fleet.host.start_model("two")
    await fleet.host.stop_model("two")
    fleet.tell("fail-restore")
    await fleet.host.start_model("two")
    assert sources(fleet) == ["loading weights", "loading weights"]
    (down,) = fleet.downs(HOLDERS[1])
    assert down.reason.startswith("its weights cannot be copied back: ")


async def test_one_process_copies_the_weights_of_all_models_and_stays(sleeping_fleet: Fleet) -> None:
    fleet = sleeping_fleet
    pids = []
    for _ in range(3):
        await fleet.host.start_model("two")
        pids.append(fleet.pid(HOLDERS[1]))
        await fleet.host.stop_model("two")
    assert pids[0] != pids[1] == pids[2]
    assert alive(pids[2])
    assert [line for line in fleet.journal() if line.startswith("copier: ")] == [
        "copier: pin two",  # when it was loaded
        "copier: restore two",
        "copier: restore two",
    ]
    # Nobody needs it while a model serves.
    await fleet.host.start_model("two")
    os.kill(pids[2], signal.SIGKILL)
    await fleet.until(lambda: not alive(pids[2]))
    await fleet.host.stop_model("two")
    await fleet.host.start_model("two")
    assert fleet.host.up("two")
    assert sources(fleet) == ["loading weights", *["copying weights back"] * 4]
    await fleet.stops()


async def test_a_copy_that_takes_for_ever_is_tried_again(
    sleeping_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = sleeping_fleet
    await fleet.host.start_model("two")
    await fleet.host.stop_model("two")
    monkeypatch.setattr(gpu_starts, "_RESTORE_SECONDS", 3.0)
    fleet.tell("hang-restore")
    waking = asyncio.create_task(fleet.host.start_model("two"))
    await fleet.until(lambda: sources(fleet).count("copying weights back") > 1)
    (fleet.run_dir.path / "hang-restore").unlink()
    await waking
    assert fleet.host.up("two")
    assert sources(fleet).count("loading weights") == 1
    (down,) = fleet.downs(HOLDERS[1])
    assert down.reason == "not ready after 3 s"


async def test_copies_take_no_more_than_they_may(run_dir: RunDir) -> None:
    async for fleet in serving(keeping(run_dir, "two", host_copies=1399)):
        for _ in range(2):
            await fleet.host.start_model("two")
            await fleet.host.stop_model("two")
        # When it has been measured it takes less than was expected.
        assert sources(fleet) == ["loading weights"] * 2
        await fleet.host.start_model("two")
        assert sources(fleet)[-1] == "copying weights back"


# ---------------------------------------------------------------- engines that rest

RESTING = ENGINES[2:]


@pytest.fixture
async def resting_fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    """The engines of the second model stay while it sleeps."""
    async for each in serving(keeping(run_dir, "two", host_copies=2000, resting=RestingSpec(4, 2))):
        await each.host.start_model("two")
        yield each


def rested(fleet: Fleet) -> int:
    return sum(line.endswith(" rests") for line in fleet.journal())


async def test_engines_stay_while_their_model_sleeps(resting_fleet: Fleet) -> None:
    fleet = resting_fleet
    before = [fleet.pid(part) for part in RESTING]
    files = []
    for rounds in (1, 2, 3):
        await fleet.host.stop_model("two")
        assert all(map(alive, before))
        assert rested(fleet) == 2 * rounds
        assert {part.model for part in fleet.host.parts if part.model} == {"one"}
        memory = gpu_memory(fleet)
        assert memory.models == {"one": 100}
        assert memory.resting == ("two",)
        assert memory.copies == {"two": 2 * 3}, "on two ranks"
        # To the unit scheduler they have ended, and it has heard that before they can come back.
        assert fleet.journal().count("u0 got EngineDown two") == 2 * rounds
        with pytest.raises(OSError, match="nobody handed weights out"):
            await kept(fleet, "two")
        await fleet.host.start_model("two")
        assert fleet.host.up("two")
        memory = gpu_memory(fleet)
        assert memory.resting == ()
        assert memory.copies == {"two": 2 * 3}
        assert [fleet.pid(part) for part in RESTING] == before
        assert await kept(fleet, "two") == b"two"
        files.append(len(os.listdir("/proc/self/fd")))
    # Each process is watched by one descriptor. Who handed weights out may close its connection a moment later.
    await fleet.until(lambda: len(os.listdir("/proc/self/fd")) <= files[1])
    assert sources(fleet) == ["loading weights", *["copying weights back"] * 3]
    # One that dies awake is forked anew, and rests as any other.
    os.kill(before[0], signal.SIGKILL)
    await fleet.until(lambda: fleet.ups(RESTING[0]) == 5 and fleet.host.up("two"))
    assert fleet.pid(RESTING[0]) != before[0]
    assert fleet.pid(RESTING[1]) == before[1]
    await fleet.host.stop_model("two")
    assert rested(fleet) == 8
    await fleet.stops()


async def test_what_is_kept_of_a_model_goes_when_it_is_served_no_longer(resting_fleet: Fleet) -> None:
    fleet = resting_fleet
    before = [fleet.pid(part) for part in RESTING]
    await fleet.host.stop_model("two")
    assert all(map(alive, before))
    await fleet.host.forget("two")
    assert not any(map(alive, before))
    memory = gpu_memory(fleet)
    assert (memory.resting, memory.copies) == ((), {})
    await fleet.until(lambda: "forget two" in fleet.journal())
    await fleet.host.start_model("two")
    assert sources(fleet) == ["loading weights"] * 2
    assert [fleet.pid(part) for part in RESTING] != before


async def test_the_engines_of_a_model_rest_together_or_not_at_all(resting_fleet: Fleet) -> None:
    fleet = resting_fleet
    await fleet.host.stop_model("two")
    first, second = (fleet.pid(part) for part in RESTING)
    os.kill(first, signal.SIGKILL)
    await fleet.until(lambda: not alive(second))
    await fleet.host.start_model("two")
    assert fleet.host.up("two")
    assert {fleet.pid(part) for part in RESTING} & {first, second} == set()
    assert sources(fleet)[-1] == "copying weights back"


@pytest.mark.parametrize("part", [WARM, MPS])
async def test_engines_that_rest_end_with_what_they_need(resting_fleet: Fleet, part: PartId) -> None:
    fleet = resting_fleet
    await fleet.host.stop_model("two")
    before = [fleet.pid(each) for each in RESTING]
    os.kill(fleet.pid(part), signal.SIGKILL)
    await fleet.until(lambda: not any(map(alive, before)))
    await fleet.until(lambda: fleet.ups(ENGINES[0]) == 2 and fleet.host.up("one"))
    await fleet.host.start_model("two")
    assert fleet.host.up("two")


async def test_an_engine_that_cannot_come_back_is_forked_anew(resting_fleet: Fleet) -> None:
    fleet = resting_fleet
    await fleet.host.stop_model("two")
    before = [fleet.pid(part) for part in RESTING]
    fleet.tell("fail-wake-two-decode")
    await fleet.host.start_model("two")
    assert fleet.host.up("two")
    assert fleet.pid(RESTING[0]) == before[0]
    assert fleet.pid(RESTING[1]) != before[1]
    (down,) = fleet.downs(RESTING[1])
    assert "the weights are of cheese" in down.reason


async def test_an_engine_that_does_not_rest_ends(resting_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = resting_fleet
    monkeypatch.setattr(gpu_starts, "_REST_SECONDS", 0.5)
    before = [fleet.pid(part) for part in RESTING]
    fleet.tell("restless-two-prefill")
    await fleet.host.stop_model("two")
    assert not any(map(alive, before))
    notes = [event.detail for event in fleet.events if isinstance(event, Progress) and "resting" in event.detail]
    assert notes == ["note: its engines end instead of resting: it takes too long"]
    await fleet.host.start_model("two")
    assert fleet.host.up("two")


async def test_weights_that_are_loaded_anew_are_mapped_by_new_engines(resting_fleet: Fleet) -> None:
    """They may lie elsewhere."""
    fleet = resting_fleet
    await fleet.host.stop_model("two")
    before = [fleet.pid(part) for part in RESTING]
    fleet.tell("fail-restore")
    await fleet.host.start_model("two")
    assert fleet.host.up("two")
    assert sources(fleet) == ["loading weights", "loading weights"]
    assert not any(map(alive, before))


async def test_engines_without_room_end(run_dir: RunDir) -> None:
    async for fleet in serving(keeping(run_dir, "one", "two", host_copies=4000, resting=RestingSpec(7, 2))):
        for model in ("one", "two"):
            await fleet.host.start_model(model)
        before = {part: fleet.pid(part) for part in ENGINES}
        # Each takes 4 of the 7 bytes: who has rested longest gives way.
        await fleet.host.stop_model("one")
        await fleet.host.stop_model("two")
        assert [alive(before[part]) for part in ENGINES] == [False, False, True, True]
        for model in ("one", "two"):
            await fleet.host.start_model(model)
            assert fleet.host.up(model)


async def test_a_model_without_room_stays_asleep(sleeping_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = sleeping_fleet
    fleet.plan.fits[False] = False
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB left"):
        await fleet.host.start_model("two")
    assert len(fleet.plan.joining) == 1, "waiting brings no room"
    monkeypatch.setattr(gpu_starts, "_FREE_SECONDS", 0.0)
    fleet.plan.busy = 100
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB free"):
        await fleet.host.start_model("two")
    assert {part.model for part in fleet.host.parts if part.model} == {"one"}


async def test_weights_that_cannot_be_mapped_any_more_are_loaded_again(keeping_fleet: Fleet) -> None:
    fleet = keeping_fleet
    path = fleet.controller.fleet.units[0].unit_spec.weights_socket("one", 1)
    await asyncio.to_thread(say, path, wire.WeightsLost("the GPU was reset"))
    again = [HOLDERS[0], *ENGINES[:2]]
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in again))
    assert all(fleet.ups(part) == 1 for part in ALL if part not in again)
    reasons = {down.part: down.reason for down in fleet.downs()}
    assert "the weights are lost: the GPU was reset" in reasons.pop(HOLDERS[0])
    assert reasons == dict.fromkeys(ENGINES[:2], "ended with the process that held its weights")
    assert await kept(fleet, "one", 1) == b"one"


async def test_all_that_computes_ends_with_the_mps_server(gpu_fleet: Fleet) -> None:
    """Weights and pool do not: they are kept outside MPS."""
    before = {part: gpu_fleet.pid(part) for part in ALL}
    os.kill(before[MPS], signal.SIGKILL)
    again = [MPS, *ENGINES]
    await gpu_fleet.until(lambda: all(gpu_fleet.ups(part) == 2 for part in again))
    for part in (VLLM, WARM, UNIT, GATEWAY, MEMORY, *HOLDERS):
        assert gpu_fleet.ups(part) == 1
        assert alive(before[part])
    after = gpu_fleet.events[next(i for i, e in enumerate(gpu_fleet.events) if isinstance(e, Down)) :]
    for engine in ENGINES:
        assert index(after, Starting, engine) > index(after, Up, MPS)
    reasons = {event.reason for event in after if isinstance(event, Down) and event.part in ENGINES}
    assert reasons == {"ended with the MPS server"}


@pytest.mark.parametrize("other_gpu_fleet", [{"keepers_in_mps": True}], indirect=True)
async def test_on_a_gpu_that_lets_mps_in_only_memory_ends_with_it(other_gpu_fleet: Fleet) -> None:
    fleet = other_gpu_fleet
    os.kill(fleet.pid(MPS), signal.SIGKILL)
    again = [MPS, MEMORY, *HOLDERS, *ENGINES]
    await fleet.until(lambda: all(fleet.ups(part) == 2 for part in again))
    after = fleet.events[next(i for i, e in enumerate(fleet.events) if isinstance(e, Down)) :]
    for part in [MEMORY, *HOLDERS]:
        assert index(after, Starting, part) > index(after, Up, MPS)
    for engine in ENGINES:
        assert index(after, Starting, engine) > index(after, Up, PartId("weights", engine.model))
        assert index(after, Starting, engine) > index(after, Up, MEMORY)
    assert fleet.journal().count("memory has 1000 pages") == 2


@pytest.mark.parametrize("other_gpu_fleet", [{"restart_mps": True}], indirect=True)
async def test_a_server_that_does_not_outlive_a_killed_client_is_started_again(other_gpu_fleet: Fleet) -> None:
    fleet = other_gpu_fleet
    os.kill(fleet.pid(ENGINES[0]), signal.SIGKILL)
    await fleet.until(lambda: all(fleet.ups(part) >= 2 for part in [MPS, *ENGINES]))
    assert all(fleet.ups(part) == 1 for part in (VLLM, WARM, UNIT, GATEWAY, MEMORY, *HOLDERS))
    reasons = {down.part: down.reason for down in fleet.downs()}
    assert reasons[MPS] == "is started again after the death of an engine"
    assert "ended with the MPS server" in reasons.values()
    # That engines end with it is no reason to start it again.
    assert fleet.ups(MPS) == 2


async def test_an_engine_that_hangs_is_taken_off_the_gpus_before_it_is_killed(
    idle_gpu_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed client has launched may go on otherwise."""
    told: list[tuple[Path, set[int], bool]] = []

    def terminate(directory: Path, pids: set[int]) -> None:
        told.append((directory, pids, all(alive(pid) for pid in pids)))

    monkeypatch.setattr(gpu_starts.mps, "terminate", terminate)
    await idle_gpu_fleet.serving()
    engine, memory = idle_gpu_fleet.pid(ENGINES[0]), idle_gpu_fleet.pid(MEMORY)
    for part in (ENGINES[0], MEMORY):
        idle_gpu_fleet.host.parts[part].kill_hung(60.0)
    await idle_gpu_fleet.until(lambda: idle_gpu_fleet.ups(ENGINES[0]) >= 2 and idle_gpu_fleet.ups(MEMORY) == 2)
    assert (idle_gpu_fleet.controller.fleet.units[0].unit_spec.mps_dir, {engine}, True) in told
    # It is no client.
    assert not any(memory in pids for _, pids, _ in told)


async def test_a_holder_that_waits_for_others_has_all_its_time_left(gpu_fleet: Fleet) -> None:
    """They load one after another; the time limit of each is for its own loading."""
    started = gpu_fleet.host._starts
    limits: list[float | None] = []
    holder = started.parts[HOLDERS[0]]
    holder.limit = cast(asyncio.Timeout, SimpleNamespace(reschedule=limits.append))
    started.on_progress(HOLDERS[0], WAITING)
    assert limits == [None]
    now = asyncio.get_running_loop().time()
    started.on_progress(HOLDERS[0], "loading weights")
    assert limits[1] == pytest.approx(now + holder.timeout, abs=10)


async def test_holders_die_with_the_warm_parent(gpu_fleet: Fleet) -> None:
    os.kill(gpu_fleet.pid(WARM), signal.SIGKILL)
    again = [WARM, *HOLDERS, *ENGINES]
    await gpu_fleet.until(lambda: all(gpu_fleet.ups(part) == 2 for part in again))
    assert gpu_fleet.ups(GATEWAY) == gpu_fleet.ups(MEMORY) == gpu_fleet.ups(MPS) == 1
    assert {down.reason for down in gpu_fleet.downs(*HOLDERS)} == {"ended with the process that it was forked from"}


async def test_gpus_that_are_too_small_end_the_start_in_words(idle_gpu_fleet: Fleet) -> None:
    idle_gpu_fleet.plan.refuse = True
    assert await idle_gpu_fleet.start() == EXIT_START
    assert idle_gpu_fleet.failed.message == "memory manager cannot start: GPU 0 is full; lower max_len"
    assert not any(isinstance(e, Starting) and e.part in (MEMORY, *ENGINES) for e in idle_gpu_fleet.events)
    assert not any(map(alive, idle_gpu_fleet.pids()))


@pytest.mark.parametrize(
    ("file", "part", "words"),
    [
        ("die-mps", MPS, "exited with status 7"),
        ("mute-weights", MEMORY, "did not say what they measured of one on rank 0"),
    ],
)
async def test_a_start_that_fails_ends_everything(idle_gpu_fleet: Fleet, file: str, part: PartId, words: str) -> None:
    idle_gpu_fleet.tell(file)
    assert await idle_gpu_fleet.start() == EXIT_START
    assert idle_gpu_fleet.failed.part == part
    assert words in idle_gpu_fleet.failed.message
    assert not any(map(alive, idle_gpu_fleet.pids()))


async def test_a_model_that_cannot_be_loaded_is_degraded_alone_and_keeps_its_room(idle_gpu_fleet: Fleet) -> None:
    broken = idle_gpu_fleet.tell("fail-two-weights")
    estimated = needs_of("two")
    idle_gpu_fleet.plan.estimated = (*needs_of("one"), *estimated)
    await idle_gpu_fleet.serving()
    (asked,) = idle_gpu_fleet.plan.asked
    assert [needs for needs in asked if needs.model == "two"] == estimated
    # What could be loaded counts as it was measured.
    assert len(asked) == 4
    assert not set(needs_of("one")) & set(asked)
    assert idle_gpu_fleet.host.degraded == {"two": f"{HOLDERS[1]} cannot start: the weights are of cheese"}
    assert idle_gpu_fleet.host.up("one")
    broken.unlink()
    await idle_gpu_fleet.until(lambda: idle_gpu_fleet.host.up("two"))
    assert not idle_gpu_fleet.host.degraded


async def test_what_a_gpu_did_is_told_in_words(gpu_fleet: Fleet) -> None:
    log = gpu_fleet.logs() / "engine-one-decode.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    os.kill(gpu_fleet.pid(ENGINES[1]), signal.SIGKILL)
    await gpu_fleet.until(lambda: gpu_fleet.ups(ENGINES[1]) == 2)
    assert "; the GPU is out of memory: lower cluster.gpu_memory, serve fewer models" in gpu_fleet.downs()[0].reason
    # What an earlier process of that engine said is no reason for the end of this one.
    os.kill(gpu_fleet.pid(ENGINES[1]), signal.SIGKILL)
    await gpu_fleet.until(lambda: gpu_fleet.ups(ENGINES[1]) == 3)
    assert "out of memory" not in gpu_fleet.downs()[1].reason


# ---------------------------------------------------------------- a model joins


async def joining(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> UnitSpec:
    """The unit of a fleet that serves, with a third model; the manager of its memory is not asked."""
    monkeypatch.setattr(server, "add_model", lambda unit_spec, model: None)
    now = fleet.host.unit_spec
    three = msgspec.structs.replace(now.models[0], name="three", path=str(checkpoint))
    return msgspec.structs.replace(now, models=[*now.models, three])


def needs_of(model: str) -> list[Needs]:
    return [Needs(model, rank, 5, 4, 3, 2) for rank in (0, 1)]


async def test_a_model_joins_a_unit_on_gpus(gpu_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = await joining(gpu_fleet, monkeypatch, tmp_path)
    handle = gpu_fleet.controller.units.units["u0"].handle
    await handle.join(wanted, "three", needs_of("three"))
    assert load(gpu_fleet.run_dir.path / "u0" / "unit.json") == wanted
    await handle.start_model("three")
    assert handle.up("three")
    assert handle.entry.serves == ["one", "two", "three"]
    # Before it is taken in, before it is started, and when it has been loaded: once for both engines.
    beside = {"one", "two"}
    assert gpu_fleet.plan.joining == [("three", beside, False), ("three", beside, False), ("three", beside, True)]
    assert all(gpu_fleet.ups(part) == 1 for part in ALL)
    assert len(gpu_fleet.plan.asked) == 1  # pools stay as they are
    engine = PartId("engine", "three", "decode")
    os.kill(gpu_fleet.pid(engine), signal.SIGKILL)
    await gpu_fleet.until(lambda: gpu_fleet.ups(engine) == 2)
    assert len(gpu_fleet.plan.joining) == 3


async def test_a_model_for_which_gpus_have_no_room_changes_nothing(
    gpu_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = await joining(gpu_fleet, monkeypatch, tmp_path)
    before = gpu_fleet.host.unit_spec
    gpu_fleet.plan.fits[False] = False
    handle = gpu_fleet.controller.units.units["u0"].handle
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB left") as caught:
        await handle.join(wanted, "three", needs_of("three"))
    assert caught.value.part == PartId("weights", "three")
    assert gpu_fleet.host.unit_spec == before == load(gpu_fleet.run_dir.path / "u0" / "unit.json")
    gone = msgspec.structs.replace(wanted.models[-1], path=str(tmp_path / "nowhere"))
    with pytest.raises(GaveUp, match="nowhere is no directory on "):
        await handle.join(msgspec.structs.replace(wanted, models=[*before.models, gone]), "three", needs_of("three"))


async def test_a_model_that_measures_more_than_is_left_goes_again(
    gpu_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = await joining(gpu_fleet, monkeypatch, tmp_path)
    gpu_fleet.plan.fits[True] = False
    handle = gpu_fleet.controller.units.units["u0"].handle
    await handle.join(wanted, "three", needs_of("three"))
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB left"):
        await handle.start_model("three")
    assert not [part for part in handle.parts if part.model == "three"]
    assert not any(alive(e.pid) for e in gpu_fleet.events if isinstance(e, Up) and e.part.model == "three")
    assert all(gpu_fleet.ups(part) == 1 for part in ALL)
    assert handle.up("one")
