"""What `deploy` makes of `mps` and `sm_sharing` on the machine at hand, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from muxserve.cli import deploy, validate
from muxserve.cli.deploy import DeployRefused
from muxserve.cli.output import errors
from muxserve.cluster import machine
from muxserve.config import FleetError
from muxserve.costs.roofline import Roofline
from muxserve.gpu import mps, nvml
from muxserve.gpu.findings import GREEN, PERCENTAGES, SHAPES, Fallback, Findings, ProbeFinding, place_of
from muxserve.gpu.unit import SmShares
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.specs.as_planned import unlike_planned
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.probes import lab
from muxserve.spec import SmSharing
from muxserve.spec.run_dir import RunDir
from tests.cluster.test_gpu_plan import MODELS, gpus, plan


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
        found = replace(found, gpus=tuple(replace(gpu, modes=nvml.GpuModes(compute=mode)) for gpu in found.gpus))
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


SHARED = {"a": SmShares(0.4, 0.3), "b": SmShares(0.4, 0.3)}
TURNS = {"a": SmShares(1.0, 1.0), "b": SmShares(1.0, 1.0)}
# Models so small that their steps are the host's time: beside each other they serve twice as much as in turns.
BUSY = """
  - {name: a, path: a, rate: 5, max_len: 512, max_num_seqs: 4}
  - {name: b, path: b, rate: 5, max_len: 512, max_num_seqs: 4}
"""


def planned_with(tmp_path: Path, shares: dict[str, SmShares], sharing: SmSharing, models: str) -> ResolvedUnit:
    planned = plan(tmp_path, "{gpus: 1}", models, found=gpus(1))
    assert planned.gpu is not None
    return planned.with_gpu(replace(planned.gpu, sharing=sharing, shares=shares))


@pytest.mark.parametrize(
    ("shares", "sharing", "models", "told"),
    [
        (SHARED, "off", MODELS, "was planned with shares of the SMs; here engines alternate on the whole GPU"),
        (SHARED, "mps", MODELS, ""),
        (TURNS, "off", BUSY, ""),
    ],
)
def test_a_plan_with_shares_is_warned_about_where_it_holds_in_turns(
    tmp_path: Path, shares: dict[str, SmShares], sharing: SmSharing, models: str, told: str
) -> None:
    planned = planned_with(tmp_path, shares, sharing, models)
    with errors.capture() as printed:
        deploy._check_as_planned([planned], Path("plan.yaml"), Roofline())
    words = " ".join(printed.get().split())
    assert told in words
    assert bool(told) == bool(words)


def test_a_plan_with_shares_is_refused_where_it_does_not_hold_in_turns(tmp_path: Path) -> None:
    planned = planned_with(tmp_path, SHARED, "off", BUSY)
    why = "plan.yaml does not hold on these GPUs: by the estimate a and b would not be served .* `cluster.mps: off`"
    with pytest.raises(DeployRefused, match=why) as refused:
        deploy._check_as_planned([planned], Path("plan.yaml"), Roofline())
    assert refused.value.code == ExitCode.NOT_DONE


def test_shares_that_were_to_follow_the_load_are_warned_about_where_they_stay(tmp_path: Path) -> None:
    planned = plan(tmp_path, "{gpus: 1, sm_sharing: green_contexts}", found=gpus(1))
    assert planned.gpu is not None
    found = unlike_planned(planned.with_gpu(replace(planned.gpu, sharing="mps")), Roofline())
    assert found is not None
    assert "that follow the load; here engines keep theirs" in found.words
    assert found.short == ()


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
        DeployRefused, match=r"GPU 0 lets only one process compute \(exclusive_process\), and MPS cannot"
    ):
        sharing(tmp_path, run_dir, monkeypatch, why_not="broken", mode="exclusive_process")


def test_somebody_elses_server_is_mentioned(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "probe", lambda *_: "")
    monkeypatch.setattr(mps, "foreign", lambda **_: "another MPS server runs here (pid 3)")
    with errors.capture() as told:
        deploy._with_sharing(plan(tmp_path, "{gpus: 1}"), run_dir)
    assert "another MPS server runs here (pid 3); engines of this fleet alternate with its clients" in told.get()


@pytest.mark.parametrize(("green", "sharing"), [("ok", "green_contexts"), ("failed", "off")])
def test_percentages_with_which_a_model_comes_out_wrong_are_not_used(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, green: Literal["ok", "failed"], sharing: str
) -> None:
    known = Findings(place_of(nvml.GpuMachine(), {}), "today", (ProbeFinding(GREEN, green, ""),))
    monkeypatch.setattr(mps, "probe", lambda *_: "")
    monkeypatch.setattr(mps, "foreign", lambda **_: "")
    monkeypatch.setattr(machine, "findings", lambda *_: known)
    monkeypatch.setattr(deploy, "findings", lambda: known)
    asked: list[list[str]] = []

    def run(of: lab.Lab, probes: Sequence[lab.Probe], seconds: float) -> list[ProbeFinding]:
        asked.append([each.name for each in probes])
        return [ProbeFinding(SHAPES, "failed", "a model comes out wrong with 70 %", 1.0, ("no_percentages",))]

    monkeypatch.setattr(lab, "run", run)
    made = plan(tmp_path, "{gpus: 1, sm_sharing: mps}", found=gpus(1))
    with errors.capture() as told:
        used = deploy._with_sharing(made, run_dir, probe=True)
    assert asked == [[SHAPES]]
    assert used.gpu is not None
    assert used.gpu.sharing == sharing
    words = "engines have green contexts" if green == "ok" else "engines alternate"
    assert f"a model comes out wrong with 70 %; {words}" in " ".join(told.get().split())


def test_engines_that_nothing_limits_share_by_mps_whatever_percentages_do(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ProbeFinding(PERCENTAGES, "failed", "", 1.0, ("no_percentages",))
    monkeypatch.setattr(mps, "probe", lambda *_: "")
    monkeypatch.setattr(mps, "foreign", lambda **_: "")
    known = Findings(place_of(nvml.GpuMachine(), {}), "today", (wrong,))
    monkeypatch.setattr(machine, "findings", lambda *_: known)
    monkeypatch.setattr(lab, "run", lambda *_: pytest.fail("there is no percentage to try"))
    models = "".join(f"\n  - {{name: {name}, path: {name}, engines: one}}" for name in "ab")
    made = plan(tmp_path, "{gpus: 1}", models, found=gpus(1), top="policy: free\n")
    with errors.capture() as told:
        used = deploy._with_sharing(made, run_dir, probe=True)
    assert used.gpu is not None
    assert used.gpu.sharing == "mps"
    assert "side by side under MPS, without percentages" in used.gpu.describe()[0]
    assert "answered wrongly" not in told.get()


class TestValidate:
    """Which sharing of GPUs `validate` shows: the one that `deploy` takes by the probes that were made before."""

    @pytest.mark.parametrize(("green", "sharing"), [("ok", "green_contexts"), ("failed", "off")])
    def test_it_shows_what_probes_have_found(
        self, tmp_path: Path, green: Literal["ok", "failed"], sharing: SmSharing
    ) -> None:
        fallbacks: tuple[Fallback, ...] = () if green == "ok" else ("no_green_contexts",)
        known = Findings(place_of(nvml.GpuMachine(), {}), "today", (ProbeFinding(GREEN, green, "", 1.0, fallbacks),))
        made = plan(tmp_path, "{gpus: 1}", found=gpus(1))
        (used,), notes = validate._as_probed(made.fleet, [made], known)
        assert made.gpu is not None
        assert used.gpu is not None
        assert (made.gpu.sharing, used.gpu.sharing) == ("mps", sharing)
        assert notes == ["as the probes have found: engines have no green contexts"] * (green == "failed")

    def test_its_pools_are_what_graphs_for_shares_that_follow_the_load_leave(self, tmp_path: Path) -> None:
        known = Findings(place_of(nvml.GpuMachine(), {}), "today", (ProbeFinding(GREEN, "ok", ""),))
        made = plan(tmp_path, "{gpus: 1}", found=gpus(1), top="policy: slack\n")
        (used,), _ = validate._as_probed(made.fleet, [made], known)
        assert used.gpu is not None
        assert used.gpu.rules.graph_sets > 1
        assert used.unit.pool_bytes < made.unit.pool_bytes
        assert used.unit.pool_bytes <= used.gpu.budgets(used.demands)[0].pool_bytes

    def test_gpus_that_cannot_serve_are_refused(self, tmp_path: Path) -> None:
        made = plan(tmp_path, "{gpus: 1}", found=gpus(1))
        broken = ProbeFinding("attention", "failed", "differs by 3", 1.0, ("refuse",))
        known = Findings(place_of(nvml.GpuMachine(), {}), "today", (broken,))
        with pytest.raises(FleetError, match=r"these GPUs cannot serve, by the probes of today: .*differs by 3"):
            validate._as_probed(made.fleet, [made], known)

    def test_without_probes_it_says_who_makes_them(self, tmp_path: Path) -> None:
        made = plan(tmp_path, "{gpus: 1}", found=gpus(1))
        plans, (note,) = validate._as_probed(made.fleet, [made], None)
        assert plans == [made]
        assert note.startswith("these GPUs have not been probed: `deploy` does it first")
