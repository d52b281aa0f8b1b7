"""Who is forked from whom on GPUs, with what in the environment. No GPU and no vLLM: see `gpu_family`."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from muxserve import spec
from muxserve.forks import family
from muxserve.forks.warm_parent import shares_by_forking
from muxserve.spec import GpuSpec, PoolSpec, UnitSpec
from tests.engine.harness import deployed_model
from tests.support.patience import PATIENCE
from tests.support.unit_specs import unit_spec_of

ROOT = Path(__file__).resolve().parents[2]
UUIDS = ["GPU-0a", "GPU-0b"]


@pytest.fixture
def of(tmp_path: Path) -> UnitSpec:
    model = deployed_model("one", ROOT / "configs/models/arithmetic", ranks=2, prefill_share=0.62, decode_share=0.38)
    unit_spec = unit_spec_of(tmp_path, [model], PoolSpec("main", 16384, 7), ranks=2, gpu=GpuSpec(UUIDS))
    unit_spec.log_dir.mkdir()
    spec.save(unit_spec, tmp_path / "unit.json")
    return unit_spec


@pytest.fixture
def control(of: UnitSpec) -> Iterator[socket.socket]:
    HEARD.clear()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE)
    file = str(Path(of.run_dir) / "unit.json")
    command = [sys.executable, "-m", "tests.engine.gpu_family", "--unit-spec", file, "--control-fd"]
    # A percentage from outside would be that of somebody else's MPS server.
    env = {**os.environ, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "3"}
    with subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT, env=env) as process:
        theirs.close()
        assert told(ours, "ready")
        yield ours
        ours.close()
        assert process.wait(PATIENCE) == 0


HEARD: list[dict[str, Any]] = []


def told(control: socket.socket, event: str) -> dict[str, Any]:
    """The next event of that name. Others are kept: a child may be quicker than its parent."""
    while True:
        for message in HEARD:
            if message["event"] == event:
                HEARD.remove(message)
                return message
        HEARD.append(json.loads(control.recv(family.MAX_MESSAGE)))


def fork(control: socket.socket, kind: str, **more: str) -> dict[str, Any]:
    control.send(json.dumps({"op": "fork", "kind": kind, "model": "one", **more}).encode())
    return told(control, "forked")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_holders_and_engines_are_children_of_the_warm_parent(control: socket.socket, of: UnitSpec) -> None:
    holder = fork(control, "weights")
    assert (holder["kind"], holder["model"]) == ("weights", "one")
    found = told(control, "up")
    pipe = str(of.mps_dir / "pipe")
    assert found["pid"] == holder["pid"]
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-0a,GPU-0b"
    assert found["pages"] == 7

    # What the holders measured decides how large the pool is.
    pools = [PoolSpec("main", 16384, 4242)]
    spec.save(msgspec.structs.replace(of, pools=pools), Path(of.run_dir) / "unit.json")
    for phase, percentage in (("prefill", "62"), ("decode", "38")):
        engine = fork(control, "engine", phase=phase)
        assert (engine["kind"], engine["phase"]) == ("engine", phase)
        found = ast.literal_eval(told(control, "progress")["detail"])
        assert found == {
            "environment": {
                "CUDA_VISIBLE_DEVICES": "GPU-0a,GPU-0b",
                "CUDA_MPS_PIPE_DIRECTORY": pipe,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage,
            },
            "pages": 4242,
        }
        assert told(control, "up")["pid"] == engine["pid"]
        assert parent_of(engine["pid"]) == parent_of(holder["pid"])

    os.kill(holder["pid"], signal.SIGKILL)
    assert told(control, "exited") == {"event": "exited", "pid": holder["pid"], "status": -signal.SIGKILL}
    assert parent_of(engine["pid"]) != 1  # a holder's death is the controller's business


@pytest.mark.parametrize(
    ("how", "source"), [({}, "loaded"), ({"weights": "copy"}, "copied"), ({"weights": "restore"}, "restore")]
)
def test_weights_come_from_where_the_order_says(control: socket.socket, how: dict[str, str], source: str) -> None:
    fork(control, "weights", **how)
    assert told(control, "up")["source"] == source


def test_an_engine_that_cannot_start_says_why(control: socket.socket, of: UnitSpec) -> None:
    pools = [PoolSpec("main", 16384, 13)]
    spec.save(msgspec.structs.replace(of, pools=pools), Path(of.run_dir) / "unit.json")
    engine = fork(control, "engine", phase="decode")
    assert told(control, "failed")["error"] == "ValueError: no such luck"
    assert told(control, "exited") == {"event": "exited", "pid": engine["pid"], "status": 1}


def test_a_process_that_has_touched_cuda_does_not_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    touched = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", touched)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = family.ForkingParent(family.Control(ours), family.Control(ours), lambda _: None)
        with pytest.raises(RuntimeError, match="has touched CUDA and cannot fork"):
            parent.fork("x", tmp_path / "log", lambda: None)


@pytest.mark.parametrize(("ranks", "gpu", "shares"), [(1, None, True), (2, None, False), (1, GpuSpec(["G"]), False)])
def test_only_engines_on_cpu_with_one_rank_share_weights_by_forking(
    of: UnitSpec, ranks: int, gpu: GpuSpec | None, shares: bool
) -> None:
    assert shares_by_forking(msgspec.structs.replace(of, ranks=ranks, gpu=gpu)) is shares


def test_who_goes_without_reading_all_is_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        control = family.Control(ours)
        control.event("ready")
        theirs.close()
        assert control.receive() is None


def test_an_engine_rests_and_is_forked_once(control: socket.socket) -> None:
    """Whoever orders it again gets the one that rests; one that has died meanwhile is forked anew."""

    def rest() -> None:
        control.send(json.dumps({"op": "rest", "model": "one", "phase": "decode"}).encode())
        assert told(control, "rests")["phase"] == "decode"

    engine = fork(control, "engine", phase="decode")
    assert told(control, "up")["pid"] == engine["pid"]
    for _ in range(2):
        rest()
        assert fork(control, "engine", phase="decode") == engine
        assert told(control, "up")["pid"] == engine["pid"]
    rest()
    os.kill(engine["pid"], signal.SIGKILL)
    assert told(control, "exited")["pid"] == engine["pid"]
    another = fork(control, "engine", phase="decode")
    assert another["pid"] != engine["pid"]
    assert told(control, "up")["pid"] == another["pid"]
    # One that serves is not taken for one that rests.
    assert fork(control, "engine", phase="decode")["pid"] not in (engine["pid"], another["pid"])
