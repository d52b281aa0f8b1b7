"""What probes found is kept for the machine, driver and packages that it is about, and changes what is deployed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from muxserve.cluster import gpu_host, machine
from muxserve.gpu import mps
from muxserve.gpu.findings import (
    FALLBACK_WORDS,
    GRAPHS,
    GREEN,
    PERCENTAGES,
    Fallback,
    Findings,
    ProbeFinding,
    place_of,
    remember,
    remembered,
    report,
)
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.gpu.sharing import PERCENTAGES_NOTE, SharingError
from muxserve.gpu.unit import GpuUnit, SmShares
from muxserve.spec import SmSharing
from placement.memory import MemoryRules

GPUS = (Gpu(0, "GPU-a", "NVIDIA H200"), Gpu(1, "GPU-b", "NVIDIA H200"))
FOUND = GpuMachine(GPUS, "580.95.05", "13.0")
PACKAGES = {"torch": "2.13.0", "vllm": "0.32.0"}


def findings(*fallbacks: Fallback) -> Findings:
    place = place_of(FOUND, PACKAGES)
    tried = tuple(ProbeFinding(f"probe {each}", "failed", "it says 3.5", 2.0, (each,)) for each in fallbacks)
    return Findings(place, "2026-01-02 03:04", (*tried, ProbeFinding("another", "ok", "fine")))


def test_what_was_found_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "gpu.json"
    assert remembered(place_of(FOUND, PACKAGES), file) is None
    remember(findings("nvls_off"), file)
    found = remembered(place_of(FOUND, PACKAGES), file)
    assert found is not None
    assert found.fallbacks == {"nvls_off"}
    file.write_text("{}")
    assert remembered(place_of(FOUND, PACKAGES), file) is None


@pytest.mark.parametrize(
    ("other", "packages"),
    [
        (replace(FOUND, driver_version="590.1"), PACKAGES),
        (FOUND, {**PACKAGES, "vllm": "0.33.0"}),
        (replace(FOUND, gpus=(*GPUS, Gpu(2, "GPU-c", "NVIDIA H200"))), PACKAGES),
    ],
)
def test_another_driver_package_or_gpu_has_to_be_tried_anew(
    tmp_path: Path, other: GpuMachine, packages: dict[str, str]
) -> None:
    remember(findings("nvls_off"), tmp_path / "gpu.json")
    assert remembered(place_of(other, packages), tmp_path / "gpu.json") is None
    hidden = place_of(replace(FOUND, gpus=GPUS[:1]), PACKAGES)
    assert remembered(hidden, tmp_path / "gpu.json") is not None


def test_the_report_says_what_is_done_instead() -> None:
    rows = report(findings("ipc_legacy"))
    assert rows[0] == ("failed", "probe ipc_legacy", f"it says 3.5 (2 s)\n-> {FALLBACK_WORDS['ipc_legacy']}")


def unit(**more: object) -> GpuUnit:
    shares = {"m": SmShares(0.5, 0.5)}
    return replace(GpuUnit(GPUS, "mps", shares, (), MemoryRules.served(0.9, engines=2)), **more)  # type: ignore[arg-type]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "probe", lambda gpus, base: "")
    monkeypatch.setattr(mps, "foreign", lambda ours=None: "")


@pytest.mark.usefixtures("works")
class TestDeploy:
    def tried(self, monkeypatch: pytest.MonkeyPatch, found: Findings | None, of: GpuUnit) -> tuple[GpuUnit, list[str]]:
        monkeypatch.setattr(machine, "findings", lambda whole: found)
        return gpu_host.tried(of, "auto", Path("/x"), FOUND)

    def test_what_nobody_has_tried_is_served_with_a_hint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, notes = self.tried(monkeypatch, None, unit())
        assert made == unit()
        assert "`muxserve doctor --gpu`" in notes[0]

    def test_where_nobody_has_asked_for_a_way_and_none_was_tried_engines_take_turns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, notes = self.tried(monkeypatch, None, unit(named=False))
        assert made.sharing == "off"
        assert len(notes) == 1
        assert "until then engines alternate" in notes[0]
        monkeypatch.setattr(machine, "findings", lambda whole: None)
        made, notes = gpu_host.tried(unit(named=False), "on", Path("/x"), FOUND)
        assert (made.sharing, notes[-1]) == ("mps", PERCENTAGES_NOTE), "who wants MPS gets it"

    @pytest.mark.parametrize(
        ("asked", "green", "percentages", "ranks", "served"),
        [
            ("", True, True, 1, "green_contexts"),
            ("", True, False, 1, "green_contexts"),
            ("", False, True, 1, "off"),
            ("", None, None, 1, "off"),
            ("", True, True, 2, "off"),
            ("mps", True, True, 1, "mps"),
            ("mps", True, False, 1, "green_contexts"),
            ("mps", True, False, 2, "off"),
            ("mps", False, False, 1, "off"),
            ("mps", False, None, 1, "mps"),
            ("green_contexts", True, True, 1, "green_contexts"),
            ("green_contexts", False, True, 1, "mps"),
            ("green_contexts", False, False, 1, "off"),
            ("green_contexts", None, None, 1, "green_contexts"),
            ("green_contexts", False, None, 1, "off"),
        ],
    )
    def test_a_way_of_sharing_that_was_found_to_answer_wrongly_is_not_taken(
        self,
        monkeypatch: pytest.MonkeyPatch,
        asked: SmSharing | Literal[""],
        green: bool | None,
        percentages: bool | None,
        ranks: int,
        served: SmSharing,
    ) -> None:
        verdicts: dict[bool | None, Literal["ok", "failed", "not tried"]] = {
            True: "ok",
            False: "failed",
            None: "not tried",
        }
        probes = (ProbeFinding(GREEN, verdicts[green], "x"), ProbeFinding(PERCENTAGES, verdicts[percentages], "x"))
        base = unit(gpus=GPUS[:ranks], sharing=asked or "mps", named=bool(asked), green_sets=4)
        made, notes = self.tried(monkeypatch, msgspec.structs.replace(findings(), findings=probes), base)
        assert made.sharing == served
        assert (PERCENTAGES_NOTE in notes) == (served == "mps")
        if served == "green_contexts" != base.sharing:
            assert made.rules.graph_sets == 4, "graphs of each set of SMs are counted"

    def test_fallbacks_reach_the_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = findings("ipc_legacy", "keepers_in_mps", "nvls_off", "restart_mps")
        made, notes = self.tried(monkeypatch, found, unit())
        told = made.deployed
        assert (told.ipc, told.keepers_in_mps, told.nvls, told.restart_mps) == (
            "legacy", True, False, True,
        )  # fmt: skip
        assert len([note for note in notes if note != PERCENTAGES_NOTE]) == 4
        assert f"as the probes have found: {FALLBACK_WORDS['nvls_off']}" in notes

    @pytest.mark.parametrize(
        ("fallbacks", "exported", "contexts"),
        [((), True, 2), (("nvls_off",), True, 2), (("ipc_legacy",), False, 3), (("keepers_in_mps",), False, 3)],
    )
    def test_holders_stay_where_memory_ends_with_them(
        self, monkeypatch: pytest.MonkeyPatch, fallbacks: tuple[Fallback, ...], exported: bool, contexts: int
    ) -> None:
        """Each then has a context, which the budget counts."""
        made, _ = self.tried(monkeypatch, findings(*fallbacks), unit())
        assert made.deployed.exports_weights is exported
        assert made._memory_rules.processes == contexts

    def test_graphs_hold_attention_where_that_was_found_to_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base = findings()
        worked = msgspec.structs.replace(base, findings=(ProbeFinding(GRAPHS, "ok", "equal"),))
        legacy = msgspec.structs.replace(base, findings=(*worked.findings, *findings("ipc_legacy").findings))
        failed = msgspec.structs.replace(base, findings=(ProbeFinding(GRAPHS, "failed", "3.5", 1.0, ("piecewise",)),))
        found = [
            self.tried(monkeypatch, each, unit())[0].deployed.full_graphs for each in (worked, legacy, failed, base)
        ]
        assert found == [True, None, False, None]

    def test_without_mps_engines_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, notes = self.tried(monkeypatch, findings("mps_off"), unit())
        assert (made.sharing, made.one_at_a_time) == ("off", True)
        assert any("a probe has found that it does not work" in note for note in notes)

    def test_ranks_that_cannot_share_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, _ = self.tried(monkeypatch, findings("fcfs"), unit())
        assert (made.sharing, made.one_at_a_time) == ("mps", True)

    def test_what_cannot_serve_is_refused_with_its_figures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            SharingError, match=r"cannot serve, by the probes of 2026-01-02 03:04: probe refuse: it says 3\.5"
        ):
            self.tried(monkeypatch, findings("refuse"), unit())
