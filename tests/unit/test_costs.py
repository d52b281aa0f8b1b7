"""What a unit learns of the costs of its models' steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from muxserve.costs.correction import PARTS, predicted_cells
from muxserve.costs.latency import EngineShape
from muxserve.costs.profile import EngineProfile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.steps import StepSums
from muxserve.scheduling.types import WHOLE
from muxserve.spec import UnitSpec
from muxserve.unit.costs import LATELY_SECONDS, PIPELINE_STEPS, UnitCosts
from muxserve.unit.costs_file import COSTS_FILE, KEEP_SECONDS, CostsFile
from muxserve.wire import StepReport
from tests.costs.models import SEVEN_B
from tests.unit.support import Bench, model, unit_spec

SHAPE = EngineShape("A100-80GB", 1, 0.5, "float16")
TRUE = Roofline().engine(SEVEN_B, SHAPE)
PREFILL, DECODE = predicted_cells(TRUE, 512, 8, 400)
PREDICTED = EngineProfile("a", ProfiledModel.of(SEVEN_B), SHAPE.device, SHAPE.dtype, 1, SHAPE.share, PREFILL, DECODE)
HALF = 500_000
# When steps do not count any more as those of late.
LONG_AFTER = math.inf


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


def test_what_a_prefill_takes_longer_on_a_device_that_has_rested_is_known() -> None:
    """Before every other one nothing was computed for a second; it then takes 5 ms longer."""
    costs, now = UnitCosts(spec(), 0.0), 0.0
    for turn in range(400):
        rested = turn % 2
        if rested:
            now += 1.0
            costs.passed(0, now)
        costs.began(b"a/prefill")
        done = prompts(64 + turn % 7 * 32)
        done.seconds += 0.005 * rested
        now += 1.0  # the lease lasts, so that nothing of it has rested afterwards
        costs.passed(WHOLE, now)
        costs.reported(b"a/prefill", "a", HALF, report(done.seconds, prefills=done))
    assert costs.state("a", 0.0)["prefill"]["paused"] == pytest.approx(0.005, rel=0.1)


def test_how_the_speed_varies_is_known() -> None:
    """In three seconds out of ten steps take 1.3 times as long."""
    costs, now = UnitCosts(spec(), 0.0), 0.0
    assert costs.pace is None
    while now < 300.0:
        done = decodes(steps=4, factor=1.3 if now % 10.0 < 3.0 else 1.0)
        now += 0.05
        costs.passed(HALF, now)
        costs.reported(b"a/decode", "a", HALF, report(done.seconds, decodes=done))
    assert costs.pace is not None
    assert costs.pace.spread == pytest.approx(math.log(1.3) * math.sqrt(0.3 * 0.7), rel=0.3)
    assert 0.3 <= costs.pace.memory <= 0.9


def test_how_long_it_takes_from_a_lease_to_the_report_of_its_first_steps_is_known() -> None:
    """2 ms, beside steps and what is between them."""
    costs, now = UnitCosts(spec(), 0.0), 0.0

    def leased(done: StepSums, between: float = 0.0, **more: Any) -> None:
        nonlocal now
        costs.passed(0, now)
        costs.began(b"a/decode")
        elapsed = done.seconds + between
        now += elapsed + 0.002
        costs.passed(HALF, now)
        costs.reported(b"a/decode", "a", HALF, report(done.seconds, decodes=done, elapsed=elapsed, **more))

    for _ in range(7):
        leased(decodes(steps=1))
    assert costs.turn is None, "few say nothing"
    leased(decodes(steps=4), between=0.5)
    assert costs.turn == pytest.approx(0.002)
    # Of a lease that goes on nothing is learnt, nor of the steps of a pipeline.
    now += 5.0
    costs.passed(HALF, now)
    costs.reported(b"a/decode", "a", HALF, report(0.01, decodes=decodes(steps=1), elapsed=0.01))
    leased(structs.replace(decodes(steps=1), seconds=0.5), computed=[0.1, 0.1])
    assert costs.turn == pytest.approx(0.002)


def test_steps_of_long_ago_count_less_and_less() -> None:
    costs = UnitCosts(spec(), 0.0)

    def lately(now: float) -> list[object]:
        learnt: Any = costs.state("a", now)
        return [each["lately"] for each in learnt.values()]

    costs.reported(b"a/decode", "a", HALF, report(1.0, decodes=decodes(steps=8), prefills=prompts()))
    assert lately(0.0) == [1.0, 8.0]
    assert lately(LATELY_SECONDS) == pytest.approx([1.0 / math.e, 8.0 / math.e], rel=1e-4)
    costs.passed(0, LATELY_SECONDS)
    costs.reported(b"a/decode", "a", HALF, report(1.0, decodes=decodes(steps=8)))
    assert lately(LATELY_SECONDS) == pytest.approx([1.0 / math.e, 8.0 / math.e + 8.0], rel=1e-4)


def test_what_neighbours_had_meanwhile_is_known() -> None:
    """`b` has half of the device in every other step of `a`, which then takes 1.3 times as long."""
    costs, now = UnitCosts(spec(), 0.0), 0.0
    for turn in range(400):
        busy = turn % 2
        costs.passed(0, now)
        costs.began(b"a/decode")
        done = decodes(steps=1, factor=1.3 if busy else 1.0)
        now += done.seconds
        costs.passed(HALF + busy * HALF, now)
        costs.reported(b"a/decode", "a", HALF, report(done.seconds, decodes=done))
        now += 0.01
    learnt: Any = costs.state("a", 0.0)["decode"]
    assert learnt["beside"] == pytest.approx(0.6, rel=0.2)
    assert sum(learnt["factors"]) / 3 == pytest.approx(1.0, rel=0.1)
    assert learnt["ratio"] == pytest.approx(1.15, rel=0.05)


def test_what_an_engine_computes_between_steps_is_a_mean_of_each_phase() -> None:
    costs = UnitCosts(spec(), 0.0)
    for between in (0.0004, 0.0008):
        costs.reported(b"a/decode", "a", HALF, report(1.0, decodes=decodes(steps=4), between=between))
    learnt = costs.state("a", 0.0)
    assert learnt["decode"]["between"] == pytest.approx(0.00015, rel=0.01)
    # A report of both kinds says what all of them took.
    costs.reported(b"a/decode", "a", HALF, report(1.0, prefills=prompts(), decodes=decodes(steps=4), between=0.00075))
    learnt = costs.state("a", 0.0)
    assert learnt["prefill"]["between"] == pytest.approx(0.00015)
    # Stages compute meanwhile.
    steps = decodes(steps=PIPELINE_STEPS)
    costs.reported(b"a/decode", "a", HALF, report(1.0, decodes=steps, computed=[0.1, 0.1], between=9.0))
    assert costs.state("a", 0.0)["decode"]["steps"] == 12 + PIPELINE_STEPS
    assert costs.state("a", 0.0)["decode"]["between"] == learnt["decode"]["between"]


def test_a_model_that_joins_is_learnt_and_the_others_stay() -> None:
    costs = UnitCosts(spec(), 0.0)
    costs.reported(b"a/decode", "a", HALF, report(1.0, decodes=decodes()))
    costs.join(unit_spec(model("a"), model("c"), costs={"a": [PREDICTED], "c": [PREDICTED]}))
    costs.reported(b"c/decode", "c", HALF, report(1.0, decodes=decodes()))
    assert [costs.state(name, 0.0)["decode"]["steps"] for name in ("a", "c")] == [4, 4]


def told(costs: UnitCosts, count: int = 20, factor: float = 1.5) -> UnitCosts:
    for number in range(count):
        batch = 1 + number % 5
        done = report(1.0, decodes=decodes(batch=batch, factor=factor), between=0.0001 * factor)
        costs.reported(b"a/decode", "a", HALF, done)
        costs.reported(b"a/prefill", "a", HALF, report(1.0, prefills=prompts(16 * batch, factor)))
    return costs


def test_a_unit_scheduler_that_was_killed_goes_on_with_what_it_learnt(tmp_path: Path) -> None:
    file = CostsFile(tmp_path, told(costs := UnitCosts(spec(), 0.0)), 0.0)
    told(costs, 1)
    file.turn(0.0)
    after = UnitCosts(spec(), 0.0)
    CostsFile(tmp_path, after, 0.0)
    assert after.state("a", LONG_AFTER) == costs.state("a", LONG_AFTER)
    assert after.state("a", 0.0)["decode"]["steps"] == 21 * 4
    # And on, as if nothing had been.
    assert told(after, factor=1.1).state("a", LONG_AFTER) == told(costs, factor=1.1).state("a", LONG_AFTER)


def test_what_was_learnt_is_written_now_and_then(tmp_path: Path) -> None:
    file = CostsFile(tmp_path, costs := UnitCosts(spec(), 0.0), 0.0)
    file.turn(0.0)
    assert not list(tmp_path.iterdir())

    def steps() -> Any:
        CostsFile(tmp_path, found := UnitCosts(spec(), 0.0), 0.0)
        return found.state("a", 0.0)["decode"]["steps"]

    for now, kept in ((1.0, 4), (1.0 + KEEP_SECONDS / 2, 4), (1.0 + KEEP_SECONDS, 12)):
        told(costs, 1)
        file.turn(now)
        assert steps() == kept
    told(costs, 1)
    file.write()
    assert steps() == 16


def test_costs_learnt_beside_another_prediction_are_not_taken_over(tmp_path: Path) -> None:
    file = CostsFile(tmp_path, costs := UnitCosts(spec(), 0.0), 0.0)
    told(costs)
    file.write()
    other = structs.replace(PREDICTED, decode=DECODE[:-1])
    after = UnitCosts(unit_spec(model("a"), costs={"a": [other]}), 0.0)
    CostsFile(tmp_path, after, 0.0)
    assert after.state("a", 0.0) == {}


@pytest.mark.parametrize("text", [b"", b"\x81\xa1a\xc0", b"not that"])
def test_a_file_that_cannot_be_read_is_written_anew(tmp_path: Path, text: bytes) -> None:
    (tmp_path / COSTS_FILE).write_bytes(text)
    file = CostsFile(tmp_path, costs := UnitCosts(spec(), 0.0), 0.0)
    assert costs.state("a", 0.0) == {}
    told(costs)
    file.write()
    CostsFile(tmp_path, after := UnitCosts(spec(), 0.0), 0.0)
    assert after.state("a", LONG_AFTER) == costs.state("a", LONG_AFTER)


def test_steps_of_a_pipeline_are_what_its_stages_compute() -> None:
    """Both kinds of steps 1.5 times as long as predicted, two thirds of it in the second stage."""
    costs = UnitCosts(spec(), 0.0)
    for _ in range(4 * PIPELINE_STEPS):
        both = prompts(factor=1.5), decodes(steps=1, factor=1.5)
        seconds = sum(each.seconds for each in both)
        # How long a step took until it returned says nothing.
        told = [StepSums(each.steps, 9.0, each.tokens, each.pairs, each.sequences, each.context) for each in both]
        computed = [seconds / 3, seconds * 2 / 3]
        costs.reported(b"a/both", "a", HALF, report(9.0, prefills=told[0], decodes=told[1], computed=computed))
    learnt: Any = costs.state("a", 0.0)
    assert [learnt[phase]["ratio"] for phase in ("prefill", "decode")] == pytest.approx([1.5, 1.5], rel=0.05)
    assert costs.stages("a") == pytest.approx([2 / 3, 4 / 3])
