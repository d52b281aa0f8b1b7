"""Decode and prefill steps against the share of SMs, alone and beside each other, under an MPS server of our own.

    python benchmarks/gpu/sharing.py [--shape llama-8b] [--shares 10 20 40 60 80 100] [--out FILE]

Every share is a process of its own with stock vLLM: its percentage is fixed for its life. The result is also a profile
(docs/costs.md) that `muxserve plan --costs` and `muxserve simulate --costs` read. MuxServe's figure 3 has the curve
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
from tests.gpu.trial.runner import finding

ROOT = Path(__file__).resolve().parents[2]
PROMPT, BATCHES, CONTEXT = 1024, (1, 32, 128), 512
PAIR = (60, 40)
PAIR_DECODE = "decode-32"
RESULT = "result: "
# Beside its KV memory: weights of an 8B model, activations, graphs, context.
PROCESS_BYTES = 19 << 30
GROWTH = 20_000  # so many tokens all requests of a batch grow by, at most


def role(model: str, kv_bytes: int, eager: bool) -> None:
    """A process with its share and so much KV memory. It reads phases, `prefill` or `decode-` and the batch, each with
    its seconds; says when steps of that phase are about to be measured; and after one more line of input measures them
    and prints what one took."""
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
        # Fixed: vLLM's own way looks at what is free, and processes that start together disturb each other.
        kv_cache_memory_bytes=kv_bytes,
        enforce_eager=eager,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    engine = llm.llm_engine
    ids: list[str] = []

    def add(tokens: int, output: int) -> None:
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        prompt = [7 + len(ids) % 50] * tokens
        ids.append(str(len(ids)))
        engine.add_request(ids[-1], {"prompt_token_ids": prompt}, params)

    def step() -> float:
        began = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def drain() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    def say(**words: Any) -> None:
        print(RESULT + json.dumps(words), flush=True)

    add(PROMPT, 4)
    drain()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    say(sms=sms)
    for line in sys.stdin:
        phase, seconds = line.split()
        first, most = len(ids), 1200
        if phase != "prefill":
            batch = int(phase.removeprefix("decode-"))
            most = min(most, GROWTH // batch)
            for _ in range(batch):
                add(CONTEXT, 1500)
            # Until all prompts are in.
            for _ in range(batch * CONTEXT // 2048 + 4):
                step()
        say(ready=phase)
        sys.stdin.readline()
        times = []
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end and len(times) < most:
            if phase == "prefill":
                add(PROMPT, 1)
            times.append(step())
        say(seconds=statistics.median(times), steps=len(times), sms=sms)
        engine.abort_request(ids[first:])
        drain()


class Sharer:
    """A process with `share` percent of the SMs. `arguments` are those of `--role` and more."""

    def __init__(self, share: int, environment: dict[str, str], arguments: list[str]) -> None:
        self.share = share
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- as long as the process
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
        )

    def answer(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            RuntimeError: it ended; the message ends with its last lines.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:  # vLLM writes there, too
            if line.startswith(RESULT):
                return dict(json.loads(line.removeprefix(RESULT)))
        self._errors.seek(0)
        raise RuntimeError(f"a process with {self.share} % ended:\n{self._errors.read()[-2000:]}")

    def prepare(self, phase: str, seconds: float) -> None:
        """Have it compute steps of that phase up to where they are measured."""
        self._tell(f"{phase} {seconds}")
        self.answer()

    def go(self) -> None:
        """Have it measure; its next answer is the result."""
        self._tell("go")

    def measure(self, phase: str, seconds: float) -> dict[str, Any]:
        """Steps of a phase, while no other process computes."""
        self.prepare(phase, seconds)
        self.go()
        return self.answer()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()


def measure(
    shape: str, shares: list[int], environment: dict[str, str], arguments: list[str], seconds: float, at_once: int
) -> dict[str, Any]:
    """Steps alone at every share, and prefill beside decode. `at_once` processes fit on the GPU: these start together,
    and are measured one after another."""
    shares = list(dict.fromkeys((*PAIR, *shares)))
    alone: list[dict[str, Any]] = []
    pair: dict[str, Any] = {}
    for first in range(0, len(shares), at_once):
        sharers = [Sharer(share, environment, arguments) for share in shares[first : first + at_once]]
        try:
            for sharer in sharers:
                sharer.answer()
            for sharer in sharers:
                alone.append(measure_alone(shape, sharer, seconds))
            if first == 0:
                pair = measure_pair(sharers[0], sharers[1], 1.5 * seconds)
        finally:
            for sharer in sharers:
                sharer.end()
    return {"alone": sorted(alone, key=lambda row: row["share"]), "pair": pair}


def measure_alone(shape: str, sharer: Sharer, seconds: float) -> dict[str, Any]:
    """Steps of every phase at one share."""
    prefill = sharer.measure("prefill", seconds)
    row: dict[str, Any] = {"share": sharer.share, "sms": prefill["sms"], "prefill": prefill["seconds"]}
    for batch in BATCHES:
        row[f"decode_{batch}"] = sharer.measure(f"decode-{batch}", seconds)["seconds"]
    decode = ", ".join(f"{row[f'decode_{batch}'] * 1e3:.2f} ms at batch {batch}" for batch in BATCHES)
    print(
        f"{shape} {sharer.share:3d} % ({row['sms']} SMs): prefill {row['prefill'] * 1e3:.1f} ms, decode {decode}",
        flush=True,
    )
    return row


def measure_pair(prefill: Sharer, decode: Sharer, seconds: float) -> dict[str, Any]:
    """Prefill in one process beside decode in another, and each of them alone just before."""
    phases = ((prefill, "prefill"), (decode, PAIR_DECODE))
    single = [sharer.measure(phase, seconds) for sharer, phase in phases]
    for sharer, phase in phases:
        sharer.prepare(phase, seconds)
    for sharer, _ in phases:
        sharer.go()
    together = [sharer.answer() for sharer, _ in phases]
    slower = [b["seconds"] / a["seconds"] for a, b in zip(single, together, strict=True)]
    words = f"{slower[0]:.2f} and {slower[1]:.2f} times as long as alone"
    finding(f"{PAIR[0]} % prefill beside {PAIR[1]} % decode: {words}")
    return {"shares": PAIR, "alone": single, "together": together, "slowdown": slower}


def as_profile(shape: str, gpu_type: str, measured: dict[str, Any], path: Path) -> None:
    """Write what was measured as a profile."""
    from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel, save_profile
    from muxserve.planning.demand.known_models import planned_architecture

    source = Path(shape) if Path(shape).is_dir() else checkpoints.SHAPES / f"{shape}.json"
    model = ProfiledModel.of(planned_architecture(str(source.resolve()), Path()))
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
    parser.add_argument("--shape", default="llama-8b", help="of configs/gpu, or a checkpoint's directory")
    # 128 requests of 700 tokens of an 8B model.
    parser.add_argument("--kv-gib", type=float, default=12.0, help="KV memory of each process")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--shares", nargs="+", type=int, default=[10, 20, 40, 60, 80, 100])
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu"))
    parser.add_argument("--out", type=Path, default=default / "sharing.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each phase")
    parser.add_argument("--role", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kv_bytes = int(options.kv_gib * (1 << 30))
    if options.role:
        role(options.role, kv_bytes, options.eager)
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
        given = Path(options.shape)
        model = given.resolve() if given.is_dir() else checkpoints.make(Path(folder), "model", options.shape)
        arguments = ["--role", str(model), "--kv-gib", str(options.kv_gib), *(["--eager"] if options.eager else [])]
        directory = Path(folder) / "mps"
        directory.mkdir()
        server = mps.MpsServer(directory, [gpu.uuid], control)
        try:
            server.start()
            environment = {"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe")}
            measured = measure(
                options.shape,
                options.shares,
                environment,
                arguments,
                options.seconds,
                max(len(PAIR), gpu.free_bytes // (PROCESS_BYTES + kv_bytes)),
            )
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
