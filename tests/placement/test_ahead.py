"""Engines that schedule a step ahead: those that decode on one GPU, in plans as in simulations."""

from __future__ import annotations

import pytest

from muxserve.costs.roofline import Roofline
from muxserve.scheduling.types import Phase
from muxserve.simulator import sim_unit
from placement.cluster import PlacedModel, PlacedUnit, ShapeName
from placement.demand import Demand, Mesh
from placement.engines import Engines
from tests.costs.models import SEVEN_B

GIB = 1 << 30
DEVICE = "H100-80GB"


@pytest.mark.parametrize(("shape", "tp"), [("split", 1), ("one", 1), ("split", 2)])
def test_plans_count_steps_that_are_scheduled_ahead(shape: ShapeName, tp: int) -> None:
    mesh = Mesh(DEVICE, tp)

    def seconds(ahead: bool) -> tuple[float, float]:
        engines = Engines([Demand("m", SEVEN_B, ahead=ahead, shape=shape)], Roofline(), {DEVICE: 80 * GIB})
        decode, prefill = engines.decode(0, mesh, 1.0), engines.prefill(0, mesh, 1.0)
        assert decode is not None
        assert prefill is not None
        return decode.seconds_at(8), prefill.seconds_at(1)

    (decode, prefill), (decode_ahead, prefill_ahead) = seconds(False), seconds(True)
    assert (decode_ahead < decode) == (tp == 1)
    assert (prefill_ahead < prefill) == (tp == 1 and shape == "one")


@pytest.mark.parametrize("tp", [1, 2])
def test_simulated_engines_schedule_ahead_as_planned_ones(tp: int) -> None:
    placed = (PlacedModel("m", 1.0, 0.5, 0.5),)
    unit = sim_unit(PlacedUnit("u", DEVICE, tuple(range(tp)), placed, 8 * GIB), {"m": Demand("m", SEVEN_B, ahead=True)})
    ahead = {phase: unit.shape_of(unit.models[0], 1.0, phase).ahead for phase in Phase}
    assert ahead == {Phase.PREFILL: False, Phase.DECODE: tp == 1, Phase.BOTH: tp == 1}
