"""Layouts of models that have devices to themselves: which are possible, which one is taken, and what it serves."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from muxserve.costs.latency import EngineShape
from muxserve.costs.measured import ProfileModel, overheads_on
from muxserve.costs.profile import DecodeCell, EngineProfile, Overheads, PrefillCell, Profile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepWork
from muxserve.planning.candidates.dedicated_units import best_place, places_of
from muxserve.planning.candidates.layouts import (
    LayoutRequest,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    replica_unit,
)
from muxserve.planning.candidates.one_engine import OneEngine
from muxserve.simulator import Link, Options, Pipeline, simulate
from muxserve.simulator.result import FleetResult
from muxserve.simulator.stages import make_stages
from muxserve.workload.trace import TraceRequest
from placement.demand import Member
from tests.planning.phases_support import TINY, WIDE, cores, gpus, tiny, wanted, with_demand

COSTS = Roofline()
# Models of one engine, over several stages and with rolling prefill.
STAGES, ROLLING = {"least_stages": 2}, {"rolling": True}


def largest(layouts: Iterator[ReplicaLayout]) -> list[ReplicaLayout]:
    """Those that leave the fewest devices idle."""
    found = list(layouts)
    return [layout for layout in found if layout.devices == max(each.devices for each in found)]


class TestLayouts:
    def test_all_devices_are_divided_among_replicas_stages_and_tensors(self) -> None:
        pool = gpus(8)
        for kind in (STAGES, ROLLING):
            for layout in largest(pool.layouts(wanted(**kind))):
                assert layout.replicas * layout.stages * layout.tp == 8
                assert (layout.stages > 1) == (kind == STAGES)
                assert layout.replicas > 1 or kind != ROLLING
        pipelined = largest(pool.layouts(wanted(**STAGES)))
        assert {(each.replicas, each.stages, each.tp) for each in pipelined} == {
            (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 2, 4),
        }  # fmt: skip

    def test_what_the_file_fixes_stays(self) -> None:
        given = replace(wanted(), replicas=2, stages=2)
        pool = gpus(8)
        assert largest(pool.layouts(given)) == [ReplicaLayout(2, 2, 2)]
        assert largest(pool.layouts(replace(given, stages=None, rolling=True))) == [ReplicaLayout(2, 1, 4, True)]

    def test_tensors_are_not_split_between_machines(self) -> None:
        layouts = largest(gpus(4, 4).layouts(wanted(rolling=True)))
        assert max(layout.tp for layout in layouts) == 4

    def test_no_stage_of_a_replica_is_on_another_machine(self) -> None:
        layouts = largest(gpus(4, 2).layouts(wanted(**STAGES)))
        assert {(each.replicas, each.stages, each.tp) for each in layouts} == {(3, 2, 1)}
        with pytest.raises(NoPlaceError, match=r"machines \(a replica is on one\) cannot be divided into 4 or more"):
            list(gpus(2, 2).layouts(wanted(least_stages=4)))

    def test_three_devices_are_no_tensor_parallel_group_but_a_pipeline(self) -> None:
        pool, given = gpus(3), wanted(replicas=1, **STAGES)
        assert largest(pool.layouts(given)) == [ReplicaLayout(1, 3, 1)]
        # 64 heads: a group of two of the three at most, and one is left idle.
        assert largest(pool.layouts(wanted(replicas=2, rolling=True))) == [ReplicaLayout(2, 1, 1, True)]

    @pytest.mark.parametrize(
        ("kind", "nodes", "more", "words"),
        [
            (ROLLING, (1,), {}, "prefill rolls over replicas, and there is one GPU"),
            (ROLLING, (4,), {"replicas": 1}, "the fleet file has one; give `replicas: 2` or more"),
            (STAGES, (1,), {}, "needs as many GPUs, and there is one"),
            (STAGES, (8,), {"stages": 3, "replicas": 3}, "cannot be divided into 3 replicas of 3 or more stages"),
            (STAGES, (16,), {"stages": 16}, "14 layers cannot be spread over 16 stages"),
        ],
    )
    def test_why_there_is_none(self, kind: dict, nodes: tuple[int, ...], more: dict, words: str) -> None:
        with pytest.raises(NoPlaceError, match=words):
            list(gpus(*nodes).layouts(wanted(**kind, **more)))


class TestPlaces:
    def test_what_the_model_leaves_of_a_device_is_its_kv_cache(self) -> None:
        rolling = gpus(2).place(wanted(), ReplicaLayout(2, 1, 1, True))
        assert rolling.own_bytes + rolling.kv_bytes <= gpus(2).memory
        assert rolling.blocks[0] * rolling.block_tokens * WIDE.kv_bytes_per_token("bfloat16") <= rolling.kv_bytes

    def test_a_stage_holds_its_layers_of_the_weights_and_of_the_kv(self) -> None:
        pool = gpus(2)
        one = pool.place(wanted(), ReplicaLayout(2, 1, 1, True))
        two = pool.place(wanted(), ReplicaLayout(1, 2, 1))
        # Half of the weights are gone and each token takes half as much: more than twice as many tokens.
        assert min(two.blocks) > 2 * one.blocks[0]
        assert two.own_bytes + two.kv_bytes <= pool.memory

    def test_too_little_memory_is_told_with_numbers(self) -> None:
        with pytest.raises(NoPlaceError, match=r"weights, activations and processes take .* on each of 1 L20-48GB"):
            gpus(2, memory=12e9).place(wanted(), ReplicaLayout(2, 1, 1, True))

    def test_engines_on_cpu_divide_the_cores(self) -> None:
        pool = cores(4)
        pipeline = pool.place(replace(tiny(), replicas=2), ReplicaLayout(2, 2, 1))
        assert pipeline.shape.share == pytest.approx(0.25)
        assert len(pipeline.blocks) == 2
        rolling = pool.place(replace(tiny(), replicas=2), ReplicaLayout(2, 1, 1, True))
        assert rolling.shape.share == pytest.approx(0.5)

    def test_memory_of_a_cpu(self) -> None:
        with pytest.raises(NoPlaceError, match="16 replicas need"):
            cores(memory=8 << 30).place(replace(tiny(), replicas=16), ReplicaLayout(16, 1, 1, True))


def played(asked: LayoutRequest, place: SimulatedLayout, rate: float, count: int = 600) -> FleetResult:
    """One replica of a place that gets `rate` requests per second of the mean lengths."""
    draw, at, requests = random.Random(1), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        requests.append(TraceRequest(at, asked.demand.name, asked.demand.prompt_tokens, asked.demand.output_tokens))
    unit = replica_unit(asked, place, "unit", tuple(range(place.layout.stages)))
    return simulate([unit], requests, COSTS, Options(sample_seconds=0.0))


class TestRule:
    def test_the_layout_that_serves_most_and_of_equal_ones_the_one_of_fewest_devices(self) -> None:
        place, engine = best_place(wanted(rolling=True), gpus(8), COSTS)
        rates = {
            each.layout: each.layout.replicas * OneEngine.of(wanted(), each, COSTS).within_objectives
            for each in places_of(wanted(rolling=True), gpus(8))
        }
        assert set(rates) == {ReplicaLayout(8 // tp, 1, tp, True) for tp in (1, 2, 4)}
        assert place.layout.replicas * engine.within_objectives >= 0.95 * max(rates.values())
        smaller = [rate for layout, rate in rates.items() if layout.tp < place.layout.tp]
        assert all(rate < 0.95 * max(rates.values()) for rate in smaller)

    def test_an_objective_that_one_device_misses_takes_more_of_them(self) -> None:
        step = OneEngine.of(wanted(), gpus(2).place(wanted(), ReplicaLayout(2, 1, 1, True)), COSTS)
        tight = wanted(rolling=True, tpot=0.7 * (step.estimate(Member(0, 1), 0.01, 1.0, 0).level.tpot or 0.0))
        assert best_place(tight, gpus(8), COSTS)[0].layout.tp > 1

    def test_weights_that_need_all_devices_leave_nothing_to_roll_over(self) -> None:
        with pytest.raises(NoPlaceError, match="may be used"):
            best_place(wanted(rolling=True), gpus(2, memory=20e9), COSTS)
        assert best_place(wanted(**STAGES), gpus(2, memory=20e9), COSTS)[0].layout.stages == 2

    def test_without_objectives_prefill_cannot_roll(self) -> None:
        with pytest.raises(NoPlaceError, match=r"needs slo\.ttft_ms and slo\.tpot_ms"):
            best_place(wanted(ttft=None, rolling=True), gpus(2), COSTS)

    @pytest.mark.parametrize("kind", [ROLLING, STAGES])
    def test_an_engine_serves_about_what_is_estimated(self, kind: dict) -> None:
        asked = with_demand(wanted(**kind), max_num_seqs=16)
        (place,) = [each for each in places_of(asked, gpus(2)) if each.layout.tp == 1]
        engine = OneEngine.of(asked, place, COSTS)
        assert engine.most == 16
        # Half of what it can: times are as estimated.
        half = engine.capacity / 2
        told, times = engine.estimate(Member(0, 1), half, 1.0, 0), played(asked, place, half).requests
        tpots = [(r.finish - r.first_token) / (r.made - 1) for r in times if r.finish and r.first_token]
        assert told.level.tpot == pytest.approx(sum(tpots) / len(tpots), rel=0.25)
        assert told.throughput == half
        # More than it can: it is the capacity that comes out.
        ends = [r.finish for r in played(asked, place, 3 * engine.capacity).requests if r.finish]
        assert len(ends) / max(ends) == pytest.approx(engine.capacity, rel=0.25)
        assert engine.estimate(Member(0, 1), 3 * engine.capacity, 1.0, 0).throughput == engine.capacity

    def test_objectives_that_cannot_be_met_leave_no_rate(self) -> None:
        for asked in (wanted(tpot=1e-5, **STAGES), wanted(ttft=1e-5, **STAGES)):
            (place, *_) = places_of(asked, gpus(2))
            engine = OneEngine.of(asked, place, COSTS)
            assert engine.within_objectives == 0.0
            assert engine.estimate(Member(0, 1), 1.0, 1.0, 0).level.attainment == 0.0
            assert engine.limit == "slo"

    def test_an_answer_of_one_token_has_no_steps(self) -> None:
        asked = with_demand(wanted(**STAGES), output_tokens=1)
        (place, *_) = places_of(asked, gpus(2))
        told = OneEngine.of(asked, place, COSTS).estimate(Member(0, 1), 1.0, 1.0, 0)
        assert (told.level.tpot, told.batch) == (None, 0.0)


class TestMeasuredCosts:
    """A profile has whole models, and stages are parts of them."""

    SHAPE = EngineShape("CPU", 1, 0.5, "float32")

    def profile(self, between: float = 0.0) -> ProfileModel:
        whole, engines = COSTS.engine(TINY, self.SHAPE), []
        measured = EngineProfile("tiny", ProfiledModel.of(TINY), "CPU", "float32", 1, 0.5)
        for tokens in (16, 64, 256):
            measured.prefill.append(PrefillCell(1, tokens, 0, 2 * whole.prefill(tokens, tokens * tokens // 2, 1)))
        for batch in (1, 8, 32):
            for context in (32, 256):
                seconds = whole.decode(batch, batch * context).seconds(batch * context)
                measured.decode.append(DecodeCell(batch, context, 2 * seconds))
        engines.append(measured)
        return ProfileModel(Profile(engines=engines, overheads={"CPU": Overheads(between=between)}), beyond=Roofline())

    def test_a_stage_takes_its_part_of_what_was_measured(self) -> None:
        latency = self.profile()
        whole = latency.engine(TINY, self.SHAPE)
        prompt, answer = StepWork(prefill=64, prompts=1, pairs=2080), StepWork(decode=8, context=800)
        two = Pipeline((2, 2), (Link(),))
        for stage in make_stages(two, latency, TINY, self.SHAPE):
            assert stage.seconds(prompt) == pytest.approx(whole.prefill(64, 2080, 1) / 2)
            assert stage.seconds(answer) == pytest.approx(whole.decode(8, 800).seconds(800) / 2)
        # One stage is the whole, and what was not measured comes from the roofline, which knows parts.
        (stage,) = make_stages(Pipeline((4,), ()), latency, TINY, self.SHAPE)
        assert stage.seconds(prompt) == whole.prefill(64, 2080, 1)
        other = replace(TINY, hidden=512)
        measured, costs = (make_stages(two, each, other, self.SHAPE) for each in (latency, COSTS))
        assert [each.seconds(prompt) for each in measured] == [each.seconds(prompt) for each in costs]

    @pytest.mark.parametrize("kind", [STAGES, ROLLING])
    def test_time_between_steps_is_in_every_kind(self, kind: dict) -> None:
        asked, pool = tiny(0.1, replicas=2, **kind), cores(2)
        (layout,) = pool.layouts(asked)
        unit = replica_unit(asked, pool.place(asked, layout), "unit", (0,))
        requests = [TraceRequest(20.0 * number, "tiny", 100, 20) for number in range(20)]
        times = []
        for latency in (self.profile(), self.profile(between=0.05)):
            options = Options(overheads_on(latency, "CPU"), sample_seconds=0.0)
            records = simulate([unit], requests, latency, options).records
            times.append(sum((each.finish or 0.0) - each.arrival for each in records))
        # One for each token, about: chunks of prompts take one each, too.
        assert times[1] - times[0] == pytest.approx(0.05 * 20 * len(requests), rel=0.2)
