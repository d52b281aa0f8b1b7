"""Worker and weight holder as far as they run without a GPU: what they ask for, tell and refuse."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

import vllm.v1.executor.abstract as abstract
from vllm.config import CompilationConfig

from muxserve.engine import ranks, support
from muxserve.engine.cuda import weight_holder, worker
from muxserve.engine.cuda.graphs import without_collecting
from muxserve.engine.cuda.weight_holder import HolderWorker
from muxserve.engine.cuda.worker import PooledGPUWorker
from muxserve.gpu import environment
from muxserve.spec import GpuSpec, PoolSpec, UnitSpec
from muxserve.vllm import args
from tests.engine.harness import deployed_model
from tests.support.unit_specs import unit_spec_of

MODEL = Path(__file__).parents[2] / "configs/models/arithmetic"
UUIDS = ["GPU-aaaa", "GPU-bbbb"]


def unit_spec(tmp_path: Path, **engine_args: Any) -> UnitSpec:
    model = deployed_model("m", MODEL, dtype="bfloat16", engine_args=engine_args)
    pool = PoolSpec("main", 2 * model.block_tokens * model.head_dim * 2, 1000)
    return unit_spec_of(tmp_path, [model], pool, ranks=2, gpu=GpuSpec(UUIDS))


def a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, uuid: str) -> Any:
    """A worker of `rank` that finds itself on the GPU `uuid`."""
    place = (unit_spec(tmp_path), "m", "decode")
    monkeypatch.setattr(worker.binding, "place_of", lambda _: place)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    made: Any = PooledGPUWorker.__new__(PooledGPUWorker)
    made.vllm_config, made.rank, made.local_rank = None, rank, rank
    made.device = torch.device("cuda", rank)
    return made


def test_a_worker_takes_the_gpu_of_its_rank_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_worker(tmp_path, monkeypatch, 1, "BBBB")._check_device()
    with pytest.raises(RuntimeError, match=r"rank 1 of 'm' runs on GPU aaaa.*on GPU-bbbb.*CUDA_VISIBLE_DEVICES"):
        a_worker(tmp_path, monkeypatch, 1, "aaaa")._check_device()


def test_what_an_engine_says_it_has_is_the_model_s_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = a_worker(tmp_path, monkeypatch, 0, "aaaa")
    ran: list[str] = []
    made._run_largest_batch = lambda: ran.append("largest batch")
    made.cache_config = SimpleNamespace(num_gpu_blocks_override=128)
    made.get_kv_cache_spec = lambda: {f"layer.{i}": SimpleNamespace(page_size_bytes=4096) for i in range(3)}
    assert made.determine_available_memory() == 128 * 3 * 4096
    assert ran == ["largest batch"]


def test_a_lack_of_memory_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = a_worker(tmp_path, monkeypatch, 0, "aaaa")

    def profile_run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nmore")

    made.vllm_config = None
    monkeypatch.setattr(worker, "set_current_vllm_config", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 140 << 30))
    made.model_runner = SimpleNamespace(profile_run=profile_run)
    words = r"no memory left for the decode engine of 'm': 1.00 of 140.00 GiB.*512.00 MiB.*max_num_batched_tokens"
    with pytest.raises(RuntimeError, match=words):
        made._run_largest_batch()


def test_a_worker_sees_to_it_that_its_sms_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = a_worker(tmp_path, monkeypatch, 0, "aaaa")
    looked: list[int] = []
    ran: list[object] = []
    monkeypatch.setattr(worker.gpu_worker.Worker, "execute_model", lambda self, output: ran.append(output))
    monkeypatch.setattr(
        worker.gpu_worker.Worker, "compile_or_warm_up_model", lambda self: self.execute_model("to warm up") or "times"
    )
    made._run_largest_batch = lambda: None
    made.model_runner = SimpleNamespace(warming_up=contextlib.nullcontext)
    entered: list[int] = []
    made._contexts = SimpleNamespace(
        check=lambda: looked.append(len(ran)), enter_again=lambda: entered.append(len(ran))
    )
    assert made.compile_or_warm_up_model() == "times"
    assert looked == []
    ran.clear()
    assert entered == [1], "what was compiled may have made another context current"
    for step in range(worker.CHECKED_STEPS + 1):
        made.execute_model(step)
    assert looked == [0, worker.CHECKED_STEPS]
    assert ran == list(range(worker.CHECKED_STEPS + 1))


def test_what_asks_for_a_stream_gets_that_of_the_current_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes one of its own otherwise, in whichever context is current when a kernel asks first."""
    made = a_worker(tmp_path, monkeypatch, 0, "aaaa")
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    made._stay_on_default_stream()
    assert streams == []
    made._contexts = object()
    made._stay_on_default_stream()
    assert streams == [("default", made.device)]


# ------------------------------------------------------------ the holder


class Events:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def event(self, event: str, **fields: Any) -> None:
        self.seen.append({"event": event, **fields})


class Ended(BaseException):
    """In place of waiting for ever."""


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor of two ranks that answers as workers do; `calls` is what it was asked."""
    calls: list[str] = []

    class Fake:
        def __init__(self, config: Any) -> None:
            calls.append("load")

        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            return [{}]

        def get_supported_kv_cache_layouts(self) -> list[list[str]]:
            return [["LBNHC"]]

        def set_kv_cache_layout(self, layout: str) -> None:
            calls.append(layout)

        def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            calls.append(method if not any(args) else f"{method}, copied")
            if method == "measure":
                figures = {"weights_bytes": 7, "activation_bytes": 5, "context_bytes": 3, "graph_bytes": 1}
                return [{"rank": rank, **figures} for rank in range(2)]
            return [None, None]

        def register_failure_callback(self, callback: Any) -> None:
            calls.append("watch")

    def pause(seconds: float) -> None:
        raise Ended

    monkeypatch.setattr(abstract.Executor, "get_class", staticmethod(lambda config: Fake))
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=None)
    monkeypatch.setattr(args, "config_of", lambda options: config)
    chosen = SimpleNamespace(name="chosen layout")
    monkeypatch.setattr(weight_holder, "resolve_kv_cache_layout", lambda *_: chosen)
    monkeypatch.setattr(support, "refuse_unsupported", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        monkeypatch.setenv(name, "25")
    monkeypatch.setattr(weight_holder.time, "sleep", pause)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return SimpleNamespace(calls=calls, cls=Fake)


def test_a_holder_measures_before_anyone_maps_and_then_says_that_it_is_up(tmp_path: Path, executor: Any) -> None:
    events = Events()
    with pytest.raises(Ended):
        weight_holder.run_holder(unit_spec(tmp_path), "m", events)
    assert executor.calls == ["load", "chosen layout", "measure", "hand_out", "watch"]
    told = [e for e in events.seen if e["event"] != "progress"]
    assert [(e["event"], e.get("rank")) for e in told] == [("measured", 0), ("measured", 1), ("up", None)]
    assert told[0]["weights_bytes"] == 7
    assert {e["kind"] for e in events.seen} == {"weights"}
    assert told[-1]["phase"] == ""
    # Outside the unit's own MPS server (and everybody else's), so that the weights survive an engine's failed kernel.
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps" / "none")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ


def test_a_holder_is_told_whether_to_keep_a_copy(tmp_path: Path, executor: Any) -> None:
    with pytest.raises(Ended):
        weight_holder.run_holder(unit_spec(tmp_path), "m", Events(), copies=True)
    assert "hand_out, copied" in executor.calls


def test_holders_measure_one_after_another(tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        with open(tmp_path / "weights.lock", "w") as lock:
            taken = False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = True
        assert taken is (method == "measure")
        return []

    monkeypatch.setattr(executor.cls, "collective_rpc", measure)
    with pytest.raises(Ended):
        weight_holder.run_holder(unit_spec(tmp_path), "m", Events())


def test_a_holder_says_why_it_cannot(tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("model 'm' cannot be served: it uses sliding windows")

    monkeypatch.setattr(support, "refuse_unsupported", refuse)
    events = Events()
    with pytest.raises(ValueError, match="sliding windows"):
        weight_holder.run_holder(unit_spec(tmp_path), "m", events)
    assert events.seen[-1] == {
        "event": "failed",
        "kind": "weights",
        "model": "m",
        "phase": "",
        "error": "ValueError: model 'm' cannot be served: it uses sliding windows",
    }


def test_a_holder_loads_as_its_model_says_and_engines_map(tmp_path: Path) -> None:
    plain, dummy = unit_spec(tmp_path), unit_spec(tmp_path, load_format="dummy")
    assert weight_holder.holder_args(plain, "m")["load_format"] == "auto"
    held = weight_holder.holder_args(dummy, "m")
    assert held["load_format"] == "dummy"
    assert held["worker_cls"] == "muxserve.engine.cuda.weight_holder.HolderWorker"
    assert held["model_loader_extra_config"] == {}
    engine = args.engine_args(dummy, "m", "decode")
    assert engine["load_format"] == args.LOAD_FORMAT
    assert engine["model_loader_extra_config"]["sockets"] == [dummy.weights_socket("m", rank) for rank in (0, 1)]
    assert engine["attention_backend"] == "CUSTOM"


def test_the_configuration_of_several_ranks_touches_no_gpu(tmp_path: Path) -> None:
    """Where this is left open, vLLM imports flashinfer to see whether it can fuse, which calls cuInit before ranks are
    forked."""
    of = unit_spec(tmp_path)
    for options in (args.engine_args(of, "m", "decode"), weight_holder.holder_args(of, "m")):
        passes = CompilationConfig(**options["compilation_config"]).pass_config
        assert passes.fuse_allreduce_rms is False
    own = unit_spec(tmp_path, compilation_config={"cudagraph_mode": "NONE", "pass_config": {"fuse_act_quant": False}})
    assert args.engine_args(own, "m", "decode")["compilation_config"] == {
        "cudagraph_mode": "NONE",
        "pass_config": {"fuse_allreduce_rms": False, "fuse_act_quant": False},
    }
    one = msgspec.structs.replace(of, ranks=1, gpu=GpuSpec(UUIDS[:1]))
    assert args.engine_args(one, "m", "decode")["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}


@pytest.mark.parametrize(
    ("found", "own", "mode"),
    [
        (None, None, "PIECEWISE"),
        (True, None, "FULL_AND_PIECEWISE"),
        (False, None, "PIECEWISE"),
        (None, "FULL", "FULL"),
        (False, "FULL", "PIECEWISE"),
        (False, "NONE", "NONE"),
    ],
)
def test_graphs_hold_attention_where_that_works(tmp_path: Path, found: bool | None, own: str | None, mode: str) -> None:
    options = {} if own is None else {"compilation_config": {"cudagraph_mode": own}}
    of = msgspec.structs.replace(unit_spec(tmp_path, **options), ranks=1, gpu=GpuSpec(UUIDS[:1], full_graphs=found))
    assert args.engine_args(of, "m", "decode")["compilation_config"] == {"cudagraph_mode": mode}


@pytest.mark.parametrize(("found", "mode"), [(None, "PIECEWISE"), (False, "PIECEWISE"), (True, "FULL_AND_PIECEWISE")])
def test_a_configuration_that_is_silent_about_graphs_has_those_of_the_machine(
    tmp_path: Path, found: bool | None, mode: str
) -> None:
    """vLLM's own default would be whole ones, on GPUs that nobody has tried."""
    own = unit_spec(tmp_path, compilation_config={"cudagraph_capture_sizes": [1, 8]})
    of = msgspec.structs.replace(own, ranks=1, gpu=GpuSpec(UUIDS[:1], full_graphs=found))
    assert args.engine_args(of, "m", "decode")["compilation_config"] == {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [1, 8],
    }


def test_ranks_are_not_forked_where_cuda_was_touched(
    tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("this process has touched CUDA and cannot fork: something has called cuInit")

    monkeypatch.setattr(environment, "refuse_cuda", refuse)
    with pytest.raises(RuntimeError, match="cannot fork"):
        weight_holder.run_holder(unit_spec(tmp_path), "m", Events())
    assert "load" not in executor.calls
    monkeypatch.setattr(ranks, "refuse_cuda", refuse)
    monkeypatch.setattr(ranks, "place_of", lambda _: (unit_spec(tmp_path), "m", "decode"))
    engine: Any = ranks.RankedExecutor.__new__(ranks.RankedExecutor)
    engine.vllm_config = None
    with pytest.raises(RuntimeError, match="cannot fork"):
        engine._init_executor()


def test_what_a_runner_makes_of_requests_is_none_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's second runner makes it behind the weights, and each engine has its own."""
    made: Any = HolderWorker.__new__(HolderWorker)
    monkeypatch.setattr(weight_holder.binding, "place_of", lambda _: (unit_spec(tmp_path), "m", "prefill"))
    monkeypatch.setattr(weight_holder._native, "exports_memory", lambda uuid: False)
    monkeypatch.setattr(weight_holder, "fingerprint", lambda *_: {})
    reserved, allocated = [100, 1130], [90, 1110]
    monkeypatch.setattr(weight_holder, "_reserved", lambda _: reserved.pop(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated.pop(0))
    monkeypatch.setattr(worker.gpu_worker.Worker, "load_model", lambda self, load_dummy_weights: None)
    made.vllm_config = made.model_config = made.cache_config = None
    made.device, made.rank, made._exported = torch.device("cuda", 0), 0, None
    made.model_runner = SimpleNamespace(get_model=torch.nn.Module, request_bytes=30)
    made.load_model()
    assert made._weights_bytes == 1000


def test_a_holder_serves_no_requests() -> None:
    with pytest.raises(NotImplementedError):
        HolderWorker.__new__(HolderWorker).compile_or_warm_up_model()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("own", "before", "used", "context"),
    [
        pytest.param(900, 0, 90000, 600, id="the driver tells of the process"),
        pytest.param(None, 1000, 1800, 500, id="it does not: what came to be in use"),
        pytest.param(None, 1000, 70000, 768, id="others took memory meanwhile"),
        pytest.param(None, 5000, 1000, 768, id="others gave memory back meanwhile"),
        pytest.param(None, None, None, 768, id="it tells nothing"),
        pytest.param(100, 1000, 1800, 500, id="it tells nonsense of the process"),
    ],
)
def test_what_a_context_takes(
    own: int | None, before: int | None, used: int | None, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_holder, "_own_bytes", lambda _: own and own * MIB)
    monkeypatch.setattr(weight_holder, "_used_bytes", lambda _: used and used * MIB)
    assert weight_holder._context_bytes("GPU-1", before and before * MIB, 300 * MIB) == context * MIB


def test_a_family_of_models_is_not_imported_to_see_that_the_model_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_up = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    monkeypatch.delitem(sys.modules, warm_up, raising=False)
    monkeypatch.delitem(sys.modules, "vllm.models.minimax_m3", raising=False)
    worker.spare_imports()
    # As vLLM does it.
    from vllm.model_executor.warmup.minimax_m3_msa_warmup import minimax_m3_msa_warmup

    minimax_m3_msa_warmup(SimpleNamespace())
    assert "vllm.models.minimax_m3" not in sys.modules


def test_a_model_of_that_family_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    monkeypatch.delitem(sys.modules, warm_up, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.models.minimax_m3", ModuleType("vllm.models.minimax_m3"))
    worker.spare_imports()
    assert warm_up not in sys.modules


def test_nothing_is_collected_while_graphs_are_captured() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen > 0, "what was frozen stays so"
    finally:
        gc.unfreeze()
