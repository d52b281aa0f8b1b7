"""Costs corrected by measured steps, against engines whose true costs are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs.calibration import GPU, Launches
from muxserve.costs.correction import Correction, PhaseCorrection, corrected, corrected_profile, predicted_cells
from muxserve.costs.latency import EngineCosts, EngineShape
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import DecodeCell, EngineProfile, Overheads, PrefillCell, Profile, ProfiledModel
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
            seconds = self._seen(self.costs.prefill(count * tokens, pairs, count), 0.0, stall)
            self.prefill.observe(StepSums(1, seconds, count * tokens, pairs, count, 0), 1.0, 0.0)

    def decodes(
        self, reports: int, most: int = 48, beside: float = 0.0, friction: float = 0.0, stall: float = 0.0
    ) -> None:
        for _ in range(reports):
            batch, steps = self.draw.randint(1, most), self.draw.randint(1, 8)
            context = batch * self.draw.randint(16, 1000)
            others = beside * self.draw.random()
            alone = self.costs.decode(batch, context).run(batch, context, steps)
            seconds = self._seen(alone, friction * others, stall)
            middle = steps * context + batch * steps * (steps - 1) // 2
            self.decode.observe(StepSums(steps, seconds, batch * steps, 0, batch * steps, middle), 1.0, others)

    def _seen(self, seconds: float, slower: float, stall: float) -> float:
        slow = 30.0 if self.draw.random() < stall else 1.0
        return seconds * (1.0 + slower) * slow * max(0.3, self.draw.gauss(1.0, self.noise))

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
    engine = corrected(predicted(), *(Correction(each, 0.0, 1.0, 0.0, 1) for each in factors))
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
    # Of long prompts and large batches nothing was seen.
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


def test_neighbours_are_told_apart_from_the_steps_own_costs() -> None:
    true = scaled(predicted(), 1.1)
    served = Served(true)
    served.prompts(50)
    served.decodes(1500, beside=1.0, friction=0.4)
    assert far_off(served.learnt, true) < 0.06
    assert served.decode.correction.beside == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize("longer", [0.0, 0.004])
def test_what_a_device_that_has_rested_takes_longer_is_told_apart_as_well(longer: float) -> None:
    true = scaled(predicted(), 1.1)
    served, draw = Served(true), random.Random(1)
    for _ in range(1500):
        tokens, rested = draw.randint(4, 1024), draw.random()
        pairs = tokens * (tokens + 1) // 2
        seconds = true.prefill(tokens, pairs, 1) * draw.gauss(1.0, 0.05) + longer * rested
        served.prefill.observe(StepSums(1, seconds, tokens, pairs, 1, 0), 1.0, 0.0, None, rested)
    assert far_off(served.learnt, true) < 0.12
    for tokens in (64, 1000):
        pairs = tokens * (tokens + 1) // 2
        assert served.learnt.prefill(tokens, pairs, 1) == pytest.approx(true.prefill(tokens, pairs, 1), rel=0.05)
    assert served.prefill.correction.paused == pytest.approx(longer, abs=0.0008)


def test_what_a_decode_step_takes_longer_after_a_pause_is_told_apart() -> None:
    """Reports of few steps have more pauses for their steps."""
    true = Roofline().engine(SEVEN_B, SHAPE)
    served, draw = Served(true), random.Random(4)
    for _ in range(1500):
        steps, batch = draw.choice((1, 2, 4, 25)), draw.randint(1, 32)
        lost = draw.choice((0.0, 0.3, 1.0))
        seconds = steps * true.decode(batch, batch * 300).seconds(batch * 300) * draw.gauss(1.0, 0.03)
        done = StepSums(steps, seconds + 0.004 * lost, batch * steps, 0, batch * steps, batch * steps * 300, lost)
        served.decode.observe(done, 1.0, 0.0, paused=done.lost)
    assert served.decode.correction.paused == pytest.approx(0.004, rel=0.1)
    assert far_off(served.learnt, true) < 0.05


def test_what_cores_take_longer_after_a_pause_is_an_overhead_of_theirs() -> None:
    known, other = (Correction((1.0,) * 4, 0.0, 1.0, 0.0, steps, paused=2e-3 / steps) for steps in (1, 3))
    on_cpu, of_b = of_a_cpu(0.5), of_a_cpu(1.0)
    predictions = {"a": [on_cpu], "b": [of_b], "c": [predicted()]}
    decode = Correction((1.0,) * 3, 0.0, 1.0, 0.0, 99, paused=1e-3)
    learnt = {"a": {"prefill": known, "decode": decode}, "b": {"prefill": other}, "c": {"prefill": known}}
    ((device, found),) = corrected_profile([(predictions, learnt)]).overheads.items()
    assert device == "CPU"
    assert found.rested == pytest.approx((2e-3 + 2e-3) / 4)
    assert found == Overheads(rested=found.rested, resumed=1e-3)


def of_a_cpu(share: float) -> EngineProfile:
    return msgspec.structs.replace(predicted(), device="CPU", dtype="float32", share=share)


def test_overheads_are_those_of_the_engines_in_the_profile_by_their_steps_lately() -> None:
    def pausing(seconds: float, steps: int, lately: float) -> Mapping[str, Correction]:
        return {"prefill": Correction((1.0,) * 4, 0.0, 1.0, 0.0, steps, paused=seconds, lately=lately)}

    # The second is a replica of the first that did much once.
    units = [(of_a_cpu(0.5), pausing(1e-3, 50, 20.0)), (of_a_cpu(0.5), pausing(9e-3, 5000, 0.5))]
    units.append((of_a_cpu(1.0), pausing(2e-3, 9000, 60.0)))
    overheads = corrected_profile([({"a": [engine]}, {"a": learnt}) for engine, learnt in units]).overheads
    assert overheads["CPU"].rested == pytest.approx((20.0 * 1e-3 + 60.0 * 2e-3) / 80.0)


def test_neighbours_on_a_cpu_are_the_friction_of_an_engines_phases() -> None:
    known = {"prefill": Correction((1.0,) * 4, 0.1, 1.0, 0.0, 10), "decode": Correction((1.0,) * 3, 0.3, 1.0, 0.0, 30)}
    profile = corrected_profile([({"a": [of_a_cpu(0.5)], "b": [predicted()]}, {"a": known, "b": known})])
    frictions = {engine.device: (engine.prefill_friction, engine.decode_friction) for engine in profile.engines}
    assert frictions == {"CPU": (0.1, 0.3), "A100-80GB": (0.0, 0.0)}
    assert not profile.interference


def test_jobs_of_an_engine_have_the_friction_that_was_learnt_of_its_phase() -> None:
    engine = msgspec.structs.replace(of_a_cpu(0.5), prefill_friction=0.1, decode_friction=0.3)
    costs = ProfileModel(Profile(engines=[engine])).engine(engine.shape.architecture("a"), engine.where)
    assert costs.prefill_load(64, 2080, 1).friction == 0.1
    assert costs.decode_load(4, 400).friction == 0.3


def test_what_engines_compute_between_steps_is_an_overhead_of_their_device() -> None:
    slow, quick = (Correction((1.0,) * 3, 0.0, 1.0, 0.0, 10 * n, between=3e-4 / n) for n in (1, 3))
    of_other = msgspec.structs.replace(predicted(), device="H100")
    predictions = {"a": [of_a_cpu(0.5)], "b": [of_a_cpu(1.0)], "c": [predicted()], "d": [of_other]}
    unknown = Correction((1.0,) * 3, 0.0, 1.0, 0.0, 10)
    learnt = {"a": {"decode": slow}, "b": {"decode": quick}, "c": {"decode": quick}, "d": {"decode": unknown}}
    overheads = corrected_profile([(predictions, learnt)]).overheads
    assert {name: each.between for name, each in overheads.items()} == {
        "CPU": pytest.approx((10 * 3e-4 + 30 * 1e-4) / 40),
        "A100-80GB": pytest.approx(1e-4),
    }


@pytest.mark.parametrize(("lately", "counts"), [(0.0, 2.0), (9.0, 3.0)])
def test_of_engines_alike_the_one_with_more_steps_lately_counts(lately: float, counts: float) -> None:
    few, many = (Correction((factor,) * 3, 0.0, factor, 0.0, steps) for factor, steps in ((3.0, 10), (2.0, 500)))
    recent = msgspec.structs.replace(few, lately=lately)
    units = [({"a": [predicted()]}, {"a": {"decode": each}}) for each in (few, many, recent)]
    (engine,) = corrected_profile([*units, ({"c": [predicted()]}, {})]).engines
    assert engine.decode[0].seconds == pytest.approx(counts * predicted().decode[0].seconds, rel=1e-6)


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
        served.decode.observe(StepSums(1, seconds, size, 0, size, context), 1.0, draw.random())
        tokens = size * draw.randint(1, 30)
        served.prefill.observe(StepSums(1, seconds, tokens, tokens * draw.randint(1, 900), size, 0), 1.0, draw.random())
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
        served.prefill.observe(
            StepSums(1, seconds + reading, 552, 512 * 513 // 2, 41, context), 1.0, 0.0, served.decode
        )
    known: Correction = served.prefill.correction
    assert known.factors == pytest.approx([1.0] * 4, rel=0.02)
    assert known.ratio == pytest.approx(1.0, rel=0.02)
