"""How much of a device is reached, and what software adds: the constants of the roofline, and where each comes from.

What a GPU does was fitted to kernels that others measured (`python benchmarks/costs.py`; docs/costs.md has the error by
device and model): linear layers, all-reduces and attention. What the host adds is of vLLM 0.32 and was measured where
this project could, on CPUs. A profile of the real machine takes the place of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

Graphs = Literal["eager", "piecewise", "full"]


class Launches(NamedTuple):
    """Seconds in which the host launches the kernels of one layer, in prefill and decode steps; `..._tp` come on top
    where there are all-reduces to launch."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_tp: float = 0.0
    decode_tp: float = 0.0


class LinkUse(NamedTuple):
    """What is reached over a link: `efficiency`, the part of its bandwidth, and `latency`, seconds of one message with
    the kernels around it."""

    efficiency: float
    latency: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of the roofline.

    Efficiencies are fractions of the device's peak. A share `s` of the compute gives `1 - (1 - s)^compute_shape` of the
    device's speed and `1 - (1 - s)^bandwidth_shape` of its bandwidth: 1 would be linear, more than 1 saturates earlier.
    `overlap` is the norm in which the compute time and the memory time of the linear layers are added: 1 is one after
    the other, infinity is perfect overlap. `layer_seconds` come on top for each layer: kernels too small to be bound by
    compute or bandwidth.

    `launches` are the host's, by how steps are launched; a step takes the device at least as long as they do together.
    Between two steps the host needs `host_step` seconds, and `host_sequence` for each sequence of the batch, for
    scheduling, inputs, sampling and outputs (`costs.host` says whether the device waits meanwhile).
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    kv_efficiency: float
    attention_efficiency: float
    compute_shape: float
    bandwidth_shape: float
    overlap: float
    layer_seconds: float
    host_step: float
    host_sequence: float
    launches: Mapping[Graphs, Launches] = field(default_factory=lambda: MappingProxyType({}))

    def compute_share(self, share: float) -> float:
        """Fraction of the device's speed that a share of its compute gives."""
        return 1.0 - float((1.0 - share) ** self.compute_shape)

    def bandwidth_share(self, share: float) -> float:
        """Fraction of the device's bandwidth that a share of its compute can use."""
        return 1.0 - float((1.0 - share) ** self.bandwidth_shape)

    def launch_seconds(self, graphs: Graphs, layers: int, parallel: bool) -> tuple[float, float]:
        """Seconds that launching a prefill step and a decode step takes."""
        each = self.launches.get(graphs, Launches())
        return (
            layers * (each.prefill + (each.prefill_tp if parallel else 0.0)),
            layers * (each.decode + (each.decode_tp if parallel else 0.0)),
        )


GPU = Calibration(
    # Linear layers of Llama-2-7B on one A100 and one H100 (Vidur's profiles, at most 4,096 tokens). One device, since
    # the shards of several fit into the second-level cache, which a repeated kernel then reads.
    compute_efficiency=0.657,
    bandwidth_efficiency=0.825,
    overlap=1.69,
    layer_seconds=36e-6,
    # How decode steps of LLaMA-7B on one whole A100 grow with their context (MuxServe's profile, paged attention of
    # 2023).
    kv_efficiency=0.745,
    # Not fitted: no published prompts are long enough. FlashAttention-2 (Dao, 2023) reports 50 to 73 % of an A100's
    # peak on long sequences; less is reached on prompts of mixed lengths.
    attention_efficiency=0.4,
    # MuxServe's profile of LLaMA-7B and 30B, 30 to 100 % of an A100's SMs.
    compute_shape=0.99,
    bandwidth_shape=2.81,
    # The steps of this project's engines on CPU without their work (`benchmarks/costs_cpu.py`); scheduling, inputs and
    # outputs are the same code on both. For each sequence, MuxServe's profile says 11 us, and the CPU's 56 with
    # the sampler, which a GPU does for all at once.
    host_step=1.0e-3,
    host_sequence=11e-6,
    launches=MappingProxyType(
        {
            # MuxServe's profile: vLLM of 2023, kernels one by one.
            "eager": Launches(0.335e-3, 0.24e-3, 0.21e-3, 0.075e-3),
            # Assumed: the replay of a graph, attention, and the writing of K and V, about 15 us each. Prompts are
            # mostly larger than the largest graph; compiled code then launches some ten kernels per layer.
            "piecewise": Launches(0.1e-3, 0.045e-3),
            # One launch for all layers; prompts are never captured whole.
            "full": Launches(0.1e-3, 0.0),
        }
    ),
)

CPU = Calibration(
    compute_efficiency=0.5,
    bandwidth_efficiency=0.5,
    kv_efficiency=0.5,
    attention_efficiency=0.25,
    compute_shape=1.0,
    bandwidth_shape=2.0,
    overlap=1.0,
    # The host is the device: nothing is launched ahead of it, and what it does for a step comes on top.
    # `python benchmarks/costs_cpu.py --fit`: of the steps of three small models, two of them fitted.
    layer_seconds=0.31e-3,
    host_step=1.05e-3,
    host_sequence=56e-6,
)

LINKS: Mapping[str, LinkUse] = MappingProxyType(
    {
        # All-reduces of NCCL over 2, 4 and 8 A100 of a DGX, 16 KiB to 64 MiB (Vidur's profiles); likewise H100.
        "nvlink3": LinkUse(0.53, 23e-6),
        "nvlink4": LinkUse(0.75, 13e-6),
        # Assumed as NVLink 4: none was measured.
        "nvlink5": LinkUse(0.75, 13e-6),
        # 20.79 GB/s of 32 between L20 (gLLM, arXiv:2504.14775). All-reduces of 4 A100 and H100 without NVLink between
        # all of them reach 0.74, and their latency is the one here (Vidur's profiles).
        "pcie": LinkUse(0.65, 29e-6),
        # 73.28 of 100 Gb/s between machines (gLLM).
        "network": LinkUse(0.73, 50e-6),
        # Copies between the processes of one machine.
        "memory": LinkUse(0.5, 5e-6),
    }
)


def calibration_of(kind: Literal["gpu", "cpu"]) -> Calibration:
    """The one for a kind of device."""
    return GPU if kind == "gpu" else CPU


def graphs_of(engine_args: Mapping[str, object]) -> Graphs:
    """How a GPU engine launches its steps, by vLLM's options for it."""
    compilation = engine_args.get("compilation_config")
    mode = compilation.get("cudagraph_mode", "PIECEWISE") if isinstance(compilation, dict) else "PIECEWISE"
    if engine_args.get("enforce_eager") or mode in ("NONE", None):
        return "eager"
    return "full" if "FULL" in str(mode) else "piecewise"


# What a thread gets of a core at a time on one core: Linux's `sched_base_slice_ns`, which the kernel multiplies by
# 1 + log2 of the cores, 8 at most (kernel/sched/fair.c, `get_update_sysctl_factor`).
CPU_SLICE = 0.7e-3
# What a thread loses then, since others have used the core's caches: 2 MiB of second-level cache at 10 GB/s. Li, Ding
# and Shen ("Quantifying the Cost of Context Switch", ExpCS 2007) measured up to 1.5 ms, by what the thread reads.
CPU_REFILL = 0.2e-3

# Bytes per second from the host's memory to a GPU, by the data sheets: PCIe 5.0 x16 from Hopper on, 4.0 before.
_GEN5, _GEN4 = 64e9, 32e9
_HOPPER = ("H100", "H200", "H20", "H800", "B200", "B300", "GB200", "GB300", "RTX")


def host_bandwidth(name: str) -> float:
    """Bytes per second that are copied from pinned memory of the host to one GPU of that type."""
    return (_GEN5 if name.split("-")[0] in _HOPPER else _GEN4) * LINKS["pcie"].efficiency
