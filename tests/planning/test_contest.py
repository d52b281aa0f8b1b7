"""A plan is never worse than GPUs of one's own or turns on them: all ways compete in the same simulation."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.costs.roofline import Roofline
from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import summarise
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.candidates.ways import as_way
from muxserve.planning.demand.demands import cluster_of
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place import simulations
from muxserve.planning.place.contest import LOOK, Contest, Rival, kept, why
from muxserve.planning.place.prediction import Prediction, Trial, predict, simulated_of
from muxserve.planning.place.window import RateWindow
from muxserve.planning.place.workloads import DECLARED, WORKLOADS, Variation
from muxserve.planning.planner import PlannedFleet, Planner, options_of
from muxserve.planning.specs.plan_file import load_plan, save_plan
from muxserve.planning.specs.unit_models import arranged, as_placed
from muxserve.simulator import SimUnit, simulate
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.objective import Objective, ObjectiveName
from placement.planner import ClusterPlan, SearchRecord
from tests.support.thoroughness import cases

SIZES = ("llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "llama-2-13b", "qwen2.5-14b")


def fleet_file(path: Path, seed: int) -> Path:
    """A random fleet: two to four models with their lengths, rates and objectives on two to six A100s."""
    rng = random.Random(seed)
    models = [
        f"  - {{ name: m{number}, architecture: {rng.choice(SIZES)}, rate: {rng.choice((0.3, 1, 3, 8, 15))}, "
        f"workload: {{ prompt_tokens: {rng.choice((50, 300, 1200))}, output_tokens: {rng.choice((20, 150, 400))} }}, "
        f"slo: {{ ttft_ms: {rng.choice((300, 1000))}, tpot_ms: {rng.choice((40, 80))} }} }}"
        for number in range(rng.randint(2, 4))
    ]
    path.write_text(f"cluster: {{ gpus: {rng.choice((2, 4, 6))}, gpu_type: a100 }}\nmodels:\n" + "\n".join(models))
    return path


def planned(file: Path, mode: str, seconds: float = 40.0) -> PlannedFleet:
    fleet = load_fleet(file, serving=False)
    cluster = cluster_of(fleet)
    assert cluster is not None
    planner = Planner(file, fleet, Roofline(), options_of(fleet, mode), seconds=0.5, simulate=seconds)
    return planner.on_gpus(cluster)


def mean_of(plan: ClusterPlan, file: Path) -> float:
    """The part of the requests that count, over all workloads."""
    units = simulated_of(plan.placement, load_fleet(file, serving=False), plan.demands, AROUND)
    tried = [kept(plan, predict(plan, Roofline(), Trial(20.0 * each.span, 0, each), units)) for each in WORKLOADS]
    return fmean(part for part in tried if part is not None)


def rival(found: PlannedFleet) -> Rival:
    return Rival("", found.plan, found.simulated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases([1, 15, 17, 21, 29], [15, 21]))
def test_a_plan_is_at_least_what_spatial_and_temporal_plans_are(tmp_path: Path, seed: int) -> None:
    file = fleet_file(tmp_path / "fleet.yaml", seed)
    found = planned(file, "muxserve")
    plan = found.rivals[0]
    for mode in ("spatial", "temporal"):
        other = rival(planned(file, mode))
        if len(other.plan.missing) > len(plan.plan.missing):
            continue
        assert not plan.short or other.short, mode
        if bool(plan.short) == bool(other.short):
            # What is called equal, and what a look at a part of the requests may be wrong by.
            assert mean_of(plan.plan, file) >= mean_of(other.plan, file) - 0.02, mode


@pytest.mark.slow
def test_whatever_way_is_best_has_spare_for_a_model_that_falls_short(tmp_path: Path) -> None:
    """Estimates put the model with the short objectives beside one that makes it miss them."""
    models = [("quick", 0.23, 123, 57, 500, 50), ("a", 0.43, 608, 78, 2000, 100), ("b", 1.2, 664, 89, 2000, 100)]
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "cluster: { gpus: 2, gpu_type: A40-48GB }\nmodels:\n"
        + "".join(
            f"  - {{ name: {name}, architecture: llama-3.1-8b, rate: {rate}, "
            f"workload: {{ prompt_tokens: {prompt}, output_tokens: {output} }}, "
            f"slo: {{ ttft_ms: {ttft}, tpot_ms: {tpot} }} }}\n"
            for name, rate, prompt, output, ttft, tpot in models
        )
    )
    found = planned(file, "muxserve", seconds=120.0)
    assert list(found.spare) == ["quick"]
    assert not found.rivals[0].short
    assert any(each.way == found.rivals[0].way and each.short for each in found.rivals[1:]), "the same without spare"
    alone = next(unit for unit in found.plan.placement.units if unit.models[0].model == "quick")
    assert len(alone.models) == 1


def demand(name: str = "a") -> Demand:
    return Demand(name, planned_architecture("llama-2-7b", Path()), rate=1.0)


def plan_of(*units: PlacedUnit, missing: int = 0, objective: ObjectiveName = "throughput") -> ClusterPlan:
    placement = Placement(Cluster((Node("A100-80GB", 4),)), units)
    nowhere = {f"x{number}": "" for number in range(missing)}
    return ClusterPlan(
        (demand(),),
        placement=placement,
        estimates=(),
        missing=nowhere,
        objective=Objective(objective),
        mode="muxserve",
    )


def contest(rates: dict[float, dict[str, float]], looks: list[tuple[float, float, str]] | None = None) -> Contest:
    """A contest in which a plan of that value serves so many requests per second under each workload."""

    def simulate(plan: ClusterPlan, part: float, varied: Variation) -> Prediction:
        if looks is not None:
            looks.append((plan.search.value, part, varied.name))
        return ended(rates[plan.search.value].get(varied.name, 1.0))

    return Contest(simulate)


def rivals(*names: str) -> list[Rival]:
    return [Rival(name, replace(plan_of(), search=SearchRecord(float(number)))) for number, name in enumerate(names)]


class TestContest:
    def test_the_best_in_the_mean_of_all_workloads_comes_first(self) -> None:
        rates = {
            0.0: {"as declared": 0.9, "groups take turns": 0.5},
            1.0: {"as declared": 0.88, "groups take turns": 0.8},
            2.0: {"as declared": 0.89, "bursts": 0.7},
        }
        ranked = contest(rates).ranked(rivals("dedicated", "shared", "turns"))
        assert [each.way for each in ranked] == ["shared", "turns"]
        assert ranked[0].mean == pytest.approx((0.88 + 0.8 + 4.0) / 6)
        behind = Rival("dedicated", plan_of(), ended(0.9), {**ranked[0].kept, "groups take turns": 0.5})
        assert why(ranked[0], behind) == (
            "5.0 points fewer over all workloads, most of them 'groups take turns': 50% of the requests count there, "
            "not 80%"
        )

    def test_of_equal_ones_the_one_that_keeps_most_under_its_worst_workload_comes_first(self) -> None:
        rates = {0.0: {"bursts": 0.87}, 1.0: {"bursts": 0.91, "30 % more": 0.94}, 2.0: {"bursts": 0.8}}
        ranked = contest(rates).ranked(rivals("shared", "free", "turns"))
        assert [each.way for each in ranked[:2]] == ["free", "shared"]
        assert ranked[0].mean < ranked[1].mean
        assert why(ranked[0], ranked[1]) == "as many requests in the mean, but 87% of them with 'bursts', not 91%"

    def test_a_plan_that_is_far_behind_is_not_tried_any_further(self) -> None:
        looks: list[tuple[float, float, str]] = []
        rates: dict[float, dict[str, float]] = {0.0: {}, 1.0: {"as declared": 0.6}, 2.0: {}}
        ranked = contest(rates, looks).ranked(rivals("shared", "turns", "dedicated"))
        assert [each.way for each in ranked] == ["shared", "dedicated"]
        assert [look for look in looks if look[0] == 1.0] == [(1.0, LOOK, "as declared")]

    def test_the_simplest_way_is_among_them_whatever_it_does(self) -> None:
        rates: dict[float, dict[str, float]] = {0.0: {}, 1.0: {each.name: 0.1 for each in WORKLOADS}}
        ranked = contest(rates).ranked(rivals("shared", "even"), always="even")
        assert [each.way for each in ranked] == ["shared", "even"]
        assert list(ranked[1].kept) == [each.name for each in WORKLOADS]

    def test_only_the_final_has_all_requests_and_only_of_what_is_declared(self) -> None:
        looks: list[tuple[float, float, str]] = []
        rates: dict[float, dict[str, float]] = {
            n: {each.name: 0.98 - n / 100 for each in WORKLOADS} for n in (0.0, 1.0, 2.0)
        }
        contest(rates, looks).ranked(rivals("shared", "turns", "dedicated"))
        assert [look for look in looks if look[1] != LOOK] == [(0.0, 1.0, "as declared"), (1.0, 1.0, "as declared")]

    def test_where_the_best_keeps_all_under_every_workload_the_others_are_not_tried(self) -> None:
        looks: list[tuple[float, float, str]] = []
        rates: dict[float, dict[str, float]] = {n: {} for n in (0.0, 1.0, 2.0, 3.0)}
        ranked = contest(rates, looks).ranked(rivals("shared", "turns", "dedicated", "even"), always="even")
        assert [each.way for each in ranked] == ["shared", "turns", "even"]
        assert [list(each.kept) for each in ranked] == [[each.name for each in WORKLOADS]] * 3
        assert [look for look in looks if look[0] == 2.0] == [(2.0, LOOK, "as declared")]
        assert [look for look in looks if look[1] == 1.0] == [(n, 1.0, "as declared") for n in (0.0, 1.0, 3.0)]

    def test_what_a_part_of_the_requests_does_not_show_is_seen_with_all(self) -> None:
        def simulate(plan: ClusterPlan, part: float, varied: Variation) -> Prediction:
            return ended(0.9 if plan.search.value == 0.0 and part == 1.0 else 0.99 if plan.search.value else 1.0)

        ranked = Contest(simulate).ranked(rivals("shared", "turns"))
        assert [(each.way, each.kept["as declared"]) for each in ranked] == [("turns", 0.99), ("shared", 0.9)]

    def test_who_keeps_all_of_what_is_declared_keeps_all_of_less(self) -> None:
        looks: list[tuple[float, float, str]] = []
        (only,) = contest({0.0: {}}, looks).ranked(rivals("shared"))
        assert only.kept["30 % less"] == 1.0
        assert "30 % less" not in {name for _, _, name in looks}

    @pytest.mark.parametrize("look", [LOOK, 1.0])
    def test_plans_of_a_heat_and_of_the_final_are_simulated_together(self, look: float) -> None:
        together: list[tuple[float, float, str]] = []
        alone: list[tuple[float, float, str]] = []

        def ahead(plans: Sequence[ClusterPlan], part: float, varied: Variation) -> None:
            together.extend((plan.search.value, part, varied.name) for plan in plans)

        rates = {n: {each.name: 0.98 - n / 100 for each in WORKLOADS} for n in (0.0, 1.0, 2.0)}
        replace(contest(rates, alone), look=look, ahead=ahead).ranked(rivals("shared", "turns", "dedicated"))
        assert set(alone) == set(together)
        assert len(set(alone)) > len(WORKLOADS)

    @pytest.mark.parametrize("objective", ["slo", "gpus"])
    def test_a_model_without_objectives_counts_with_what_is_answered_in_time(self, objective: ObjectiveName) -> None:
        """Otherwise the plan on the fewest devices would win however little of it that serves."""
        few = plan_of(UNIT, objective=objective)
        more = replace(few, search=SearchRecord(1.0), placement=plan_of(UNIT, replace(UNIT, devices=(1,))).placement)

        def simulate(plan: ClusterPlan, part: float, varied: Variation) -> Prediction:
            return replace(ended(1.0), summary=summarise(ANSWERED), in_time={"a": 99 if plan is more else 60})

        ranked = Contest(simulate, [DECLARED]).ranked([Rival("shared", few), Rival("even", more)])
        assert [(each.way, each.short, each.worst) for each in ranked] == [("even", 0, 0.99), ("shared", 1, 0.6)]
        assert [each.score for each in ranked] == [pytest.approx(0.99), pytest.approx(0.6)]

    def test_a_plan_that_has_no_place_for_a_model_does_not_compete(self) -> None:
        made = [Rival("shared", plan_of()), Rival("dedicated", plan_of(missing=1))]
        ranked = Contest(lambda *_: ended(1.0)).ranked(made)
        assert [each.way for each in ranked] == ["shared"]

    def test_what_cannot_be_simulated_leaves_the_first(self) -> None:
        ranked = Contest(lambda *_: None).ranked(rivals("shared", "turns"))
        assert [each.way for each in ranked] == ["shared"]

    def test_where_parts_show_nothing_all_requests_are_simulated_and_only_for_the_best(self) -> None:
        looks: list[tuple[float, float, str]] = []
        rates = {float(n): {"as declared": 0.9 - 0.05 * n} for n in range(5)}
        whole = replace(contest(rates, looks), look=1.0)
        ranked = whole.ranked(rivals("a", "b", "c", "d", "e"))
        assert [each.way for each in ranked] == ["a", "b"]
        assert {part for _, part, _ in looks} == {1.0}
        assert {value for value, _, name in looks if name == "bursts"} == {0.0, 1.0}


def test_what_comes_too_late_is_not_in_time_where_there_are_no_objectives() -> None:
    """More than one GPU serves: all of it is answered once no more comes, which is not what was asked for."""
    asked = replace(demand(), rate=14.0)
    unit = replace(UNIT, models=(PlacedModel("a", 14.0, 1.0, 1.0, "one"),), kv_bytes=40 << 30, policy="free")
    plan = replace(plan_of(unit, objective="gpus"), demands=(asked,))
    made = predict(plan, Roofline(), Trial(30.0))
    assert made.summary.overall.completed == made.summary.overall.requests
    assert made.kept("a") == made.in_time["a"] < 0.9 * made.summary.overall.requests
    assert Rival("shared", plan, made).short == 1


class TestWays:
    @pytest.mark.slow
    def test_shares_per_lease_compete_where_engines_can_change_theirs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = "architecture: llama-2-7b, rate: 2, slo: { ttft_ms: 2000, tpot_ms: 100 }, engines: split"
        file = tmp_path / "fleet.yaml"
        simulated: set[tuple[str, bool]] = set()

        def watched(units: Sequence[SimUnit], *arguments: Any, **more: Any) -> Any:
            simulated.update((unit.policy, unit.models[0].profile.engines.elastic) for unit in units)
            return simulate(units, *arguments, **more)

        monkeypatch.setattr(simulations, "simulate", watched)
        for policy, sharing in (("slack", "auto"), ("free", "green_contexts"), ("slack", "mps")):
            can = sharing != "mps"
            simulated.clear()
            file.write_text(
                f"policy: {policy}\ncluster: {{ gpus: 1, gpu_type: a100, sm_sharing: {sharing} }}\nmodels:\n"
                f"  - {{ name: a, {model} }}\n  - {{ name: b, {model} }}\n"
            )
            arguments = ["plan", str(file), "--simulate", "8", "--no-robust", "--json"]
            data = json.loads(CliRunner().invoke(app, arguments).stdout)
            assert data["candidates"]
            others = {("slack", True), ("adbs" if policy == "slack" else policy, True)} if can else set()
            assert {(policy, can), *others} <= simulated

    @pytest.mark.slow
    def test_the_plan_tells_what_it_and_the_simplest_way_do_under_every_workload(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(
            "cluster: { gpus: 2, gpu_type: a100 }\nmodels:\n"
            "  - { name: a, architecture: llama-2-7b, rate: 1, slo: { ttft_ms: 2000, tpot_ms: 100 } }\n"
            "  - { name: b, architecture: llama-2-7b, rate: 1, slo: { ttft_ms: 2000, tpot_ms: 100 } }\n"
        )
        arguments = ["plan", str(file), "--simulate", "20", "--seconds", "60"]
        data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        tried = data["candidates"]
        assert any("even" in (each["way"], *each["alike"]) for each in tried)
        assert all(list(each["workloads"]) == [each.name for each in WORKLOADS] for each in tried)
        assert tried[0]["mean"] == pytest.approx(fmean(tried[0]["workloads"].values()))
        assert tried[0]["why_not"] == ""
        assert all(each["why_not"] for each in tried[1:])
        assert data["search"]["contest_seconds"] > 0
        shown = CliRunner().invoke(app, arguments).stdout
        assert all(each.name in shown for each in WORKLOADS)
        data = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--no-robust"]).stdout)
        assert all(list(each["workloads"]) == [DECLARED.name] for each in data["candidates"])


def ended(throughput: float, longest: float | None = 1.0) -> Prediction:
    """A simulation of 2,000 s with a request per second: those that ended per second, and the latency of the longest,
    seconds."""
    asked = summarise([RequestRecord("a", float(n), 10, 1) for n in range(2000)])
    return Prediction(asked, 2000.0, {"a": RateWindow(2000.0, round(1000.0 * throughput), longest)})


ANSWERED = [RequestRecord("a", float(n), 10, 1, first_token=n + 9.0, finish=n + 9.0) for n in range(100)]
UNIT = PlacedUnit("unit0", "A100-80GB", (0,), (PlacedModel("a", 1.0, 1.0, 1.0),), 1 << 30)
AROUND = Surroundings(MemoryRules.served(0.92))
FLEET = "cluster: {{ gpus: 1, gpu_type: a100 }}\nmodels:\n  - {{ name: a, architecture: llama-2-7b, rate: 1{more} }}\n"


class TestPlanFile:
    def test_a_plan_file_names_engines_and_policy_and_the_fleet_gets_them(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(FLEET.format(more=""))
        fleet = load_fleet(file, serving=False)
        unit = replace(UNIT, models=(replace(UNIT.models[0], shape="one"),))
        one = as_way("one engine", plan_of(unit), fleet, AROUND, Roofline()).placement
        save_plan(one, tmp_path / "plan.yaml")
        (unit,) = load_plan(tmp_path / "plan.yaml", fleet).units
        assert (unit.models[0].shape, unit.stages, unit.policy) == ("one", 1, "free")
        (model,) = arranged(fleet, tmp_path / "plan.yaml", [unit]).models
        assert (model.engines, model.stages) == ("one", 1)
        shared = as_way("shared", plan_of(UNIT), fleet, AROUND, Roofline()).placement
        save_plan(shared, tmp_path / "plan.yaml")
        (unit,) = load_plan(tmp_path / "plan.yaml", fleet).units
        assert as_placed(fleet, unit, 1).policy == "adbs"


@pytest.mark.slow
def test_a_plan_says_who_came_second_and_why(tmp_path: Path) -> None:
    file, plan = fleet_file(tmp_path / "fleet.yaml", 17), tmp_path / "plan.yaml"
    arguments = ["plan", str(file), "--simulate", "20", "--seconds", "0.5"]
    shown = CliRunner().invoke(app, [*arguments, "-o", str(plan)])
    assert shown.exit_code in (0, 1), shown.output
    assert "chosen by simulation: " in shown.output
    assert "runner-up: " in shown.output
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert len(data["candidates"]) >= 2
    known = {"way", "alike", "about", "score", "latency_mean", "devices_used", "workloads", "mean", "why_not"}
    assert known == set(data["candidates"][0])
    assert len(load_plan(plan, load_fleet(file, serving=False)).units) == len(data["units"])
