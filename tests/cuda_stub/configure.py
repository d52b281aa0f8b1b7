"""What vLLM's CUDA build does before processes are forked: `python -m tests.cuda_stub.configure DIRECTORY`.

Imports what the warm parent imports. Then, each in a fork of it: the configurations of engines and holder of one unit,
which is what happens in them before their ranks are forked. Prints one line of JSON per step, with how often CUDA was
initialised by then, in any of the processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def initialised() -> int:
    log = Path(os.environ["CUDA_STUB_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def say(step: str, **more: Any) -> None:
    print(json.dumps({"step": step, "initialised": initialised(), **more}), flush=True)


def checkpoints(directory: Path) -> dict[str, Path]:
    """A dense model, one with experts, two with states, and one with FP8 weights (only its configuration is read)."""
    from tests.support.tiny_checkpoint import tiny_checkpoint

    dense, experts = ROOT / "configs/models/atlas", tiny_checkpoint("gpt_oss")
    quantised = directory / "fp8"
    shutil.copytree(dense, quantised)
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    states = {"state spaces": tiny_checkpoint("granite_hybrid"), "delta nets": tiny_checkpoint("qwen3_next")}
    return {"dense": dense, "experts": experts, "FP8": quantised, **states}


def configure(directory: Path, path: Path, ranks: int, stages: int) -> dict[str, Any]:
    """The configurations of all processes of a unit with one model."""
    from muxserve.engine.cuda.weight_holder import holder_args
    from muxserve.spec import GpuSpec, PolicyName, PoolSpec, UnitSpec
    from muxserve.vllm.args import config_of, engine_args
    from tests.engine.harness import deployed_model

    shape = "one" if stages > 1 else "split"
    model = deployed_model("m", path, ranks, dtype="bfloat16", shape=shape, stages=stages)
    uuids = [f"GPU-{rank:08d}-0000-0000-0000-000000000000" for rank in range(ranks)]
    pool = PoolSpec("main", 2 * model.block_tokens * model.head_dim * 2, 1000)
    policy: PolicyName = "free" if stages > 1 else "slack"
    unit_spec = UnitSpec(str(directory), "u", policy, 2, [pool], [model], ranks)
    unit_spec = msgspec.structs.replace(unit_spec, gpu=GpuSpec(uuids))
    engines = [config_of(engine_args(unit_spec, "m", phase)) for phase in model.engines]
    config_of(holder_args(unit_spec, "m"))
    return {"device": str(engines[0].device_config.device_type), "world": engines[0].parallel_config.world_size}


def in_a_fork(job: Callable[[], dict[str, Any]], step: str) -> None:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        say(step, **job())
    except BaseException as error:
        say(step, error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def main() -> None:
    directory = Path(sys.argv[1])
    from muxserve.forks import warm_parent
    from muxserve.vllm import args

    os.environ.update(args.environment())
    warm_parent.preload("cuda")
    say("imported")
    from tests.engine.harness import deployed_model

    found = checkpoints(directory)
    warm_parent.register([deployed_model(name, path) for name, path in found.items()], "cuda")
    say("looked at")
    for name, path in found.items():
        for ranks, stages in ((1, 1), (2, 1), (2, 2)):
            job = lambda path=path, ranks=ranks, stages=stages: configure(directory, path, ranks, stages)  # noqa: E731
            in_a_fork(job, f"{name}, {ranks} ranks, {stages} stages")

    def initialise() -> dict[str, Any]:
        import torch

        torch.cuda.init()
        return {}

    in_a_fork(initialise, "initialised by torch")


if __name__ == "__main__":
    main()
