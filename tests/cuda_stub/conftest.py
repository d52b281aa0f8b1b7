from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cuda_stub import stand_ins
from tests.cuda_stub.stand_ins import Environment
from tests.e2e.fleet import Fleet, running
from tests.support.patience import PATIENCE

Start = Callable[..., AbstractContextManager[Fleet]]


@pytest.fixture(scope="session")
def without_gpus(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """See `stand_ins.without_gpus`."""
    return stand_ins.without_gpus(tmp_path_factory.mktemp("without-gpus"))


@pytest.fixture(scope="session")
def with_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """See `stand_ins.with_a_gpu`."""
    return stand_ins.with_a_gpu(tmp_path_factory.mktemp("with-a-gpu"))


@pytest.fixture
def with_mps(tmp_path: Path, with_a_gpu: Environment) -> Environment:
    """See `stand_ins.with_mps`."""
    return stand_ins.with_mps(with_a_gpu, tmp_path)


@pytest.fixture
def deploy(tmp_path: Path, with_mps: Environment) -> Start:
    """Deploys a fleet on the stand-ins."""

    @contextmanager
    def start(
        *models: dict[str, Any],
        policy: str = "slack",
        lies: Mapping[str, str] | None = None,
        memory: Mapping[str, Any] | None = None,
        **cluster: Any,
    ) -> Iterator[Fleet]:
        path = tmp_path / "fleet.yaml"
        fleet_file = {"policy": policy, "cluster": {"gpu_memory": 0.05, **cluster}, "models": list(models)}
        if memory is not None:
            fleet_file["memory"] = dict(memory)
        path.write_text(yaml.safe_dump(fleet_file))
        # The sockets of MPS want a short path.
        with (
            tempfile.TemporaryDirectory(prefix="m") as short,
            running(
                path,
                10 * PATIENCE,
                {**with_mps, **(lies or {}), "XDG_RUNTIME_DIR": short},
                # Kernels compute nothing: probes would find that nothing can be served.
                options=["--no-probe"],
            ) as fleet,
        ):
            yield fleet

    return start
