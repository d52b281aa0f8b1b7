"""Weights from who loads them to engines in vLLM's CUDA build: `python -m tests.cuda_stub.share DIRECTORY`.

For each way to quantise: a process loads a model (its values are made up), fills every tensor with bytes of its own and
has the weights kept; an engine builds the model on them and rests. The GPU's memory is given back, another process
copies the weights there from the host's memory, the engine maps them again, and a second engine builds the model on
these. Prints one line of JSON per model: what differs between any two of them, how many tensors were compared, and how
much memory the engine let go of while it rested.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "configs/models/atlas"
UUIDS = [f"GPU-00010203-0405-0607-0809-0a0b0c0d0e{rank:02x}" for rank in range(2)]

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "dtype": "bfloat16", "tie_word_embeddings": False}  # fmt: skip
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
           "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1,
           "mlp_only_layers": []}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 128,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
          "num_key_value_heads": 8, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
          "moe_intermediate_size": 256, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
          "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
          "scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # fmt: skip
GLM = {**LATENT, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
       "qk_nope_head_dim": 192, "v_head_dim": 256,
       "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
SINKS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8,
         "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {**YARN, "truncate": False}}  # fmt: skip
SPACES = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
          "layer_types": ["mamba", "attention"], "position_embedding_type": "nope", "mamba_n_heads": 16,
          "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64, "mamba_expand": 2,
          "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}  # fmt: skip
DELTA = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
         "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 8, "linear_num_key_heads": 4,
         "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
         "mamba_ssm_dtype": "float32"}  # fmt: skip
NEXT = {**DELTA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}  # fmt: skip
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 16,
            "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "chunk_size": 64, "conv_kernel": 4,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 512, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "mlp_hidden_act": "relu2"}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def packed(bits: int, activations: dict[str, Any] | None = None, format: str = "pack-quantized") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": 128} if activations is None else {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FLOAT = {**packed(8, {**DYNAMIC, "type": "float"}, "float-quantized")}
FLOAT["config_groups"]["group_0"]["weights"]["type"] = "float"
# Ranks over all stages, and stages; one of each where nothing is said.
SPLIT = {"2 ranks": (2, 1), "2 stages": (2, 2)}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "dense": ({}, None),
    "fp8": ({}, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "awq": ({}, AWQ),
    "gptq": ({}, GPTQ),
    "int4": ({}, packed(4)),
    "int8": ({}, packed(8, DYNAMIC, "int-quantized")),
    "float8": ({}, FLOAT),
    "modelopt": ({}, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None,
                      "exclude_modules": ["lm_head"]}),
    "experts": (EXPERTS, None),
    "experts, awq": (EXPERTS, AWQ),
    "experts, gptq": (EXPERTS, GPTQ),
    "experts, int4": (EXPERTS, packed(4)),
    "latents": (LATENT, None),
    "latents, fp8": (LATENT, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "latents of GLM": (GLM, None),
    "sinks": (SINKS, None),
    "sinks, mxfp4": (SINKS, {"quant_method": "mxfp4"}),
    "state spaces": (SPACES, None),
    "state spaces, experts": (NEMOTRON, None),
    "delta nets": (DELTA, None),
    "delta nets, fp8": (DELTA, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "delta nets, experts": (NEXT, None),
    "dense, 2 ranks": ({}, None),
    "experts, 2 ranks": (EXPERTS, None),
    "fp8, 2 ranks": ({}, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "latents, 2 ranks": (LATENT, None),
    "state spaces, 2 ranks": (SPACES, None),
    "state spaces, experts, 2 ranks": (NEMOTRON, None),
    "delta nets, 2 ranks": (DELTA, None),
    "delta nets, fp8, 2 ranks": (DELTA, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "delta nets, experts, 2 ranks": (NEXT, None),
    "dense, 2 stages": ({}, None),
}  # fmt: skip


def checkpoint(directory: Path, name: str) -> Path:
    more, quantisation = MODELS[name]
    made = directory / name.replace(", ", "-")
    shutil.copytree(SOURCE, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((SOURCE / "config.json").read_text()) | SIZES | more
    if quantisation is not None:
        config["quantization_config"] = quantisation
    (made / "config.json").write_text(json.dumps(config))
    return made


def unit_spec_of(directory: Path, path: Path, ranks: int, stages: int) -> Any:
    from muxserve.spec import GpuSpec, PolicyName, PoolSpec, UnitSpec, save
    from tests.engine.harness import deployed_model

    shape = "one" if stages > 1 else "split"
    model = deployed_model(
        "m", path, ranks // stages, dtype="bfloat16", shape=shape, stages=stages, engine_args={"load_format": "dummy"}
    )
    pool = PoolSpec("main", 2 * model.block_tokens * model.head_dim * 2, 2000)
    gpu = GpuSpec(UUIDS[:ranks], sm_sharing="off")
    policy: PolicyName = "free" if stages > 1 else "slack"
    spec = UnitSpec(str(directory), "u", policy, 2, [pool], [model], ranks)
    spec = msgspec.structs.replace(spec, gpu=gpu)
    save(spec, directory / "unit.json")
    return spec


def bytes_of(tensor: Any) -> Any:
    """The bytes that a tensor lies in, uint8, not copied: kernels are not launched here."""
    import torch

    from muxserve.engine.cuda.weight_tensors import span_of

    start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[start : start + span_of(tensor.shape, tensor.stride()) * tensor.itemsize]


def contents(worker: Any) -> dict[str, list[Any]]:
    """By rank and name: form and checksum of every tensor of the worker's model."""
    import torch

    from muxserve.engine.cuda.weight_tensors import found_in, kept_by

    found: dict[str, list[Any]] = {}
    for each in found_in(worker.model_runner.get_model()):
        name = f"{worker.rank}/{each.name}"
        if isinstance(each.value, torch.Tensor):
            tensor = each.value.detach()
            data = bytes_of(tensor).cpu().numpy().tobytes() if tensor.numel() else b""
            form = [str(tensor.dtype), list(tensor.shape), list(tensor.stride())]
            found[name] = [*form, hashlib.sha256(data).hexdigest()]
        else:
            found[name] = ["number", each.value]
    # What others keep of them is no memory of its own.
    known = {value.data_ptr() for value in worker.model_runner.get_model().parameters()}
    for name, module in worker.model_runner.get_model().named_modules():
        for each in kept_by(name, module):
            if isinstance(each.value, torch.nn.Parameter):
                found[f"{worker.rank}/{each.name}, kept"] = ["of the model", each.value.data_ptr() in known]
    return found


def fill(worker: Any) -> None:
    """Bytes of its own for every tensor, others on every rank."""
    import torch

    from muxserve.engine.cuda.weight_tensors import found_in

    generator = torch.Generator().manual_seed(worker.rank)
    for each in found_in(worker.model_runner.get_model()):
        if isinstance(each.value, torch.Tensor) and each.value.numel() and each.value.device.type == "cuda":
            place = bytes_of(each.value.detach())
            place.copy_(torch.randint(0, 255, place.shape, dtype=torch.uint8, generator=generator))


def of_all_ranks(executor: Any) -> dict[str, Any]:
    return {name: form for each in executor.collective_rpc(contents) for name, form in each.items()}


def holder(spec: Any) -> dict[str, Any]:
    from vllm.v1.executor.abstract import Executor

    from muxserve.engine.cuda.weight_holder import holder_args
    from muxserve.vllm.args import config_of

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    config = config_of(holder_args(spec, "m"))
    executor: Any = Executor.get_class(config)(config)
    executor.collective_rpc(fill)
    if executor.collective_rpc("hand_out", args=(True,)) != [True] * spec.ranks:
        raise RuntimeError("the weights are not kept")
    return of_all_ranks(executor)


def mapped(worker: Any) -> int:
    """Bytes of the GPU's memory, as the stand-in has it, that the process of a worker has mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:fake-cuda" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines))


def of_engine(spec: Any, pipe: Connection) -> None:
    """Build the model and tell of it; then do what the parent says."""
    executor = engine(spec)
    pipe.send(of_all_ranks(executor))
    before = sum(executor.collective_rpc(mapped))
    pipe.recv()
    executor.collective_rpc("release_weights")
    pipe.send({"released": before - sum(executor.collective_rpc(mapped))})
    pipe.recv()
    executor.collective_rpc("map_weights")
    pipe.send(of_all_ranks(executor))


class Engine:
    """One in a process of its own."""

    def __init__(self, spec: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if not self._pid:
            self.pipe.close()
            try:
                of_engine(spec, theirs)
            except BaseException as error:
                traceback.print_exc()
                theirs.send({"error": f"{type(error).__name__}: {error}"})
            finally:
                os._exit(0)
        theirs.close()

    def says(self) -> dict[str, Any]:
        """What it says next."""
        said: dict[str, Any] = self.pipe.recv()
        if "error" in said:
            raise RuntimeError(said["error"])
        return said

    def after(self, order: str) -> dict[str, Any]:
        """What it says to an order."""
        self.pipe.send(order)
        return self.says()

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def engine(spec: Any) -> Any:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from muxserve.engine.binding import Binding, bind
    from muxserve.engine.ranks import RankedExecutor
    from muxserve.memory.client import MemoryClient
    from muxserve.vllm.args import config_of, engine_args

    model = spec.models[0]
    phase = model.engines[0]
    client = MemoryClient(spec.memory_socket, f"m/{phase}")
    bind(Binding(model, phase, client, client.map("m")))
    config = config_of(engine_args(spec, "m", phase))
    return (UniProcExecutor if spec.ranks == 1 else RankedExecutor)(config)


def restorer(spec: Any) -> dict[str, Any]:
    from muxserve.engine.cuda.weight_copier import HostCopies, known, restore

    copies = HostCopies()
    known(spec, "m", copies)
    while copies.pin_next():
        pass
    for rank in range(spec.ranks):
        restore(spec, "m", rank, copies)
    return {}


def in_a_fork(job: Callable[[], Any], out: Path) -> dict[str, Any]:
    pid = os.fork()
    if not pid:
        try:
            out.write_text(json.dumps(job()))
        except BaseException as error:
            traceback.print_exc()
            out.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found: dict[str, Any] = json.loads(out.read_text())
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def through(spec: Any, said: dict[str, Any]) -> None:
    """What becomes of the weights of a model; fills `said`."""
    from muxserve.gpu.weight_server import WeightServer

    sockets = [spec.weights_socket("m", rank) for rank in range(spec.ranks)]
    keepers = [WeightServer(path, on_lost=print) for path in sockets]
    engines: list[Engine] = []
    try:
        theirs = in_a_fork(lambda: holder(spec), Path(spec.run_dir) / "holder.json")
        engines.append(Engine(spec))
        found = [engines[0].says()]
        said |= engines[0].after("rest")
        for keeper in keepers:
            keeper.close()
        copies = [keeper.copy for keeper in keepers]
        said["weights"] = sum(copy.bytes for copy in copies if copy is not None)
        keepers = [WeightServer(path, on_lost=print, copy=copy) for path, copy in zip(sockets, copies, strict=True)]
        in_a_fork(lambda: restorer(spec), Path(spec.run_dir) / "restorer.json")
        found.append(engines[0].after("come back"))
        engines.append(Engine(spec))
        found.append(engines[1].says())
        said["tensors"] = len(theirs)
        said["state"] = sum(":" in each for each in found[0])
        names = {name for each in (theirs, *found) for name in each}
        said["different"] = sorted(name for name in names if any(each.get(name) != theirs[name] for each in found))
    finally:
        for each in engines:
            each.end()
        for keeper in keepers:
            keeper.close()


def main() -> None:
    directory = Path(sys.argv[1])
    from muxserve.forks import warm_parent
    from muxserve.memory import server
    from muxserve.vllm import args

    os.environ.update(args.environment())
    warm_parent.preload("cuda")
    for name in sys.argv[2:] or MODELS:
        path = checkpoint(directory, name)
        run_dir = directory / f"{path.name}.run"
        run_dir.mkdir()
        spec = unit_spec_of(run_dir, path, *SPLIT.get(name.rpartition(", ")[2], (1, 1)))
        manager = server.start(spec)
        said: dict[str, Any] = {"model": name}
        try:
            warm_parent.register(spec.models, "cuda")
            through(spec, said)
        except (RuntimeError, EOFError) as error:
            said["error"] = str(error) or type(error).__name__
        manager.terminate()
        manager.wait()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
