"""A plan is never worse than GPUs of one's own or turns on them: all ways compete in the same simulation."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.metrics.summary import summarise
from muxserve.planning import prediction, simulations
from muxserve.planning.checkpoints import planned_architecture
from muxserve.planning.demands import cluster_of
from muxserve.planning.plan_file import load_plan, save_plan
from muxserve.planning.planner import PlannedFleet, Planner, options_of
from muxserve.planning.prediction import PERTURBATIONS, Perturbation, Prediction, Surroundings, predict
from muxserve.planning.rivals import EQUAL, Rival, as_way, best_of
from muxserve.planning.unit_plan import arranged, as_placed
from muxserve.planning.window import RateWindow
from muxserve.simulator import SimUnit, simulate
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan, PlanOptions, plan_cluster
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


def rival(found: PlannedFleet) -> Rival:
    return Rival("", found.plan, found.simulated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases([1, 15, 17, 21, 29], [15, 21]))
def test_a_plan_is_at_least_what_spatial_and_temporal_plans_are(tmp_path: Path, seed: int) -> None:
    file = fleet_file(tmp_path / "fleet.yaml", seed)
    plan = rival(planned(file, "muxserve"))
    for mode in ("spatial", "temporal"):
        other = rival(planned(file, mode))
        if len(other.plan.missing) > len(plan.plan.missing):
            continue
        assert not plan.short or other.short, mode
        if bool(plan.short) == bool(other.short):
            # What is called equal here and there, and the engine that has spatial's place.
            assert plan.score >= (1.0 - 2 * EQUAL) * other.score, mode


def demand(name: str = "a") -> Demand:
    return Demand(name, planned_architecture("llama-2-7b", Path()), rate=1.0)


def plan_of(*units: PlacedUnit, missing: int = 0, objective: str = "throughput") -> ClusterPlan:
    placement = Placement(Cluster((Node("A100-80GB", 4),)), units)
    nowhere = {f"x{number}": "" for number in range(missing)}
    return ClusterPlan(
        (demand(),),
        placement=placement,
        estimates=(),
        missing=nowhere,
        objective=Objective(objective),
        mode="muxserve",
        value=0.0,
        greedy_value=0.0,
        evaluations=0,
    )  # type: ignore[arg-type]


class TestHalving:
    def test_the_better_half_of_a_short_run_is_simulated_whole_and_the_best_comes_first(self) -> None:
        rates = {"shared": 1.0, "turns": 3.0, "dedicated": 2.0, "one engine": 0.5}
        plans = {way: replace(plan_of(), value=rate) for way, rate in rates.items()}
        looks: list[tuple[float, float]] = []

        def simulate(plan: ClusterPlan, part: float) -> Prediction:
            looks.append((plan.value, part))
            return ended(plan.value)

        ranked = best_of([Rival(way, plan) for way, plan in plans.items()], simulate)
        assert [each.way for each in ranked] == ["turns", "dedicated"]
        assert looks == [(1.0, 0.25), (3.0, 0.25), (2.0, 0.25), (0.5, 0.25), (3.0, 1.0), (2.0, 1.0)]

    def test_a_plan_that_has_no_place_for_a_model_does_not_compete(self) -> None:
        rivals = [Rival("shared", plan_of()), Rival("dedicated", plan_of(missing=1))]
        assert [each.way for each in best_of(rivals, lambda *_: ended(1.0))] == ["shared"]

    def test_what_cannot_be_simulated_leaves_the_first(self) -> None:
        rivals = [Rival("shared", plan_of()), Rival("turns", plan_of())]
        assert [each.way for each in best_of(rivals, lambda *_: None)] == ["shared"]


class TestOtherWorkloads:
    def test_of_equal_plans_the_one_that_holds_up_best_is_taken_and_no_other_is_tried(self) -> None:
        rates = {"shared": 3.0, "dedicated": 3.01, "turns": 1.0}
        plans = {way: replace(plan_of(), value=rate) for way, rate in rates.items()}
        holds = {3.0: {"burst": 0.4, "more": 0.9}, 3.01: {"burst": 0.9, "more": 0.8}}
        asked: list[float] = []

        def stress(plan: ClusterPlan) -> dict[str, float]:
            asked.append(plan.value)
            return holds[plan.value]

        rivals = [Rival(way, plan) for way, plan in plans.items()]
        ranked = best_of(rivals, lambda plan, _: ended(plan.value), stress)
        assert [each.way for each in ranked] == ["dedicated", "shared"]
        assert sorted(asked) == [3.0, 3.01]
        assert ranked[0].robust == pytest.approx(0.85)

    def test_a_better_plan_is_taken_whatever_it_does_under_other_workloads(self) -> None:
        plans = [Rival("shared", replace(plan_of(), value=3.0)), Rival("turns", replace(plan_of(), value=2.9))]

        def stress(plan: ClusterPlan) -> dict[str, float]:
            raise AssertionError("there is nothing to decide")

        ranked = best_of(plans, lambda plan, _: ended(plan.value), stress)
        assert ranked[0].way == "shared"

    @pytest.mark.slow
    def test_workloads_differ_in_rates_in_lengths_or_by_a_burst_of_the_busiest(self) -> None:
        models = [replace(demand("a"), rate=2.0, prompt_tokens=40), replace(demand("b"), rate=1.0, prompt_tokens=40)]
        memory = {"A100-80GB": device("A100-80GB").memory_bytes}
        plan = plan_cluster(models, Cluster((Node("A100-80GB", 2),)), Roofline(), memory, PlanOptions())

        def came(perturbed: Perturbation | None) -> tuple[int, int, float]:
            made = predict(plan, Roofline(), seconds=80.0, perturbed=perturbed).summary
            a, b = made.models["a"], made.models["b"]
            return a.requests, b.requests, made.overall.prompt_tokens / made.overall.requests

        a, b, mean = came(None)
        told = {each.name: came(each) for each in PERTURBATIONS}
        more, fewer, burst = told["rates +30 %"], told["rates -30 %"], told["one model x3"]
        assert (more[0] / a, more[1] / b) == pytest.approx((1.3, 1.3), rel=0.25)
        assert (fewer[0] / a, fewer[1] / b) == pytest.approx((0.7, 0.7), rel=0.25)
        assert (burst[0] / a, burst[1] / b) == pytest.approx((3.0, 1.0), rel=0.25)
        assert told["lengths of ShareGPT"][2] > 3 * mean

    @pytest.mark.slow
    def test_shares_per_lease_compete_where_engines_can_change_theirs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = "architecture: llama-2-7b, rate: 2, slo: { ttft_ms: 2000, tpot_ms: 100 }, phases: multiplexed"
        file = tmp_path / "fleet.yaml"
        simulated: set[tuple[str, bool]] = set()

        def watched(units: Sequence[SimUnit], *arguments: Any, **more: Any) -> Any:
            simulated.update((unit.policy, unit.models[0].profile.elastic) for unit in units if not unit.combined)
            return simulate(units, *arguments, **more)

        monkeypatch.setattr(simulations, "simulate", watched)
        for policy, ways in (("slack", {"mps"}), ("free", {"mps"}), ("slack", set())):
            monkeypatch.setattr(prediction, "SHARES_PER_LEASE", frozenset(ways))
            simulated.clear()
            file.write_text(
                f"policy: {policy}\ncluster: {{ gpus: 1, gpu_type: a100, sm_sharing: mps }}\nmodels:\n"
                f"  - {{ name: a, {model} }}\n  - {{ name: b, {model} }}\n"
            )
            arguments = ["plan", str(file), "--simulate", "8", "--no-robust", "--json"]
            data = json.loads(CliRunner().invoke(app, arguments).stdout)
            assert data["candidates"]
            own = (policy, bool(ways))
            others = {("slack", True), ("adbs" if policy == "slack" else policy, True)} if ways else set()
            assert {own, *others} <= simulated
            assert ("slack", not ways) not in simulated

    @pytest.mark.slow
    def test_the_plan_tells_what_equal_ways_kept_and_how_long_that_took(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(
            "cluster: { gpus: 2, gpu_type: a100 }\nmodels:\n"
            "  - { name: a, architecture: llama-2-7b, rate: 1, slo: { ttft_ms: 2000, tpot_ms: 100 } }\n"
            "  - { name: b, architecture: llama-2-7b, rate: 1, slo: { ttft_ms: 2000, tpot_ms: 100 } }\n"
        )
        arguments = ["plan", str(file), "--simulate", "20", "--seconds", "60"]
        data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        tried = [each for each in data["candidates"] if each["under_other_workloads"]]
        assert len(tried) > 1
        assert all(list(each["under_other_workloads"]) == [p.name for p in PERTURBATIONS] for each in tried)
        assert data["search"]["robust_seconds"] > 0
        assert "(--no-robust leaves it out)" in CliRunner().invoke(app, arguments).stdout
        data = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--no-robust"]).stdout)
        assert not any(each["under_other_workloads"] for each in data["candidates"])


def ended(throughput: float, longest: float | None = 1.0) -> Prediction:
    """A simulation of 2,000 s: requests that ended per second, and the latency of the longest, seconds."""
    return Prediction(summarise([]), 2000.0, {"a": RateWindow(2000.0, round(1000.0 * throughput), longest)})


UNIT = PlacedUnit("unit0", "A100-80GB", (0,), (PlacedModel("a", 1.0, 1.0, 1.0),), 1 << 30)
AROUND = Surroundings(MemoryRules.served(0.92))
FLEET = "cluster: {{ gpus: 1, gpu_type: a100 }}\nmodels:\n  - {{ name: a, architecture: llama-2-7b, rate: 1{more} }}\n"


class TestWays:
    def test_a_plan_file_names_policy_and_batching_and_the_fleet_gets_them(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(FLEET.format(more=""))
        fleet = load_fleet(file, serving=False)
        one = as_way("one engine", plan_of(UNIT), fleet, AROUND, Roofline()).placement
        save_plan(one, tmp_path / "plan.yaml")
        assert "policy" not in (tmp_path / "plan.yaml").read_text()
        (unit,) = load_plan(tmp_path / "plan.yaml", fleet).units
        assert (unit.phases, unit.stages, unit.batching) == ("pipelined", 1, "vllm")
        (model,) = arranged(fleet, tmp_path / "plan.yaml", [unit]).models
        assert (model.phases, model.stages, model.batching) == ("pipelined", 1, "vllm")
        turns = as_way("first come", plan_of(UNIT), fleet, AROUND, Roofline()).placement
        save_plan(turns, tmp_path / "plan.yaml")
        (unit,) = load_plan(tmp_path / "plan.yaml", fleet).units
        assert as_placed(fleet, unit, 1).policy == "fcfs"

    def test_what_the_file_says_of_phases_stays(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(FLEET.format(more=", phases: multiplexed"))
        fleet = load_fleet(file, serving=False)
        assert as_way("one engine", plan_of(UNIT), fleet, AROUND, Roofline()).placement.units == (UNIT,)


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
    known = {"way", "about", "score", "latency_mean", "devices_used", "under_other_workloads"}
    assert known == set(data["candidates"][0])
    assert len(load_plan(plan, load_fleet(file, serving=False)).units) == len(data["units"])
