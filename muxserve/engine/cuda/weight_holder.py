"""The process that loads a model's weights on every GPU of the unit, and measures what its engines will need.

    holder (one per model, forked from the warm parent; ends when the weights are kept)
      └── rank 0, rank 1, ...: a shard in exported memory of one GPU; descriptors and places go to the controller,
          which hands them out on a Unix socket. Or, where memory cannot be exported: in its own memory, with a socket
          of its own that hands out CUDA IPC handles, until it is killed

vLLM's own weight cache (`model_loader/weight_cache`) does the latter for one model and one user of it per GPU. Its
part that builds a model of mapped tensors is used (`weight_loader`), and what it refuses (most ways to quantise) is
added. Its daemon and its wire are not: messages are pickled, sockets are named by GPU, and an engine may load a copy of
its own from disk, which a unit has no memory for.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.worker.worker_base import CompilationTimes

from muxserve.engine import binding
from muxserve.engine.cuda import attention, latent, states
from muxserve.engine.cuda.page_table import STAGED_ROWS, table_bytes
from muxserve.engine.cuda.pooled import token_numbers
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from muxserve.engine.cuda.splits import MAX_PARTIAL_BYTES
from muxserve.engine.cuda.weight_loader import fingerprint
from muxserve.engine.cuda.weight_memory import ExportedWeights, on_gpu
from muxserve.engine.cuda.weight_tensors import describe, found_at, processed
from muxserve.engine.cuda.worker import PooledGPUWorker, out_of_memory
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.budget import WAITING
from muxserve.gpu.weight_server import WeightServer
from muxserve.gpu.weight_wire import say
from muxserve.memory import _native
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.process import words
from muxserve.spec import UnitSpec
from muxserve.vllm.weight_seam import publish_layout

log = logging.getLogger(__name__)

# What a context takes where the driver does not tell, on the safe side for a data-centre GPU.
UNKNOWN_CONTEXT_BYTES = 768 << 20
_PRIVATE_WORKER = "muxserve.engine.private.cuda.PrivateHolderWorker"
# More than any context takes, with the libraries' workspaces and what NCCL has for a few ranks.
LARGEST_CONTEXT_BYTES = 4 << 30


class HolderModelRunner(PooledGPUModelRunner):
    """A runner without a unit around it: a pool of one page, for trying how much memory captured graphs take."""

    def _mapped_pool(self) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        group = self.kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        assert isinstance(spec, AttentionSpec)
        page_bytes = spec.block_size * token_numbers(spec) * spec.dtype.itemsize
        table = np.zeros((1, len(group.layer_names), spec.num_kv_heads), dtype=np.int32)
        return torch.zeros((1, page_bytes), dtype=torch.uint8, device=self.device), table

    def _make_states(self, specs: dict[str, MambaSpec]) -> states.PagedStates:
        page_bytes = page_bytes_of(self.vllm_config)
        return states.PagedStates(specs, self.scheduler_config.max_num_seqs, page_bytes, self.device)


def page_bytes_of(vllm_config: VllmConfig) -> int:
    """Bytes of the pages that the model will have."""
    unit_spec, model, _ = binding.place_of(vllm_config)
    return unit_spec.pool(unit_spec.model(model).pool).page_bytes


class HolderWorker(PooledGPUWorker):
    """`worker_cls` of a holder: loads from disk what engines map from it."""

    runner_class = HolderModelRunner

    def _bind(self) -> None:
        """A holder needs no memory manager; there is none yet."""

    def _enter_sm_share(self) -> None:
        """A holder computes nothing once it has measured."""

    def init_device(self) -> None:
        unit_spec, _, _ = binding.place_of(self.vllm_config)
        assert unit_spec.gpu is not None
        self._used_before = _used_bytes(unit_spec.gpu.uuids[self.rank])
        super().init_device()
        self._fingerprint: dict[str, str] = {}
        self._server: WeightServer | None = None
        self._exported: ExportedWeights | None = None

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._fingerprint = fingerprint(self.model_config, self.cache_config)
        self._before_weights = _reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        unit_spec, model, _ = binding.place_of(self.vllm_config)
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(out_of_memory(model, "the weights", self.device, error)) from error
        loaded = self.model_runner.get_model()
        self._rebuilding = largest_rebuilt(loaded)
        assert unit_spec.gpu is not None
        uuid = unit_spec.gpu.uuids[self.rank]
        if unit_spec.gpu.exports_weights:
            if _native.exports_memory(uuid):
                self._exported = ExportedWeights(on_gpu(uuid, self.device))
                self._exported.move(loaded)
            else:
                log.warning("GPU %s cannot export memory; this process stays, to hold the weights", uuid)
        self._after_weights = _reserved(self.device)
        # A very small model fits into what torch had taken before.
        allocated = torch.cuda.memory_allocated(self.device) - allocated
        taken = max(allocated, self._after_weights - self._before_weights)
        # Each engine has those of its own.
        self._weights_bytes = taken - self.model_runner.request_bytes + self._exported_bytes

    @property
    def _exported_bytes(self) -> int:
        return self._exported.size if self._exported is not None else 0

    def measure(self) -> dict[str, int]:
        """What the weights take, and what an engine of this model will take beside them, in bytes on this GPU.

        The larger of the phases is measured: a forward pass of `max_num_batched_tokens` tokens and the sampling of
        `max_num_seqs` requests. Activations are what torch takes from the GPU for it; the context is all that the
        process has on the GPU and torch does not know of.
        """
        unit_spec, _, _ = binding.place_of(self.vllm_config)
        device = self.device
        torch.cuda.reset_peak_memory_stats(device)
        self._run_largest_batch()
        peak = torch.cuda.max_memory_reserved(device) - self._after_weights
        graphs = 0
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            with set_current_vllm_config(self.vllm_config):
                graphs = max(0, int(self.model_runner.profile_cudagraph_memory()))
        self._take_in()
        left = _reserved(device)
        assert unit_spec.gpu is not None
        context = _context_bytes(unit_spec.gpu.uuids[self.rank], self._used_before, left + self._exported_bytes)
        # Where nobody has expected this process to stay, its own context is not counted.
        stays = unit_spec.gpu.exports_weights and self._exported is None
        return {
            "rank": self.rank,
            "weights_bytes": self._weights_bytes + stays * context,
            # With the buffers that a runner has from the start and makes of requests, and what attention needs, which
            # was left out. Before its first step an engine rebuilds its modules there.
            "activation_bytes": (
                max(peak, self._rebuilding)
                + self._before_weights
                + self.model_runner.request_bytes
                + self.model_runner.table_bytes
                + self._attention_bytes()
            ),
            "context_bytes": context,
            "graph_bytes": graphs,
        }

    def _attention_bytes(self) -> int:
        """What attention and states on pages need on the GPU: folded tables, partial results, staged rows, copies of
        states."""
        unit_spec, model, _ = binding.place_of(self.vllm_config)
        deployed = unit_spec.model(model)
        tables = attention.table_shape(self.vllm_config, deployed.layers, deployed.kv_heads, deployed.block_tokens)
        partial = MAX_PARTIAL_BYTES
        if deployed.latent:
            rank = self.model_config.hf_text_config.kv_lora_rank
            partial = latent.workspace_bytes(self.vllm_config, rank, deployed.latent)
        return (
            tables.bytes
            + partial
            + STAGED_ROWS * table_bytes(1, deployed.layers, deployed.kv_heads)
            + states.workspace_bytes(self.vllm_config, self.model_runner.state_specs, page_bytes_of(self.vllm_config))
        )

    def _take_in(self) -> None:
        """Keep what has come in place of what was loaded: at its first step a model may make its rotary tables anew, in
        the type of its activations (gpt-oss)."""
        if self._exported is not None:
            before = self._exported_bytes
            self._exported.move(self.model_runner.get_model())
            self._weights_bytes += self._exported_bytes - before

    def hand_out(self, copies: bool = False) -> bool:
        """Let engines map the weights from now on; whether they can without this process. `copies`: they are kept in
        the host's memory, too."""
        unit_spec, model, _ = binding.place_of(self.vllm_config)
        path = unit_spec.weights_socket(model, self.rank)
        gpu = "" if unit_spec.gpu is None else unit_spec.gpu.uuids[self.rank]
        loaded = self.model_runner.get_model()
        if self._exported is None:
            self._server = WeightServer(path, self._fingerprint, describe(loaded, gpu))
            return False
        held = describe(loaded, gpu, self._exported.export, kind="vmm")
        descriptors = self._exported.descriptors
        in_order = [descriptors[each.handle] for each in held.allocations if each.kind == "vmm"]
        torch.cuda.synchronize(self.device)
        files = self._copied() if copies else {}
        in_order += [files[each.handle] for each in held.allocations if each.kind == "vmm" and files]
        say(path, wire.Keep(self._fingerprint, held, bool(files)), in_order)
        for file in files.values():
            os.close(file)
        return True

    def _copied(self) -> dict[bytes, int]:
        assert self._exported is not None
        try:
            return self._exported.copied()
        except OSError as error:
            log.warning("no copy of the weights is kept in the host's memory: %s", error)
            return {}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        raise NotImplementedError("a holder serves no requests")


def largest_rebuilt(model: torch.nn.Module) -> int:
    """Bytes that an engine needs while it rebuilds the largest module of `model` that it must: as loaded, and as made
    of that, which are about as large."""

    def size(name: str, module: torch.nn.Module) -> int:
        tensors = [found.value for found in found_at(name, module) if isinstance(found.value, torch.Tensor)]
        return sum({id(each): each.numel() * each.itemsize for each in tensors}.values())

    return 2 * max((size(name, module) for name, module in model.named_modules() if processed(module)), default=0)


def holder_args(unit_spec: UnitSpec, model: str) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for a holder: those of an engine, but loading from disk."""
    from muxserve.vllm.args import engine_args

    deployed = unit_spec.model(model)
    own = deployed.engine_args
    return {
        **engine_args(unit_spec, model, deployed.engines[0]),
        "load_format": own.get("load_format", "auto"),
        "model_loader_extra_config": own.get("model_loader_extra_config", {}),
        "worker_cls": _PRIVATE_WORKER if deployed.private else f"{__name__}.HolderWorker",
    }


def run_holder(unit_spec: UnitSpec, model: str, control: Any, copies: bool = False) -> None:
    """Load the weights of `model` on each GPU of the unit, measure, have them kept or hand them out; until this process
    is killed. `copies`: have them kept in the host's memory, too.

    Reports `measured` for each rank and then `up` on `control`, with `kept`; `failed` with the reason if it cannot.
    """
    try:
        executor, kept = _load(unit_spec, model, control, copies)
    except Exception as error:
        log.exception("cannot hold the weights of %s", model)
        control.event("failed", kind="weights", model=model, phase="", error=words(error))
        raise
    # A shard's process that dies takes the whole holder with it: engines need all of them.
    executor.register_failure_callback(lambda: os._exit(1))
    heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, f"weights-{model}"))
    # Whose weights are kept is ended then.
    control.event("up", kind="weights", model=model, phase="", pid=os.getpid(), kept=kept)
    while True:
        heartbeat.beat()
        time.sleep(PERIOD_SECONDS)


def _load(unit_spec: UnitSpec, model: str, control: Any, copies: bool) -> tuple[Any, bool]:
    """An executor whose workers have loaded the weights, told what they measured and handed them out; and whether the
    weights are kept by others on all ranks."""
    from vllm.v1.executor.abstract import Executor

    from muxserve.engine.support import refuse_unsupported
    from muxserve.gpu import environment
    from muxserve.vllm.args import config_of

    def progress(detail: str) -> None:
        control.event("progress", kind="weights", model=model, phase="", detail=detail)

    # Outside MPS, so that the weights stay when a kernel of an engine fails.
    environment.prepare(unit_spec, model, "weights")
    # Workers of several ranks are forked, like everything else here: no CUDA and no team of threads until then.
    torch.set_num_threads(1)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    config = config_of(holder_args(unit_spec, model))
    if unit_spec.ranks > 1:
        environment.refuse_cuda()
    progress(WAITING)
    with open(Path(unit_spec.run_dir) / "weights.lock", "w") as lock:
        # One after the other: what a context takes shows only as a difference of the GPU's free memory.
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress("loading weights")
        executor = Executor.get_class(config)(config)
        refuse_unsupported(executor, unit_spec.model(model), unit_spec.stages)
        _resolve_layout(config, executor)
        progress("measuring memory")
        measured = executor.collective_rpc("measure")
    kept = all(executor.collective_rpc("hand_out", args=(copies,)))
    engines = len(unit_spec.model(model).engines)
    for each in measured:
        control.event("measured", kind="weights", model=model, engine_count=engines, **each)
    return executor, kept


def _resolve_layout(config: Any, executor: Any) -> None:
    """Settle vLLM's layout of a KV cache, as its engine core does before it tries how much memory graphs take. The pool
    has a layout of its own, but vLLM asks."""
    specs = [spec for worker in executor.get_kv_cache_specs() for spec in worker.values()]
    layout = resolve_kv_cache_layout(config, executor.get_supported_kv_cache_layouts(), specs)
    publish_layout(executor, layout.name, config)


def _reserved(device: torch.device) -> int:
    """What torch has taken from the GPU and needs."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _context_bytes(uuid: str, used_before: int | None, torch_bytes: int) -> int:
    """What this process has on a GPU beyond the `torch_bytes` that torch took.

    From what the driver says of the process; where it does not tell (a PID namespace of its own), from what came to be
    in use since `used_before`. That is not to be believed when somebody else took memory meanwhile.
    """
    own = _own_bytes(uuid)
    if own is not None and own >= torch_bytes:
        return own - torch_bytes
    used = _used_bytes(uuid)
    if used is None or used_before is None:
        return UNKNOWN_CONTEXT_BYTES
    context = used - used_before - torch_bytes
    if 0 < context <= LARGEST_CONTEXT_BYTES:
        return context
    log.warning("others took or gave back memory of GPU %s meanwhile; a context is taken for %d MiB large", uuid,
                UNKNOWN_CONTEXT_BYTES >> 20)  # fmt: skip
    return UNKNOWN_CONTEXT_BYTES


def _own_bytes(uuid: str) -> int | None:
    """Memory of this process on a GPU, if the driver tells; as a client of an MPS server it stands in a list of its
    own."""
    from vllm.third_party import pynvml

    def processes() -> Iterator[Any]:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for ask in (pynvml.nvmlDeviceGetMPSComputeRunningProcesses, pynvml.nvmlDeviceGetComputeRunningProcesses):
            with contextlib.suppress(pynvml.NVMLError):
                yield from ask(gpu)

    try:
        with _nvml():
            found = [each.usedGpuMemory for each in processes() if each.pid == os.getpid()]
    except pynvml.NVMLError:
        return None
    return int(found[0]) if found and found[0] else None


def _used_bytes(uuid: str) -> int | None:
    """Memory in use on a GPU, as the driver sees it; asking makes no context."""
    from vllm.third_party import pynvml

    try:
        with _nvml():
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    except pynvml.NVMLError as error:
        log.warning("the driver does not tell how much memory GPU %s uses: %s", uuid, error)
        return None


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
