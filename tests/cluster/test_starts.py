"""What the parts of a unit are, and what a supervisor hears of them, without any process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import msgspec
import pytest

from muxserve.cluster.events import Event, PartId, Progress
from muxserve.cluster.gpu_starts import GpuStarts
from muxserve.cluster.host import UnitHost
from muxserve.cluster.launcher import Commands, Launcher
from muxserve.cluster.processes import Reaper
from muxserve.cluster.starts import MEMORY, MIGRATOR, MPS, UNIT, WARM, CpuStarts
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import GpuPlan, PoolSizer
from muxserve.spec import UnitSpec
from tests.cluster.conftest import FakePlan, fake_unit_spec, gpu_unit_spec
from tests.cluster.effects import FakeUnitEffects

ENGINES = [PartId("engine", model, phase) for model in ("one", "two") for phase in ("prefill", "decode")]
ASLEEP = Needs("two", 0, 1, 1, 1, 1)


def launcher(unit_spec: UnitSpec) -> Launcher:
    return Launcher(unit_spec, Commands(lambda store: [], [], [], []))


def cpu(directory: Path, models: tuple[str, ...] = ("one", "two")) -> tuple[CpuStarts, FakeUnitEffects]:
    unit_spec, effects = fake_unit_spec(directory), FakeUnitEffects()
    return CpuStarts(unit_spec, models, launcher(unit_spec), effects, {}), effects


def gpu(
    unit_spec: UnitSpec, models: tuple[str, ...] = ("one", "two"), sleeping: tuple[Needs, ...] = ()
) -> tuple[GpuStarts, FakeUnitEffects]:
    plan, effects = FakePlan(unit_spec), FakeUnitEffects()
    plan.sleeping = sleeping
    sizer = PoolSizer(cast(GpuPlan, plan), unit_spec, Path(unit_spec.run_dir) / "unit.json")
    return GpuStarts(unit_spec, models, launcher(unit_spec), effects, {}, sizer), effects


async def test_the_parts_of_a_unit_on_a_cpu(tmp_path: Path) -> None:
    starts, _ = cpu(tmp_path)
    assert list(starts.parts) == [MEMORY, WARM, UNIT, *ENGINES]
    assert list(cpu(tmp_path, ("two",))[0].parts) == [MEMORY, WARM, UNIT, *ENGINES[2:]]
    assert not any(part.releases for part in starts.parts.values())


async def test_the_parts_of_a_unit_on_gpus(tmp_path: Path) -> None:
    starts, _ = gpu(unit_spec := gpu_unit_spec(tmp_path))
    one, two = PartId("weights", "one"), PartId("weights", "two")
    parts = [WARM, MEMORY, UNIT, one, *ENGINES[:2], two, *ENGINES[2:]]
    assert list(starts.parts) == [MPS, *parts]
    # The others are no clients of the MPS server.
    assert [part.id for part in starts.parts.values() if part.releases] == ENGINES
    assert starts.migrator().releases
    assert unit_spec.gpu is not None
    alone, _ = gpu(msgspec.structs.replace(unit_spec, gpu=msgspec.structs.replace(unit_spec.gpu, sm_sharing="off")))
    assert list(alone.parts) == parts
    assert not any(part.releases for part in alone.parts.values())


async def test_on_gpus_all_models_start_but_those_that_sleep(tmp_path: Path) -> None:
    """What they need is measured before the pools take the rest."""
    unit_spec = gpu_unit_spec(tmp_path)
    assert gpu(unit_spec, models=("one",))[0].engines == ENGINES
    assert gpu(unit_spec, models=("one",), sleeping=(ASLEEP,))[0].engines == ENGINES[:2]
    assert gpu(unit_spec, sleeping=(ASLEEP,))[0].engines == ENGINES


async def test_who_calls_the_memory_manager_may_have_to_wait_for_it(tmp_path: Path) -> None:
    for starts, _ in (cpu(tmp_path), gpu(gpu_unit_spec(tmp_path))):
        parts = [*starts.parts.values(), starts.migrator()]
        assert {part.id for part in parts if part.waits_for == (MEMORY,)} == {UNIT, MIGRATOR, *ENGINES}
        assert all(part.waits_for in ((), (MEMORY,)) for part in parts)


async def test_what_the_warm_parent_says_reaches_the_unit(tmp_path: Path) -> None:
    for starts, effects in (cpu(tmp_path), gpu(gpu_unit_spec(tmp_path))):
        starts.on_progress(ENGINES[0], "compiling")
        assert effects.events == [Progress(ENGINES[0], "compiling")]


async def test_a_process_that_loads_a_model_is_watched(tmp_path: Path) -> None:
    starts, effects = cpu(tmp_path)
    starts.on_model_parent("one", os.getpid())
    assert effects.model_parents == starts.model_parents
    assert starts.model_parents["one"].pid == os.getpid()


class TestPatience:
    """How `UnitHost` answers a supervisor."""

    @pytest.fixture
    async def host(self, tmp_path: Path) -> UnitHost:
        unit_spec = fake_unit_spec(tmp_path)
        events: list[Event] = []
        return UnitHost(unit_spec, ["one"], launcher(unit_spec), events.append, Reaper(), migrates=True)

    async def test_parts_from_the_beginning_serve_when_the_unit_does(self, host: UnitHost) -> None:
        first = [host.parts[part] for part in (UNIT, MIGRATOR, ENGINES[0])]
        assert not any(map(host.serving, first))
        host.ready.set()
        assert all(map(host.serving, first))

    async def test_a_model_that_comes_later_serves_when_it_has_been_up(self, host: UnitHost) -> None:
        host.ready.set()
        engine = host._starts.parts_of("two")[0]
        assert not host.serving(engine)
        host._served.add("two")
        assert host.serving(engine)

    async def test_a_migrator_that_comes_later_may_come_and_go(self, host: UnitHost) -> None:
        assert host.serving(host._starts.migrator())

    async def test_only_a_unit_that_starts_leaves_a_model_out(self, host: UnitHost) -> None:
        assert not host.spared(host._starts.parts_of("two")[0])
        assert not host.spared(host.parts[UNIT])
        assert host._starts.left_out == set()
        assert host.spared(host.parts[ENGINES[0]])
        assert host._starts.left_out == {"one"}
