"""The CUDA engine's runner over vLLM's second one: whole requests on a CPU with vLLM's kernels in Triton's interpreter,
and what it keeps vLLM from doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from muxserve.engine.cuda import graphs as graphs_module
from muxserve.engine.cuda.graphs import ContextGraphs
from muxserve.engine.cuda.second_runner import PageZeroer, SecondPooledRunner
from muxserve.gpu.driver import Driver
from muxserve.gpu.green import ContextSet, GreenContext
from muxserve.vllm.args import STATE_PROMPTS
from tests.engine_cuda.serve_on_cpu import OTHERS, STATEFUL
from tests.gpu_control.fake_driver import FakeDriver
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / "build/triton"


@pytest.fixture(scope="module")
def second(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `serve_second` has written."""
    if not TRITON.is_dir():
        pytest.skip("no Triton: make build/triton/.installed")
    out = tmp_path_factory.mktemp("second")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_cuda.serve_second", str(served), str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON)]), "TRITON_INTERPRET": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=20 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ours", "ahead", *OTHERS])
def test_tokens_are_those_of_stock_vllm(served: Path, second: Path, kind: str) -> None:
    """Also one step ahead, after a restart of the memory manager, and behind a snapshot of states."""
    expected = json.loads((served / (f"stock-{kind}.json" if kind in OTHERS else "stock.json")).read_text())
    answers = json.loads((second / f"{kind}.json").read_text())
    for run in ("first", "again", "after"):
        assert answers[run] == expected, run
    assert answers["known_after_restart"] == 0
    assert answers["uploads"] > 0
    assert bool(answers["snapshots"]) == (kind in STATEFUL)


def a_runner(**more: Any) -> Any:
    runner: Any = SecondPooledRunner.__new__(SecondPooledRunner)
    vars(runner).update(more)
    return runner


def test_what_vllm_warms_up_with_is_written_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests name blocks that are others', and as many prompts as one with states has no memory for."""
    tables = SimpleNamespace(redirect_writes_to_null_block=False)
    scheduling = SimpleNamespace(max_num_seqs=10 * STATE_PROMPTS)
    runner = a_runner(block_tables=tables, scheduler_config=scheduling, states=object())
    followed: list[Any] = []
    runner.follow = followed.append
    added: list[bool] = []
    monkeypatch.setattr(
        GPUModelRunner, "add_requests", lambda self, step: added.append(tables.redirect_writes_to_null_block)
    )
    step = SchedulerOutput.make_empty()
    with runner.warming_up():
        assert scheduling.max_num_seqs == STATE_PROMPTS
        runner.add_requests(step)
    runner.add_requests(step)
    assert added == [True, False]
    assert followed == [step]
    assert scheduling.max_num_seqs == 10 * STATE_PROMPTS


def test_no_block_is_zeroed_for_block_0() -> None:
    zeroed: list[Any] = []
    zeroer = PageZeroer(zeroed.append)
    zeroer.warmup(100)
    zeroer.zero_block_ids([0])
    zeroer.zero_block_ids([0, 3, 5])
    assert zeroed == [[3, 5]]


def test_what_a_step_that_failed_was_to_write_is_written_before_the_next() -> None:
    written: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(apply_staged_writes=lambda: written.append(name))

    names = ("block_tables", "req_states", "model_state", "sampler")
    runner = a_runner(
        **{name: part(name) for name in names},
        execute_model_state="of the step",
        encoder_cache=SimpleNamespace(reset_encoder_cache=lambda: written.append("images")),
        pooling_runner=None,
    )
    runner.forget_step()
    assert runner.execute_model_state is None
    assert written == ["images", *names]


@pytest.mark.parametrize(
    ("queue", "taken"),
    [
        ([None, {1}], 2),  # as in the step before: the first stage has nothing else in flight
        ([{1}, {2}], 1),
        ([{2}, {1}], 2),
        ([{2}, None], 1),
    ],
)
def test_a_request_goes_on_with_its_token_however_many_steps_were_between(
    queue: list[set[int] | None], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's first stage takes the tokens of a step two steps later, if there are two stages."""
    sent = deque(each and SimpleNamespace(idx_mapping_np=np.array([*each])) for each in queue)
    found: list[Any] = []
    runner = a_runner(
        pp_handler=SimpleNamespace(queue=sent), req_states=SimpleNamespace(req_id_to_index={"r": 1}), states=None
    )

    def take() -> None:
        found.append(sent.popleft())
        sent.append(None)

    runner.update_pp_decode_requests = take
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda self, step: take())
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs.req_ids.append("r")
    runner.execute_model(step)
    assert len(found) == taken


def test_a_pool_that_moved_has_whole_graphs_captured_anew_in_every_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    driver = Driver(fake)
    contexts = ContextSet(driver, [GreenContext(driver, handle, 8 * handle) for handle in (11, 12, 13)])
    manager = mock.Mock(graphs={}, release_graphs=lambda: manager.graphs.clear())
    runner = a_runner(
        device=torch.device("cpu"),
        cudagraph_manager=manager,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
        kv_caches=[torch.zeros(1)],
    )
    runner._bind_pool = lambda: setattr(runner, "kv_caches", [torch.zeros(2)])
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream)
    round_ = "graph"

    def capture(self: Any, profile_only: bool = False) -> int:
        assert not manager.graphs
        stream = graphs_module.parallel_state.GraphCaptureContext("torch's").stream  # type: ignore[arg-type]
        manager.graphs["batch"] = (round_, fake.streams[stream])  # type: ignore[index]
        return 10

    monkeypatch.setattr(GPUModelRunner, "capture_model", capture)
    runner.compute_in(contexts)
    assert isinstance(runner.graphs, ContextGraphs)
    assert runner.capture_model(profile_only=False) == 30
    runner.graphs.use(0)
    round_ = "anew"
    runner.rebind_pool()
    for index in (0, 1, 2):
        runner.graphs.use(index)
        assert manager.graphs == {"batch": ("anew", 11 + index)}
