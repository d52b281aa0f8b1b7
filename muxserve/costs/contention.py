"""How much engines slow each other down that no lease separates: together they may compute on more than the device has.

Under leases the shares of the jobs that run are at most the whole device, and conservation is all that is asked
(`interference`). Where they are more, the hardware decides who computes when. Three ways of it are modelled. Each is
an assumption with a source, none has been verified on a GPU, and none says less than conservation does.

**Cores of a CPU** (`cores`). The kernel divides c cores evenly among N > c threads, so each runs c/N of the time. A
step of one thread takes N/c times as long. A step of a team has a barrier after every kernel, at which those that are
there wait, spinning, for those that do not run: the team gets on only while all of its threads run at once (Ousterhout,
"Scheduling Techniques for Concurrent Systems", 1982; Feitelson and Rudolph, "Gang Scheduling Performance Benefits for
Fine-Grain Synchronization", 1992). Independent threads do so for (c/N)^k of the time. Measured here are teams of two:
beside one thread on two cores, where this says 2.25, their steps take 2.2 to 2.3 times as long as those of one thread
do there (benchmarks/results/lease_threads.json). Larger teams count as teams of two, which is the least. And threads
that take turns on a core find their caches cold after each slice (`CPU_SLICE`, `CPU_REFILL`).

**A GPU with MPS and no percentages** (`kernels`). Blocks of threads go to the SMs in the order in which their kernels
came, and none is interrupted (Amert et al., "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017;
NVIDIA, "Multi-Process Service"). A job has a kernel on the SMs for a part of the time: that of the resource that it
needs most (`Load`). So a kernel of another job finds one there with that probability, and waits until it is done.
Kernels of a long prefill are long, those of a decode step are short, and decode hardly gets on beside prefill. Equal
jobs slow each other down as much as conservation says.

**A GPU without MPS** (`time_slices`). Processes have the whole GPU in turn, in slices of equal length, whatever they do
with it (NVIDIA, "Multi-Process Service": "work from different CUDA contexts cannot run concurrently").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from muxserve.costs.calibration import CPU_REFILL, CPU_SLICE
from muxserve.costs.devices import Device
from muxserve.costs.latency import Load

# How the processes on a GPU share it.
Sharing = Literal["mps", "time_slices"]
# Jobs whose shares are more than that together are not separated. Shares are fractions that were rounded.
WHOLE = 1.0 + 1e-6
# Larger teams were not measured.
_LARGEST_TEAM = 2


class RunningJob(NamedTuple):
    """A job that runs: the `share` of the device on which it computes, what it asks of the device alone (`load`), and
    the mean seconds of one of its kernels, up to a factor that is the same for all jobs (`grain`: seconds of a step
    per layer)."""

    share: float
    load: Load
    grain: float = 0.0


def slowdowns_in_crowd(on: Device, jobs: Sequence[RunningJob], sharing: Sharing) -> list[float]:
    """Factor by which each job is slower than alone, as far as that comes from want of separation."""
    if on.kind == "cpu":
        return cores(on.cores, [job.share for job in jobs])
    return kernels(jobs) if sharing == "mps" else time_slices(jobs)


def cores(count: int, shares: Sequence[float]) -> list[float]:
    """Teams of threads, each of which would fill a share of the `count` cores."""
    part = sum(shares)
    if part <= WHOLE:
        return [1.0] * len(shares)
    slices = CPU_SLICE * (1 + min(3, max(1, count).bit_length() - 1))
    cold = 1.0 + CPU_REFILL / slices
    return [part ** min(_LARGEST_TEAM, max(1, round(share * count))) * cold for share in shares]


def kernels(jobs: Sequence[RunningJob]) -> list[float]:
    """Kernels in the order in which they come."""
    # The chance to find one of the job's kernels there, times the seconds for which it is there.
    waits = [max(job.load) ** 2 * job.grain for job in jobs]
    whole = sum(waits)
    return [
        1.0 + (whole - own) / job.grain if job.grain > 0.0 else float(len(jobs))
        for job, own in zip(jobs, waits, strict=True)
    ]


def time_slices(jobs: Sequence[RunningJob]) -> list[float]:
    """The whole device in turn."""
    return [float(len(jobs))] * len(jobs)
