"""What is made of NVML's answers, over a stand-in for the library."""

from __future__ import annotations

import pytest

from muxserve.gpu import nvml
from muxserve.gpu.faults import explain
from muxserve.gpu.nvml import (
    Gpu,
    GpuActivity,
    GpuChoiceError,
    GpuMachine,
    GpuModes,
    GpuProcess,
    choose,
    device_name,
    visible,
)
from tests.gpu_control.fake_nvml import GIB, OLDER, FakeGpu, FakeNvml

OPTIONAL = [
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetComputeRunningProcesses",
]  # fmt: skip


def uuid(number: int) -> str:
    return f"GPU-{number:08d}-0000-0000-0000-000000000000"


def fleet(*used: int, name: str = "NVIDIA H200") -> GpuMachine:
    gpus = tuple(Gpu(i, uuid(i), name, 140 * GIB, each * GIB) for i, each in enumerate(used))
    return GpuMachine(gpus, "580", "13.0")


def test_everything_that_is_known_of_a_gpu() -> None:
    library = FakeNvml(FakeGpu(pids=[7, -1]))
    found = nvml.machine(library)
    assert (found.driver_version, found.cuda_version, found.why_none) == ("580.95.05", "13.0", "")
    (gpu,) = found.gpus
    assert (gpu.index, gpu.uuid, gpu.name) == (0, "GPU-00000000-0000-0000-0000-000000000000", "NVIDIA H200")
    assert (gpu.memory_bytes, gpu.used_bytes) == (143771 << 20, GIB)
    assert gpu.activity == GpuActivity(0.4, (GpuProcess(7, 7), GpuProcess(-1, None)))
    assert (gpu.modes, gpu.fault) == (GpuModes(), "")
    assert library.sessions == 0
    assert found.by_uuid(gpu.uuid) is gpu
    assert found.by_uuid("GPU-x") is None


@pytest.mark.parametrize("error", [3, OLDER])  # 3 is NVML_ERROR_NOT_SUPPORTED
def test_a_gpu_need_not_answer_everything(error: int) -> None:
    (gpu,) = nvml.machine(FakeNvml(FakeGpu(errors=dict.fromkeys(OPTIONAL, error)))).gpus
    assert (gpu.activity, gpu.modes, gpu.fault) == (GpuActivity(), GpuModes(), "")


@pytest.mark.parametrize(
    ("number", "words"),
    [(9, "driver is not loaded"), (12, "libnvidia-ml.so.1 is missing"), (18, "do not fit"), (77, "NVML: error 77")],
)
def test_no_driver_is_told_in_words(number: int, words: str) -> None:
    found = nvml.machine(FakeNvml(init_error=number))
    assert found.gpus == ()
    assert words in found.why_none


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    library = FakeNvml(FakeGpu(errors={"nvmlDeviceGetMemoryInfo": 15}), FakeGpu(uuid=uuid(1)))
    lost, good = nvml.machine(library).gpus
    assert "fallen off the bus" in lost.fault
    assert good.fault == ""
    assert choose(nvml.machine(library), 1) == (good,)


def test_failed_memory_is_a_fault() -> None:
    (gpu,) = nvml.machine(FakeNvml(FakeGpu(ecc=2))).gpus
    assert gpu.fault == "its memory had 2 uncorrectable errors since the driver was loaded; reset the GPU"


def test_no_gpus_and_no_library() -> None:
    assert nvml.machine(FakeNvml()).why_none == "the driver shows no GPU"


class TestChoice:
    def test_the_freest_of_one_type_in_the_order_of_their_numbers(self) -> None:
        assert [gpu.index for gpu in choose(fleet(50, 1, 70, 2), 2)] == [1, 3]

    def test_by_number_and_uuid_in_the_given_order(self) -> None:
        assert [gpu.index for gpu in choose(fleet(50, 1, 70), 2, [2, uuid(0)])] == [2, 0]

    @pytest.mark.parametrize(
        ("ids", "words"),
        [([5], "there is no GPU 5; this machine has 0"), ([0, uuid(0)], "named twice"), ([1], "divided by MIG")],
    )
    def test_what_cannot_be_had_is_named(self, ids: list[int | str], words: str) -> None:
        good, other = fleet(1, 1).gpus
        divided = Gpu(other.index, other.uuid, other.name, other.memory_bytes, modes=GpuModes(mig=True))
        with pytest.raises(GpuChoiceError, match=words) as caught:
            choose(GpuMachine((good, divided)), len(ids), ids)
        assert caught.value.key == "gpu_ids"

    def test_too_few_of_one_type(self) -> None:
        mixed = GpuMachine((*fleet(1).gpus, Gpu(1, uuid(1), "NVIDIA L40S", 45 * GIB)))
        with pytest.raises(
            GpuChoiceError, match=r"2 GPUs of one type are wanted, this machine has 1 NVIDIA H200, 1 NV"
        ):
            choose(mixed, 2)
        with pytest.raises(GpuChoiceError, match="must be of one type"):
            choose(mixed, 2, [0, 1])

    def test_forbidden_by_compute_mode(self) -> None:
        gpu = Gpu(0, uuid(0), "NVIDIA H200", GIB, modes=GpuModes(compute="prohibited"))
        with pytest.raises(GpuChoiceError, match="GPU 0 is out: its compute mode forbids"):
            choose(GpuMachine((gpu,)), 1)

    def test_none_at_all_says_why(self) -> None:
        with pytest.raises(GpuChoiceError, match="no usable GPU: no driver"):
            choose(GpuMachine(why_none="no driver"), 1)


@pytest.mark.parametrize(
    ("text", "left"), [("1,0", [0, 1]), ("2", [2]), ("GPU-00000001", [1]), ("", []), ("-1", []), ("7", [])]
)
def test_only_visible_gpus_count(text: str, left: list[int]) -> None:
    found = visible(fleet(1, 1, 1), {"CUDA_VISIBLE_DEVICES": text})
    assert [gpu.index for gpu in found.gpus] == left
    assert bool(found.why_none) == (not left)


def test_all_are_visible_unless_told_otherwise() -> None:
    assert visible(fleet(1, 1), {}) == fleet(1, 1)


@pytest.mark.parametrize(
    ("name", "mebibytes", "known"),
    [
        ("NVIDIA H200", 143771, "H200-141GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H100 NVL", 95830, None),
        ("NVIDIA L40S", 46068, "L40S-48GB"),
        ("NVIDIA L20", 46068, "L20-48GB"),
        ("NVIDIA A10", 23028, "A10"),
        ("Tesla V100-SXM2-32GB", 32768, None),
        ("", 0, None),
    ],
)
def test_names_of_the_cost_model(name: str, mebibytes: int, known: str | None) -> None:
    assert device_name(Gpu(0, uuid(0), name, mebibytes << 20)) == known


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "out of memory"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "the GPU is lost"),
        ("NVRM: Xid (PCI:0000:3b:00): 94, Contained ECC error", "memory has failed"),
        ("CUDA error: uncorrectable ECC error encountered", "memory has failed"),
        ("cudaErrorMpsServerNotReady: MPS server is not ready", "the MPS server failed"),
        ("CUDA error: an illegal memory access was encountered", "a kernel failed"),
        ("ValueError: a number", ""),
    ],
)
def test_last_words_of_an_engine(line: str, words: str) -> None:
    said = explain(["loading", line, "Traceback ends"])
    assert words in said
    assert bool(said) == bool(words)
