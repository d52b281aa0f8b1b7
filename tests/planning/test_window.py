"""A plan is simulated for long enough to show what it serves, and what was not measured is no figure."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.metrics.summary import summarise
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.planning.place.contest import EQUAL, Rival, kept
from muxserve.planning.place.prediction import Prediction, Trial, predict
from muxserve.planning.place.window import (
    ANSWERS,
    RateWindow,
    longer_seconds,
    longest_of,
    longest_tokens,
    usual_seconds,
)
from muxserve.planning.place.workloads import loads_of
from muxserve.planning.report.document import _too_short, warnings_of
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.objective import Objective
from placement.planner import ClusterPlan, PlanOptions, plan_cluster

H100 = "H100-80GB"
FLEET = """\
cluster: {{ gpus: 1, gpu_type: H100 }}
models:
  - {{ name: m, architecture: llama-3.1-8b, rate: {rate}{more} }}
"""


def plan_for(rate: float, output: int = 256) -> ClusterPlan:
    demand = Demand(
        "m", planned_architecture("llama-3.1-8b", Path()), rate=rate, output_tokens=output, dtype="bfloat16"
    )
    memory = {H100: device(H100).memory_bytes}
    options = PlanOptions(objective=Objective("throughput"))
    return plan_cluster([demand], Cluster((Node(H100, 1),)), Roofline(), memory, options)


def planned(file: Path, *arguments: str) -> Mapping[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(file), "--json", "--seconds", "0", *arguments])
    assert result.exit_code == 0, result.output
    data: Mapping[str, Any] = json.loads(result.stdout)
    return data


@pytest.mark.parametrize("rate", [0.001, 0.1, 1.0, 30.0, 200.0])
def test_at_any_rate_it_holds_several_of_the_longest_answers_and_some_requests(rate: float) -> None:
    plan = plan_for(rate)
    # One in a hundred log-normal lengths with a mean of 256 and a sigma of 0.8 is longer than 1,196.
    tokens = longest_tokens(loads_of(plan.demands, {"m": 8192}, 300.0)["m"].output)
    assert tokens == pytest.approx(1196, rel=0.2)
    longest = tokens * (plan.estimates[0].models[0].level.tpot or 0.0)
    seconds = longer_seconds(usual_seconds(plan), longest, rate)
    assert seconds >= ANSWERS * longest
    assert seconds * rate >= 199.999


def test_what_would_take_too_many_requests_is_not_simulated_that_long() -> None:
    assert longer_seconds(0.1, 100.0, 20_000.0) == pytest.approx(2.5)
    assert longer_seconds(20.0, 100.0, 20_000.0) == 20.0, "as long as was asked for in any case"
    assert longer_seconds(20.0, 100.0, 0.0) == 20.0


def test_no_answer_and_no_time_measure_nothing() -> None:
    assert not RateWindow(100.0, 0, None).is_long_enough
    assert not RateWindow(0.0, 0, 0.0).is_long_enough
    assert RateWindow(0.0, 0, 0.0).rate == 0.0
    assert RateWindow(100.0, 0, 100.0 / ANSWERS).is_long_enough
    assert longest_of([None, 8.0, 2.0]) == 8.0
    assert longest_of([None]) is None


def test_only_models_with_long_answers_are_simulated_for_longer(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    model = "architecture: llama-3.1-8b, engines: split, slo: { ttft_ms: 2000, tpot_ms: 100 }"
    file.write_text(
        "cluster: { gpus: 2, gpu_type: H100 }\nmodels:\n"
        f"  - {{ name: brief, rate: 30, {model}, workload: {{ prompt_tokens: 100, output_tokens: 10 }} }}\n"
        f"  - {{ name: wordy, rate: 0.5, {model}, workload: {{ prompt_tokens: 100, output_tokens: 1500 }} }}\n"
    )
    data = planned(file, "--no-robust")
    seconds = data["simulated"]["seconds"]
    found = {m["model"]: m["simulated"] for unit in data["units"] for m in unit["models"]}
    assert len(data["units"]) == 2
    assert found["brief"]["throughput_seconds"] == seconds
    assert found["wordy"]["throughput_seconds"] > 2 * seconds
    assert found["wordy"]["throughput"] == pytest.approx(0.5, rel=0.4)
    assert found["brief"]["requests"] == pytest.approx(30 * seconds, rel=0.1)
    assert found["wordy"]["requests"] == pytest.approx(0.5 * seconds, rel=0.5), "of the same seconds as the other's"


@pytest.mark.slow
def test_a_fleet_that_is_asked_for_too_much_is_told_what_it_serves(tmp_path: Path) -> None:
    """At a rate of 70 on a GPU that serves about 30."""
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(rate=70, more=""))
    data = planned(file)
    assert data["simulated"]["throughput"] == pytest.approx(31.0, abs=1.5)
    assert data["simulated"]["ttft_mean"] is None, "the queue grows"
    first, second = data["candidates"][:2]
    assert first["score"] == pytest.approx(data["simulated"]["throughput"])
    assert 0.9 * first["score"] < second["score"] <= first["score"] * (1 + EQUAL)
    assert second["latency_mean"] is None


def test_a_simulation_that_is_too_short_prints_no_figure_and_says_what_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(rate=20, more=""))
    data = planned(file, "--simulate", "2")
    (unit,) = data["units"]
    assert data["simulated"]["throughput"] is None
    assert unit["models"][0]["simulated"]["throughput"] is None
    assert data["candidates"] == []
    assert any("--simulate" in warning and "were not measured" in warning for warning in data["warnings"])
    arguments = ["plan", str(file), "--seconds", "0", "--simulate", "2"]
    shown = CliRunner().invoke(app, [*arguments, "--html", str(tmp_path / "page.html")]).output
    assert "s of virtual time\n" in shown
    assert "runner-up" not in shown
    assert "were not measured" in (tmp_path / "page.html").read_text()


def test_a_model_that_had_no_answer_is_named() -> None:
    answered = RateWindow(300.0, 300, 20.0)
    silent = RateWindow(300.0, 0, None)
    assert _too_short(Prediction(summarise([]), 300.0, {"busy": answered, "placeless": silent})) == (
        "in the simulated 300 s no request of placeless was answered"
    )
    assert _too_short(Prediction(summarise([]), 300.0, {"a": silent, "b": silent})) == (
        "in the simulated 300 s no request was answered, so nothing was measured"
    )


def test_a_model_that_hardly_anybody_asks_has_no_rate_in_simulation() -> None:
    few = Prediction(summarise([]), 300.0, {"busy": RateWindow(300.0, 300, 20.0), "idle": RateWindow(300.0, 3, 20.0)})
    assert few.sustained("busy") == 2.0
    assert few.sustained("idle") is None
    assert few.throughput == pytest.approx(303 / 150)


def test_a_run_without_requests_has_no_parts_of_them() -> None:
    nothing = Prediction(summarise([]), 300.0, {"m": RateWindow(300.0, 0, None)})
    for objective in ("throughput", "slo"):
        plan = replace(plan_for(1.0), objective=Objective(objective))
        assert kept(plan, nothing) is None
        assert "requests/s" not in Rival("shared", replace(plan, objective=Objective("throughput")), nothing).words
        assert any("nothing was measured" in warning for warning in warnings_of(plan, nothing))


def test_a_sweep_without_objectives_has_no_part_within_them(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.format(rate=0.5, more=", workload: { prompt_tokens: 60, output_tokens: 20 }"))
    data = planned(file, "--sweep", "gpus=1..1", "--simulate", "100")
    assert data["sweep"][0]["simulated_attainment"] is None


def test_a_queue_that_grows_is_not_played_to_its_end() -> None:
    plan = plan_for(1500.0, output=40)
    found = predict(plan, Roofline(), Trial(4.0))
    figures = found.summary.models["m"]
    assert figures.unfinished > 0
    assert found.unbounded("m")
    assert figures.completed + figures.unfinished == figures.requests
