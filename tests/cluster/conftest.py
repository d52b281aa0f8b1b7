from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from muxserve.cluster import fleet_starts, starts, supervision, unit_set
from muxserve.cluster.changes import Changes
from muxserve.cluster.controller import EXIT_OK, Controller
from muxserve.cluster.events import Down, Event, Failed, PartId, Progress, Up
from muxserve.cluster.fleet_starts import FleetCommands, FleetLauncher
from muxserve.cluster.host import UnitHost
from muxserve.cluster.launcher import Commands
from muxserve.cluster.restarts import RestartPolicy
from muxserve.cluster.steps import UnitPlanner
from muxserve.cluster.units import LocalUnits, PlannedUnit
from muxserve.gpu.budget import Budget, BudgetError, Needs, NotFreeError
from muxserve.gpu.unit import GpuMemory, GpuPlan
from muxserve.spec import (
    FleetSpec,
    GatewaySpec,
    GpuSpec,
    PoolSpec,
    UnitEntry,
    UnitSpec,
    load_fleet,
)
from muxserve.spec.run_dir import RunDir
from placement import ModelPlan, PoolPlan, TablePlan, UnitPlan
from tests.cluster import fakes
from tests.support.patience import PATIENCE
from tests.support.unit_specs import model_spec, unit_spec_of

ROOT = Path(__file__).resolve().parents[2]


def fake_unit_spec(
    run_dir: Path,
    unit: str = "u0",
    names: Sequence[str] = ("one", "two"),
    rolling: bool = False,
) -> UnitSpec:
    """A unit's, in its directory below the fleet's."""
    models = [
        model_spec(
            name, pool="pool0", num_blocks=10, quota_pages=20, floor_pages=4, max_len=64, max_num_seqs=8,
            max_num_batched_tokens=64, max_concurrency=8, max_queue=8,
            shape="one" if rolling else "split", rolling=rolling,
        )
        for name in names
    ]  # fmt: skip
    policy = "rolling" if rolling else "adbs"
    return unit_spec_of(run_dir / unit, models, PoolSpec("pool0", 65536, 41), unit=unit, policy=policy)


def gpu_unit_spec(run_dir: Path) -> UnitSpec:
    """Two models over two GPUs under MPS."""
    return msgspec.structs.replace(fake_unit_spec(run_dir), ranks=2, gpu=GpuSpec(["GPU-a", "GPU-b"]))


class FakePlan:
    """A `GpuPlan` that takes what was measured, and makes pools of 1000 pages of it; or says that there is no room."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self.unit_spec = unit_spec
        self.asked: list[list[Needs]] = []
        self.refuse = False
        # Models that came later: which, beside which, and whether they had been loaded; and whether they fit then.
        self.joining: list[tuple[str, set[str], bool]] = []
        self.fits = {False: True, True: True}
        # How often the driver still holds memory of a process that has just ended.
        self.busy = 0
        # Bytes that sleeping models are estimated to need.
        self.sleeping: tuple[Needs, ...] = ()
        # Before anything is measured.
        self.estimated: tuple[Needs, ...] = ()

    def pools(self, needs: Sequence[Needs]) -> tuple[UnitPlan, list[Budget]]:
        self.asked.append(list(needs))
        if self.refuse:
            raise BudgetError("GPU 0 is full; lower max_len")
        # It is less than was planned: sequences are shorter.
        models = tuple(
            ModelPlan(
                m.name,
                pool=m.pool,
                table=TablePlan(m.block_tokens, m.num_blocks),
                quota_pages=m.quota_pages,
                floor_pages=m.floor_pages,
                max_len=m.max_len // 2,
                threads=m.threads,
                share=m.prefill_share,
            )
            for m in self.unit_spec.models
        )
        pools = (PoolPlan("pool0", "float32", 65536, 1000, tuple(m.name for m in models)),)
        return UnitPlan(2, pools, models, ()), [Budget("GPU 0", 1 << 30, (), 1000 * 65536, tables=4)]

    def resting(self, needs: Sequence[Needs]) -> int:
        return max(each.context_bytes + each.graph_bytes for each in needs)

    def used(self, present: Sequence[Needs], pools: object) -> GpuMemory:
        return GpuMemory(1000, {each.model: each.weights_bytes for each in present})

    def check_room(
        self, served: Sequence[Needs], joining: Sequence[Needs], pools: object, found: object, loaded: bool
    ) -> None:
        self.joining.append((joining[0].model, {each.model for each in served}, loaded))
        if self.busy:
            self.busy -= 1
            raise NotFreeError("GPU 0 has 1 GiB free")
        if not self.fits[loaded]:
            raise BudgetError("GPU 0 has 1 GiB left")


def fake(*args: object) -> list[str]:
    # What needs no package is spared the search for packages.
    alone = args[0] in ("mps", "memory", "migrator")
    return [sys.executable, *(["-I", "-S"] if alone else []), str(fakes.SELF), *map(str, args)]


def fake_commands(unit_spec: UnitSpec, file: Path) -> Commands:
    return Commands(
        memory_manager=lambda store: fake("memory", file),
        unit_scheduler=fake("unit", file),
        migrator=fake("migrator", file),
        warm_parent=fake("warm", file),
        mps=fake("mps", file),
        environment={"FAKE_ENVIRONMENT": "1"},
    )


def fake_fleet_commands(fleet: FleetSpec) -> FleetCommands:
    return FleetCommands(
        vllm=fake("vllm", fleet.file),
        scheduler=fake("scheduler", fleet.file),
    )


def fake_fleet(unit_specs: Sequence[UnitSpec], run_dir: Path, **more: Any) -> FleetSpec:
    """The fleet of those units."""
    models = {model.name: model for unit_spec in unit_specs for model in unit_spec.models}
    entries = [
        UnitEntry(each, each.unit_address, each.migrator_address, [model.name for model in each.models])
        for each in unit_specs
    ]
    gateway = GatewaySpec("127.0.0.1", 0, drain_seconds=5.0)
    return FleetSpec(str(run_dir), gateway, list(models.values()), entries, **more)


class Fleet:
    """A controller over fake processes, and what it said."""

    def __init__(
        self,
        run_dir: RunDir,
        unit_specs: Sequence[UnitSpec],
        planner: UnitPlanner | None = None,
        gateways: int = 1,
        sleeping: Sequence[Needs] = (),
        **more: Any,
    ) -> None:
        self.run_dir = run_dir
        self.unit_spec = unit_specs[0]
        self.plan = FakePlan(self.unit_spec)
        self.plan.sleeping = tuple(sleeping)
        asleep = {needs.model for needs in sleeping}
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        fleet = fake_fleet(unit_specs, run_dir.path, **more)
        fleet = msgspec.structs.replace(fleet, gateway=msgspec.structs.replace(fleet.gateway, count=gateways))
        gpu = cast(GpuPlan, self.plan)
        self.planned = [
            PlannedUnit(each, tuple(m.name for m in each.models if m.name not in asleep), gpu if each.gpu else None)
            for each in unit_specs
        ]
        launcher = FleetLauncher(fake_fleet_commands(fleet), fleet.log_dir)
        self.controller = Controller(
            fleet,
            self.planned,
            launcher,
            lambda warm, left: LocalUnits(fake_commands, warm, left),
            self._emit,
            planner,
        )
        self.task: asyncio.Task[int] | None = None

    @property
    def host(self) -> UnitHost:
        """That of the first unit."""
        handle = next(iter(self.controller.units.units.values())).handle
        assert isinstance(handle, UnitHost)
        return handle

    @property
    def changes(self) -> Changes:
        return self.controller.changes

    @property
    def serves(self) -> dict[str, list[str]]:
        """What the fleet's file says."""
        return {unit.name: unit.serves for unit in load_fleet(self.controller.fleet.file).units}

    def logs(self, unit: str = "u0") -> Path:
        return self.run_dir.path / unit / "logs"

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.changed.set()

    def start(self) -> asyncio.Task[int]:
        self.task = asyncio.create_task(self.controller.run())
        return self.task

    async def serving(self) -> None:
        self.start()
        await self.until(self.controller.ready.is_set)

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                assert self.task is None or not self.task.done(), f"the controller has ended: {self.events[-3:]}"
                self.changed.clear()
                waiter = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait([waiter], timeout=0.05)  # files of fakes change without an event of ours
                waiter.cancel()

    def pid(self, part: PartId) -> int:
        return [event.pid for event in self.events if isinstance(event, Up) and event.part == part][-1]

    async def spare(self, but: int = 0) -> int:
        """The pid of what is forked to take the place of what imported vLLM, when there is one other than `but`."""

        def pid() -> int:
            spare = self.controller._starts._spare
            return 0 if spare is None else spare[1].pid

        await self.until(lambda: pid() not in (0, but))
        return pid()

    async def down(self, part: PartId) -> Down:
        """The first death of a part."""
        await self.until(lambda: bool(self.downs(part)))
        return self.downs(part)[0]

    def ups(self, part: PartId) -> int:
        return sum(isinstance(event, Up) and event.part == part for event in self.events)

    def downs(self, *parts: PartId) -> list[Down]:
        """The deaths of these parts, or of all."""
        return [event for event in self.events if isinstance(event, Down) and (not parts or event.part in parts)]

    def details(self, part: PartId) -> list[str]:
        """The part's progress."""
        return [event.detail for event in self.events if isinstance(event, Progress) and event.part == part]

    @property
    def failed(self) -> Failed:
        """Why the start failed, or the fleet ended."""
        return next(event for event in self.events if isinstance(event, Failed))

    async def stops(self) -> list[str]:
        """End it as its user does, with every process; the names of those that were asked to stop, in order."""
        self.controller.stop()
        assert self.task is not None
        assert await self.task == EXIT_OK
        assert not any(map(alive, self.pids()))
        return [line.removeprefix("stop ") for line in self.journal() if line.startswith("stop ")]

    def pids(self) -> list[int]:
        return [event.pid for event in self.events if isinstance(event, Up)]

    def tell(self, name: str, text: str = "") -> Path:
        file = self.run_dir.path / name
        # Whoever looks for it finds all of it.
        (whole := file.with_name(f"{file.name}.new")).write_text(text)
        return whole.replace(file)

    def journal(self) -> list[str]:
        file = self.run_dir.path / "journal"
        return file.read_text().splitlines() if file.exists() else []


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    before = {child.pid for child in psutil.Process().children()}
    yield fleet
    if fleet.task is not None and not fleet.task.done():
        fleet.controller.stop()
        fleet.controller.stop()
        await asyncio.wait([fleet.task])
    await _nothing_left(before)
    fleet.run_dir.remove()


async def serving(fleet: Fleet) -> AsyncIterator[Fleet]:
    """The same of one that serves by now."""
    async for each in running(fleet):
        await each.serving()
        yield each


async def _nothing_left(before: set[int]) -> None:
    """A controller that could not start ends at once, and its process with it; what was being forked meanwhile ends
    without it, and comes to this process, which goes on."""
    deadline = time.monotonic() + PATIENCE
    while left := [child for child in psutil.Process().children() if child.pid not in before]:
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        assert time.monotonic() < deadline, f"not ended: {[(child, child.cmdline()) for child in left]}"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is started again at once."""

    def policy(
        max_deaths: int | None = 5, window: float = 60.0, delays: object = (), start_delays: object = ()
    ) -> RestartPolicy:
        return RestartPolicy(max_deaths, window, (0.01,), (0.01,))

    for module in (supervision, starts, fleet_starts, unit_set):
        monkeypatch.setattr(module, "RestartPolicy", policy)


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir(tmp_path_factory.mktemp("run"))


@pytest.fixture
async def idle_fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    """Not started yet."""
    async for each in running(Fleet(run_dir, [fake_unit_spec(run_dir.path)])):
        yield each


@pytest.fixture
async def fleet(idle_fleet: Fleet) -> Fleet:
    await idle_fleet.serving()
    return idle_fleet


@pytest.fixture
async def other_gpu_fleet(run_dir: RunDir, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """On GPUs that have to be treated otherwise: the parameter is what of their spec differs."""
    of = gpu_unit_spec(run_dir.path)
    assert of.gpu is not None
    of = msgspec.structs.replace(of, gpu=msgspec.structs.replace(of.gpu, **request.param))
    async for each in serving(Fleet(run_dir, [of])):
        yield each


@pytest.fixture
async def idle_gpu_fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    """Not started yet."""
    async for each in running(Fleet(run_dir, [gpu_unit_spec(run_dir.path)])):
        yield each


@pytest.fixture
async def gpu_fleet(idle_gpu_fleet: Fleet) -> Fleet:
    await idle_gpu_fleet.serving()
    return idle_gpu_fleet
