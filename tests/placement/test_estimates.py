"""Curves, Algorithm 2, the steady state of Eq. 3, latencies and memory."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs.latency import EngineShape
from placement.candidates import Candidates
from placement.curves import DecodeCurve, PrefillCurve, batch_grid
from placement.demand import Demand, Member, Mesh, splits_evenly
from placement.engines import Engines, ShareRules, lengths_of
from placement.estimator import Estimator, Shares
from placement.memory import MemoryRules, model_bytes, sequence_bytes
from placement.settle import turns
from tests.placement.analytic import B7, B13, B30, B65, GIB, MEMORY, Analytic, AnalyticCosts, demand, estimator

ONE, TWO, FOUR, EIGHT = (Mesh("big", size) for size in (1, 2, 4, 8))


def costs(size: int = 1, share: float = 1.0) -> AnalyticCosts:
    return AnalyticCosts(B7, EngineShape("big", size, share, "float16"))


class TestCurves:
    def test_grid_starts_at_one_and_ends_at_the_largest(self) -> None:
        assert batch_grid(1) == [1]
        assert batch_grid(10) == [1, 2, 3, 4, 6, 8, 10]

    def test_batch_for_inverts_capacity(self) -> None:
        curve = DecodeCurve(costs(), lengths_of(demand("a")))
        for batch in (0.25, 1.0, 2.5, 17.0, 200.0):
            assert curve.batch_for(curve.capacity_at(batch)) == pytest.approx(batch)
        assert curve.batch_for(curve.capacity_at(256) * 1.01) == math.inf

    def test_capacity_is_batch_over_the_time_of_all_steps(self) -> None:
        curve = DecodeCurve(costs(), lengths_of(demand("a")))
        context = 8 * (161 + 338)
        assert curve.capacity_at(8) == pytest.approx(8 / (337 * costs().decode(8, context).seconds(context)))

    def test_batch_within_a_step_time(self) -> None:
        curve = DecodeCurve(costs(), lengths_of(demand("a")))
        assert curve.batch_within(curve.seconds_at(40)) == pytest.approx(40)
        assert curve.batch_within(1e-6) == 0
        assert curve.batch_within(10) == 256

    def test_prompts_longer_than_a_step_are_chunked(self) -> None:
        long = demand("a", prompt_tokens=5000, max_num_batched_tokens=2048)
        curve = PrefillCurve(costs(), lengths_of(long))
        parts = [(2048, 0), (2048, 2048), (904, 4096)]
        expected = sum(costs().prefill(q, q * c + q * (q + 1) // 2, 1) for q, c in parts)
        assert curve.seconds_at(1) == curve.seconds_at(9) == pytest.approx(expected)

    def test_prefill_of_a_full_step_costs_least_per_request(self) -> None:
        curve = PrefillCurve(costs(), lengths_of(demand("a", prompt_tokens=161)))
        assert curve.seconds_at(1) > curve.seconds_at(6) > curve.seconds_at(12)
        assert curve.seconds_at(12) == curve.seconds_at(100)


class TestFit:
    def test_heads_and_columns_must_split_evenly(self) -> None:
        assert [n for n in range(1, 9) if splits_evenly(B30, n)] == [1, 2, 4]
        assert [n for n in range(1, 9) if splits_evenly(B13, n)] == [1, 2, 4, 8]

    def test_a_model_needs_its_weights_and_room_for_a_request(self) -> None:
        engines = Engines([demand("a", B65), demand("b", B7)], Analytic(), MEMORY)
        assert [mesh.size for mesh in (ONE, TWO, FOUR, EIGHT) if engines.fits(0, mesh)] == [2, 4, 8]
        assert engines.fits(1, Mesh("small", 1))
        assert not engines.fits(1, Mesh("unheard-of", 1))

    def test_memory_counts_weights_processes_and_kv(self) -> None:
        rules = MemoryRules()
        seven = demand("a", B7)
        assert model_bytes(seven, 1, rules) > B7.weight_bytes("float16") + 2 * rules.context_bytes
        assert model_bytes(seven, 1, rules) < B7.weight_bytes("float16") + 3 * GIB
        assert sequence_bytes(seven, 1) == (161 + 338) * B7.kv_bytes_per_token("float16")
        assert sequence_bytes(seven, 2) == sequence_bytes(seven, 1) / 2

    def test_engines_that_capture_nothing_have_no_graphs(self) -> None:
        rules = MemoryRules.served(graph_sets=2)
        seven = demand("a", B7)
        eager = replace(seven, graphs="eager")
        assert rules.resting_bytes(seven) == 2 * (2 * rules.graph_bytes + rules.context_bytes)
        assert rules.resting_bytes(eager) == 2 * rules.context_bytes
        assert model_bytes(seven, 1, rules) - model_bytes(eager, 1, rules) == 2 * 2 * rules.graph_bytes

    def test_a_model_that_answers_with_vectors_has_one_engine(self) -> None:
        vectors = demand("b", replace(B7, pooling=True))
        engines = Engines([demand("a", B7), vectors], Analytic(), MEMORY)
        both, one = (engines.footprint(model, ONE).own for model in (0, 1))
        rules = engines.rules
        assert one == model_bytes(vectors, 1, rules.of_one_engine())
        assert both == model_bytes(demand("a", B7), 1, rules)

    def test_devices_beyond_the_kv_heads_hold_copies(self) -> None:
        grouped = demand("a", replace(B7, kv_heads=4))
        assert sequence_bytes(grouped, 8) == sequence_bytes(grouped, 4)

    def test_what_costs_are_not_known_for_is_kept_with_the_reason(self) -> None:
        engines = Engines([demand("a")], Analytic(), {"odd": 80 * GIB})
        assert not engines.fits(0, Mesh("odd", 1))
        assert "nothing is known of odd" in engines.unknown["a"]


class TestCandidates:
    def test_the_fewest_sms_that_meet_the_rate(self) -> None:
        candidates = Candidates(Engines([demand("a", rate=4.0)], Analytic(), MEMORY))
        found = candidates.of(Member(0), ONE)
        assert found is not None
        assert found.meets
        below = candidates.shares[candidates.shares.index(found.share) - 1]
        less = candidates._alone(Member(0), ONE, below)
        assert less is not None
        assert not less.meets

    def test_where_none_is_enough_the_share_that_serves_most(self) -> None:
        candidates = Candidates(Engines([demand("a", rate=500.0)], Analytic(), MEMORY))
        found = candidates.of(Member(0), ONE)
        assert found is not None
        assert not found.meets
        whole = candidates.whole(Member(0), ONE)
        assert whole is not None
        assert found.throughput == pytest.approx(whole.throughput)

    def test_more_devices_or_replicas_need_fewer_sms(self) -> None:
        candidates = Candidates(Engines([demand("a", rate=8.0)], Analytic(), MEMORY))
        shares = [c.share for c in candidates.all(Member(0), (ONE, TWO, FOUR, EIGHT))]
        assert shares == sorted(shares, reverse=True)
        whole, half = candidates.of(Member(0), ONE), candidates.of(Member(0, 2), ONE)
        assert whole is not None
        assert half is not None
        assert half.share < whole.share

    def test_shares_without_costs_are_passed_over(self) -> None:
        candidates = Candidates(Engines([demand("a", rate=0.1)], Analytic(least_share=0.35), MEMORY))
        found = candidates.of(Member(0), ONE)
        assert found is not None
        assert found.share == 0.4

    def test_a_tight_objective_asks_for_more_sms(self) -> None:
        def share(slo: float | None) -> float:
            candidates = Candidates(Engines([demand("a", rate=3.0, slo_tpot=slo)], Analytic(), MEMORY))
            found = candidates.of(Member(0), ONE)
            assert found is not None
            return found.share

        assert share(0.014) > share(None)


class TestUnits:
    def test_equation_3_for_models_that_are_equally_long_in_service(self) -> None:
        """With all compute for prefill, free SMs for decode and no interference: b / (sum t_p + t_d l) = W."""
        both = estimator([demand("a", rate=6.0), demand("b", rate=6.0)], interference=False)
        unit = both.unit(EIGHT, (Member(0), Member(1)), Shares(1.0, (0.4, 0.4)))
        assert unit is not None
        decode, prefill = both.engines.decode(0, EIGHT, 0.4), both.engines.prefill(0, EIGHT, 1.0)
        assert decode is not None
        assert prefill is not None
        for model in unit.models:
            assert model.throughput == pytest.approx(6.0)
            prefills = sum(m.batch * prefill.seconds_at(m.batch) for m in unit.models)
            steps = 337 * decode.seconds_at(model.batch)
            assert model.batch / (prefills + steps) == pytest.approx(6.0, rel=0.01)

    def test_prefill_on_part_of_the_sms_does_not_hold_decode_up(self) -> None:
        one = estimator([demand("a", rate=4.0)], interference=False)
        beside = one.unit(TWO, (Member(0),), Shares(0.6, (0.4,)))
        before = one.unit(TWO, (Member(0),), Shares(1.0, (0.4,)))
        assert beside is not None
        assert before is not None
        assert beside.load.progress == pytest.approx(1.0)
        assert before.load.progress < 1.0
        assert beside.models[0].level.tpot < before.models[0].level.tpot
        assert beside.models[0].level.ttft > before.models[0].level.ttft

    def test_jobs_that_do_not_fit_beside_each_other_take_turns(self) -> None:
        many = estimator([demand(f"m{i}", rate=4.0) for i in range(3)], interference=False)
        members = tuple(Member(i) for i in range(3))
        wide = many.unit(EIGHT, members, Shares(1.0, (1.0, 1.0, 1.0)))
        slim = many.unit(EIGHT, members, Shares(1.0, (0.3, 0.3, 0.3)))
        assert wide is not None
        assert slim is not None
        assert wide.load.progress < 0.4 < slim.load.progress

    def test_neighbours_on_the_memory_bus_slow_each_other_down(self) -> None:
        apart, together = (
            estimator([demand("a", rate=3.0), demand("b", rate=3.0)], interference=flag).unit(
                ONE, (Member(0), Member(1)), Shares(1.0, (0.5, 0.5))
            )
            for flag in (False, True)
        )
        assert apart is not None
        assert together is not None
        assert together.models[0].level.tpot > apart.models[0].level.tpot

    def test_a_full_pool_is_divided_by_demand_and_named_as_the_limit(self) -> None:
        tight = estimator([demand("a", B65, rate=8.0), demand("b", B65, rate=2.0)])
        unit = tight.unit(FOUR, (Member(0), Member(1)), Shares(1.0, (0.5, 0.5)))
        assert unit is not None
        assert unit.kv_bytes == pytest.approx(unit.pool_bytes)
        first, second = unit.models
        assert first.limit == second.limit == "memory"
        assert first.batch == pytest.approx(4 * second.batch)
        assert math.isinf(first.level.ttft)

    @pytest.mark.parametrize(("own", "limit"), [(True, "sequences"), (False, "batch")])
    def test_a_full_batch_is_named_by_who_has_set_it(self, own: bool, limit: str) -> None:
        small = replace(demand("a", B7, rate=100.0), max_num_seqs=2, own_batch=own)
        unit = estimator([small]).unit(ONE, (Member(0),), Shares(1.0, (1.0,)))
        assert unit is not None
        assert unit.models[0].limit == limit

    def test_who_needs_less_than_its_part_of_the_pool_leaves_the_rest(self) -> None:
        tight = estimator([demand("a", B65, rate=8.0), demand("b", B65, rate=2.0, output_tokens=2)])
        unit = tight.unit(FOUR, (Member(0), Member(1)), Shares(1.0, (0.5, 0.5)))
        assert unit is not None
        assert unit.models[0].limit == "memory"
        assert unit.models[1].batch * 4 < unit.models[0].batch

    def test_weights_that_do_not_fit_have_no_estimate(self) -> None:
        heavy = estimator([demand("a", B65), demand("b", B65), demand("c", B65)])
        members = (Member(0), Member(1), Member(2))
        assert heavy.unit(TWO, members, Shares(1.0, (0.3, 0.3, 0.3))) is None

    def test_headroom_is_where_the_unit_stops_meeting_its_rates(self) -> None:
        base = demand("a", rate=2.0)
        unit = estimator([base]).unit(ONE, (Member(0),), Shares(1.0, (1.0,)))
        assert unit is not None
        assert unit.next_limit

        def served(factor: float) -> bool:
            grown = estimator([demand("a", rate=2.0 * factor)]).unit(ONE, (Member(0),), Shares(1.0, (1.0,)))
            assert grown is not None
            return grown.models[0].meets_rate

        assert served(unit.headroom * 0.98)
        assert not served(unit.headroom * 1.05)

    def test_attainment_falls_with_tighter_objectives(self) -> None:
        def met(**slo: float) -> float:
            unit = estimator([demand("a", rate=4.0, **slo)]).unit(ONE, (Member(0),), Shares(1.0, (1.0,)))
            assert unit is not None
            return unit.models[0].level.attainment

        assert met() == 1.0
        assert met(slo_ttft=1e-4) == 0.0
        assert met(slo_tpot=1e-4) == 0.0
        assert met(slo_ttft=0.05) < met(slo_ttft=0.2) <= 1.0
        assert met(slo_ttft=2.0) > 0.99

    def test_turns_gives_everyone_everything(self) -> None:
        both = Estimator(Candidates(Engines([demand("a"), demand("b")], Analytic(), MEMORY, sharing=None)))
        assert both.choices(ONE, (Member(0), Member(1))) == [Shares(1.0, (1.0, 1.0))]

    def test_on_larger_meshes_than_engines_share_they_take_turns(self) -> None:
        engines = Engines([demand("a"), demand("b")], Analytic(), MEMORY, sharing=ShareRules(most_devices=1))
        both, members = Estimator(Candidates(engines)), (Member(0), Member(1))
        assert len(both.choices(ONE, members)) > 1
        assert both.choices(TWO, members) == [Shares(1.0, (1.0, 1.0))]

    def test_engines_whose_shares_change_have_graphs_for_each_of_these(self) -> None:
        rules = MemoryRules.served()
        whole, parts = (
            Engines([demand("a")], Analytic(), MEMORY, rules, sharing=ShareRules(graph_sets=sets)) for sets in (None, 4)
        )
        # Two engines have three more each.
        assert parts.footprint(0, ONE).own - whole.footprint(0, ONE).own == 2 * 3 * rules.graph_bytes
        assert parts.footprint(0, TWO) == whole.footprint(0, TWO)

    @settings(max_examples=40, deadline=None)
    @given(
        rates=st.lists(st.floats(0.05, 60), min_size=1, max_size=4),
        factor=st.floats(1.0, 4.0),
        size=st.sampled_from([1, 2, 4, 8]),
        prefill=st.sampled_from([0.5, 1.0]),
    )
    def test_what_serves_much_serves_less_as_well(
        self, rates: list[float], factor: float, size: int, prefill: float
    ) -> None:
        members = tuple(Member(i) for i in range(len(rates)))
        shares = Shares(prefill, tuple(0.2 for _ in rates))
        less, more = (
            estimator([demand(f"m{i}", rate=rate * f) for i, rate in enumerate(rates)]).unit(
                Mesh("big", size), members, shares
            )
            for f in (1.0, factor)
        )
        if less is None or more is None:
            assert less is more
            return
        for unit in (less, more):
            assert 0 <= unit.kv_bytes <= unit.pool_bytes * (1 + 1e-9)
            assert 0 < unit.load.progress <= 1
            for model in unit.models:
                assert 0 < model.throughput <= model.rate * (1 + 1e-9)
                assert 0 <= model.level.attainment <= 1
                assert 0 < model.batch <= 256
                # Little's law, of what is decoded.
                assert model.batch == pytest.approx(model.throughput * 337 * model.level.tpot, rel=0.02)
        if all(model.meets_rate for model in more.models):
            assert all(model.meets_rate for model in less.models)


class TestTurns:
    def test_as_few_as_possible(self) -> None:
        assert turns([0.3, 0.3, 0.3], 1.0) == [[0, 1, 2]]
        assert turns([1.0, 0.1, 0.1], 1.0) == [[0], [1, 2]]
        assert turns([0.5, 0.6, 0.4, 0.5], 1.0) == [[1, 2], [0, 3]]
        assert turns([0.5, 0.1], 0.4) is None

    @given(shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
    def test_each_job_once_and_none_too_many(self, shares: list[float]) -> None:
        groups = turns(shares, 1.0)
        assert groups is not None
        assert sorted(i for group in groups for i in group) == list(range(len(shares)))
        assert all(sum(shares[i] for i in group) <= 1 + 1e-6 for group in groups)


def test_a_demand_must_make_sense() -> None:
    with pytest.raises(ValueError, match="must be above zero"):
        Demand("a", B7, rate=0.0)


def test_models_alike_share_their_tables() -> None:
    source = Analytic()
    engines = Engines([demand(f"m{i}", rate=1.0 + i) for i in range(50)], source, MEMORY)
    for model in range(50):
        assert engines.fits(model, ONE)
    assert len(source.asked) == 1
