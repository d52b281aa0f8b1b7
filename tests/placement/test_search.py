"""Meshes, Algorithm 1, the local search against the exact solver, the baselines and the facade."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.demand import Demand, Member, Mesh
from placement.greedy import GreedyLimits, fill, greedy, kinds, replicas_needed
from placement.improve import ImproveLimits, improve
from placement.layout import Layout, Unit
from placement.meshes import Machines
from placement.objective import Objective, ObjectiveName
from placement.planner import MODES, ClusterPlan, ModeName, PlanOptions, plan_cluster
from placement.values import IMPOSSIBLE, Values
from tests.placement.analytic import B7, B30, B65, MEMORY, Analytic, cluster, demand, estimator, random_fleet
from tests.support.exact_placement import TooLargeError, _cuts, exact
from tests.support.thoroughness import cases, examples

QUICK = ImproveLimits(kicks=15, evaluations=3000)


def values_of(fleet: list[Demand], objective: ObjectiveName = "throughput", colocate: bool = True) -> Values:
    return Values(estimator(fleet), Objective(objective), colocate)


def check(layout: Layout) -> None:
    """Every model is placed with all replicas in different units or is missing; the machines have room."""
    homes: Counter[Member] = Counter()
    for unit in layout.units.values():
        assert layout.values.of(unit.mesh, unit.members) != IMPOSSIBLE
        assert len({m.model for m in unit.members}) == len(unit.members)
        homes.update(unit.members)
    assert all(n == member.replicas for member, n in homes.items())
    placed = Counter(member.model for member in homes)
    assert all(n == 1 for n in placed.values()), "replicas of a model agree on their number"
    assert set(placed) | layout.missing == set(range(len(layout.values.demands)))
    assert not set(placed) & layout.missing
    assert layout.machines.assign([unit.mesh for unit in layout.units.values()]) is not None
    fresh = Layout(layout.values, layout.machines, layout.units.values())
    assert layout.value == pytest.approx(fresh.value)


class TestMachines:
    def test_meshes_lie_within_machines(self) -> None:
        machines = Machines(cluster(("big", 4), ("big", 4)))
        assert machines.fits({Mesh("big", 3): 2, Mesh("big", 1): 2})
        assert not machines.fits({Mesh("big", 3): 2, Mesh("big", 2): 1})
        assert not machines.fits({Mesh("big", 2): 5})
        assert not machines.fits({Mesh("small", 1): 1})

    def test_no_mesh_leaves_its_machine(self) -> None:
        machines = Machines(cluster(("big", 4), ("big", 4)))
        assert not machines.fits({Mesh("big", 8): 1})
        assert machines.assign([Mesh("big", 8)]) is None

    @settings(max_examples=examples(80), deadline=None)
    @given(
        nodes=st.lists(st.tuples(st.sampled_from(["big", "small"]), st.integers(1, 9)), min_size=1, max_size=5),
        wanted=st.lists(st.tuples(st.sampled_from(["big", "small"]), st.integers(1, 12)), max_size=8),
    )
    def test_what_fits_gets_devices_of_its_own(
        self, nodes: list[tuple[str, int]], wanted: list[tuple[str, int]]
    ) -> None:
        machines = Machines(cluster(*nodes))
        meshes = [Mesh(*each) for each in wanted]
        fits = machines.fits(Counter(meshes))
        answers = machines.assign(meshes) if all(mesh.device in machines.nodes for mesh in meshes) else None
        assert fits == (answers is not None)
        if answers is None:
            return
        owner = [(device, node) for node, (device, count) in enumerate(nodes) for _ in range(count)]
        taken = [number for devices in answers for number in devices]
        assert len(taken) == len(set(taken))
        for mesh, devices in zip(meshes, answers, strict=True):
            assert len(devices) == mesh.size
            assert {owner[d][0] for d in devices} == {mesh.device}
            assert len({owner[d][1] for d in devices}) == 1

    def test_all_ways_of_cutting_a_machine(self) -> None:
        cuts = {tuple(sorted(cut.elements())) for cut in _cuts(4, (4, 2, 1))}
        assert cuts == {(4,), (2, 2), (1, 1, 2), (1, 1, 1, 1)}


class TestGreedy:
    def test_only_kinds_on_which_something_runs(self) -> None:
        values = values_of([demand("a", B30)])
        assert [mesh.size for mesh in kinds(values, Machines(cluster(("big", 8))))] == [1, 2, 4]

    def test_the_busiest_model_is_placed_first_and_each_where_it_adds_most(self) -> None:
        values = values_of([demand("idle", rate=0.1), demand("busy", rate=10.0)])
        machines = Machines(cluster(("big", 2)))
        group = ((Mesh("big", 1), 2),)
        layout = fill(values, machines, group, [Member(1), Member(0)], width=4)
        assert sorted(unit.members for unit in layout.units.values()) == [(Member(0),), (Member(1),)]

    def test_replicas_where_one_mesh_cannot_carry_a_model(self) -> None:
        fleet = [demand("a", rate=60.0), demand("b", rate=0.5)]
        values, machines = values_of(fleet), Machines(cluster(*[("big", 1)] * 8))
        needed = replicas_needed(values, machines, kinds(values, machines))
        assert needed[0] > 1
        assert needed[1] == 1
        layout = improve(greedy(values, machines), QUICK)
        check(layout)
        assert layout.value == pytest.approx(60.5, rel=0.01)

    def test_a_model_that_fits_nowhere_is_missing(self) -> None:
        values = values_of([demand("a", B65), demand("b")])
        layout = greedy(values, Machines(cluster(("big", 1))))
        check(layout)
        assert layout.missing == {0}

    def test_a_search_among_many_groups_is_as_good_as_all_of_them_nearly(self) -> None:
        for seed in range(3):
            values = values_of(random_fleet(seed, 6, 6.0))
            machines = Machines(cluster(("big", 8)))
            every = greedy(values, machines, GreedyLimits(enumerate_up_to=1000))
            some = greedy(values, machines, GreedyLimits(enumerate_up_to=0))
            assert some.value >= 0.7 * every.value
            check(every)
            check(some)


class TestImprove:
    @pytest.mark.slow
    @pytest.mark.parametrize("objective", ["throughput", "slo", "gpus"])
    @pytest.mark.parametrize("seed", cases(range(3), [0]))
    def test_never_worse_and_the_same_every_time(self, objective: ObjectiveName, seed: int) -> None:
        fleet = random_fleet(seed, 8, 5.0)
        machines = Machines(cluster(("big", 8), ("small", 4)))
        found = []
        for _ in range(2):
            values = values_of(fleet, objective)
            start = greedy(values, machines)
            better = improve(start, QUICK)
            check(better)
            assert better.value >= start.value - 1e-9
            found.append((better.value, sorted(better.units.values())))
        assert found[0] == found[1]

    def test_a_poor_start_is_mended(self) -> None:
        fleet = [demand("a", rate=14.0), demand("b", rate=14.0), demand("c", B30, rate=0.5)]
        values, machines = values_of(fleet), Machines(cluster(("big", 4)))
        poor = Layout(values, machines, [Unit(Mesh("big", 2), (Member(0), Member(1), Member(2)))])
        better = improve(poor, QUICK)
        check(better)
        assert better.value > 1.1 * poor.value
        assert better.value == pytest.approx(exact(values, machines, replicas=1).layout.value, rel=0.001)

    def test_it_ends_when_told_to(self) -> None:
        values = values_of(random_fleet(1, 8, 8.0))
        start = greedy(values, Machines(cluster(("big", 8))))
        before = values.evaluations
        again = improve(start, ImproveLimits(), stop=lambda: True)
        assert again.value == pytest.approx(start.value)
        assert values.evaluations == before

    def test_a_missing_model_finds_room(self) -> None:
        values, machines = values_of([demand("a"), demand("b")]), Machines(cluster(("big", 2)))
        better = improve(Layout(values, machines, [Unit(Mesh("big", 1), (Member(0),))]), QUICK)
        assert not better.missing


class TestExact:
    @pytest.mark.slow
    def test_no_search_beats_it_and_the_searches_come_near(self) -> None:
        for seed in range(4):
            values = values_of(random_fleet(seed, 4, 6.0))
            machines = Machines(cluster(("big", 4), ("small", 2)))
            best = exact(values, machines)
            assert best.proven
            check(best.layout)
            for layout in (greedy(values, machines), improve(greedy(values, machines), QUICK)):
                assert layout.value <= best.bound + 1e-6 * abs(best.bound)
            assert best.gap(improve(greedy(values, machines))) < 0.02

    def test_against_all_placements_of_a_tiny_fleet(self) -> None:
        fleet = [demand("a", rate=9.0), demand("b", B30, rate=1.0), demand("c", rate=0.3)]
        values, machines = values_of(fleet), Machines(cluster(("big", 2)))
        one, two = Mesh("big", 1), Mesh("big", 2)
        a, b, c = Member(0), Member(1), Member(2)
        layouts = [[(two, (a, b, c))]]
        layouts += [[(one, (a, b)), (one, (c,))], [(one, (a, c)), (one, (b,))], [(one, (b, c)), (one, (a,))]]
        best = max(sum(values.of(*unit) for unit in units) for units in layouts)
        assert exact(values, machines, replicas=1).layout.value == pytest.approx(best)

    def test_a_large_fleet_is_refused(self) -> None:
        with pytest.raises(TooLargeError, match="small fleets"):
            exact(values_of(random_fleet(1, 12, 1.0)), Machines(cluster(("big", 8))), columns=200)


def replicas_of(layout: Layout) -> Counter[int]:
    return Counter(member.model for unit in layout.units.values() for member in unit.members)


class TestReplicas:
    """How many a model has is the planner's choice, within what is asked."""

    @pytest.mark.parametrize("mode", ["muxserve", "spatial", "temporal"])
    def test_as_many_as_are_asked_for(self, mode: ModeName) -> None:
        fleet = [
            demand("a", rate=1.0, least=3, most=3),
            demand("b", rate=60.0, least=1, most=1),
            demand("c", rate=60.0),
        ]
        plan = plan_cluster(fleet, cluster(("big", 8)), Analytic(), MEMORY, PlanOptions(mode=mode, local=QUICK))
        count = Counter(model.model for unit in plan.placement.units for model in unit.models)
        assert (count["a"], count["b"]) == (3, 1)
        assert count["c"] > 1
        assert not plan.missing

    @settings(max_examples=examples(12), deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 2)), min_size=1, max_size=4), st.integers(0, 9)
    )
    def test_within_bounds_or_not_at_all(self, bounds: list[tuple[int, int | None]], seed: int) -> None:
        fleet = [
            replace(each, least=least, most=None if more is None else least + more)
            for each, (least, more) in zip(random_fleet(seed, len(bounds), 8.0), bounds, strict=True)
        ]
        values, machines = values_of(fleet), Machines(cluster(("big", 4), ("small", 3)))
        first = greedy(values, machines)
        for layout in (first, improve(first, QUICK), improve(Layout(values, machines), QUICK)):
            check(layout)
            assert all(fleet[model].may_have(count) for model, count in replicas_of(layout).items())

    def test_the_searches_come_near_the_best(self) -> None:
        fleet = [demand("a", rate=4.0, least=3, most=3), demand("b", rate=9.0), demand("c", B30, rate=0.5, least=2)]
        values, machines = values_of(fleet), Machines(cluster(("big", 4)))
        best = exact(values, machines)
        found = improve(greedy(values, machines))
        assert replicas_of(best.layout)[0] == replicas_of(found)[0] == 3
        assert best.gap(found) < 0.02

    def test_more_than_there_is_room_for(self) -> None:
        plan = plan_cluster([demand("a", least=3), demand("b")], cluster(("big", 2)), Analytic(), MEMORY)
        assert plan.missing == {
            "a": "there is no room for all of its 3 replicas beside the others; give the fleet more devices, or fewer "
            "replicas"
        }
        assert [model.model for unit in plan.placement.units for model in unit.models].count("b") >= 1

    def test_a_missing_model_comes_with_all_of_them(self) -> None:
        values, machines = values_of([demand("a"), demand("b", least=2)]), Machines(cluster(("big", 2)))
        better = improve(Layout(values, machines, [Unit(Mesh("big", 1), (Member(0),))]), QUICK)
        assert not better.missing
        assert replicas_of(better)[1] == 2

    @pytest.mark.parametrize(("least", "most"), [(0, None), (2, 1), (0, 0)])
    def test_none_is_no_number(self, least: int, most: int | None) -> None:
        with pytest.raises(ValueError, match="are none"):
            demand("a", least=least, most=most)


class TestObjectives:
    def test_as_few_devices_as_meet_the_rates(self) -> None:
        fleet = [demand(f"m{i}", rate=0.2) for i in range(3)]
        plan = plan_cluster(fleet, cluster(("big", 8)), Analytic(), MEMORY, PlanOptions(Objective("gpus"), local=QUICK))
        assert plan.meets
        assert plan.devices == 1

    def test_objectives_are_worth_devices(self) -> None:
        fleet = [demand(f"m{i}", rate=1.0, slo_tpot=0.0095) for i in range(3)]
        few, met = (
            plan_cluster(fleet, cluster(("big", 8)), Analytic(), MEMORY, PlanOptions(Objective(name), local=QUICK))
            for name in ("gpus", "slo")
        )
        assert few.devices > 1
        assert met.attainment >= few.attainment - 1e-6
        assert met.attainment > 0.95

    def test_no_objective_gives_up_a_model_for_the_rest(self) -> None:
        fleet = [demand("giant", B65, rate=0.01), demand("busy", rate=100.0)]
        for name in ("throughput", "slo", "gpus"):
            plan = plan_cluster(
                fleet, cluster(("big", 2)), Analytic(), MEMORY, PlanOptions(Objective(name), local=QUICK)
            )
            assert not plan.missing


def plans(seed: int = 3) -> dict[str, ClusterPlan]:
    machines = cluster(("big", 8), ("small", 4))
    fleet = random_fleet(seed, 8, 12.0)
    return {m: plan_cluster(fleet, machines, Analytic(), MEMORY, PlanOptions(mode=m, local=QUICK)) for m in MODES}


class TestPlans:
    @pytest.mark.slow
    def test_modes_keep_their_rules_and_muxserve_serves_most(self) -> None:
        found = plans()
        for mode, plan in found.items():
            owners = [number for unit in plan.placement.units for number in unit.devices]
            assert len(owners) == len(set(owners)) == plan.devices
            for unit in plan.placement.units:
                assert unit.kv_bytes > 0
                if mode == "spatial":
                    assert len(unit.models) == 1
                if mode in ("spatial", "temporal"):
                    assert {m.decode_share for m in unit.models} == {1.0}
            rates = Counter()
            for unit in plan.placement.units:
                rates.update({m.model: m.rate for m in unit.models})  # type: ignore[arg-type]
            for d in plan.demands:
                assert d.name in plan.missing or rates[d.name] == pytest.approx(d.rate)
        best = found["muxserve"].throughput
        assert all(plan.throughput <= best * 1.001 for plan in found.values())

    @pytest.mark.slow
    def test_every_unit_says_what_limits_it(self) -> None:
        plan = plans()["muxserve"]
        for unit, note in zip(plan.placement.units, plan.placement.notes, strict=False):
            assert note.startswith(f"{unit.name}: ")
            assert any(word in note for word in ("memory", "SMs", "max_num_seqs", "SLO", "pool", "spare"))

    def test_a_model_without_a_place_says_why(self) -> None:
        plan = plan_cluster([demand("a", B65), demand("b")], cluster(("small", 2)), Analytic(), MEMORY)
        assert list(plan.missing) == ["a"]
        assert "on each of 2 small" in plan.missing["a"]
        assert not plan.meets
        odd = plan_cluster([demand("a")], cluster(("odd", 2)), Analytic(), {"odd": 80 << 30})
        assert "nothing is known of odd" in odd.missing["a"]

    def test_nothing_to_plan(self) -> None:
        with pytest.raises(ValueError, match="at least one model"):
            plan_cluster([], cluster(("big", 1)), Analytic(), MEMORY)
        with pytest.raises(ValueError, match="one device"):
            plan_cluster([demand("a", B7)], cluster(), Analytic(), MEMORY)
