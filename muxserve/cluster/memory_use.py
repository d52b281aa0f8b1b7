"""What the processes of a fleet take of this machine's memory, as the kernel counts it; and of its GPUs, as it was
measured when their models were loaded.

PSS (proportional set size) shares a page among those that map it, so the sum over all processes is what they take
together. It says too much of a model: its processes share the pages of the vLLM that they were forked from, which stay
when the model goes. What comes free with a model is its PSS less its part of those pages, and less shared memory, which
is the KV pool's.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from muxserve.gpu.unit import GpuMemory
from muxserve.net.process_memory import KIB, memory_of
from muxserve.spec import ResidencySpec
from muxserve.wire import MemoryReport


def gone_since_peak(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes that the process had mapped, when it had most (since it was forked), beyond what it has mapped now."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                sizes[name] = int(value.split()[0]) * KIB
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))


def process_tree(proc: Path = Path("/proc")) -> dict[int, list[int]]:
    """The children of every process."""
    tree: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir(proc):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The name may have spaces and parentheses of its own.
                tree[int((proc / entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry))
    return dict(tree)


def below(tree: Mapping[int, Iterable[int]], root: int) -> list[int]:
    """`root` and everything below it."""
    found = [root]
    for pid in found:
        found += tree.get(pid, ())
    return found


def measure(
    unit: str,
    root: int,
    model_parents: Mapping[str, int],
    warm_parents: Iterable[int],
    proc: Path = Path("/proc"),
) -> MemoryReport:
    """What everything below the process `root` takes.

    Args:
        unit: that has the models.
        model_parents: by model, the process that loaded its weights and forked its engines.
        warm_parents: what those were forked from.
    """
    tree = process_tree(proc)
    every = {pid: memory_of(pid, proc) for pid in below(tree, root)}
    # A warm parent's own pages aside, all of them map what it maps.
    shared = max((each.pss - each.private for pid in warm_parents if (each := every.get(pid))), default=0)
    models, wake_peaks = {}, {}
    for model, parent in model_parents.items():
        group = [every[pid] for pid in below(tree, parent) if pid in every]
        own = sum(each.pss - each.shared_memory - shared for each in group)
        models[model] = max(own, sum(each.private for each in group))
        # It loaded the weights before it forked engines, which have written what is theirs alone since.
        engines = sum(every[pid].private for pid in below(tree, parent)[1:] if pid in every)
        wake_peaks[model] = models[model] - engines + gone_since_peak(parent, proc)
    pools = sum(each.shared_memory for each in every.values())
    total = sum(each.pss for each in every.values())
    return MemoryReport(unit, total, models, pools, wake_peaks=wake_peaks)


def of_gpus(unit: str, found: GpuMemory | None, residency: ResidencySpec, there: Collection[str]) -> MemoryReport:
    """What a unit takes of its GPUs.

    Args:
        found: what the unit's host says; None: it measures nothing, since the GPUs are pretended, or it is only being
            started. What was expected counts then.
        there: the models that have processes.
    """
    if found is not None:
        return MemoryReport(
            unit, found.total, dict(found.models), found.pools, copies=dict(found.copies), resting=list(found.resting)
        )
    models = {name: costs.bytes for name, costs in residency.models.items() if name in there}
    return MemoryReport(unit, residency.rules.fixed + sum(models.values()), models)
