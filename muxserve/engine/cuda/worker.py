"""vLLM's GPU worker on the shared pool, with weights that another process holds."""

from __future__ import annotations

import contextlib
import gc
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from muxserve.engine import binding
from muxserve.engine.cuda import attention, latent, mapped_weights
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from muxserve.engine.cuda.weight_loader import register_loader
from muxserve.gpu import green, sm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# How often a worker looks whether it still computes on its own SMs.
CHECKED_STEPS = 1000

# vLLM imports this to warm up models of the family `_FAMILY`, whatever the model.
_WARM_UP, _FAMILY = "vllm.model_executor.warmup.minimax_m3_msa_warmup", "vllm.models.minimax_m3"

attention.register()
latent.register()
register_loader()


def prepare() -> None:
    """Do once, before engines are forked, what each of them would do when vLLM warms it up. Touches no GPU."""
    # A hash of all its files, by which Triton finds what it has compiled.
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def spare_imports() -> None:
    """Have vLLM not import a family of models, and FlashInfer for it, only to see that the engine's model is none of
    them: that is a third of an engine's start. To be called when the model has been made."""
    if _FAMILY not in sys.modules:
        nothing_to_do = ModuleType(_WARM_UP)
        setattr(nothing_to_do, _WARM_UP.rpartition(".")[2], lambda worker: None)
        sys.modules.setdefault(_WARM_UP, nothing_to_do)


class PooledGPUWorker(gpu_worker.Worker):
    """`worker_cls` of engines on GPUs.

    It takes no part in vLLM's division of a GPU's memory: weights are mapped from their holder, the pool belongs to the
    memory manager, and what an engine needs beyond them was measured and set aside before the pool was made.
    """

    runner_class: ClassVar[type[Any]] = PooledGPUModelRunner
    _contexts: green.ContextSet | None = None
    _warm = False
    _steps = 0

    def init_device(self) -> None:
        """Bind to the unit, take the GPU of this rank, and its SM share.

        Raises:
            RuntimeError: the GPU is not the one that the unit's spec names for this rank.
        """
        self._bind()
        index = current_platform.logical_device_id_to_visible_device_id(self.local_rank)
        torch.accelerator.set_device_index(index)
        # Before anything makes a stream: it would belong to the whole GPU.
        self._enter_sm_share()
        # vLLM would refuse to start when less is free than a part of the whole GPU.
        gpu_worker.request_memory = _request_nothing
        super().init_device()
        self._stay_on_default_stream()
        self._check_device()

    def _stay_on_default_stream(self) -> None:
        """Compute on the default stream, which is that of whichever context is current.

        Some kernels (Marlin's) ask for `vllm.utils.current_stream`, which makes a stream of its own when it is asked
        first: all later steps would be computed in the context that was current then, whatever their leases say.
        """
        if self._contexts is not None:
            torch.cuda.set_stream(torch.cuda.default_stream(self.device))

    def _bind(self) -> None:
        binding.bind_worker(self.vllm_config, self.rank)

    def _enter_sm_share(self) -> None:
        unit_spec, model, phase = binding.place_of(self.vllm_config)
        self._contexts = green.enter(unit_spec, model, phase, self.local_rank)

    def _check_device(self) -> None:
        unit_spec, model, _ = binding.place_of(self.vllm_config)
        if unit_spec.gpu is None or self.device.type != "cuda":
            return
        expected = unit_spec.gpu.uuids[self.rank]
        # From CUDA itself: vLLM would work it out from CUDA_VISIBLE_DEVICES, which an MPS server reads anew.
        found = torch.cuda.get_device_properties(self.device).uuid
        if _plain(found) != _plain(expected):
            raise RuntimeError(
                f"rank {self.rank} of {model!r} runs on GPU {found}, but its weights and its pool are on {expected}; "
                "CUDA_VISIBLE_DEVICES must list the unit's GPUs in the order of the ranks"
            )

    def _make_model_runner(self) -> Any:
        made = self.runner_class(self.vllm_config, self.device)
        if self._contexts is not None:
            made.compute_in(self._contexts)
        return made

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes of the model's blocks, as the unit has them.

        Runs the largest batch: it compiles the model and allocates the most memory that activations need. So a lack of
        memory shows at start-up, with a reason, and not while serving.
        """
        self._run_largest_batch()
        self._enter_again()
        blocks = self.cache_config.num_gpu_blocks_override
        assert blocks is not None
        return blocks * sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())

    def compile_or_warm_up_model(self) -> Any:
        spare_imports()
        with self.model_runner.warming_up():
            times = super().compile_or_warm_up_model()
        # Capturing graphs has given the memory of activations back.
        self._run_largest_batch()
        self._enter_again()
        self._warm = True
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        # vLLM's second runner warms up with steps.
        if self._warm:
            if self._steps % CHECKED_STEPS == 0:
                self._check_sm_share()
            self._steps += 1
        return super().execute_model(scheduler_output)

    def _enter_again(self) -> None:
        """What is compiled and captured may have made the whole GPU's context current (seen with torch 2.11)."""
        if self._contexts is not None:
            self._contexts.enter_again()

    def _check_sm_share(self) -> None:
        if self._contexts is not None:
            self._contexts.check()

    def _run_largest_batch(self) -> None:
        try:
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.profile_run()
        except torch.OutOfMemoryError as error:
            _, model, phase = binding.place_of(self.vllm_config)
            raise RuntimeError(out_of_memory(model, f"the {phase} engine", self.device, error)) from error
        gc.collect()

    def compute_on(self, region: int) -> None:
        """The next steps run on `region` millionths of the GPU's SMs, as near as this engine has a set of them.

        Raises:
            muxserve.gpu.green.GreenContextError: the driver refuses.
        """
        graphs = self.model_runner.graphs
        if graphs is not None:
            graphs.use(sm.step_of(region, len(graphs.contexts.contexts)))

    def forget_step(self) -> None:
        """See the runner's."""
        self.model_runner.forget_step()

    def rebind_pool(self) -> None:
        """See `PooledOnDevice.rebind_pool`."""
        self.model_runner.rebind_pool()

    def release_weights(self) -> None:
        """The model sleeps: see `mapped_weights.release`."""
        mapped_weights.release()

    def map_weights(self) -> None:
        """The model is woken, and its weights are on the GPU again: see `mapped_weights.map_again`."""
        mapped_weights.map_again()


def out_of_memory(model: str, who: str, device: torch.device, error: Exception) -> str:
    """What lacks memory, how much, and what helps."""
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"GPU {device.index} has no memory left for {who} of {model!r}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB "
        f"are free ({str(error).splitlines()[0]}). Serve fewer models on it, lower the model's "
        "max_num_batched_tokens or max_num_seqs, or stop what else uses this GPU"
    )


def _request_nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _plain(uuid: object) -> str:
    return str(uuid).lower().removeprefix("gpu-")
