"""How much of a device is reached, and what software adds: the constants of the roofline, and where each comes from.

`GPU` was fitted with `python benchmarks/costs.py --fit` to step times measured on A100-80GB (Llama 7B and 30B; 13B and
65B were held out; docs/costs.md shows how well it does). Other GPUs are assumed to reach the same fractions of their
peaks. `CPU` is a machine that reaches half of everything; only what a step takes beside its work was fitted (to small
models on one machine). A profile of the real one takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of the roofline.

    Efficiencies are fractions of the device's peak. A share `s` of the compute gives `1 - (1 - s)^compute_shape` of the
    device's speed and `1 - (1 - s)^bandwidth_shape` of its bandwidth: 1 would be linear, more than 1 saturates earlier.
    `overlap` is the norm in which the compute time and the memory time of the linear layers are added: 1 is one after
    the other, infinity is perfect overlap. Launch times are seconds of the host per layer and step; a step lasts at
    least as long as they do together. `..._launch_tp` come on top, per layer, where there are all-reduces to launch.
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    kv_efficiency: float
    attention_efficiency: float
    link_efficiency: float
    compute_shape: float
    bandwidth_shape: float
    overlap: float
    prefill_launch: float
    decode_launch: float
    prefill_launch_tp: float
    decode_launch_tp: float
    step_seconds: float

    def compute_share(self, share: float) -> float:
        """Fraction of the device's speed that a share of its compute gives."""
        return 1.0 - float((1.0 - share) ** self.compute_shape)

    def bandwidth_share(self, share: float) -> float:
        """Fraction of the device's bandwidth that a share of its compute can use."""
        return 1.0 - float((1.0 - share) ** self.bandwidth_shape)


GPU = Calibration(
    compute_efficiency=0.686,
    bandwidth_efficiency=0.599,
    kv_efficiency=0.441,
    # Not fitted: with prompts of at most 512 tokens attention is too little to be seen. FlashAttention-2 (Dao, 2023)
    # reports 50 to 73 % of an A100's peak on long sequences; less is reached on prompts of mixed lengths.
    attention_efficiency=0.4,
    link_efficiency=0.281,
    compute_shape=1.097,
    bandwidth_shape=3.371,
    overlap=1.157,
    prefill_launch=0.435e-3,
    decode_launch=0.373e-3,
    prefill_launch_tp=0.210e-3,
    decode_launch_tp=0.043e-3,
    step_seconds=0.0,
)

CPU = Calibration(
    compute_efficiency=0.5,
    bandwidth_efficiency=0.5,
    kv_efficiency=0.5,
    attention_efficiency=0.25,
    link_efficiency=0.5,
    compute_shape=1.0,
    bandwidth_shape=2.0,
    overlap=1.0,
    # The host is the device: nothing is launched ahead of it, and what it does for a step comes on top.
    prefill_launch=0.0,
    decode_launch=0.0,
    prefill_launch_tp=0.0,
    decode_launch_tp=0.0,
    # `python benchmarks/costs_cpu.py --fit`: of the steps of three small models, two of them fitted.
    step_seconds=2.6e-3,
)


def calibration_of(kind: Literal["gpu", "cpu"]) -> Calibration:
    """The one for a kind of device."""
    return GPU if kind == "gpu" else CPU
