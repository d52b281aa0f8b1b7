"""The command line of the migrator, and what it imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from muxserve import spec
from muxserve.memory import server
from muxserve.migration.process import main
from muxserve.net import sockets
from muxserve.spec import UnitSpec
from tests.memory.support import unit_spec
from tests.support.patience import PATIENCE


def test_it_loads_neither_torch_nor_vllm() -> None:
    code = "import muxserve.migration.process, sys; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.fixture
def small() -> Iterator[UnitSpec]:
    with tempfile.TemporaryDirectory(prefix="mx") as run_dir:
        yield unit_spec(Path(run_dir))


def test_a_file_that_is_no_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, wrong = tmp_path / "missing.json", tmp_path / "wrong.json"
    wrong.write_text("{}")
    for path in (missing, wrong):
        assert main(["--unit-spec", str(path)]) == 2
        assert f"{path}: not a unit's spec" in capsys.readouterr().err


def test_an_address_that_cannot_be_listened_on(small: UnitSpec, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = msgspec.structs.replace(small, run_dir=f"{small.run_dir}/missing")
    file = Path(small.run_dir) / "unit.json"
    spec.save(elsewhere, file)
    assert main(["--unit-spec", str(file)]) == 3
    assert f"cannot listen on {elsewhere.migrator_address}" in capsys.readouterr().err


def test_it_ends_in_order(small: UnitSpec) -> None:
    """Without memory manager and without unit scheduler: it waits for both, and SIGTERM ends it."""
    file = Path(small.run_dir) / "unit.json"
    spec.save(small, file)
    process = subprocess.Popen(
        [sys.executable, "-m", "muxserve.migration.process", "--unit-spec", str(file)], stderr=subprocess.PIPE
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        sockets.bind_local(router, small.unit_address)
        assert router.poll(20_000), "it greets as soon as there is somebody"
    process.terminate()
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert b"Traceback" not in said


def test_nothing_that_it_mapped_outlives_it(small: UnitSpec) -> None:
    """nanobind would tell of each object that is left when the interpreter ends."""
    file = Path(small.run_dir) / "unit.json"
    spec.save(small, file)
    manager = server.start(small)
    process = subprocess.Popen(
        [sys.executable, "-m", "muxserve.migration.process", "--unit-spec", str(file)], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if b"bound to the memory manager" in line:
            break
    process.terminate()
    said += process.stderr.readlines()
    assert process.wait(PATIENCE) == 0, said
    process.stderr.close()
    assert said[-1].endswith(b"stopped\n"), said
    manager.terminate()
    assert manager.wait(PATIENCE) == 0
    for stream in (manager.stdout, manager.stderr):
        if stream is not None:
            stream.close()
