"""What `muxserve simulate` says of fleets that it does not play as they would be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.cli.simulate_places import places_of
from muxserve.costs.roofline import Roofline
from muxserve.planning.planfile import save_plan
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(("name", "said"), [("rolling", True), ("pipeline", True), ("replicas", False)])
def test_other_arrangements_are_simulated_as_multiplexed(name: str, said: bool) -> None:
    places = places_of(ROOT / f"configs/{name}.yaml", 2, "A100-80GB", None, None, Roofline())
    assert ("multiplexed, also arithmetic;" in places.note) is said


def test_those_of_a_plan(tmp_path: Path) -> None:
    """What the plan says goes before the fleet file, which may leave it open."""
    fleet, plan = tmp_path / "fleet.yaml", tmp_path / "plan.yaml"
    text = (ROOT / "configs/pipeline.yaml").read_text().replace("pipelined", "auto")
    fleet.write_text(text.replace("models/", f"{ROOT}/configs/models/"))
    models = (PlacedModel("arithmetic", 1.0, 1.0, 1.0),)
    unit = PlacedUnit("unit0", "A100-80GB", (0, 1), models, 1 << 30, "pipelined", 2)
    save_plan(Placement(Cluster((Node("A100-80GB", 2),)), (unit,)), plan)
    assert "also arithmetic;" in places_of(fleet, None, None, None, plan, Roofline()).note
    assert places_of(fleet, 2, "A100-80GB", None, None, Roofline()).note == ""
