"""Where `muxserve simulate` plays the models of a fleet, and how each is arranged there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from muxserve.cli.app import app
from muxserve.cli.simulate_places import PlacementSearch, places_of
from muxserve.cluster.machine import usable_cores
from muxserve.config import FleetError
from muxserve.costs.roofline import Roofline
from muxserve.planning import planner
from muxserve.planning.place.prediction import Verified
from muxserve.planning.specs.plan_file import save_plan
from muxserve.simulator import mode_of
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = PlacementSearch(seconds=0.0)
# Short, so that plans are verified by few steps.
LENGTHS = "workload: { prompt_tokens: 200, output_tokens: 40 }"
SLO = f"{LENGTHS}, slo: {{ ttft_ms: 2000, tpot_ms: 100 }}"
MIXED = f"""
cluster: {{ gpus: 8, gpu_type: A100-80GB }}
models:
  - {{ name: ring, architecture: llama-2-7b, rate: 2, {SLO}, engines: one, dispatch: rolling, replicas: 2 }}
  - {{ name: pipe, architecture: llama-2-13b, rate: 1, {SLO}, engines: one, stages: 2, replicas: 1 }}
  - {{ name: chat, architecture: llama-2-7b, rate: 2, {SLO}, engines: split }}
  - {{ name: code, architecture: llama-2-13b, rate: 1, {LENGTHS}, engines: split }}
"""
LOAD = "poisson:rate=6,duration=10,seed=1,max_prompt=900,max_output=60"
SHORT = ("--seconds", "0")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mixed") / "fleet.yaml"
    file.write_text(MIXED)
    return file


@pytest.fixture(scope="module")
def plan_of_mixed(mixed: Path) -> Path:
    plan = mixed.with_name("plan.yaml")
    placed = places_of(mixed, None, None, None, None, Roofline(), QUICK).placed("muxserve")
    save_plan(placed.placement, plan)
    return plan


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.mark.slow
def test_a_fleet_of_all_shapes(mixed: Path, plan_of_mixed: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    modes = ("--mode", "muxserve,spatial,fcfs")
    given = ("--workload", LOAD, *SHORT, "--plan", plan_of_mixed, *modes, "--json", "--html", page, "--timeline", trace)
    result = simulate(mixed, *given)
    assert result.exit_code == 0, result.output
    assert "spatial serves ring and pipe without stages and without rolling prefill" in " ".join(result.stderr.split())
    runs = json.loads(result.stdout)["runs"]
    units = {name: [tuple(unit["engines_of"].values()) for unit in run["extra"]["units"]] for name, run in runs.items()}
    for name in ("muxserve", "fcfs"):
        assert units[name][-3:] == [("one",)] * 3
        assert set(sum(units[name][:-3], ())) == {"split"}
    assert set(sum(units["spatial"], ())) == {"one"}
    for run in runs.values():
        assert run["overall"]["completed"] == run["overall"]["requests"] > 30
        assert set(run["models"]) == {"ring", "pipe", "chat", "code"}
        assert run["extra"]["devices"] <= 8
    mux, other = (runs[name] for name in ("muxserve", "fcfs"))
    # Another policy changes units of two engines alone.
    for name in ("ring", "pipe"):
        for figure in ("ttft", "tpot", "latency", "completed", "output_tokens"):
            assert mux["models"][name][figure] == other["models"][name][figure]
    ring, pipe = mux["extra"]["units"][-2:]
    assert 0.0 <= ring["switch_wait"]["p50"] <= ring["switch_wait"]["p99"]
    assert [each["busy_seconds"] > 0 and 0 <= each["bubbles"] < 1 for each in pipe["stages"]] == [True, True]
    assert pipe["devices"] == 2
    assert len(ring["pages"]["seconds"]) == len(ring["pages"]["ring"]) > 5
    assert "KV pages in use: muxserve" in page.read_text()
    jobs = json.loads((tmp_path / "trace-muxserve.json").read_text())["traceEvents"]
    assert len({job["pid"] for job in jobs if job["ph"] == "X"}) == mux["extra"]["devices"]


@pytest.mark.slow
def test_words_of_each_shape(mixed: Path, plan_of_mixed: Path) -> None:
    """A plan is simulated as it is, and with the same report every time."""
    given = (mixed, "--workload", LOAD, "--plan", plan_of_mixed)
    words = " ".join(simulate(*given).stdout.split())
    assert "ring is rolling over 2 replicas; after its first token a request waits" in words
    assert "pipe has 1 replica of 2 stages with" in words
    assert simulate(*given, "--json").stdout == simulate(*given, "--json").stdout


@pytest.mark.parametrize(("name", "units", "stages"), [("rolling", 3, 1), ("pipeline", 1, 2)])
def test_units_of_their_own_on_this_machine(name: str, units: int, stages: int) -> None:
    places = places_of(ROOT / f"configs/{name}.yaml", None, None, None, None, Roofline(), QUICK)
    placed = places.placed("muxserve")
    assert len(placed.others) == len(placed.placement.units) == units
    for unit in placed.others:
        (model,) = unit.models
        assert unit.pipeline is None or unit.pipeline.stages == stages
        # Stages take turns on the cores; replicas have threads of their own, one at least.
        assert model.cost_share == pytest.approx(
            1 / stages if units == 1 else max(1, usable_cores() // units) / usable_cores()
        )
        assert model.max_len == 2048
    # A baseline has one unit and knows two engines only.
    other = places.placed("temporal")
    assert not other.others
    assert len(other.placement.units) == 1
    served = "temporal serves arithmetic without stages and without rolling prefill, whatever the fleet file says"
    assert places.baselines(["temporal"]) == served


def test_replicas_on_this_machine_divide_its_cores() -> None:
    places = places_of(ROOT / "configs/replicas.yaml", None, None, None, None, Roofline(), QUICK)
    placed = places.placed("muxserve")
    assert [unit.models[0].rate for unit in placed.placement.units] == [4.0] * 4
    assert len(places.placed("temporal").placement.units) == 1
    assert places.baselines(["temporal"]) == ""


def test_a_model_with_a_cache_of_its_own_has_one_engine_in_baselines_too(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    models = ROOT / "configs/models"
    file.write_text(
        "kv_pool: {size: 64MiB}\nmodels:\n"
        f"  - {{name: a, path: {models / 'atlas'}}}\n  - {{name: b, path: {models / 'frontdesk'}, kv: private}}\n"
    )
    (unit,) = places_of(file, None, None, None, None, Roofline(), QUICK).placed("temporal").placement.units
    assert {each.model: each.shape for each in unit.models} == {"a": "split", "b": "one"}


@pytest.mark.slow
def test_what_is_left_open_is_chosen_as_in_a_plan(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    open_model = f"  - {{ name: ring, architecture: llama-2-7b, rate: 0.5, {SLO}, engines: auto }}"
    fleet.write_text(f"cluster: {{ gpus: 2, gpu_type: A100-80GB }}\nmodels:\n{open_model}\n")
    plan = tmp_path / "plan.yaml"
    result = CliRunner().invoke(app, ["plan", str(fleet), "--seconds", "0", "-o", str(plan)])
    assert result.exit_code == 0, result.output
    planned = places_of(fleet, None, None, None, plan, Roofline(), QUICK).placed("muxserve").placement
    places = places_of(fleet, None, None, None, None, Roofline(), QUICK)
    assert places.placed("muxserve").placement.units == planned.units
    (note,) = places.notes
    assert note.startswith("ring: ")
    assert ", chosen by simulation (" in note


def plan_file(file: Path, unit: PlacedUnit, nodes: tuple[Node, ...] = (Node("A100-80GB", 4),)) -> Path:
    save_plan(Placement(Cluster(nodes), (unit,)), file)
    return file


def pipelined_fleet(tmp_path: Path, engines: str = "auto") -> Path:
    file = tmp_path / "fleet.yaml"
    text = f"models:\n  - {{ name: pipe, architecture: llama-2-13b, engines: {engines} }}\n"
    file.write_text(text)
    return file


UNIT = PlacedUnit(
    "unit0",
    device="A100-80GB",
    devices=(0, 1, 2, 3),
    models=(PlacedModel("pipe", 1.0, 1.0, 1.0, "one"),),
    kv_bytes=8 << 30,
    stages=2,
)


def test_the_units_of_a_plan(tmp_path: Path) -> None:
    """What the plan says goes before a fleet file that leaves it open, also the size of its page pools."""
    fleet = pipelined_fleet(tmp_path)
    larger = plan_file(tmp_path / "larger.yaml", replace(UNIT, kv_bytes=16 << 30))
    found = []
    for plan in (plan_file(tmp_path / "plan.yaml", UNIT), larger):
        (unit,) = places_of(fleet, None, None, None, plan, Roofline()).placed("muxserve").others
        found.append(unit)
    assert [unit.tp for unit in found] == [2, 2]
    assert found[1].pools[0].pages == pytest.approx(2 * found[0].pools[0].pages, rel=0.001)
    with pytest.raises(FleetError, match="the plan has pipe with `engines: one`, the fleet file `split`"):
        places_of(pipelined_fleet(tmp_path, "split"), None, None, None, larger, Roofline())


@pytest.mark.slow
def test_the_default_placement_is_the_one_that_plan_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where objectives are missed in the first plan's simulation, too: `plan` makes it again with spare."""
    file, plan = tmp_path / "fleet.yaml", tmp_path / "plan.json"
    file.write_text(
        "cluster: { gpus: 4, gpu_type: A100-80GB }\nmodels:\n"
        f"  - {{ name: chat, architecture: llama-2-7b, rate: 200, {SLO} }}\n"
        f"  - {{ name: code, architecture: llama-2-13b, rate: 100, {SLO} }}\n"
    )
    # What was found with spare is told by the rates that it was asked for.
    made_again: list[bool] = []

    def again(demands: Any, plan: Any, simulate: Any) -> Verified:
        more = [replace(demand, rate=demand.rate * 1.5) for demand in demands]
        made_again.append(True)
        made = plan(more)
        return Verified(made, simulate(made), {"chat": 1.5})

    monkeypatch.setattr(planner, "verified", again)
    result = CliRunner().invoke(app, ["plan", str(file), "--seconds", "0", "-o", str(plan)])
    assert result.exit_code == 0, result.output
    given = places_of(file, None, None, None, plan, Roofline(), QUICK).placed("muxserve")
    assert made_again == [True]
    found = places_of(file, None, None, None, None, Roofline(), QUICK).placed("muxserve")
    assert made_again == [True, True]
    assert found.placement.units == given.placement.units
    assert str(plan) in given.about
    assert "as `muxserve plan` prints it" in found.about
    assert all(unit.name in found.about for unit in found.placement.units)


@pytest.mark.parametrize(("mps", "sharing"), [("auto", "mps"), ("off", "time_slices")])
def test_processes_without_mps_have_the_gpu_in_turn(tmp_path: Path, mps: str, sharing: str) -> None:
    placed = PlacedUnit("unit0", "A100-80GB", (0,), (PlacedModel("chat", 1.0, 0.5, 0.5),), 20 << 30)
    save_plan(Placement(Cluster((Node("A100-80GB", 1),)), (placed,)), tmp_path / "plan.yaml", "")
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"cluster: {{ gpus: 1, gpu_type: A100-80GB, mps: {mps} }}\n"
        f"models: [{{ name: chat, architecture: llama-2-7b, rate: 1, {LENGTHS} }}]\n"
    )
    found = places_of(file, None, None, None, tmp_path / "plan.yaml", Roofline(), QUICK).placed("muxserve")
    assert {unit.sharing for unit in found.units(mode_of("muxserve"))} == {sharing}


def test_units_are_simulated_under_the_fleet_s_policy_with_what_their_engines_can(
    tmp_path: Path,
) -> None:
    model = f"models: [{{ name: chat, architecture: llama-2-7b, rate: 1, {LENGTHS}, engines: split }}]\n"
    placed = PlacedUnit("unit0", "A100-80GB", (0,), (PlacedModel("chat", 1.0, 0.5, 0.5),), 20 << 30)
    save_plan(Placement(Cluster((Node("A100-80GB", 1),)), (placed,)), tmp_path / "plan.yaml", "")
    file = tmp_path / "fleet.yaml"
    cases = (
        ("adbs", "mps", False),
        ("slack", "green_contexts", True),
        ("slack", "auto", True),
        ("slack", "mps", False),
    )
    for policy, sharing, elastic in cases:
        head = f"cluster: {{ gpus: 1, gpu_type: A100-80GB, sm_sharing: {sharing} }}\n"
        file.write_text(f"policy: {policy}\n{head}{model}")
        found = places_of(file, None, None, None, tmp_path / "plan.yaml", Roofline()).placed("muxserve")
        (unit,) = found.units(mode_of("muxserve"))
        assert (unit.policy, unit.models[0].profile.engines.elastic, unit.share_steps > 0) == (policy, elastic, elastic)
