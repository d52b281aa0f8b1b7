"""Answers of one engine on the CUDA engine's runner, and of stock vLLM: `python serve_on_cpu.py OUT`.

Several requests at once, prompts of several chunks, a repeated prompt that hits the prefix cache, decodes of different
lengths, a restart of the memory manager in between. Once with weights from the checkpoint, once with weights that
another process holds; and both with weights of 4 bits, of which vLLM makes another form when they are loaded. Once
with asynchronous scheduling. Then both with models of other kinds of attention, with sinks and of latents, and with
models whose layers keep states. Last a model that embeds.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from muxserve.cluster.machine import this_machine
from tests.support.tiny_checkpoint import Kind, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/models/arithmetic"
INT4 = ROOT / "configs/models/atlas-int4"
QUESTIONS = ["What is 12 + 7?", "hello", "What is 3 + 4? " * 20, "What is 9 - 2?", "What is 3 + 4? " * 20]
TOKENS = [20, 33, 9, 25, 14]
# Far more than all of them take.
MOST_STEPS = 5000
WORKER = "tests.engine_cuda.cpu_stand_in.StandInWorker"
# Models whose attention has sinks, or latents in place of K and V; and those with states.
STATEFUL: tuple[Kind, ...] = ("granite_hybrid", "nemotron_h", "qwen3_5")
OTHERS: tuple[Kind, ...] = ("gpt_oss", "deepseek_v3", *STATEFUL)


def stock(checkpoint: Path = MODEL) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    from muxserve.vllm.args import frontend_args
    from tests.engine.harness import deployed_model

    args = frontend_args(deployed_model("m", checkpoint))
    del args["served_model_name"]
    llm = LLM(**args, kv_cache_memory_bytes=64 << 20)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in TOKENS]
    results = llm.generate(QUESTIONS, params, use_tqdm=False)
    return [list(result.prompt_token_ids) + list(result.outputs[0].token_ids) for result in results]


def hold(path: str, ready: Any, checkpoint: Path) -> None:
    """Load a model as a holder does, move its weights, and hand them out (by value: they are on a CPU) until killed."""
    import torch
    from vllm.v1.executor.abstract import Executor

    from muxserve.engine.cuda import weight_loader
    from muxserve.engine.cuda.weight_memory import ExportedWeights, Piece
    from muxserve.engine.cuda.weight_tensors import describe
    from muxserve.gpu.weight_server import WeightServer
    from muxserve.vllm.args import config_of, frontend_args

    without_repacking()
    options = {**frontend_args(served(checkpoint)), "kv_cache_memory_bytes": 64 << 20, "additional_config": {}}
    config = config_of(options)
    executor = Executor.get_class(config)(config)
    fingerprint = weight_loader.fingerprint(config.model_config)
    model = executor.driver_worker.worker.model_runner.get_model()
    exported = ExportedWeights(lambda size: Piece("", -1, torch.zeros(size, dtype=torch.uint8)), device="cpu")
    exported.move(model)
    held = describe(model, "GPU-none")
    server = WeightServer(path, fingerprint, held)
    kinds = [each.kind for each in held.tensors]
    ready.send({"moved": exported.size, **{kind: kinds.count(kind) for kind in ("param", "buffer", "state")}})
    ready.close()
    server.wait()


def served(checkpoint: Path, **changes: Any) -> Any:
    """A model of the fleet."""
    from tests.engine.harness import deployed_model

    model = deployed_model("m", checkpoint, **changes)
    # Each layer's state begins with a page. Prompts may go on behind a snapshot.
    stateful = bool(model.state_blocks)
    return msgspec.structs.replace(
        model, state_blocks=2 * model.state_blocks, prefix_caching=stateful or model.prefix_caching
    )


def without_repacking() -> None:
    """Leave weights as loaded: what oneDNN packs cannot be told as tensors. (Packing does not exist on GPUs.)"""
    from vllm import _custom_ops as ops

    ops._supports_onednn = False


def map_held_weights(path: str) -> dict[str, Any]:
    """Let the loader of the CUDA engine work on a CPU, and say with which arguments an engine uses it."""
    import torch
    import vllm.model_executor.model_loader.weight_cache.ipc_loader as ipc_loader

    from muxserve.engine.cuda.weight_loader import HeldWeightsLoader, register_loader
    from muxserve.vllm.args import LOAD_FORMAT

    without_repacking()
    register_loader()
    ipc_loader.check_ipc_platform_support = lambda: None
    HeldWeightsLoader._device = lambda self: torch.device("cpu")
    torch.accelerator.current_device_index = lambda: 0
    return {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"sockets": [path]}}


def ours(
    prompts: list[list[int]], held_at: str | None = None, checkpoint: Path = MODEL, ahead: bool = False
) -> dict[str, Any]:
    model = served(checkpoint, max_num_batched_tokens=64, engine_args={"async_scheduling": ahead})
    with serving(model, "decode", held_at, ahead) as (core, place, manager_dies):
        first = run(core, place, prompts)
        runner = core.model_executor.driver_worker.worker.model_runner
        table = runner.page_table
        snapshots = 0
        if runner.states is not None:
            copy = runner.states.copy

            def counted(*pages: Any) -> None:
                nonlocal snapshots
                snapshots += 1
                copy(*pages)

            runner.states.copy = counted
            assert all(place.tile for place in runner.states.places.values()), "decode steps are on pages"
        uploads = table.uploaded_rows
        again = run(core, place, prompts)
        # Other pages, and whatever the device knows of the old table is wrong.
        manager_dies()
        known = int((table.table >= 0).any(dim=-1).any(dim=-1).sum())
        return {
            "first": first,
            "again": again,
            "after": run(core, place, prompts),
            "known_after_restart": known,
            "uploads": uploads,
            "snapshots": snapshots,
        }


@contextlib.contextmanager
def serving(
    model: Any, phase: Any, held_at: str | None = None, ahead: bool = False
) -> Iterator[tuple[Any, Any, Callable[[], None]]]:
    """An engine of the model, its binding to the pool, and what has the memory manager die and begin anew."""
    from vllm.v1.engine.core import EngineCore

    from muxserve.engine.binding import Binding, bind
    from muxserve.memory import server
    from muxserve.memory.client import MemoryClient
    from muxserve.spec import PoolSpec, UnitSpec, save
    from muxserve.vllm import args
    from tests.engine import ahead_on_host

    ahead_on_host.allow()
    with tempfile.TemporaryDirectory(prefix="mux", dir="/tmp") as run_dir:
        item = 4 if model.dtype == "float32" else 2
        pools = [PoolSpec("main", 2 * model.block_tokens * model.head_dim * item, 2500)]
        unit_spec = UnitSpec(run_dir, "test", "adbs", 1, pools, [model])
        save(unit_spec, Path(run_dir) / "unit.json")
        manager = server.start(unit_spec)
        try:
            client = MemoryClient(unit_spec.memory_socket, "m/test")
            place = Binding(model, phase, client, client.map("m"))
            bind(place)
            options = args.engine_args(unit_spec, "m", phase) | (map_held_weights(held_at) if held_at else {})
            config = args.config_of({**options, "worker_cls": WORKER})
            # Which vLLM's platform for CPUs switches off for latent attention.
            config.scheduler_config.enable_chunked_prefill = True
            config.cache_config.enable_prefix_caching = model.prefix_caching
            core = EngineCore(config, ahead_on_host.ThreadedExecutor, log_stats=False)
            if ahead:
                core.model_executor.begin_thread(lambda: None)
                core.model_executor.collective_rpc("schedule_ahead")

            def manager_dies() -> None:
                nonlocal manager
                manager.kill()
                manager.wait()
                core.scheduler.forget_all()
                place.client.close()
                manager = server.start(unit_spec)
                place.client = MemoryClient(unit_spec.memory_socket, "m/test")
                place.view = place.client.map("m")
                core.model_executor.collective_rpc("rebind_pool")

            yield core, place, manager_dies
        finally:
            manager.kill()
            manager.wait()
            server.remove_segments(unit_spec)


def run(core: Any, place: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of all requests; one joins every third step."""
    from vllm.sampling_params import SamplingParams

    requests = [
        request_of(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS[index], ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]
    tokens = {str(index): list(prompt) for index, prompt in enumerate(prompts)}
    for output in outputs_of(core, place, requests):
        tokens[output.request_id] += output.new_token_ids
    return [tokens[str(index)] for index in range(len(prompts))]


def request_of(name: str, prompt: list[int], sampling: Any = None, pooling: Any = None) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=pooling,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def outputs_of(core: Any, place: Any, requests: list[Any]) -> Iterator[Any]:
    """What the engine says of its requests until all are finished; one joins every third step."""
    waiting = list(requests)
    step = 0
    while waiting or core.scheduler.has_requests() or core.batch_queue:
        assert step < MOST_STEPS, "nothing gets on"
        if waiting and step % 3 == 0:
            core.add_request(*core.preprocess_add_request(waiting.pop(0)))
        with place.client.writing():
            outputs, _ = core.step_fn()
        core.scheduler.pool.end_step()
        for batch in (outputs or {}).values():
            yield from batch.outputs
        step += 1


def stock_vectors(checkpoint: Path) -> list[list[float]]:
    """Embeddings of the questions, by stock vLLM."""
    from vllm import LLM

    from muxserve.vllm.args import frontend_args

    args = frontend_args(served(checkpoint, pooling=True))
    del args["served_model_name"]
    llm = LLM(**args, kv_cache_memory_bytes=64 << 20)
    return [result.outputs.embedding for result in llm.embed(QUESTIONS, use_tqdm=False)]


def our_vectors(checkpoint: Path) -> list[list[float]]:
    """The same by the runner of the CUDA engine, in chunks of 64 tokens."""
    from vllm.pooling_params import PoolingParams
    from vllm.tokenizers import cached_tokenizer_from_config

    model = served(checkpoint, pooling=True, max_num_batched_tokens=64)
    with serving(model, "prefill") as (core, place, _):
        params = PoolingParams(task="embed")
        params.verify(core.vllm_config.model_config)
        tokenizer = cached_tokenizer_from_config(core.vllm_config.model_config)
        requests = [request_of(str(n), tokenizer.encode(text), pooling=params) for n, text in enumerate(QUESTIONS)]
        vectors = {output.request_id: output.pooling_output for output in outputs_of(core, place, requests)}
        return [vectors[request.request_id].tolist() for request in requests]


def fork(job: Any) -> int:
    """A child that runs `job`; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        job()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def in_a_fork(job: Any, out: Path) -> Any:
    """What `job` answers, by way of the file `out`."""
    if os.waitstatus_to_exitcode(os.waitpid(fork(lambda: out.write_text(json.dumps(job()))), 0)[1]):
        raise SystemExit(f"{out.stem} failed")
    return json.loads(out.read_text())


def main() -> None:
    from tests.engine.stock import SETTINGS, prepare_forks

    os.environ.update(SETTINGS)
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    prepare_forks()
    out = Path(sys.argv[1])
    expected = in_a_fork(stock, out / "stock.json")
    prompts = [tokens[: len(tokens) - count] for tokens, count in zip(expected, TOKENS, strict=True)]
    in_a_fork(lambda: ours(prompts), out / "ours.json")
    in_a_fork(lambda: ours(prompts, ahead=True), out / "ahead.json")

    for kind in OTHERS:
        made = Path(in_a_fork(lambda kind=kind: str(tiny_checkpoint(kind, layers=3)), out / f"checkpoint-{kind}.json"))
        stocks = in_a_fork(lambda made=made: stock(made), out / f"stock-{kind}.json")
        theirs = [tokens[: len(tokens) - count] for tokens, count in zip(stocks, TOKENS, strict=True)]
        in_a_fork(lambda made=made, theirs=theirs: ours(theirs, checkpoint=made), out / f"{kind}.json")
        path = str(out / f"{kind}.sock")
        with holding(path, made):
            in_a_fork(lambda made=made, theirs=theirs, path=path: ours(theirs, path, made), out / f"held-{kind}.json")

    embedder = tiny_checkpoint("qwen3", layers=3)
    in_a_fork(lambda: stock_vectors(embedder), out / "stock-vectors.json")
    in_a_fork(lambda: our_vectors(embedder), out / "vectors.json")

    packed = this_machine().avx512  # vLLM has no kernels for int4 on other CPUs
    if packed:
        in_a_fork(lambda: ours(prompts, checkpoint=INT4), out / "int4.json")
    for checkpoint, name in ((MODEL, "held"), *([(INT4, "held-int4")] if packed else [])):
        path = str(out / f"{name}.sock")
        with holding(path, checkpoint) as tensors:
            (out / f"{name}-tensors.json").write_text(json.dumps(tensors))
            held_at = {"held_at": path, "checkpoint": checkpoint}
            in_a_fork(lambda held_at=held_at: ours(prompts, **held_at), out / f"{name}.json")


@contextlib.contextmanager
def holding(path: str, checkpoint: Path) -> Iterator[Any]:
    """A process holds the weights for the length of the block; what they consist of."""
    receive, send = multiprocessing.Pipe(duplex=False)
    holder = fork(lambda: hold(path, send, checkpoint))
    send.close()
    try:
        yield receive.recv()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


if __name__ == "__main__":
    main()
