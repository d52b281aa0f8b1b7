"""Plans by costs that a fleet has corrected while it served."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.correction import PhaseCorrection, corrected, predicted_cells
from muxserve.costs.latency import EngineCosts, EngineShape
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel, save_profile
from muxserve.costs.roofline import Roofline
from muxserve.costs.steps import StepSums
from muxserve.planning.demand.known_models import planned_architecture

# So high a rate that what is served is decided by what steps cost.
FLEET = """\
cluster: { gpus: 1, gpu_type: a100 }
models:
  - name: small
    architecture: llama-7b
    rate: 30
    dtype: float16
    workload: { prompt_tokens: 161, output_tokens: 338 }
"""
WRONG = 1.5


def wrong_profile(architecture: ModelArchitecture) -> list[EngineProfile]:
    """Every step 1.5 times as long as it is."""
    engines = []
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        shape = EngineShape("A100-80GB", 1, share, "float16")
        prefill, decode = predicted_cells(Roofline().engine(architecture, shape), 2048, 256, 2048)
        prefill = [PrefillCell(*cell.place, WRONG * cell.seconds) for cell in prefill]
        decode = [DecodeCell(*cell.place, WRONG * cell.seconds) for cell in decode]
        of = ProfiledModel.of(architecture)
        engines.append(EngineProfile("small", of, shape.device, shape.dtype, 1, share, prefill, decode))
    return engines


def served(engines: list[EngineProfile], costs: EngineCosts) -> tuple[PhaseCorrection, PhaseCorrection]:
    """What is learnt of an engine on the whole device that takes `costs`, under a load of its own."""
    draw = random.Random(4)
    prefill, decode = PhaseCorrection("prefill", engines), PhaseCorrection("decode", engines)
    for _ in range(400):
        tokens, batch = draw.randint(20, 600), draw.randint(1, 60)
        pairs, context = tokens * (tokens + 1) // 2, batch * draw.randint(100, 500)
        took = costs.prefill(tokens, pairs, 1) * draw.gauss(1.0, 0.05)
        prefill.observe(StepSums(1, took, tokens, pairs, 1, 0), 1.0)
        took = costs.decode(batch, context).seconds(context) * draw.gauss(1.0, 0.05)
        decode.observe(StepSums(1, took, batch, 0, batch, context), 1.0)
    return prefill, decode


def plan(fleet: Path, *options: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(fleet), "--json", "--simulate", "0", *map(str, options)])
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_a_profile_that_is_one_and_a_half_times_wrong_plans_right_when_corrected(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    architecture = planned_architecture("llama-7b", tmp_path)
    wrong = wrong_profile(architecture)
    true = Roofline().engine(architecture, EngineShape("A100-80GB", 1, 1.0, "float16"))
    prefill, decode = served(wrong, true)
    right = [corrected(engine, prefill.correction, decode.correction) for engine in wrong]
    throughput = {}
    for name, engines in {"wrong": wrong, "corrected": right}.items():
        save_profile(Profile(engines=engines), tmp_path / name)
        throughput[name] = plan(fleet, "--costs", tmp_path / name)["totals"]["throughput"]
    truth = plan(fleet, "--costs", "roofline")["totals"]["throughput"]
    assert throughput["wrong"] < 0.85 * truth
    assert throughput["corrected"] == pytest.approx(truth, rel=0.05)
