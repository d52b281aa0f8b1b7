"""What came of a simulated cluster, in the terms of Llumnix's evaluation (section 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from muxserve.simulator.instances.requests import ReplicaRequest


@dataclass(slots=True)
class ClusterResult:
    """`seconds` is from the start to the end of the last request; `instance_seconds` sums over instances the time from
    the decision to start them to their end. `migrations` arrived, `aborted` were given up. `downtimes` are the seconds
    in which migrated requests were in no batch, `copy_seconds` those from the first stage to the arrival. `peak` and
    `started` count instances."""

    requests: list[ReplicaRequest]
    seconds: float = 0.0
    instance_seconds: float = 0.0
    steps: int = 0
    busy_seconds: float = 0.0
    preemptions: int = 0
    migrations: int = 0
    aborted: int = 0
    started: int = 0
    peak: int = 0
    downtimes: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def average_instances(self) -> float:
        """Instances that were paid for, on average."""
        return self.instance_seconds / self.seconds if self.seconds else 0.0

    def figures(self, which: Callable[[ReplicaRequest], bool] | None = None) -> dict[str, dict[str, float]]:
        """Mean, p50 and p99, seconds, of `prefill` (time to first token), `decode` (mean time per token after it),
        `request` (arrival to last token) and `loss` (by preemptions), over the answered requests (that `which` takes).
        """
        done = [r for r in self.requests if r.finish is not None and (which is None or which(r))]
        prefill = [r.first_token - r.arrival for r in done if r.first_token is not None]
        decode = [
            (r.finish - r.first_token) / (r.made - 1)
            for r in done
            if r.made > 1 and r.finish is not None and r.first_token is not None
        ]
        whole = [r.finish - r.arrival for r in done if r.finish is not None]
        return {
            "prefill": spread(prefill),
            "decode": spread(decode),
            "request": spread(whole),
            "loss": spread([r.lost for r in done]),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50 and p99 of `values`; zeros of none."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    middle, tail = np.percentile(values, (50, 99))
    return {"mean": float(np.mean(values)), "p50": float(middle), "p99": float(tail)}
