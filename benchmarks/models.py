"""Tiny checkpoints of the families that are served, each beside one stock vLLM server: the same tokens, and as fast.

    python benchmarks/models.py [--families gemma3,gpt_oss] [--requests 50] [--rounds 3]
                                [--out benchmarks/results/models.json]

For each family a fleet and a stock server run side by side. The fleet has the checkpoint twice, with prefix caching and
without, on one pool that is too small for all requests at once: some are preempted. They are sent together; some have
prompts that begin alike, some are computed in chunks; half are greedy, half seeded. Families that are computed in 16
bits are asked one request at a time: what else is in a batch changes the last bits, and now and then a token. Then
tokens per second of a few requests at a time, for which there is room, are measured in turns. `--rounds 0` compares
tokens only, which no other work on the machine disturbs, `--requests 0` speed only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from load import Call, Outcome, client, closed_loop, summary
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, muxserve_fleet
from stock_vllm import StockSettings, stock_server

sys.path.insert(0, str(ROOT))
from muxserve.costs.architecture import read_architecture
from tests.engine.harness import FAMILIES, LATENT, STATEFUL, TINY

# Tokens of a tiny checkpoint's vocabulary that are plain bytes.
FIRST_BYTE, LAST_BYTE = 5, 260
MAX_LEN = 1024
# Tokens of a step: the longest prompts take several. Latent prompts are computed in one piece.
CHUNK = 256
# The pool holds so many sequences of MAX_LEN tokens of each model.
SEQUENCES = 2
# Speed: requests at a time, and tokens of prompt and answer.
CONCURRENCY, PROMPT, OUTPUT = 8, 32, 64
TARGET = 0.95


@dataclass(frozen=True)
class Asked(Call):
    """A request whose tokens are compared. With `shared` its prompt begins as those of all others with that."""

    shared: bool = False
    params: dict[str, object] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """Body for `/v1/completions`; what is sampled does not depend on the server's name for the model."""
        rng, prefix = random.Random(self.seed), random.Random("shared")
        count = 150 if self.shared else 0
        prompt = [prefix.randint(FIRST_BYTE, LAST_BYTE) for _ in range(count)]
        prompt += [rng.randint(FIRST_BYTE, LAST_BYTE) for _ in range(self.prompt_tokens - count)]
        return {
            "model": self.model, "prompt": prompt, "max_tokens": self.output_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **self.params,
        }  # fmt: skip


def asked(count: int) -> list[Asked]:
    """The requests: of 20 to 600 tokens. Short prompts have long answers, so that sequences outgrow the pool."""
    found = []
    for index in range(count):
        rng = random.Random(f"request {index}")
        prompt, answer = rng.choice([(20, 300), (60, 350), (200, 100), (450, 60)])
        prompt, answer = (rng.randint(value, value + value // 3) for value in (prompt, answer))
        params: dict[str, object] = {"temperature": 1.0, "top_p": 0.9, "seed": index} if index % 2 else {}
        found.append(Asked("", prompt, answer, index, shared=prompt > 150, params=params))
    return found


async def answers(server: Server, model: str, requests: Sequence[Asked], concurrency: int) -> list[list[int] | str]:
    """The tokens of each answer, or what went wrong."""
    turns = asyncio.Semaphore(concurrency)

    async def one(request: Asked) -> list[int] | str:
        async with turns, session.post(f"{server.url}/v1/completions", json=request.body()) as answer:
            if answer.status != 200:
                return f"HTTP {answer.status}: {(await answer.text())[:200]}"
            tokens: list[int] = (await answer.json())["choices"][0]["token_ids"]
            return tokens

    async with client() as session:
        return await asyncio.gather(*(one(replace(request, model=model)) for request in requests))


def preempted(fleet: Server) -> int:
    """Requests of the fleet that lost their pages and were prefilled again."""
    values = re.findall(r"^muxserve_requests_preempted(?:_total)?(?:\{[^}]*\})? (\S+)$", fleet.metrics(), re.MULTILINE)
    return int(sum(map(float, values)))


def type_of(path: Path) -> str:
    """What the model is computed in: float32, but vLLM's CPU kernels for quantised weights and gated delta nets have
    none."""
    config = json.loads((path / "config.json").read_text())
    return "bfloat16" if "quantization_config" in config or "linear_num_key_heads" in config else "float32"


def fleet_of(kind: str, path: Path, folder: Path) -> tuple[Path, list[str]]:
    """A fleet file with that checkpoint, and the names of its models."""
    architecture, dtype = read_architecture(json.loads((path / "config.json").read_text())), type_of(path)
    caching = [True, False]
    sequence = MAX_LEN * architecture.kv_bytes_per_token(dtype) + architecture.state_bytes(dtype)
    size = SEQUENCES * len(caching) * sequence
    common: dict[str, Any] = {
        "path": str(path), "dtype": dtype, "max_len": MAX_LEN, "limits": {"max_wait": "none"},
    }  # fmt: skip
    if kind in STATEFUL:
        # Blocks are so large that the states of all can be mapped.
        common["max_num_seqs"] = 4 * CONCURRENCY
    if kind not in LATENT:
        common["max_num_batched_tokens"] = CHUNK
    names = ["cached" if on else "uncached" for on in caching]
    models = [{"name": name, **common, "prefix_caching": on} for name, on in zip(names, caching, strict=True)]
    fleet = folder / f"{kind}.yaml"
    fleet.write_text(yaml.safe_dump({"kv_pool": {"size": f"{size >> 10}KiB"}, "models": models}))
    return fleet, names


def measure(
    fleet: Server, names: Sequence[str], stock: Server, options: argparse.Namespace, alone: bool
) -> dict[str, Any]:
    """Identity and speed of one family; `alone`: its requests are asked one at a time."""
    figures = identity(fleet, names, stock, asked(options.requests), alone) if options.requests else {}
    return figures | speed(fleet, names, stock, options.rounds) if options.rounds else figures


def identity(
    fleet: Server, names: Sequence[str], stock: Server, requests: Sequence[Asked], alone: bool
) -> dict[str, Any]:
    """In how many answers of the fleet some token differs."""
    right = asyncio.run(answers(stock, "stock", requests, 1 if alone else CONCURRENCY))
    different = 0
    for name in names:
        given = asyncio.run(answers(fleet, name, requests, 1 if alone else len(requests)))
        for request, one, other in zip(requests, given, right, strict=True):
            if one != other:
                different += 1
                at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), "-")
                words = one if isinstance(one, str) else f"differs from token {at}"
                print(f"  {name}, request {request.seed}: {words}", flush=True)
    return {"requests": len(requests) * len(names), "different": different, "preempted": preempted(fleet)}


def speed(fleet: Server, names: Sequence[str], stock: Server, rounds: int) -> dict[str, Any]:
    """Tokens per second of both, in turns."""
    sides = [(fleet, name) for name in names] + [(stock, "stock")]
    speeds: dict[str, list[float]] = {name: [] for _, name in sides}
    failed = 0
    for turn in range(-1, rounds):  # the first turn warms up
        for server, name in sides if turn % 2 == 0 else sides[::-1]:
            calls = [
                Call(name, PROMPT, OUTPUT, seed=(turn + 2) * 1000 + i, last_token=LAST_BYTE)
                for i in range(2 * CONCURRENCY)
            ]
            outcomes: list[Outcome] = asyncio.run(closed_loop(server.url, calls, CONCURRENCY))
            found = summary(outcomes)
            failed += int(str(found["failed"]))
            if turn >= 0:
                speeds[name].append(float(str(found.get("output_tokens_per_second", 0.0))))
    # Both sides of a ratio are of the same turn.
    ratios = {
        name: round(statistics.median(m / s for m, s in zip(speeds[name], speeds["stock"], strict=True)), 3)
        for name in names
    }
    return {
        "failed": failed,
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "to stock": ratios,
    }  # fmt: skip


def main() -> int:
    """Run everything; exit code 1 if a server does not come up, a request fails or a token differs."""
    kinds = TINY | FAMILIES
    parser = argparse.ArgumentParser(description="Compare tiny models of each family with a stock server.")
    parser.add_argument(
        "--families", default=",".join(kinds), help=f"families to run, with commas, of {', '.join(kinds)}"
    )
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/models.json")
    options = parser.parse_args()
    families = options.families.split(",")
    if unknown := set(families) - set(kinds):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    end_cleanly()
    report: dict[str, Any] = {"machine": machine(), "target": TARGET, "families": {}}
    status = 0
    for kind in families:
        path = kinds[kind]()
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            file, names = fleet_of(kind, path, Path(folder))
            latent, dtype = kind in LATENT, type_of(path)
            settings = StockSettings(
                dtype=dtype, kv_bytes=128 << 20, max_len=MAX_LEN,
                # Stock vLLM on CPU fails where a seeded prompt is computed in chunks.
                max_num_batched_tokens=CONCURRENCY * MAX_LEN, prefix_caching=kind not in LATENT | STATEFUL,
                attention_backend="CPU_MLA" if latent else "",
                # What waits for messages without a pause would take a core from the other side.
                polls=False, text_of_qwen3_5=kind.startswith("qwen3_5"),
            )  # fmt: skip
            try:
                fleet = stack.enter_context(muxserve_fleet(file))
                stock = stack.enter_context(stock_server(path, "stock", settings))
            except ServerError as error:
                print(f"{kind}: {error}", file=sys.stderr)
                status = 1
                continue
            figures = measure(fleet, names, stock, options, alone=dtype != "float32")
        report["families"][kind] = figures
        print(f"{kind:14s} {figures}", flush=True)
        status = status or int(bool(figures.get("different") or figures.get("failed")))
        # What is measured already is kept, whatever becomes of the others.
        write_report(options.out, report)
    return status


if __name__ == "__main__":
    sys.exit(main())
