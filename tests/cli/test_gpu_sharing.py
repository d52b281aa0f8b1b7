"""What `deploy` makes of `mps` and `sm_sharing` on the machine at hand, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.cli import deploy
from muxserve.cli.deploy import DeployRefused
from muxserve.cli.output import errors
from muxserve.cluster import machine
from muxserve.gpu import mps, nvml
from muxserve.gpu.findings import Findings, place_of
from muxserve.spec import SmSharing
from muxserve.spec.run_dir import RunDir
from tests.cluster.test_gpu_plan import gpus, plan


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    made = RunDir(tmp_path_factory.mktemp("run"))
    yield made
    made.remove()


def sharing(
    tmp_path: Path,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    keys: str = ", sm_sharing: mps",
    why_not: str = "",
    mode: str = "",
) -> tuple[str, str]:
    """The way of sharing, and what the user is told."""
    asked: list[list[str]] = []

    def probe(uuids: list[str], base: Path) -> str:
        asked.append(uuids)
        return why_not

    monkeypatch.setattr(mps, "probe", probe)
    # Somebody has tried what these GPUs can do, and all worked.
    monkeypatch.setattr(machine, "findings", lambda _: Findings(place_of(nvml.GpuMachine(), {}), "today", ()))
    monkeypatch.setattr(mps, "foreign", lambda **_: "")
    found = gpus(2)
    if mode:
        found = replace(found, gpus=tuple(replace(gpu, compute_mode=mode) for gpu in found.gpus))
    with errors.capture() as told:
        made = deploy._with_sharing(plan(tmp_path, f"{{gpus: 2{keys}}}", found=found), run_dir)
    assert made.gpu is not None
    assert asked == ([] if "off" in keys else [["GPU-0", "GPU-1"]])
    return made.gpu.sharing, told.get()


def test_mps_that_works(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    how, told = sharing(tmp_path, run_dir, monkeypatch)
    assert how == "mps"
    assert "on an H200 (driver 580.159.04) such fleets answered wrongly" in " ".join(told.split())
    assert sharing(tmp_path, run_dir, monkeypatch, ", sm_sharing: green_contexts")[0] == "mps", "of several ranks"


def test_without_mps_engines_take_turns_with_a_warning(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, told = sharing(tmp_path, run_dir, monkeypatch, why_not="not installed [x]")
    assert how == "off"
    assert "without MPS: not installed [x]; engines alternate" in told


@pytest.mark.parametrize(
    ("mps", "sharing", "warned"), [("auto", "off", True), ("auto", "mps", False), ("off", "off", False)]
)
def test_a_plan_with_shares_is_warned_about_where_engines_alternate(
    tmp_path: Path, mps: str, sharing: SmSharing, warned: bool
) -> None:
    planned = plan(tmp_path, f"{{gpus: 2, mps: {mps}}}", found=gpus(2))
    assert planned.gpu is not None
    planned = planned.with_gpu(replace(planned.gpu, sharing=sharing))
    found = list(deploy._unlike_planned([planned]))
    assert len(found) == warned
    assert all("was planned with shares of the SMs for its engines; here they alternate" in words for words in found)


def test_mps_off_is_not_tried_and_not_warned_about(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharing(tmp_path, run_dir, monkeypatch, ", mps: off") == ("off", "")


def test_mps_on_is_refused_where_it_does_not_work(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeployRefused, match=r"cluster\.mps is on, but MPS does not work here: broken"):
        sharing(tmp_path, run_dir, monkeypatch, ", mps: on, sm_sharing: mps", why_not="broken")


def test_an_exclusive_gpu_needs_mps(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharing(tmp_path, run_dir, monkeypatch, mode="exclusive_process")[0] == "mps"
    with pytest.raises(
        DeployRefused, match=r"GPU 0 lets one process compute only \(exclusive_process\), and MPS cannot"
    ):
        sharing(tmp_path, run_dir, monkeypatch, why_not="broken", mode="exclusive_process")


def test_somebody_elses_server_is_mentioned(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "probe", lambda *_: "")
    monkeypatch.setattr(mps, "foreign", lambda **_: "another MPS server runs here (pid 3)")
    with errors.capture() as told:
        deploy._with_sharing(plan(tmp_path, "{gpus: 1}"), run_dir)
    assert "another MPS server runs here (pid 3); engines of this fleet alternate with its clients" in told.get()
