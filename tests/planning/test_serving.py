"""A plan file as `muxserve deploy --plan` takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.cluster.plan import plan_fleet
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.planning.planfile import save_plan
from muxserve.planning.serving import with_plan
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("arithmetic", "atlas", "frontdesk")


@pytest.fixture
def fleet() -> Fleet:
    return load_fleet(ROOT / "configs/quickstart.yaml")


def saved(path: Path, device: str = "CPU", units: int = 1, share: float = 0.5) -> Path:
    parts = [MODELS] if units == 1 else [MODELS[:1], MODELS[1:]]
    placed = tuple(
        PlacedUnit(f"unit{i}", device, (i,), tuple(PlacedModel(n, 2.0, share / 2, share) for n in names), 64 << 20)
        for i, names in enumerate(parts)
    )
    save_plan(Placement(Cluster((Node(device, units),)), placed), path)
    return path


def test_pool_rates_and_threads_are_the_plans(fleet: Fleet, tmp_path: Path) -> None:
    planned = with_plan(fleet, saved(tmp_path / "plan.yaml"), cores=8)
    assert planned.kv_pool.size == 64 << 20
    assert {model.name: (model.rate, model.threads) for model in planned.models} == dict.fromkeys(MODELS, (2.0, 4))
    machine = Machine(8, 16 << 30)
    unit = plan_fleet(planned, machine).unit
    assert unit.pool_bytes <= 64 << 20
    assert {model.name: (model.threads, model.share) for model in unit.models} == dict.fromkeys(MODELS, (4, 0.5))


def test_a_share_of_less_than_a_core_is_one_thread(fleet: Fleet, tmp_path: Path) -> None:
    planned = with_plan(fleet, saved(tmp_path / "plan.yaml", share=0.2), cores=2)
    assert {model.threads for model in planned.models} == {1}


@pytest.mark.parametrize(
    ("device", "units", "said"),
    [("A100-80GB", 1, "for A100-80GB; this version serves on CPU"), ("CPU", 2, "2 units; this version serves one")],
)
def test_what_cannot_be_served_is_refused(fleet: Fleet, tmp_path: Path, device: str, units: int, said: str) -> None:
    with pytest.raises(FleetError, match=said):
        with_plan(fleet, saved(tmp_path / "plan.yaml", device, units), cores=2)


def test_a_plan_of_another_fleet_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    file = saved(tmp_path / "plan.yaml")
    file.write_text(file.read_text().replace("atlas", "globe"))
    with pytest.raises(FleetError, match="globe"):
        with_plan(fleet, file, cores=2)
