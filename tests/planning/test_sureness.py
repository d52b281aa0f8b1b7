"""How sure a plan is: errors of its costs, and what becomes of it if steps take longer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.costs.latency import EngineShape
from muxserve.costs.roofline import Roofline
from muxserve.costs.slower import Slower
from muxserve.costs.sources import ERRORS, ERRORS_ON_BLACKWELL, CostSource, CostsUsed, Doubt, MeasuredError
from muxserve.costs.stages import costs_of_stages
from muxserve.planning.report.sureness import Sureness, newly_short
from tests.costs.models import SEVEN_B

ROOT = Path(__file__).resolve().parents[2]
MEASURED = MeasuredError(0.1, 0.3, "runs")
A100 = EngineShape("A100", dtype="float16")
FLEET = """\
cluster: { gpus: 4, gpu_type: a100 }
models: [{ name: a, architecture: llama-7b, rate: 6, slo: { ttft_ms: 500, tpot_ms: 40 } }]
"""


def test_slower_steps_take_a_factor_longer_and_ask_for_the_same() -> None:
    costs, slower = Roofline().engine(SEVEN_B, A100), Slower(Roofline(), 1.5).engine(SEVEN_B, A100)
    assert slower.prefill(512, 512 * 256, 1) == pytest.approx(1.5 * costs.prefill(512, 512 * 256, 1))
    assert slower.decode(8, 9000).seconds(9000) == pytest.approx(1.5 * costs.decode(8, 9000).seconds(9000))
    assert slower.decode_load(8, 9000) == costs.decode_load(8, 9000)


def test_stages_are_slower_by_as_much() -> None:
    (first, _), (slower, _) = (costs_of_stages((16, 16), each, SEVEN_B, A100) for each in (Roofline(), _SLOWER))
    assert slower.prefill(512, 0, 1) == pytest.approx(1.5 * first.prefill(512, 0, 1))


_SLOWER = Slower(Roofline(), 1.5)


@pytest.mark.parametrize(
    ("on", "of", "errors"), [("Hopper", "all", ERRORS), ("B200-180GB", "vllm", ERRORS_ON_BLACKWELL)]
)
def test_the_errors_are_those_of_the_benchmark(on: str, of: str, errors: dict[str, MeasuredError]) -> None:
    rows = json.loads((ROOT / "benchmarks/results/costs_runs.json").read_text())["rows"]
    names = {"measured": "kernels", "roofline": "roofline"}
    for kind, error in errors.items():
        wanted = (on, of, "TPOT", names[kind])
        (row,) = (r for r in rows if (r["on"], r["of"], r["phase"], r["costs"]) == wanted)
        assert (error.median, error.p90) == (
            pytest.approx(row["median"], abs=0.005),
            pytest.approx(row["p90"], abs=0.01),
        )
        assert error.of.startswith(f"{row['cells']:,} ")


def test_the_source_with_the_largest_error_on_a_gpu_counts() -> None:
    profile, kernels, roofline = CostSource("profile", "a.json"), CostSource("measured"), CostSource("roofline")
    assert CostsUsed((("a", "A100", kernels), ("b", "L20", roofline))).doubtful == ("roofline", ERRORS["roofline"])
    assert CostsUsed((("a", "A100", kernels), ("b", "A100", profile))).doubtful == ("measured", ERRORS["measured"])
    assert CostsUsed((("a", "H100", kernels), ("b", "B200", kernels))).doubtful == (
        "measured",
        ERRORS_ON_BLACKWELL["measured"],
    )
    assert CostsUsed((("a", "A100", profile), ("b", "CPU", roofline))).doubtful is None


@pytest.mark.parametrize(
    ("slower", "bears", "words"),
    [
        (8, 0.1, "8 GPUs are enough also if steps take 10% longer than predicted"),
        (10, 0.0, "8 GPUs are enough if steps take as long as predicted; 10 are if they take 10% longer"),
        (10, 0.05, "8 GPUs are enough if steps take at most 5% longer than predicted; 10 are if they take 10% longer"),
        (None, 0.0, "8 GPUs are enough if steps take as long as predicted; none of these sizes is if they take 10% "
         "longer"),
    ],
)  # fmt: skip
def test_the_verdict_of_a_sweep_is_a_range_where_the_error_matters(
    slower: int | None, bears: float, words: str
) -> None:
    source, said = Sureness(Doubt("measured", MEASURED), needed=8, slower=slower, bears=bears).words
    assert source.startswith("no GPU of yours was measured: measured kernels were 10% off in the median")
    assert "`muxserve profile --from-fleet`" in source
    assert said == words


def test_who_would_fall_short_is_named() -> None:
    overall = SimpleNamespace(slo={"all": 0.91})
    simulated: Any = SimpleNamespace(summary=SimpleNamespace(overall=overall), throughput=None)
    assert newly_short(["a"], ["a", "b"]) == ("b",)
    (_, said) = Sureness(Doubt("roofline", ERRORS["roofline"]), simulated, ("b",)).words
    assert said == "if steps take 20% longer: 91.0% of the requests within their objectives; b would fall short"


@pytest.mark.slow
def test_plans_and_sweeps_say_how_sure_they_are(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    found = {}
    for options in ((), ("--sweep", "gpus=1..4")):
        command = ["plan", str(fleet), "--json", "--simulate", "20", "--costs", "roofline", "--no-robust", *options]
        if options:
            command.remove("--no-robust")
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        found[options] = json.loads(result.stdout)
    one, sweep = (each["sureness"]["if_steps_take_longer"] for each in found.values())
    assert one["attainment"] <= found[()]["simulated"]["attainment"]
    needed = found["--sweep", "gpus=1..4"]["gpus_needed"]
    assert sweep["gpus_needed"] >= needed
    assert (sweep["gpus_enough_up_to"] == sweep["by"]) == (sweep["gpus_needed"] == needed)
