"""Arrangements that are chosen when a fleet is deployed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.config import Fleet, load_fleet
from muxserve.gpu.nvml import Gpu
from muxserve.planning.auto_phases import choose_at_deploy, with_choices
from muxserve.planning.comparison import ChosenPhases, Comparison
from placement import Machine
from tests.planning.phases_support import COSTS
from tests.support.checkpoint_files import write_files

# Wide, so that its steps take long and few are simulated.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
L20 = Gpu(0, "GPU-0", "NVIDIA L20", memory_bytes=46068 << 20)


def fleet_of(tmp_path: Path, first: str, second: str = "", width: int = 2048) -> Fleet:
    file = tmp_path / "fleet.yaml"
    (tmp_path / "wide").mkdir(exist_ok=True)
    (tmp_path / "wide/config.json").write_text(
        json.dumps(CONFIG | {"hidden_size": width, "intermediate_size": 4 * width})
    )
    write_files(tmp_path / "wide")
    slo = "slo: { ttft_ms: 1000, tpot_ms: 100 }"
    load = "workload: { prompt_tokens: 60, output_tokens: 12 }"
    lines = [f"  - {{ name: a, path: wide, dtype: float32, rate: 4, {slo}, {load}, {first} }}"]
    lines += [f"  - {{ name: b, path: wide, dtype: float32, {second} }}"] if second else []
    file.write_text("kv_pool: { size: 64MiB }\nmodels:\n" + "\n".join(lines) + "\n")
    return load_fleet(file)


def chosen(phases: str, stages: int = 1) -> ChosenPhases:
    comparison = Comparison("a", "", 1.0, (), "multiplexed", "")
    return ChosenPhases(phases, 2, stages, 1, "", comparison)  # type: ignore[arg-type]


@pytest.mark.slow
def test_only_models_that_leave_it_open_are_chosen_for(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, "replicas: 2, max_num_seqs: 4, phases: auto", "phases: multiplexed")
    found = choose_at_deploy(fleet, Machine(1, 8 << 30), latency=COSTS)
    assert list(found) == ["a"]
    assert found["a"].replicas == 2
    assert {each.phases for each in found["a"].comparison.arrangements if each.figures} == {
        "multiplexed", "pipelined", "rolling",
    }  # fmt: skip
    assert choose_at_deploy(fleet_of(tmp_path, "replicas: 2"), Machine(1, 8 << 30)) == {}


@pytest.mark.slow
def test_gpus_of_all_units_of_a_model(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, "replicas: 2, max_num_seqs: 4, phases: auto", "replicas: 2", width=8192)
    # Two units of its own and two of the other model, if it does not share: a quarter of eight for each.
    found = choose_at_deploy(fleet, Machine(1, 8 << 30), [replace(L20, index=n) for n in range(8)], latency=COSTS)
    assert found["a"].comparison.devices == "4 L20-48GB"
    figures = found["a"].comparison.of("rolling").figures
    assert figures is not None
    assert (figures.layout.replicas, figures.layout.tp) == (2, 2)


def test_nothing_is_chosen_where_nothing_is_known_of_the_gpu(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, "phases: auto")
    assert choose_at_deploy(fleet, Machine(1, 8 << 30), [replace(L20, name="NVIDIA Unheard-of")]) == {}
    assert with_choices(fleet, {}).models[0].phases == "multiplexed"


@pytest.mark.parametrize(
    ("choice", "phases", "stages"),
    [(chosen("rolling"), "rolling", "auto"), (chosen("pipelined", 4), "pipelined", 4)],
)
def test_the_fleet_as_it_was_chosen(tmp_path: Path, choice: ChosenPhases, phases: str, stages: object) -> None:
    fleet = fleet_of(tmp_path, "replicas: 2, phases: auto", "phases: rolling, slo: { ttft_ms: 1, tpot_ms: 1 }")
    first, second = with_choices(fleet, {"a": choice}).models
    assert (first.phases, first.stages) == (phases, stages)
    assert second.phases == "rolling"
    assert fleet.models[0].phases == "auto"
