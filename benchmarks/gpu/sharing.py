"""Decode and prefill steps against the share of SMs, alone and beside each other, under an MPS server of our own.

    python benchmarks/gpu/sharing.py [--shape llama-8b] [--shares 10 20 40 60 80 100] [--out FILE]

Every share is a process of its own with stock vLLM: its percentage is fixed for its life. The result is also a profile
(docs/costs.md) that `muxserve plan --profile` and `muxserve simulate --profile` read. MuxServe's figure 3 has the curve
that is to be expected: decode needs few SMs, prefill all that it can get.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report import write_report

from gpu import checkpoints

ROOT = Path(__file__).resolve().parents[2]
PROMPT, BATCHES, CONTEXT = 1024, (1, 32, 128), 512
PAIR_SECONDS = 5.0
PAIR = (60, 40)
RESULT = "result: "
KV_BYTES = 36 << 30  # 128 requests of 2,048 tokens of an 8B model


def role(model: str, phase: str, seconds: float, batch: int, gate: str) -> None:
    """Steps of one phase for so long, in a process with its share; prints what one took. `gate` holds it back until the
    other process is ready, too."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=2048,
        # Fixed: vLLM's own way looks at what is free, and two processes that start together disturb each other.
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    engine = llm.llm_engine
    number = 0

    def add(tokens: int, output: int) -> None:
        nonlocal number
        number += 1
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        engine.add_request(str(number), {"prompt_token_ids": [7 + number % 50] * tokens}, params)

    def step() -> float:
        began = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def drain() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    add(PROMPT, 4)
    drain()
    if phase == "decode":
        for _ in range(batch):
            add(CONTEXT, 1500)
        # Until all prompts are in.
        for _ in range(batch * CONTEXT // 2048 + 4):
            step()
    if gate:
        Path(gate, phase).touch()
        limit = time.monotonic() + 120
        while len(list(Path(gate).iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(times) < 1200:
        if phase == "prefill":
            add(PROMPT, 1)
        times.append(step())
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(RESULT + json.dumps({"seconds": statistics.median(times), "steps": len(times), "sms": sms}))


def start(
    share: int, environment: dict[str, str], model: Path, phase: str, seconds: float, batch: int = 32, gate: str = ""
) -> subprocess.Popen[str]:
    """A process with `share` percent of the SMs."""
    arguments = ["--role", phase, "--model", str(model), "--role-seconds", str(seconds), "--batch", str(batch)]
    return subprocess.Popen(
        [sys.executable, __file__, *arguments, "--gate", gate],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it measured.

    Raises:
        RuntimeError: it failed; the message ends with its last lines.
    """
    out, err = process.communicate(timeout=600)
    if process.returncode != 0:
        raise RuntimeError(err[-2000:])
    # vLLM writes to the standard output, too.
    line = next(line for line in reversed(out.splitlines()) if line.startswith(RESULT))
    return dict(json.loads(line.removeprefix(RESULT)))


def measure(shape: str, shares: list[int], environment: dict[str, str], model: Path) -> dict[str, Any]:
    """Steps alone at every share, and prefill beside decode."""
    alone = []
    for share in shares:
        prefill = finish(start(share, environment, model, "prefill", 3.0))
        row: dict[str, Any] = {"share": share, "sms": prefill["sms"], "prefill": prefill["seconds"]}
        for batch in BATCHES:
            row[f"decode_{batch}"] = finish(start(share, environment, model, "decode", 3.0, batch))["seconds"]
        alone.append(row)
        decode = ", ".join(f"{row[f'decode_{batch}'] * 1e3:.2f} ms at batch {batch}" for batch in BATCHES)
        print(
            f"{shape} {share:3d} % ({row['sms']} SMs): prefill {row['prefill'] * 1e3:.1f} ms, decode {decode}",
            flush=True,
        )
    single = [
        finish(start(PAIR[0], environment, model, "prefill", PAIR_SECONDS)),
        finish(start(PAIR[1], environment, model, "decode", PAIR_SECONDS)),
    ]
    with tempfile.TemporaryDirectory() as gate:
        both = [
            start(PAIR[0], environment, model, "prefill", PAIR_SECONDS, gate=gate),
            start(PAIR[1], environment, model, "decode", PAIR_SECONDS, gate=gate),
        ]
        together = [finish(process) for process in both]
    slower = [b["seconds"] / a["seconds"] for a, b in zip(single, together, strict=True)]
    print(f"{PAIR[0]} % prefill beside {PAIR[1]} % decode: {slower[0]:.2f} and {slower[1]:.2f} times as long as alone")
    return {"alone": alone, "pair": {"shares": PAIR, "alone": single, "together": together, "slowdown": slower}}


def as_profile(shape: str, gpu_type: str, measured: dict[str, Any], path: Path) -> None:
    """Write what was measured as a profile."""
    from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel, save_profile
    from muxserve.planning.checkpoints import planned_architecture

    model = ProfiledModel.of(planned_architecture(str(checkpoints.SHAPES / f"{shape}.json"), Path()))
    engines = [
        EngineProfile(
            shape,
            model,
            gpu_type,
            "bfloat16",
            1,
            row["share"] / 100,
            [PrefillCell(1, PROMPT, 0, row["prefill"], 1)],
            [DecodeCell(batch, CONTEXT, row[f"decode_{batch}"], 1) for batch in BATCHES],
        )
        for row in measured["alone"]
    ]
    save_profile(Profile(engines=engines), path)


def main() -> int:
    """Exit code 1 if a process failed."""
    parser = argparse.ArgumentParser(description="Steps against the share of SMs, and beside each other.")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--shares", nargs="+", type=int, default=[10, 20, 40, 60, 80, 100])
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu"))
    parser.add_argument("--out", type=Path, default=default / "sharing.json")
    parser.add_argument("--role", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--role-seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gate", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role(options.model, options.role, options.role_seconds, options.batch, options.gate)
        return 0
    from muxserve.gpu import mps, nvml

    found = nvml.visible(nvml.machine(), os.environ)
    control = mps.binary()
    if not found.gpus or control is None:
        print(f"nothing was measured: {found.why_none or mps.CONTROL + ' is not installed'}")
        return 0
    (gpu,) = nvml.choose(found, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        model = checkpoints.make(Path(folder), "model", options.shape)
        directory = Path(folder) / "mps"
        directory.mkdir()
        server = mps.MpsServer(directory, [gpu.uuid], control)
        try:
            server.start()
            environment = {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe")}
            measured = measure(options.shape, options.shares, environment, model)
        except (RuntimeError, mps.MpsError) as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            server.stop()
    write_report(options.out, {"gpu": gpu.name, "shape": options.shape, **measured})
    as_profile(options.shape, nvml.device_name(gpu) or gpu.name, measured, options.out.with_name("profile.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
