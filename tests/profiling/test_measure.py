"""Real engines measured, interrupted, and gone on with; a small grid of one small model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muxserve.cluster.launcher import Launcher
from muxserve.cluster.machine import this_machine
from muxserve.cluster.processes import Process
from muxserve.config import load_fleet
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import EngineShape
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Profile, load_profile
from muxserve.engine.synthetic import Encoder, RequestsWanted
from muxserve.memory import server
from muxserve.planning.specs.unit_plan import resolve_unit
from muxserve.planning.specs.unit_specs import unit_spec_of
from muxserve.profiling import family, measure
from muxserve.profiling.grid import Grid
from muxserve.profiling.jobs import Bodies
from muxserve.profiling.measure import Scope, Session
from muxserve.spec import UnitSpec
from muxserve.spec.run_dir import RunDir
from tests.engine.nursery import nursery

ROOT = Path(__file__).resolve().parents[2]
SMALL = Grid(tokens=(16, 128), sequences=(1, 2), chunk=64, batches=(1, 4), contexts=(64,))
# The second model has the shape of the first: nothing of it is to be measured.
FLEET = f"""\
kv_pool: {{size: 64MiB}}
models:
  - {{name: first, path: {ROOT}/configs/models/arithmetic, dtype: float32}}
  - {{name: second, path: {ROOT}/configs/models/arithmetic, dtype: float32}}
"""


class Run:
    """A session, what it said, and how many cells it counted."""

    def __init__(self, path: Path, run_dir: RunDir, profile: Profile) -> None:
        fleet = path / "fleet.yaml"
        fleet.write_text(FLEET)
        plan = resolve_unit(load_fleet(fleet).as_split(), this_machine())
        self.architecture: ModelArchitecture = plan.architectures[0]
        self.said: list[str] = []
        self.cells = 0
        self.stop_after: int | None = None
        self.task: asyncio.Task[None] | None = None
        self.session = Session(
            unit_spec_of(plan, str(run_dir.path)),
            architectures=plan.architectures,
            scope=Scope([1], SMALL),
            profile=profile,
            path=path / "profile.json",
            progress=self.said.append,
            advanced=self._advanced,
        )

    def _advanced(self, cells: int) -> None:
        self.cells += cells
        if self.stop_after is not None and self.cells >= self.stop_after:
            assert self.task is not None
            self.task.cancel()

    async def run(self) -> None:
        self.task = asyncio.create_task(self.session.run())
        await self.task


class BodiesMadeHere(Bodies):
    """Need no process that imports vLLM: this one has. Those of the first session are made as ever."""

    async def __aenter__(self) -> Bodies:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def _ask(self, wanted: RequestsWanted) -> list[bytes]:
        return Encoder().make(wanted).bodies


class Nursed:
    """Warm parents that need not import vLLM: forked from the tests' process that has."""

    async def until_up(self) -> None:
        nursery()

    async def fork(self, unit_spec: UnitSpec, control_fd: int) -> Process:
        with socket.socket(fileno=os.dup(control_fd)) as control:
            file, log = Path(unit_spec.run_dir) / "unit.json", unit_spec.log_dir / "warm_parent.log"
            return Process(nursery().fork(unit_spec.unit, file, log, control).pid)


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    directory = RunDir()
    yield directory
    directory.remove()


@pytest.mark.thorough
def test_measuring_is_interrupted_and_goes_on(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "Launcher", lambda of, commands: Launcher(of, commands, Nursed()))
    nursery()
    others = _left(run_dir)
    first = Run(tmp_path, run_dir, Profile())
    first.stop_after = 5
    total = first.session.outstanding(1)
    # 16 and 128 tokens of 1 and 2 sequences, a prompt of two chunks, decode with 1 and 4.
    assert total == 4 + 1 + 2
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(first.run())
    assert not list(Path("/dev/shm").glob(f"{server.prefix(first.session.unit_spec)}.*"))
    kept = load_profile(tmp_path / "profile.json")
    (engine,) = kept.engines
    assert (engine.model, engine.share) == ("first", round(1 / first.session.unit_spec.cores, 4))
    assert len(engine.prefill) + len(engine.decode) == 5

    monkeypatch.setattr(measure, "Bodies", BodiesMadeHere)
    second = Run(tmp_path, run_dir, kept)
    assert second.session.outstanding(1) == 2
    asyncio.run(second.run())
    assert second.cells == 2
    assert second.session.outstanding(1) == 0
    profile = load_profile(tmp_path / "profile.json")
    (engine,) = profile.engines
    assert {cell.place for cell in engine.prefill} == {(1, 16, 0), (2, 16, 0), (1, 128, 0), (2, 128, 0), (1, 64, 64)}
    assert {cell.place for cell in engine.decode} == {(1, 64), (4, 64)}
    assert engine.prefill[:5] == kept.engines[0].prefill[:5]

    # A step of this model takes between a tenth of a millisecond and a minute on anything that runs this test.
    times = [cell.seconds for cell in [*engine.prefill, *engine.decode]]
    assert all(1e-4 < seconds < 60.0 for seconds in times)
    costs = ProfileModel(profile).engine(second.architecture, EngineShape("CPU", 1, engine.share, "float32"))
    assert costs.prefill(256, 256 * 64, 2) > 0
    assert costs.decode(2, 128).seconds(128) > 0
    assert set(profile.overheads) == {"CPU"}
    assert profile.overheads["CPU"].turn > 0

    third = Run(tmp_path, run_dir, profile)
    asyncio.run(third.run())
    assert (third.said, third.cells) == ([], 0)
    assert not _left(run_dir) - others


def _left(run_dir: RunDir) -> set[int]:
    """Children of this process that a session has started, or that nobody has collected; programs that run beside the
    tests are children, too."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            begins = ("muxserve", str(run_dir.path))
            ours = any(word.startswith(begins) for word in child.cmdline())
            if ours or child.status() == psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found
