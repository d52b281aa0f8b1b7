"""Real raylets on this machine, each with an address of its own: a node that can be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

MEMORY = 80 << 20


class Nodes:
    """A head at that address that has no CPUs, and nodes that have. (Ray takes 127.0.0.1 for a mistake.)"""

    def __init__(self, head: str) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        # A dead node, which refuses connections, is found out in seconds; one that is slow is not taken for dead.
        config = {
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 5,
            "health_check_timeout_ms": 10_000,
            # Ray would start a Python worker for each CPU before anybody asks for one.
            "prestart_worker_first_driver": False,
        }
        self._cluster.add_node(
            num_cpus=0,
            object_store_memory=MEMORY,
            include_dashboard=False,
            node_ip_address=head,
            _system_config=config,
        )
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Where nodes and drivers reach the cluster's head."""
        return str(self._cluster.address)

    def add(self, host: str, cpus: int, **more: Any) -> None:
        """Start a node at that address. `more` is as for `ray start`."""
        self._nodes[host] = self._cluster.add_node(
            num_cpus=cpus, object_store_memory=MEMORY, node_ip_address=host, **more
        )

    def kill(self, host: str) -> None:
        """SIGKILL for its raylet."""
        self._cluster.remove_node(self._nodes.pop(host), allow_graceful=False)

    def process(self, host: str) -> psutil.Process:
        """The raylet of that node."""
        (info,) = self._nodes[host].all_processes["raylet"]
        return psutil.Process(info.process.pid)

    def forget(self, host: str) -> None:
        """The node has been killed."""
        self._cluster.remove_node(self._nodes.pop(host), allow_graceful=False)

    def close(self) -> None:
        """Stop everything."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def nodes(head: str) -> Iterator[Nodes]:
    """A cluster while it lasts."""
    made = Nodes(head)
    try:
        yield made
    finally:
        made.close()
