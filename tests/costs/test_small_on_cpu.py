"""Small models on a CPU: what the roofline says before anything was measured there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import load_profile
from muxserve.costs.roofline import Roofline

PROFILE = Path(__file__).resolve().parents[2] / "benchmarks/results/profile_quickstart_cpu.json"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_steps_are_within_a_factor_of_two_of_those_that_were_measured(phase: str) -> None:
    measured = ProfileModel(load_profile(PROFILE))
    wrong = {(o.engine, o.place) for o in measured.outliers if o.phase == phase}
    errors = []
    for engine in measured.profile.engines:
        costs = Roofline().engine(engine.shape.architecture(engine.model), engine.where)
        for cell in engine.prefill if phase == "prefill" else engine.decode:
            if (str(engine), cell.place) in wrong:
                continue
            if phase == "prefill":
                predicted = costs.prefill(cell.total, cell.pairs, cell.sequences)  # type: ignore[union-attr]
            else:
                batch, context = cell.place
                predicted = costs.decode(batch, batch * context).seconds(batch * context)
            errors.append(math.log(predicted / cell.seconds))
    assert len(errors) > 70
    assert max(map(abs, errors)) < math.log(2.0)
    assert abs(sum(errors) / len(errors)) < math.log(1.2), "neither too fast nor too slow on the whole"
