"""What a unit learns of the costs of its models' steps."""

from __future__ import annotations

from typing import Any

import pytest

from muxserve.costs.correction import PARTS, predicted_cells
from muxserve.costs.latency import EngineShape
from muxserve.costs.profile import EngineProfile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.steps import StepSums
from muxserve.spec import UnitSpec
from muxserve.unit.costs import PIPELINE_STEPS, UnitCosts
from muxserve.wire import StepReport
from tests.costs.models import SEVEN_B
from tests.unit.support import Bench, model, unit_spec

SHAPE = EngineShape("A100-80GB", 1, 0.5, "float16")
TRUE = Roofline().engine(SEVEN_B, SHAPE)
PREFILL, DECODE = predicted_cells(TRUE, 512, 8, 400)
PREDICTED = EngineProfile("a", ProfiledModel.of(SEVEN_B), SHAPE.device, SHAPE.dtype, 1, SHAPE.share, PREFILL, DECODE)
HALF = 500_000


def spec(**more: Any) -> UnitSpec:
    return unit_spec(model("a"), model("b"), costs={"a": [PREDICTED]}, **more)


def report(seconds: float, **more: Any) -> StepReport:
    return StepReport(1, 0, seconds, 1, 1, 0, **more)


def decodes(steps: int = 4, batch: int = 3, context: int = 900, factor: float = 1.0) -> StepSums:
    seconds = factor * steps * TRUE.decode(batch, context).seconds(context)
    return StepSums(steps, seconds, batch * steps, 0, batch * steps, context * steps)


def prompts(tokens: int = 64, factor: float = 1.0) -> StepSums:
    pairs = tokens * (tokens + 1) // 2
    return StepSums(1, factor * TRUE.prefill(tokens, pairs, 1), tokens, pairs, 1, 0)


def test_reports_of_engines_reach_the_state() -> None:
    bench = Bench(model("a"), model("b"), costs={"a": [PREDICTED]})
    bench.decoding("r")
    assert bench.state()["models"]["a"]["costs"] == {}
    bench.report("a/decode", decodes=decodes(factor=2.0))
    (phase,) = bench.state()["models"]["a"]["costs"].items()
    name, learnt = phase
    assert name == "decode"
    assert (learnt["steps"], len(learnt["factors"])) == (4, len(PARTS["decode"]))
    assert learnt["ratio"] == pytest.approx(2.0, rel=0.1)
    # Nothing was predicted of the other one, nothing reported of prefills.
    assert bench.state()["models"]["b"]["costs"] == {}
    bench.report("a/decode", prefills=prompts(factor=2.0))
    assert set(bench.state()["models"]["a"]["costs"]) == {"prefill", "decode"}


def test_a_model_that_joins_is_learnt_and_the_others_stay() -> None:
    costs = UnitCosts(spec())
    costs.reported("a", HALF, report(1.0, decodes=decodes()))
    costs.join(unit_spec(model("a"), model("c"), costs={"a": [PREDICTED], "c": [PREDICTED]}))
    costs.reported("c", HALF, report(1.0, decodes=decodes()))
    assert [costs.state(name)["decode"]["steps"] for name in ("a", "c")] == [4, 4]


def test_steps_of_a_pipeline_are_what_its_stages_compute() -> None:
    """Both kinds of steps 1.5 times as long as predicted, two thirds of it in the second stage."""
    costs = UnitCosts(spec())
    for _ in range(4 * PIPELINE_STEPS):
        both = prompts(factor=1.5), decodes(steps=1, factor=1.5)
        seconds = sum(each.seconds for each in both)
        # How long a step took until it returned says nothing.
        told = [StepSums(each.steps, 9.0, each.tokens, each.pairs, each.sequences, each.context) for each in both]
        computed = [seconds / 3, seconds * 2 / 3]
        costs.reported("a", HALF, report(9.0, prefills=told[0], decodes=told[1], computed=computed))
    learnt: Any = costs.state("a")
    assert [learnt[phase]["ratio"] for phase in ("prefill", "decode")] == pytest.approx([1.5, 1.5], rel=0.05)
    assert costs.stages("a") == pytest.approx([2 / 3, 4 / 3])
