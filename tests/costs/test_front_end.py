"""The front end's work comes with the jobs that bring it, and slows all that run."""

from __future__ import annotations

import pytest

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.front_end import FrontEnd, FrontEndLearner, FrontEndUse, FrontEndWork, with_front_end
from muxserve.costs.latency import EngineShape, Load
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepCosts, StepWork
from tests.costs.models import SEVEN_B

SHAPE = EngineShape("CPU", 1, 0.5, "float32")


def costs(request: float, token: float, step: float = 0.0, architecture: ModelArchitecture = SEVEN_B):
    return FrontEnd(Roofline(), FrontEndWork(request, token, step)).engine(architecture, SHAPE)


def test_steps_take_as_long_as_without() -> None:
    plain, loaded = Roofline().engine(SEVEN_B, SHAPE), costs(0.01, 0.001)
    assert loaded.decode(4, 400) == plain.decode(4, 400)
    assert loaded.prefill(64, 2080, 1) == plain.prefill(64, 2080, 1)


def test_a_decode_step_brings_the_work_of_its_tokens() -> None:
    plain, loaded = Roofline().engine(SEVEN_B, SHAPE), costs(0.0, 0.001)
    seconds = plain.decode(4, 400).seconds(400)
    before, after = plain.decode_load(4, 400), loaded.decode_load(4, 400)
    assert after.brought == pytest.approx(4 * 0.001 / seconds)
    assert after[:2] == before[:2]


def test_a_prefill_step_brings_the_work_of_its_first_tokens_and_no_requests() -> None:
    plain, loaded = Roofline().engine(SEVEN_B, SHAPE), costs(0.01, 0.001)
    before, after = plain.prefill_load(128, 4160, 2), loaded.prefill_load(128, 4160, 2)
    assert after.brought == pytest.approx(2 * 0.001 / plain.prefill(128, 4160, 2))
    assert after[:2] == before[:2]


def test_a_step_brings_work_of_its_own_however_many_tokens_it_has() -> None:
    plain, loaded = Roofline().engine(SEVEN_B, SHAPE), costs(0.0, 0.0, 0.002)
    for batch in (1, 8):
        seconds = plain.decode(batch, 400).seconds(400)
        assert loaded.decode_load(batch, 400).brought == pytest.approx(0.002 / seconds)
    assert loaded.prefill_load(128, 4160, 2).brought == pytest.approx(0.002 / plain.prefill(128, 4160, 2))


def test_a_mixed_step_brings_work_for_all_tokens() -> None:
    engine = Roofline().engine(SEVEN_B, SHAPE)
    plain, loaded = StepCosts(engine), StepCosts(engine, FrontEndWork(0.01, 0.001, 0.002))
    step = StepWork()
    step.add_prompt(64, 0)
    for context in (100, 120, 140):
        step.add_sequence(context)
    assert loaded.seconds(step) == plain.seconds(step)
    assert loaded.load(step).brought == pytest.approx((0.002 + 4 * 0.001) / plain.seconds(step))
    assert loaded.load(step)[:2] == plain.load(step)[:2]


def test_two_engines_that_leave_no_core_free_are_stretched_by_just_that_work() -> None:
    model = FrontEnd(Roofline(), FrontEndWork(0.0, 0.0))
    # Two engines on half of the cores each, and a tenth of the cores for the front end of each.
    mine = Load(0.0, 0.5, 0.1)
    # What is done for both is 1.2 of the cores.
    assert model.slowdowns("CPU", [mine, mine]) == pytest.approx([1.2, 1.2], abs=0.01)
    assert model.slowdowns("CPU", [Load(0.0, 0.5)] * 2) == pytest.approx([1.0, 1.0], abs=0.01)


def test_who_brings_more_work_is_slowed_no_more_by_it() -> None:
    model = FrontEnd(Roofline(), FrontEndWork(0.0, 0.0))
    busy, quiet = Load(0.0, 0.5, 0.3), Load(0.0, 0.5)
    first, second = model.slowdowns("CPU", [busy, quiet])
    assert first == pytest.approx(second)
    # One engine and its front end have a core each.
    assert model.slowdowns("CPU", [busy]) == [1.0]


def test_nothing_measured_changes_nothing() -> None:
    roofline = Roofline()
    assert with_front_end(roofline, None) is roofline
    assert with_front_end(roofline, Overheads(turn=0.001)) is roofline
    assert isinstance(with_front_end(roofline, Overheads(token_work=1e-4)), FrontEnd)
    assert isinstance(with_front_end(roofline, Overheads(step_work=1e-4)), FrontEnd)


# Core-seconds of some machine.
TRUE = FrontEndWork(request=0.014, token=0.0002, step=0.0005, lease=0.0008)


def interval(requests: int, steps: int, tokens: int, leases: int = 0, more: float = 0.0) -> FrontEndUse:
    busy = 0.1 + requests * TRUE.request + steps * TRUE.step + tokens * TRUE.token + leases * TRUE.lease
    return FrontEndUse(4.0, busy + more, requests, steps, tokens, leases)


def test_nothing_is_known_before_the_first_step() -> None:
    learner = FrontEndLearner()
    # Something else ran meanwhile.
    learner.observe(FrontEndUse(4.0, 3.0, 0, 0, 0))
    assert learner.work is None


def test_the_work_is_learnt_from_intervals_of_different_mixtures() -> None:
    learner = FrontEndLearner()
    for _ in range(40):
        for use in (
            interval(60, 1500, 3000, 100),
            interval(10, 2000, 2000, 10),
            interval(60, 400, 6000, 60),
            interval(60, 1200, 3000, 700),
            interval(0, 0, 0),
        ):
            learner.observe(use)
    work = learner.work
    assert work is not None
    for name in ("request", "step", "token", "lease"):
        assert getattr(work, name) == pytest.approx(getattr(TRUE, name), rel=0.2), name
    whole, true = (60 * each.request + 1500 * each.step + 3000 * each.token + 100 * each.lease for each in (work, TRUE))
    assert whole == pytest.approx(true, rel=0.05)


def test_after_a_few_intervals_of_one_mixture_a_slow_machine_is_slow_in_everything() -> None:
    learner = FrontEndLearner()
    fast = FrontEndLearner()
    for _ in range(5):
        learner.observe(FrontEndUse(4.0, 0.1 + 2.0 * 1.55, 60, 1500, 4500))
        fast.observe(FrontEndUse(4.0, 0.1 + 1.55, 60, 1500, 4500))
    slow_work, fast_work = learner.work, fast.work
    assert slow_work is not None
    assert fast_work is not None
    for name in ("request", "step", "token"):
        assert getattr(slow_work, name) / getattr(fast_work, name) == pytest.approx(2.0, rel=0.35)


def test_one_interval_in_which_something_else_ran_moves_little() -> None:
    learner = FrontEndLearner()
    for _ in range(30):
        learner.observe(interval(60, 1500, 3000))
    before = learner.work
    learner.observe(interval(60, 1500, 3000, more=6.0))
    after = learner.work
    assert before is not None
    assert after is not None
    assert after.seconds(2) + after.request < 1.1 * (before.seconds(2) + before.request)


def test_a_profile_has_it_per_second_of_all_cores() -> None:
    overheads = TRUE.overheads(4)
    assert overheads == Overheads(
        request_work=0.0035, token_work=0.00005, step_work=0.000125, lease_work=pytest.approx(0.0002)
    )


def test_what_the_machine_does_anyway_is_no_work_of_requests() -> None:
    learner = FrontEndLearner()
    # It starts.
    for _ in range(20):
        learner.observe(FrontEndUse(4.0, 8.0, 0, 0, 0))
    for turn in range(40):
        learner.observe(interval(60, 1500, 3000, more=2.0))
        # Half a core; in every fourth interval something else starts, too.
        learner.observe(FrontEndUse(4.0, 2.1 + (0.0 if turn % 4 else 3.0), 0, 0, 0))
    work = learner.work
    assert work is not None
    whole, true = (60 * each.request + 1500 * each.step + 3000 * each.token for each in (work, TRUE))
    assert whole == pytest.approx(true, rel=0.1)


def test_what_the_machine_does_anyway_is_no_work_of_requests_where_a_fleet_is_always_asked() -> None:
    learner = FrontEndLearner()
    for turn in range(60):
        # Never without a step; and in every twelfth interval a client starts.
        learner.observe(interval(20, 300, 600) if turn % 2 else interval(2, 30, 60, more=0.0 if turn % 12 else 1.0))
    work = learner.work
    assert work is not None
    whole, true = (20 * each.request + 300 * each.step + 600 * each.token for each in (work, TRUE))
    assert whole == pytest.approx(true, rel=0.06)
