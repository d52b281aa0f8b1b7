"""What devices can do at most, by their makers' words. How much of it is reached is in `costs.calibration`.

Tensor-core figures are dense (without sparsity); `float32` is without TF32, which PyTorch does not use unless told to.
Memory is what `nvidia-smi` shows with ECC on, which is less than what the data sheets say for GDDR6.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from muxserve.costs.latency import CostError

_T, _G = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the whole CPU of one machine.

    `flops` are operations per second by dtype, `bandwidth` is bytes per second of its memory, `memory_bytes` what it
    has of it. `cores` counts streaming multiprocessors (cores of a CPU; 0: unknown). `link_bandwidth` is bytes per
    second that one device sends to its peers, in one direction, over a `link` of that kind (`costs.calibration.LINKS`).
    """

    name: str
    kind: Literal["gpu", "cpu"]
    flops: Mapping[str, float]
    bandwidth: float
    memory_bytes: int
    cores: int
    link_bandwidth: float
    link: str

    def peak(self, dtype: str) -> float:
        """Operations per second in `dtype`.

        Raises:
            CostError: the device has no figure for it.
        """
        try:
            return self.flops[dtype]
        except KeyError:
            known = ", ".join(sorted(self.flops))
            raise CostError(f"no speed of {self.name} in {dtype} is known, only in {known}") from None


def _gpu(
    name: str,
    tensor: float,
    float32: float,
    bandwidth: float,
    mebibytes: int,
    cores: int,
    link: str,
    link_bandwidth: float,
) -> Device:
    flops = MappingProxyType({"bfloat16": tensor * _T, "float16": tensor * _T, "float32": float32 * _T})
    return Device(name, "gpu", flops, bandwidth * _G, mebibytes << 20, cores, link_bandwidth * _G, link)


_DEVICES = (
    # NVIDIA A10 data sheet: 125 TFLOPS FP16/BF16, 31.2 FP32, 600 GB/s, 24 GB, PCIe Gen4 64 GB/s in both directions.
    # 72 SMs: NVIDIA GA102 with 9,216 CUDA cores, 128 per SM.
    _gpu("A10", 125, 31.2, 600, 23028, 72, "pcie", 32),
    # NVIDIA A30 data sheet: 165 TFLOPS FP16/BF16, 10.3 FP32, 933 GB/s, 24 GB, PCIe Gen4 64 GB/s in both directions; 56
    # SMs (3,584 CUDA cores, 64 per SM).
    _gpu("A30-24GB", 165, 10.3, 933, 24576, 56, "pcie", 32),
    # NVIDIA A40 data sheet: 149.7 TFLOPS FP16/BF16, 37.4 FP32, 696 GB/s, 48 GB, PCIe Gen4 64 GB/s in both directions.
    # 84 SMs: NVIDIA GA102 with 10,752 CUDA cores, 128 per SM.
    _gpu("A40-48GB", 149.7, 37.4, 696, 46068, 84, "pcie", 32),
    # NVIDIA A100 data sheet: 312 TFLOPS FP16/BF16, 19.5 FP32, 1,555 GB/s (40 GB), 2,039 GB/s (80 GB SXM), NVLink
    # 600 GB/s in both directions. 108 SMs: NVIDIA A100 Tensor Core GPU Architecture white paper.
    _gpu("A100-40GB", 312, 19.5, 1555, 40960, 108, "nvlink3", 300),
    _gpu("A100-80GB", 312, 19.5, 2039, 81920, 108, "nvlink3", 300),
    # The same data sheet: as a PCIe card, 1,935 GB/s, PCIe Gen4 64 GB/s in both directions.
    _gpu("A100-80GB-PCIe", 312, 19.5, 1935, 81920, 108, "pcie", 32),
    # NVIDIA A800 data sheet: an A100 80 GB with NVLink cut to 400 GB/s in both directions.
    _gpu("A800-80GB", 312, 19.5, 2039, 81920, 108, "nvlink3", 200),
    # The same data sheet: as a PCIe card, 1,935 GB/s, PCIe Gen4 64 GB/s in both directions.
    _gpu("A800-80GB-PCIe", 312, 19.5, 1935, 81920, 108, "pcie", 32),
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOPS FP16/BF16 with sparsity, half of it dense, 67 FP32, 3.35 TB/s, 80 GB,
    # NVLink 900 GB/s in both directions. 132 SMs: NVIDIA H100 Tensor Core GPU Architecture white paper.
    _gpu("H100-80GB", 989.4, 66.9, 3350, 81559, 132, "nvlink4", 450),
    # The same data sheet: as a PCIe card, 1,513 TFLOPS with sparsity, 51 FP32, 2 TB/s, PCIe Gen5 128 GB/s in both
    # directions, 114 SMs.
    _gpu("H100-80GB-PCIe", 756.5, 51, 2000, 81559, 114, "pcie", 64),
    # NVIDIA H200 data sheet, SXM: an H100 with 141 GB at 4.8 TB/s.
    _gpu("H200-141GB", 989.4, 66.9, 4800, 143771, 132, "nvlink4", 450),
    # NVIDIA L20 product brief: 119.5 TFLOPS FP16/BF16, 59.8 FP32, 864 GB/s, 48 GB, PCIe Gen4 64 GB/s in both
    # directions; 92 SMs (11,776 CUDA cores, 128 per SM).
    _gpu("L20-48GB", 119.5, 59.8, 864, 46068, 92, "pcie", 32),
    # NVIDIA L40S data sheet: 362.05 TFLOPS FP16/BF16, 91.6 FP32, 864 GB/s, 48 GB, PCIe Gen4 64 GB/s in both directions;
    # 142 SMs (18,176 CUDA cores, 128 per SM).
    _gpu("L40S-48GB", 362.05, 91.6, 864, 46068, 142, "pcie", 32),
    # NVIDIA L4 data sheet: 242 TFLOPS FP16/BF16 with sparsity, 30.3 FP32, 300 GB/s, 24 GB, PCIe Gen4 64 GB/s in both
    # directions; 58 SMs (7,424 CUDA cores, 128 per SM).
    _gpu("L4-24GB", 121, 30.3, 300, 23034, 58, "pcie", 32),
    # NVIDIA HGX B200 and HGX B300 (of eight): 36 PFLOPS FP16/BF16 with sparsity, 600 TFLOPS FP32, 1.44 and 2.3 TB of
    # memory at 7.7 and 7.75 TB/s each, NVLink 1,800 GB/s in both directions; 148 SMs.
    _gpu("B200-180GB", 2250, 75, 7700, 183359, 148, "nvlink5", 900),
    _gpu("B300-288GB", 2250, 75, 7750, 275040, 148, "nvlink5", 900),
    # NVIDIA GB200 NVL72 and GB300 NVL72 (of 72): 360 PFLOPS FP16/BF16 with sparsity, 5,760 TFLOPS FP32, 13.4 and 20 TB
    # at 576 TB/s, NVLink 1,800 GB/s each in both directions.
    _gpu("GB200-186GB", 2500, 80, 8000, 189471, 152, "nvlink5", 900),
    _gpu("GB300-288GB", 2500, 80, 8000, 284208, 152, "nvlink5", 900),
    # NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet: 4 PFLOPS FP4 with sparsity, an eighth of it FP16/BF16
    # without, 120 FP32, 1,597 GB/s, 96 GB, PCIe Gen5 128 GB/s in both directions; 188 SMs.
    _gpu("RTX-PRO-6000-96GB", 500, 120, 1597, 97887, 188, "pcie", 64),
    # A stand-in, since CPUs differ more than GPUs do and virtual machines show a part of one: two cores at 3 GHz with
    # two 512-bit FMA units (Intel 64 and IA-32 Architectures Optimization Reference Manual: 64 FP32 operations per
    # cycle) and one channel of DDR5-4800 (JEDEC JESD79-5: 38.4 GB/s). bfloat16 counts as AMX gives it at that clock
    # (same manual: 1,024 multiply-adds per cycle). Figures of a real CPU come from `muxserve profile`.
    Device(
        "CPU",
        "cpu",
        MappingProxyType({"float32": 384 * _G, "bfloat16": 12288 * _G, "float16": 384 * _G}),
        38.4 * _G,
        16 << 30,
        2,
        38.4 * _G,
        "memory",
    ),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})

# What people write when they mean the common variant.
_ALIASES = {
    "a30": "A30-24GB",
    "a100-pcie": "A100-80GB-PCIe",
    "b200": "B200-180GB",
    "b300": "B300-288GB",
    "gb200": "GB200-186GB",
    "gb300": "GB300-288GB",
    "h100-pcie": "H100-80GB-PCIe",
    "l4": "L4-24GB",
    "rtx-pro-6000": "RTX-PRO-6000-96GB",
    "rtx-pro-6000-server": "RTX-PRO-6000-96GB",
    "a100": "A100-80GB",
    "a100-sxm": "A100-80GB",
    "a40": "A40-48GB",
    "a800": "A800-80GB",
    "h100": "H100-80GB",
    "h100-sxm": "H100-80GB",
    "h200": "H200-141GB",
    "l20": "L20-48GB",
    "l40s": "L40S-48GB",
}
_BY_KEY = {name.lower(): name for name in DEVICES} | _ALIASES


def device(name: str) -> Device:
    """The device of that name, in any case; the memory size may be left out (`a100` is the one with 80 GB).

    Raises:
        CostError: nobody knows it; the message suggests what may be meant.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    known = _BY_KEY.get(key)
    if known is not None:
        return DEVICES[known]
    close = list(dict.fromkeys(_BY_KEY[k] for k in difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.6)))
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise CostError(f"unknown device {name!r}: {hint}Known are {', '.join(DEVICES)}")
