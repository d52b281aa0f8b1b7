"""`plan --scale`, `--sweep scale=...` and `--save`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import load_fleet
from muxserve.planning.demand.demands import cluster_of
from muxserve.planning.report.what_if import parse_scales, save_fleet, with_rates

FLEET = """\
# chat and code
cluster: { gpus: 2, gpu_type: a100, network: 25Gb/s }
models:
  - { name: a, architecture: llama-7b, rate: 6, slo: { ttft_ms: 500, tpot_ms: 40 } }
  - { name: b, architecture: llama-7b }
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


def plan(*arguments: object) -> dict[str, Any]:
    command = ["plan", *map(str, arguments), "--json", "--costs", "roofline"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("scale=0.5..4", [0.5, 1, 2, 4]),
        ("scale=1..3", [1, 2, 3]),
        ("scale=1..2:0.5", [1, 1.5, 2]),
        ("scale=2..2", [2]),
        ("scale=0.1..0.3:0.1", [0.1, 0.2, 0.3]),
    ],
)
def test_scales(text: str, scales: list[float]) -> None:
    assert parse_scales(text) == pytest.approx(scales)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale=2", "is not a sweep such as scale=0.5..4"),
        ("scale=4..2", "upwards, not from 4 to 2"),
        ("scale=0..2", "a sweep goes from more than 0"),
        ("scale=1..2:0", "the step of a sweep must be more than 0"),
        ("scale=1..100:1", "more than 50 plans"),
    ],
)
def test_mistakes_in_scales(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"sweep|plans") as error:
        parse_scales(text)
    assert message in str(error.value)


def test_a_scale_is_of_all_rates(fleet: Path) -> None:
    assert plan(fleet, "--simulate", 0, "--scale", 2)["totals"]["rate"] == 14


@pytest.mark.slow
def test_a_sweep_over_rates_answers_how_far_the_devices_go(fleet: Path) -> None:
    data = plan(fleet, "--simulate", 10, "--sweep", "scale=0.5..64:21")
    met = [each["scale"] for each in data["scales"] if each["meets"] and not each["falls_short"]]
    assert [each["scale"] for each in data["scales"]] == [0.5, 21.5, 42.5, 63.5, 64]
    assert data["scale_met"] == max(met) < 64
    assert data["totals"]["rate"] == 7 * data["scale_met"]


def test_the_fleet_file_of_an_answer_has_its_gpus_and_rates(fleet: Path) -> None:
    own = load_fleet(fleet, serving=False)
    answer = cluster_of(own, 20, "h100")
    saved = fleet.with_name("saved.yaml")
    save_fleet(fleet, saved, answer, with_rates(own, 2))
    again = load_fleet(saved, serving=False)
    assert cluster_of(again) == answer
    assert [model.rate for model in again.models] == [12, 2]
    assert again.cluster.network == own.cluster.network
    assert again.models[0].slo == own.models[0].slo


def test_machines_that_differ_are_saved_as_machines(fleet: Path) -> None:
    own = load_fleet(fleet, serving=False)
    answer = cluster_of(own, nodes="2x8:H100-80GB,1x4:L20")
    save_fleet(fleet, fleet.with_name("saved.yaml"), answer, own)
    assert cluster_of(load_fleet(fleet.with_name("saved.yaml"), serving=False)) == answer


@pytest.mark.parametrize("own", ["{ gpus: 8, gpu_type: a100 }", "{ gpu_ids: [0, 1], gpu_type: a100 }", "auto"])
@pytest.mark.parametrize("nodes", ["1x16:H100-80GB", "1x2:L20", "2x4:L20"])
def test_whatever_gpus_the_file_had_those_of_the_answer_are_saved(fleet: Path, own: str, nodes: str) -> None:
    fleet.write_text(FLEET.replace("{ gpus: 2, gpu_type: a100, network: 25Gb/s }", own))
    declared = load_fleet(fleet, serving=False)
    answer = cluster_of(declared, nodes=nodes)
    save_fleet(fleet, fleet.with_name("saved.yaml"), answer, declared)
    assert cluster_of(load_fleet(fleet.with_name("saved.yaml"), serving=False)) == answer


def test_a_rate_however_small_stays_above_zero(fleet: Path) -> None:
    saved = fleet.with_name("saved.yaml")
    save_fleet(fleet, saved, None, with_rates(load_fleet(fleet, serving=False), 1e-7))
    assert [model.rate for model in load_fleet(saved, serving=False).models] == [
        pytest.approx(6e-7),
        pytest.approx(1e-7),
    ]


def test_an_answer_is_saved_beside_its_fleet_file(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    result = CliRunner().invoke(app, ["plan", str(fleet), "--simulate", "0", "--save", str(tmp_path / "other/f.yaml")])
    assert result.exit_code == 2
    assert "--save: " in result.stderr
    assert "must be in the directory of fleet.yaml" in result.stderr


def test_a_fleet_of_several_files_is_saved_as_one(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("include: one.yaml\nmodel_defaults: {rate: 3}\n")
    (tmp_path / "one.yaml").write_text(
        "models:\n  - {name: a, architecture: llama-7b}\n  - {name: b, architecture: llama-7b, rate: 1}\n"
    )
    own = load_fleet(tmp_path / "fleet.yaml", serving=False)
    save_fleet(tmp_path / "fleet.yaml", tmp_path / "saved.yaml", None, with_rates(own, 1 / 3))
    (tmp_path / "one.yaml").unlink()
    again = load_fleet(tmp_path / "saved.yaml", serving=False)
    assert [model.rate for model in again.models] == [pytest.approx(1, abs=1e-5), pytest.approx(1 / 3, abs=1e-5)]
