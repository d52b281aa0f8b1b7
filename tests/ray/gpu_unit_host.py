"""The host of a unit on GPUs as it is, over its real MPS process and a warm parent that only pretends (`gpu_family`);
what needs a driver is a fake. Arguments as those of `muxserve.cluster.unit_host`."""

from __future__ import annotations

import sys
from pathlib import Path

from muxserve.cluster import machine, unit_host
from muxserve.cluster.launcher import Commands
from muxserve.gpu.environment import client_environment
from muxserve.spec import UnitSpec
from tests.cluster.conftest import fake


def commands(unit_spec: UnitSpec, file: Path) -> Commands:
    def python(module: str, *more: str) -> list[str]:
        return [sys.executable, "-m", module, "--unit-spec", str(file), *more]

    return Commands(
        memory_manager=lambda store: fake("memory", file),
        unit_scheduler=fake("unit", file),
        migrator=fake("migrator", file),
        warm_parent=python("tests.ray.gpu_family"),
        mps=python("muxserve.gpu.mps"),
        environment=client_environment(unit_spec),
    )


if __name__ == "__main__":
    vars(unit_host)["commands_for"] = commands
    vars(machine)["vllm_without_cuda"] = lambda: ""
    sys.exit(unit_host.main())
