"""Arrangements of prefill and decode, compared by simulation on the same devices."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.costs.latency import EngineShape
from muxserve.costs.measured import TURN_SECONDS, ProfileModel, overheads_on
from muxserve.costs.profile import DecodeCell, EngineProfile, Overheads, PrefillCell, Profile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepWork
from muxserve.metrics.definitions import Objectives
from muxserve.planning.arrangements.base import NoPlaceError, ReplicaLayout, wanted_of
from muxserve.planning.comparison import (
    ArrangementFigures,
    Compared,
    Comparison,
    Spread,
    choose_phases,
    compare,
    largest_first,
    recommend,
)
from muxserve.planning.trial import (
    STEP,
    GoodputSearch,
    Outcome,
    Trial,
    TrialLoad,
    balance,
    bracket,
    objectives_of,
    part_met,
    point_of,
    run_trial,
)
from muxserve.simulator import Link, Pipeline
from muxserve.simulator.stages import make_stages
from muxserve.spec import PhasesName
from tests.planning.phases_support import TINY, WIDE, cores, gpus, tiny, wanted, with_demand

COSTS = Roofline()


@pytest.mark.parametrize("crossing", [-40, -33, -7, -1, 0, 1, 5, 33, 40])
def test_a_crossing_is_found_wherever_it_is_within_reach(crossing: int) -> None:
    # Strides double: 2, 6, 14, 30 and then beyond the reach of 40, to which the last one is cut.
    low, high = bracket(lambda point: point <= crossing, 0, 2, 40)
    assert low is not None
    assert low <= crossing
    assert crossing < high or high == 40
    assert bracket(lambda point: False, 0, 2, 40)[0] is None


def figures(goodput: float, attainment: float = 1.0, smooth: float | None = None) -> ArrangementFigures:
    spread = Spread(0.1, 0.1, 0.2, 0.3)
    return ArrangementFigures(
        layout=ReplicaLayout("multiplexed", 2, 1, 1),
        devices=2,
        goodput=goodput,
        goodput_smooth=goodput if smooth is None else smooth,
        attainment=attainment,
        attainment_smooth=attainment,
        ttft=spread,
        ttft_with_wait=spread,
        tpot=spread,
        tpot_after_wait=spread,
        served=1.0,
        running=1.0,
        preemptions=0,
        balance=1.0,
        bubbles=(),
        link_bytes=0.0,
        network_bytes=0.0,
        device_hours=None,
        tokens_per_request=100,
    )


class TestLayouts:
    def test_all_devices_are_divided_among_replicas_stages_and_tensors(self) -> None:
        pool = gpus(8)
        for phases in ("multiplexed", "pipelined", "rolling"):
            for layout in largest_first(list(pool.layouts(wanted(), phases))):
                assert layout.replicas * layout.stages * layout.tp == 8
                assert (layout.stages > 1) == (phases == "pipelined")
                assert layout.replicas > 1 or phases != "rolling"
        pipelined = largest_first(list(pool.layouts(wanted(), "pipelined")))
        assert {(each.replicas, each.stages, each.tp) for each in pipelined} == {
            (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 2, 4),
        }  # fmt: skip

    def test_what_the_file_fixes_stays(self) -> None:
        given = replace(wanted(), replicas=2, stages=2)
        pool = gpus(8)
        assert largest_first(list(pool.layouts(given, "pipelined"))) == [ReplicaLayout("pipelined", 2, 2, 2)]
        assert largest_first(list(pool.layouts(given, "rolling"))) == [ReplicaLayout("rolling", 2, 1, 4)]

    def test_tensors_are_not_split_between_machines(self) -> None:
        layouts = largest_first(list(gpus(4, 4).layouts(wanted(), "multiplexed")))
        assert max(layout.tp for layout in layouts) == 4

    def test_three_devices_are_no_tensor_parallel_group_but_a_pipeline(self) -> None:
        pool, given = gpus(3), replace(wanted(), replicas=1)
        assert largest_first(list(pool.layouts(given, "pipelined"))) == [ReplicaLayout("pipelined", 1, 3, 1)]
        # 64 heads: two of the three at most.
        assert largest_first(list(pool.layouts(given, "multiplexed"))) == [ReplicaLayout("multiplexed", 1, 1, 2)]

    @pytest.mark.parametrize(
        ("phases", "nodes", "more", "words"),
        [
            ("rolling", (1,), {}, "prefill rolls over replicas, and there is one GPU"),
            ("rolling", (4,), {"replicas": 1}, "the fleet file has one; give `replicas: 2` or more"),
            ("pipelined", (1,), {}, "needs as many GPUs, and there is one"),
            ("pipelined", (8,), {"stages": 3, "replicas": 3}, "cannot be divided into 3 replicas of 3 or more stages"),
            ("pipelined", (16,), {"stages": 16}, "14 layers cannot be spread over 16 stages"),
        ],
    )
    def test_why_there_is_none(self, phases: PhasesName, nodes: tuple[int, ...], more: dict, words: str) -> None:
        with pytest.raises(NoPlaceError, match=words):
            list(gpus(*nodes).layouts(replace(wanted(), **more), phases))


class TestPlaces:
    def test_an_engine_of_both_phases_leaves_more_for_kv_than_two(self) -> None:
        pool = gpus(2)
        multiplexed = pool.place(wanted(), ReplicaLayout("multiplexed", 2, 1, 1))
        rolling = pool.place(wanted(), ReplicaLayout("rolling", 2, 1, 1))
        assert rolling.kv_bytes > multiplexed.kv_bytes
        assert rolling.blocks[0] * rolling.block_tokens * WIDE.kv_bytes_per_token("bfloat16") <= rolling.kv_bytes

    def test_a_stage_holds_its_layers_of_the_weights_and_of_the_kv(self) -> None:
        pool = gpus(2)
        one = pool.place(wanted(), ReplicaLayout("rolling", 2, 1, 1))
        two = pool.place(wanted(), ReplicaLayout("pipelined", 1, 2, 1))
        # Half of the weights are gone and each token takes half as much: more than twice as many tokens.
        assert min(two.blocks) > 2 * one.blocks[0]
        assert two.own_bytes + two.kv_bytes <= pool.memory

    def test_stages_on_several_machines_send_over_the_network(self) -> None:
        slow = gpus(2, 2, network=1e8).place(wanted(), ReplicaLayout("pipelined", 1, 4, 1))
        assert [link.bandwidth < 1e9 for link in slow.links] == [False, True, False]
        assert slow.network_bytes == pytest.approx(slow.link_bytes / 3)
        within = gpus(4).place(wanted(), ReplicaLayout("pipelined", 1, 4, 1))
        assert within.network_bytes == 0.0

    def test_bytes_per_token(self) -> None:
        hidden = WIDE.hidden * 2
        split = gpus(2).place(wanted(), ReplicaLayout("multiplexed", 1, 1, 2))
        # Two all-reduces per layer, in each of which both devices send the hidden state once.
        assert split.link_bytes == 2 * WIDE.layers * 2 * hidden
        assert gpus(2).place(wanted(), ReplicaLayout("pipelined", 1, 2, 1)).link_bytes == 2 * hidden
        assert gpus(2).place(wanted(), ReplicaLayout("rolling", 2, 1, 1)).link_bytes == 0

    def test_too_little_memory_is_told_with_numbers(self) -> None:
        with pytest.raises(NoPlaceError, match=r"weights, activations and processes take .* on each of 1 L20-48GB"):
            gpus(2, memory=12e9).place(wanted(), ReplicaLayout("multiplexed", 2, 1, 1))

    def test_engines_on_cpu_divide_the_cores(self) -> None:
        pool = cores(4)
        pipeline = pool.place(replace(tiny(), replicas=2), ReplicaLayout("pipelined", 2, 2, 1))
        assert pipeline.shape.share == pytest.approx(0.25)
        assert len(pipeline.blocks) == 2
        rolling = pool.place(replace(tiny(), replicas=2), ReplicaLayout("rolling", 2, 1, 1))
        assert rolling.shape.share == pytest.approx(0.5)
        multiplexed = pool.place(tiny(), ReplicaLayout("multiplexed", 1, 1, 1))
        assert multiplexed.cost_share is not None
        assert multiplexed.prefill_share is not None
        assert multiplexed.cost_share <= multiplexed.prefill_share <= 1.0

    def test_memory_of_a_cpu(self) -> None:
        with pytest.raises(NoPlaceError, match="16 replicas need"):
            cores(memory=8 << 30).place(replace(tiny(), replicas=16), ReplicaLayout("rolling", 16, 1, 1))


class TestLoad:
    def test_the_same_requests_come_at_every_rate(self) -> None:
        load = TrialLoad(wanted(), seed=3)
        slow, fast = load.requests(2.0), load.requests(8.0)
        assert [(r.prompt_tokens, r.output_tokens) for r in slow] == [
            (r.prompt_tokens, r.output_tokens) for r in fast[: len(slow)]
        ]
        for a, b in zip(slow, fast, strict=False):
            assert a.arrival == pytest.approx(4 * b.arrival)
        assert load.requests(2.0) == slow == TrialLoad(wanted(), seed=3).requests(2.0)
        assert TrialLoad(wanted(), seed=4).requests(2.0) != slow

    def test_no_sequence_is_longer_than_the_model_allows(self) -> None:
        short = with_demand(wanted(), max_len=300)
        requests = TrialLoad(with_demand(short, prompt_tokens=280), seed=0).requests(10.0)
        assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 300

    def test_a_model_without_an_objective_for_the_first_token_gets_one(self) -> None:
        assert objectives_of(wanted(ttft=None)) == Objectives(10.0, 0.1)


class TestPlaying:
    def test_the_wait_for_the_switch_is_in_one_of_the_two_times(self) -> None:
        outcome = Outcome(arrival=1.0, ttft=0.5, wait=0.3, rest=1.3, tokens=11)
        assert outcome.times(switch=True) == (pytest.approx(0.8), pytest.approx(0.1))
        assert outcome.times(switch=False) == (0.5, pytest.approx(0.13))
        assert outcome.met(Objectives(0.6, 0.13), switch=False)
        assert not outcome.met(Objectives(0.6, 0.13), switch=True)
        assert not Outcome(1.0, None).met(Objectives(9.0, 9.0), switch=True)

    def test_the_first_requests_do_not_count(self) -> None:
        trial = Trial([Outcome(0.0, None), Outcome(5.0, 0.1, 0.0, 1.0, 11), Outcome(6.0, 9.0, 0.0, 1.0, 11)])
        assert part_met(trial, Objectives(1.0, 1.0), 1.0, switch=True) == 0.5
        assert part_met(trial, Objectives(1.0, 1.0), 100.0, switch=True) == 1.0

    def test_balance_is_the_busiest_over_the_mean(self) -> None:
        assert balance([1.0, 3.0]) == 1.5
        assert balance([]) == balance([0.0, 0.0]) == 1.0

    @pytest.mark.parametrize("phases", ["multiplexed", "pipelined", "rolling"])
    def test_every_request_is_answered_in_every_arrangement(self, phases: PhasesName) -> None:
        asked, pool = wanted(rate=4.0), gpus(4)
        load = TrialLoad(asked, seed=1)
        for layout in largest_first(list(pool.layouts(asked, phases))):
            trial = run_trial(asked, pool, pool.place(asked, layout), COSTS, load.requests(4.0), 4.0)
            assert len(trial.outcomes) == load.count(4.0)
            assert all(outcome.ttft is not None and outcome.ttft > 0 for outcome in trial.outcomes)
            assert [o.tokens for o in sorted(trial.outcomes)] == [r.output_tokens for r in load.requests(4.0)]
            assert len(trial.bubbles) == (layout.stages if phases == "pipelined" else 0)
            assert all(0.0 <= part < 1.0 for part in trial.bubbles)


class TestGoodput:
    @pytest.mark.slow
    def test_it_is_the_last_point_of_the_grid_that_attains(self) -> None:
        asked, pool = wanted(), gpus(2)
        search = GoodputSearch(
            asked, pool, pool.place(asked, ReplicaLayout("rolling", 2, 1, 1)), COSTS, TrialLoad(asked, 0)
        )
        found = search.goodput(0.9, point_of(8.0))
        point = point_of(found)
        assert found == pytest.approx(STEP**point)
        assert search.attained(point) >= 0.9 > search.attained(point + 1)
        # From elsewhere, and on the coarse grid, it ends close by.
        assert search.goodput(0.9, point_of(1.0)) == pytest.approx(found, rel=0.11)
        assert search.goodput(0.9, point_of(300.0, 4), 4) == pytest.approx(found, rel=0.3)

    @pytest.mark.slow
    def test_what_never_attains_has_none(self) -> None:
        asked, pool = wanted(tpot=1e-4), gpus(2)
        search = GoodputSearch(
            asked, pool, pool.place(asked, ReplicaLayout("multiplexed", 2, 1, 1)), COSTS, TrialLoad(asked, 0)
        )
        assert search.goodput(0.9, point_of(8.0)) == 0.0
        assert search.simulations < 10


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(wanted(), gpus(2), COSTS)


class TestComparison:
    @pytest.mark.slow
    def test_all_arrangements_have_figures_of_the_same_devices(self, comparison: Comparison) -> None:
        assert [each.phases for each in comparison.arrangements] == ["multiplexed", "pipelined", "rolling"]
        for each in comparison.arrangements:
            assert each.figures is not None, each.why_not
            assert each.figures.devices == each.figures.layout.devices == 2
            assert each.figures.goodput > 0
            assert each.figures.ttft is not None
            assert each.figures.ttft.p50 <= each.figures.ttft.p90 <= each.figures.ttft.p99
            assert each.figures.device_hours == pytest.approx(2000 / (0.9 * each.figures.goodput * 3600))
        rolling = comparison.of("rolling").figures
        assert rolling is not None
        assert rolling.ttft_with_wait is not None
        assert rolling.ttft is not None
        assert rolling.ttft_with_wait.mean > rolling.ttft.mean
        pipelined = comparison.of("pipelined").figures
        assert pipelined is not None
        assert len(pipelined.bubbles) == 2

    def test_the_recommended_one_is_within_five_percent_of_the_best(self, comparison: Comparison) -> None:
        goodputs = {each.phases: each.figures.goodput for each in comparison.arrangements if each.figures}
        assert goodputs[comparison.recommended] >= 0.95 * max(goodputs.values())
        assert comparison.recommended in comparison.reason
        assert comparison.layout == comparison.of(comparison.recommended).figures.layout  # type: ignore[union-attr]

    def test_the_same_seed_gives_the_same_figures(self, comparison: Comparison) -> None:
        assert compare(wanted(), gpus(2), COSTS, only=("rolling",)).of("rolling") == comparison.of("rolling")

    def test_without_objectives_prefill_cannot_roll(self) -> None:
        found = compare(wanted(ttft=None), gpus(2), COSTS, only=("rolling",))
        assert "needs slo.ttft_ms and slo.tpot_ms" in found.of("rolling").why_not
        assert "counts as missed" in found.notes[0]

    def test_what_fits_nowhere_is_told_for_each(self) -> None:
        found = compare(wanted(), gpus(2, memory=6e9), COSTS)
        assert all(each.figures is None and each.why_not for each in found.arrangements)
        assert found.recommended == "multiplexed"
        assert found.layout is None

    @pytest.mark.slow
    def test_weights_that_need_all_devices_leave_nothing_to_roll_over(self) -> None:
        found = compare(wanted(), gpus(2, memory=20e9), COSTS)
        rolling = found.of("rolling")
        assert rolling.figures is None
        assert found.of("pipelined").figures is not None
        assert "may be used" in rolling.why_not

    def test_progress_rises_to_the_end(self) -> None:
        told: list[float] = []
        compare(wanted(), gpus(2), COSTS, tell=lambda part, _: told.append(part), only=("rolling",))
        assert told == sorted(told)
        assert told[0] >= 0.0
        assert 0.8 < told[-1] <= 1.0

    @pytest.mark.slow
    def test_cores_of_one_machine(self) -> None:
        found = compare(replace(tiny(), replicas=2), cores(2), COSTS)
        for each in found.arrangements:
            assert each.figures is not None, each.why_not
            assert each.figures.devices == 1
            assert each.figures.layout.replicas == 2
        assert found.devices == "2 cores of this machine"


class TestRecommendation:
    @pytest.mark.parametrize(
        ("goodputs", "name", "words"),
        [
            ((10.0, 12.0, 11.0), "pipelined", r"pipelined serves 12 requests/s .*\(multiplexed 10, rolling 11\)"),
            ((10.0, 10.4, 10.4), "multiplexed", "pipelined and rolling within 5% of that, and multiplexed is simpler"),
            ((5.0, 10.0, 10.4), "pipelined", "rolling within 5% of that, and pipelined is simpler"),
            ((5.0, 6.0, 10.0), "rolling", "rolling serves 10 requests/s"),
        ],
    )
    def test_the_highest_goodput_and_of_equals_the_simplest(
        self, goodputs: tuple[float, float, float], name: str, words: str
    ) -> None:
        found = [
            Compared(phases, figures(goodput))
            for phases, goodput in zip(("multiplexed", "pipelined", "rolling"), goodputs, strict=True)
        ]
        recommended, reason = recommend(found)
        assert recommended == name
        assert re.search(words, reason), reason

    def test_what_rolling_owes_to_the_wait_is_told(self) -> None:
        found = [Compared("multiplexed", figures(5.0)), Compared("rolling", figures(10.0, smooth=4.0))]
        assert recommend(found)[1].endswith("as time per output token it is 4")

    def test_where_nothing_attains_the_best_at_the_rate_asked_for(self) -> None:
        found = [Compared("multiplexed", figures(0.0, 0.2)), Compared("pipelined", figures(0.0, 0.6))]
        recommended, reason = recommend(found)
        assert recommended == "pipelined"
        assert "60%" in reason

    def test_one_that_is_possible(self) -> None:
        found = [Compared("multiplexed", None, "no"), Compared("pipelined", figures(1.0))]
        assert recommend(found) == ("pipelined", "pipelined is the only arrangement that is possible")


class TestFleet:
    @pytest.mark.slow
    def test_models_that_leave_it_open_are_chosen_for(self) -> None:
        from muxserve.config import parse_fleet

        fleet = parse_fleet(
            "models:\n"
            "- {name: a, architecture: llama-7b, phases: auto, slo: {ttft_ms: 900, tpot_ms: 90}, replicas: 2,\n"
            "   rolling: {lower: 2, upper: 5, spared: mean}, batching: fixed}\n"
            "- {name: b, architecture: llama-7b}\n",
            "fleet.yaml",
            Path(),
            serving=False,
        )
        model = wanted_of(fleet.models[0], wanted().demand, free=False)
        assert (model.spared, model.bounds.lower, model.bounds.upper) == (None, 2, 5)
        assert model.throttle is None, "a fixed budget"
        assert model.replicas == 2
        assert wanted_of(fleet.models[1], wanted().demand, free=True).replicas is None
        assert wanted_of(fleet.models[1], wanted().demand, free=False).replicas == 1
        chosen = choose_phases(fleet, [wanted().demand] * 2, lambda _: gpus(2), COSTS)
        assert list(chosen) == ["a"]
        assert chosen["a"].replicas == 2
        assert chosen["a"].phases == chosen["a"].comparison.recommended


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

    def test_time_between_steps_is_in_every_arrangement(self) -> None:
        assert overheads_on(COSTS, "CPU") == Overheads(turn=TURN_SECONDS), "also where nothing was measured"
        asked, pool = replace(tiny(0.1), replicas=2), cores(2)
        requests = TrialLoad(asked, 0).requests(0.1)[:40]
        for phases in ("multiplexed", "pipelined", "rolling"):
            (layout,) = pool.layouts(asked, phases)
            place = pool.place(asked, layout)
            quick = run_trial(asked, pool, place, self.profile(), requests, 0.1)
            slow = run_trial(asked, pool, place, self.profile(between=0.05), requests, 0.1)
            longer = sum(each.latency for each in slow.outcomes) - sum(each.latency for each in quick.outcomes)
            # One for each token, about: batches are others then, and chunks of prompts take one each, too.
            assert longer == pytest.approx(0.05 * sum(each.tokens for each in quick.outcomes), rel=0.4)
