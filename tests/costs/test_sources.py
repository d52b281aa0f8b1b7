"""`--costs`: which latency model it names, and which part of it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.costs.kernels import KernelModel, package_version
from muxserve.costs.latency import CostError, EngineShape
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel, save_profile
from muxserve.costs.roofline import Roofline
from muxserve.costs.sources import ERRORS, CostSource, CostsUsed, chosen_costs, profile_of, source_of
from tests.costs.models import SEVEN_B, llama

A100 = EngineShape("A100-80GB", dtype="float16")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of LLaMA-7B on one A100, beside the fleet's file."""
    cells = [PrefillCell(1, tokens, 0, tokens * 1e-4) for tokens in (64, 512)]
    steps = [DecodeCell(batch, context, 0.02) for batch in (1, 8) for context in (64, 512)]
    where = {"device": "A100-80GB", "dtype": "float16", "tp": 1, "share": 1.0}
    engine = EngineProfile(model="seven", shape=ProfiledModel.of(SEVEN_B), prefill=cells, decode=steps, **where)
    file = profile_of(tmp_path / "fleet.yaml")
    save_profile(Profile(engines=[engine]), file)
    return file


def test_the_roofline_is_the_roofline(tmp_path: Path) -> None:
    assert isinstance(chosen_costs("roofline", tmp_path / "fleet.yaml"), Roofline)


def test_auto_takes_the_profile_beside_the_fleet_for_what_it_has(profile: Path, tmp_path: Path) -> None:
    latency = chosen_costs("auto", tmp_path / "fleet.yaml")
    assert isinstance(latency, ProfileModel)
    assert source_of(latency, SEVEN_B, A100) == CostSource("profile", str(profile))
    other = source_of(latency, llama(layers=40), EngineShape("L20"))
    assert other == CostSource("roofline", why="there are no kernel tables of L20-48GB")
    assert source_of(latency, SEVEN_B, EngineShape("CPU", dtype="float32")) == CostSource("roofline")


def test_auto_without_a_profile_asks_kernel_tables_first(tmp_path: Path) -> None:
    assert isinstance(chosen_costs("auto", tmp_path / "fleet.yaml"), KernelModel)


@pytest.mark.skipif(bool(package_version()), reason="the tables are installed")
def test_kernels_that_are_asked_for_and_not_installed_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"pip install 'muxserve\[plan\]', or give --costs roofline"):
        chosen_costs("measured", tmp_path / "fleet.yaml")


def test_a_word_that_is_no_file_is_answered_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"--costs: rofline: .*it takes auto, roofline, measured"):
        chosen_costs("rofline", tmp_path / "fleet.yaml")


def test_a_plan_names_each_source_once() -> None:
    roofline, file = CostSource("roofline", why="nothing was measured"), CostSource("profile", "a.json")
    used = CostsUsed((("a", "L20", roofline), ("b", "A100", file), ("c", "L20", roofline)))
    assert str(used) == "roofline, since nothing was measured for a, c; profile (a.json) for b"
    assert str(CostsUsed(used.engines[1:2])) == "profile (a.json)"
    told = {"model": "a", "device": "L20", "kind": "roofline", "why": "nothing was measured"}
    error = ERRORS["roofline"]
    assert used.as_list()[0] == told | {"error_median": error.median, "error_p90": error.p90}
    assert [used.of(model, on) for model, on, _ in used.engines[:2]] == ["roofline, ±20%", "profile"]
