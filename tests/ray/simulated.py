"""What `test_fleet.py` runs, with Ray importable: `muxserve deploy --simulated` with two units on two nodes, first on
their CPUs, of which one is killed while it serves, then on GPUs that there are not.

    PYTHONPATH=$PWD:$PWD/build/ray python -m tests.ray.simulated
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.fleet import Fleet, running
from tests.ray.cluster import Nodes, nodes
from tests.ray.live import engines_up, fleet_of_two, streams, streams_survive, units

HEAD, ONE, OTHER, THIRD = "127.0.3.2", "127.0.3.3", "127.0.3.4", "127.0.3.5"
GPUS = {"gpus": 2, "gpu_type": "H100"}


def changed(file: Path, cluster: dict[str, Any]) -> Path:
    """The fleet file with that in its cluster, too, and weights that are not to be read."""
    fleet = yaml.safe_load(file.read_text())
    fleet["cluster"] |= cluster
    for model in fleet["models"]:
        model["engine_args"] = {"load_format": "dummy"}
        if "gpus" in cluster:
            del model["dtype"]
    if "gpus" in cluster:
        del fleet["kv_pool"]
    file.write_text(yaml.safe_dump(fleet))
    return file


def started(fleet: Fleet) -> None:
    """Wait until both units serve."""
    fleet.wait(lambda: len(engines_up(fleet)) == 4, 240, "up in both units")
    assert all(unit["remote"] for unit in units(fleet)), units(fleet)


def on_cpus(cluster: Nodes, directory: Path) -> None:
    file = changed(fleet_of_two(directory, cluster.address), {})
    with running(file, seconds=240, options=("--simulated",)) as fleet:
        started(fleet)
        wanted = asyncio.run(streams(fleet))
        assert all(wanted)
        streams_survive(fleet, cluster, ONE, wanted)


def on_pretended_gpus(cluster: Nodes, directory: Path) -> None:
    with running(
        changed(fleet_of_two(directory, cluster.address), GPUS), seconds=240, options=("--simulated",)
    ) as fleet:
        started(fleet)
        assert all(asyncio.run(streams(fleet)))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mux-ray-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        with nodes(HEAD) as cluster:
            for host in (ONE, OTHER):
                cluster.add(host, 1)
            on_cpus(cluster, Path(directory))
            print("a node killed, every stream of the other complete and as before", flush=True)
            cluster.add(THIRD, 1)
            on_pretended_gpus(cluster, Path(directory))
            print("two units on GPUs that there are not", flush=True)


if __name__ == "__main__":
    main()
