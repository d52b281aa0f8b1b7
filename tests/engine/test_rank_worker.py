"""A worker process of one rank guards what it writes itself: its engine may have died."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput

from muxserve.engine import binding, rank_worker
from muxserve.engine.binding import Binding
from muxserve.engine.rank_worker import RankWorker
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.spec import PoolSpec, UnitSpec
from tests.engine.harness import deployed_model
from tests.support.patience import PATIENCE
from tests.support.unit_specs import unit_spec_of

ROOT = Path(__file__).resolve().parents[2]


class Inner:
    """The worker inside. `output` is what a forward pass returns; None: tokens are sampled by a second call."""

    def __init__(self) -> None:
        self.output: Any = None
        self.steps = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self.steps += 1
        if isinstance(scheduler_output, Exception):
            raise scheduler_output
        return self.output

    def sample_tokens(self, grammar_output: Any) -> str:
        return "tokens"


class Ended(BaseException):
    pass


@pytest.fixture
def of(tmp_path: Path) -> UnitSpec:
    model = deployed_model("one", ROOT / "configs/models/arithmetic", ranks=2, num_blocks=8, quota_pages=63)
    return unit_spec_of(tmp_path, [model], PoolSpec("main", 16384, 64), ranks=2)


@pytest.fixture
def manager(of: UnitSpec) -> Iterator[subprocess.Popen[bytes]]:
    process = server.start(of)
    yield process
    process.terminate()
    process.wait(PATIENCE)


@pytest.fixture
def worker(of: UnitSpec, manager: object, monkeypatch: pytest.MonkeyPatch) -> RankWorker:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(rank_worker.os, "_exit", end)
    with MemoryClient(of.memory_socket, "one/decode/1") as client:
        view = client.map("one", 1)
    monkeypatch.setattr(binding, "_binding", Binding(of.models[0], "decode", client, view, 1))
    made = RankWorker(rpc_rank=1)
    made.worker = Inner()
    made.mm_receiver_cache = None
    made._writing = ExitStack()
    return made


def guarded(of: UnitSpec) -> bool:
    """Whether somebody is writing, so that a new memory manager would wait."""
    with open(f"/dev/shm/{server.prefix(of)}.guard") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_step_is_guarded_until_its_tokens_are_there(worker: RankWorker, of: UnitSpec) -> None:
    for _ in range(2):
        assert not guarded(of)
        assert worker.execute_model(None) is None
        assert guarded(of)
        assert worker.sample_tokens(None) == "tokens"
        assert not guarded(of)


def test_tokens_that_are_still_on_their_way_are_waited_for(worker: RankWorker, of: UnitSpec) -> None:
    """vLLM's second runner returns while the GPU still writes."""

    class OnTheirWay(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            assert guarded(of)
            return "tokens"

    assert worker.execute_model(None) is None
    worker.worker.sample_tokens = lambda grammar_output: OnTheirWay()
    assert worker.sample_tokens(None) == "tokens"
    assert not guarded(of)


def test_a_step_without_sampling_is_guarded_until_it_returns(worker: RankWorker, of: UnitSpec) -> None:
    worker.worker.output = "nothing to do"
    assert worker.execute_model(None) == "nothing to do"
    assert not guarded(of)


def test_nothing_is_written_when_the_memory_manager_is_another_one(
    worker: RankWorker, of: UnitSpec, manager: subprocess.Popen[bytes]
) -> None:
    os.kill(manager.pid, signal.SIGKILL)
    manager.wait()
    again = server.start(of)
    try:
        with pytest.raises(Ended):
            worker.execute_model(None)
        assert worker.worker.steps == 0
    finally:
        again.terminate()
        again.wait(PATIENCE)


def test_a_worker_whose_step_fails_ends(worker: RankWorker) -> None:
    with pytest.raises(Ended):
        worker.execute_model(ValueError("a step failed"))
