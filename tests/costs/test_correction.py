"""Costs corrected by measured steps, against engines whose true costs are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs.calibration import GPU, Launches
from muxserve.costs.correction import Correction, PhaseCorrection, corrected, corrected_profile, predicted_cells
from muxserve.costs.latency import EngineCosts, EngineShape
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.steps import StepSums
from tests.costs.models import SEVEN_B

SHAPE = EngineShape("A100-80GB", 1, 1.0, "float16")
MOST_TOKENS, MOST_SEQUENCES, LONGEST = 2048, 64, 2048
# 1.4 times as long launches, 0.8 of the bandwidth: wrong by another factor in each part.
OTHER = Roofline(replace(GPU, bandwidth_efficiency=0.55, launches={"piecewise": Launches(0.9e-3, 0.9e-3)}))


def predicted() -> EngineProfile:
    prefill, decode = predicted_cells(Roofline().engine(SEVEN_B, SHAPE), MOST_TOKENS, MOST_SEQUENCES, LONGEST)
    model = ProfiledModel.of(SEVEN_B)
    return EngineProfile("seven", model, SHAPE.device, SHAPE.dtype, 1, 1.0, prefill, decode)


def scaled(engine: EngineProfile, factor: float) -> EngineCosts:
    """The predicted costs, all so many times as long."""
    found = replace_cells(engine, lambda seconds: seconds * factor)
    return ProfileModel(Profile(engines=[found])).engine(SEVEN_B, SHAPE)


def replace_cells(engine: EngineProfile, to: Callable[[float], float]) -> EngineProfile:
    return EngineProfile(
        engine.model,
        engine.shape,
        engine.device,
        engine.dtype,
        engine.tp,
        engine.share,
        [PrefillCell(*c.place, to(c.seconds)) for c in engine.prefill],
        [DecodeCell(*c.place, to(c.seconds)) for c in engine.decode],
    )


class Served:
    """An engine of true `costs` that serves, and what is learnt of it."""

    def __init__(self, costs: EngineCosts, seed: int = 0, noise: float = 0.05) -> None:
        self.costs, self.noise = costs, noise
        self.draw = random.Random(seed)
        self.prefill = PhaseCorrection("prefill", [predicted()])
        self.decode = PhaseCorrection("decode", [predicted()])

    def prompts(self, steps: int, most: int = 1024, stall: float = 0.0) -> None:
        for _ in range(steps):
            count = self.draw.randint(1, 4)
            tokens = self.draw.randint(4, max(4, most // count))
            pairs = count * tokens * (tokens + 1) // 2
            seconds = self._seen(self.costs.prefill(count * tokens, pairs, count), stall)
            self.prefill.observe(StepSums(1, seconds, count * tokens, pairs, count, 0), 1.0)

    def decodes(self, reports: int, most: int = 48, stall: float = 0.0) -> None:
        for _ in range(reports):
            batch, steps = self.draw.randint(1, most), self.draw.randint(1, 8)
            context = batch * self.draw.randint(16, 1000)
            alone = self.costs.decode(batch, context).run(batch, context, steps)
            seconds = self._seen(alone, stall)
            middle = steps * context + batch * steps * (steps - 1) // 2
            self.decode.observe(StepSums(steps, seconds, batch * steps, 0, batch * steps, middle), 1.0)

    def _seen(self, seconds: float, stall: float) -> float:
        slow = 30.0 if self.draw.random() < stall else 1.0
        return seconds * slow * max(0.3, self.draw.gauss(1.0, self.noise))

    @property
    def learnt(self) -> EngineCosts:
        engine = corrected(predicted(), self.prefill.correction, self.decode.correction)
        return ProfileModel(Profile(engines=[engine])).engine(SEVEN_B, SHAPE)


PREFILLS = [(64, 64 * 65 // 2, 1), (512, 512 * 513 // 2, 1), (800, 4 * 200 * 201 // 2, 4)]
DECODES = [(1, 200), (8, 8 * 300), (48, 48 * 700)]


def far_off(found: EngineCosts, true: EngineCosts) -> float:
    """The largest relative error over steps of different sizes."""
    errors = [abs(found.prefill(*work) / true.prefill(*work) - 1) for work in PREFILLS]
    errors += [abs(found.decode(b, c).seconds(c) / true.decode(b, c).seconds(c) - 1) for b, c in DECODES]
    return max(errors)


@pytest.mark.parametrize("seed", range(3))
def test_it_converges_where_every_part_is_wrong_by_another_factor(seed: int) -> None:
    factors = (1.8, 1.1, 1.4, 1.0), (1.5, 2.0, 0.7)
    engine = corrected(predicted(), *(Correction(each, 1.0, 0.0, 1) for each in factors))
    true = ProfileModel(Profile(engines=[engine])).engine(SEVEN_B, SHAPE)
    served = Served(true, seed)
    before = far_off(served.learnt, true)
    served.prompts(600)
    served.decodes(600)
    assert before > 0.3
    assert far_off(served.learnt, true) < 0.05


def test_an_engine_of_another_kind_is_met_as_well_as_factors_can() -> None:
    true = OTHER.engine(SEVEN_B, SHAPE)
    served = Served(true)
    before = far_off(served.learnt, true)
    served.prompts(600)
    served.decodes(600)
    assert before > 0.25
    assert far_off(served.learnt, true) < 0.12


def test_a_factor_that_all_have_in_common_is_found_from_steps_of_one_size() -> None:
    true = scaled(predicted(), 1.5)
    served = Served(true, noise=0.02)
    for _ in range(20):
        served.decodes(1, most=1)
        served.prompts(1, most=16)
    # No long prompts and no large batches were seen.
    assert far_off(served.learnt, true) < 0.1
    assert served.decode.correction.ratio == pytest.approx(1.5, rel=0.05)


def test_drift_is_followed() -> None:
    served = Served(scaled(predicted(), 1.5))
    served.decodes(2000)
    served.costs = true = scaled(predicted(), 0.8)
    served.decodes(4000)
    served.prompts(100)
    assert far_off(served.learnt, true) < 0.06


def test_stalled_steps_do_not_count_for_what_they_took() -> None:
    true = scaled(predicted(), 1.2)
    served = Served(true)
    served.decodes(1000, stall=0.02)
    served.prompts(1000, stall=0.02)
    assert far_off(served.learnt, true) < 0.1


def test_where_steps_scatter_their_parts_stay_together() -> None:
    """On a machine with other work, from a few steps, a slope would be anything."""
    served = Served(scaled(predicted(), 2.0), noise=0.7)
    served.decodes(100, most=4)
    served.prompts(100, most=64)
    for phase in (served.prefill, served.decode):
        factors = phase.correction.factors
        assert max(factors) < 1.8 * min(factors)
        assert sum(factors) / len(factors) == pytest.approx(2.0, rel=0.35)


def test_of_engines_alike_the_one_with_the_most_steps_counts() -> None:
    few, many = (Correction((factor,) * 3, factor, 0.0, steps) for factor, steps in ((3.0, 10), (2.0, 500)))
    units = [({"a": [predicted()]}, {"a": {"decode": each}}) for each in (few, many, few)]
    (engine,) = corrected_profile([*units, ({"c": [predicted()]}, {})]).engines
    assert engine.decode[0].seconds == pytest.approx(2.0 * predicted().decode[0].seconds, rel=1e-6)


def test_what_was_not_measured_stays_as_predicted() -> None:
    assert corrected(predicted(), None, None) == predicted()
    served = Served(scaled(predicted(), 2.0))
    assert corrected(predicted(), served.prefill.correction, served.decode.correction) == predicted()
    served.decodes(50)
    engine = corrected(predicted(), served.prefill.correction, served.decode.correction)
    assert engine.prefill == predicted().prefill
    assert engine.decode != predicted().decode


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), min_size=1, max_size=60))
def test_costs_are_positive_and_fall_in_no_direction_whatever_is_reported(
    seed: int, reports: list[tuple[int, float]]
) -> None:
    draw = random.Random(seed)
    served = Served(Roofline().engine(SEVEN_B, SHAPE))
    for size, seconds in reports:
        context = size * draw.randint(1, 2000)
        served.decode.observe(StepSums(1, seconds, size, 0, size, context), 1.0)
        tokens = size * draw.randint(1, 30)
        served.prefill.observe(StepSums(1, seconds, tokens, tokens * draw.randint(1, 900), size, 0), 1.0)
    costs = served.learnt
    for tokens, pairs, count in PREFILLS:
        here = costs.prefill(tokens, pairs, count)
        assert here > 0
        assert here <= costs.prefill(tokens + 40, pairs, count) + 1e-12
        assert here <= costs.prefill(tokens, pairs + 5000, count) + 1e-12
        assert here <= costs.prefill(tokens, pairs, count + 1) + 1e-12
    for batch, context in DECODES:
        here = costs.decode(batch, context).seconds(context)
        assert here > 0
        assert here <= costs.decode(batch + 1, context).seconds(context) + 1e-12
        assert here <= costs.decode(batch, context + 900).seconds(context + 900) + 1e-12


def test_sequences_that_decode_among_prompts_are_read_beside_them() -> None:
    served = Served(Roofline().engine(SEVEN_B, SHAPE))
    context = 40 * 1000
    reading = served.decode.reading(context, 1.0)
    alone = StepSums(1, 1.0, 552, 512 * 513 // 2, 41, 0)
    seconds = sum(served.prefill.parts(alone, 1.0))
    for _ in range(200):
        served.prefill.observe(StepSums(1, seconds + reading, 552, 512 * 513 // 2, 41, context), 1.0, served.decode)
    known: Correction = served.prefill.correction
    assert known.factors == pytest.approx([1.0] * 4, rel=0.02)
    assert known.ratio == pytest.approx(1.0, rel=0.02)
