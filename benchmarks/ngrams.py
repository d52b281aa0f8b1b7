"""n-gram speculation beside the same engine without it: one checkpoint served twice by one fleet, asked in turns.

    python benchmarks/ngrams.py [--rounds 5] [--out benchmarks/results/ngrams.json]

Output tokens per second, their ratio, and how many times fewer steps there were, for answers of four kinds:

* repeating: the likeliest tokens of a small model, which soon go round in circles;
* not repeating: the same with a penalty on tokens that were there before, so that nearly all proposals are rejected;
* sampled: at temperature 1, for which nothing is proposed;
* mixed: half of them repeating, half sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from load import client
from report import machine, write_report
from servers import ROOT, end_cleanly, muxserve_fleet

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
SIDES = ("plain", "ngram")
KINDS: dict[str, list[dict[str, Any]]] = {
    "repeating": [{"temperature": 0}],
    "not repeating": [{"temperature": 0, "repetition_penalty": 2.0, "frequency_penalty": 2.0}],
    "sampled": [{"temperature": 1}],
    "mixed": [{"temperature": 0}, {"temperature": 1}],
}


def fleet(folder: Path, checkpoint: Path) -> Path:
    """A fleet that serves the checkpoint under both names."""
    model = {"path": str(checkpoint), "dtype": "float32", "rate": 4, "limits": {"max_wait": "none"}}
    models = [
        {"name": "plain", **model},
        {"name": "ngram", **model, "engine_args": {"speculative_config": SPECULATION}},
    ]
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({"gateway": {"port": 8000}, "models": models}))
    return file


async def answered(url: str, model: str, kind: str, count: int, at_once: int, tokens: int, turn: int) -> float:
    """Output tokens per second of `count` requests, `at_once` of them under way."""
    room = asyncio.Semaphore(at_once)
    async with client(limit=at_once) as session:

        async def ask(number: int) -> int:
            own = KINDS[kind][number % len(KINDS[kind])]
            body = {
                "model": model,
                "prompt": f"{turn} {number} apples",
                "max_tokens": tokens,
                "ignore_eos": True,
                **own,
            }
            async with room, session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                return int((await answer.json())["usage"]["completion_tokens"])

        began = time.perf_counter()
        told = await asyncio.gather(*(ask(number) for number in range(count)))
        return sum(told) / (time.perf_counter() - began)


def steps_of(url: str, model: str) -> int:
    """Steps that the model's decode engine has taken."""
    with urllib.request.urlopen(f"{url}/fleet", timeout=30) as answer:
        (unit,) = json.load(answer)["units"]
    steps: int = unit["state"]["models"][model]["phases"]["decode"]["jobs"]
    return steps


def compare(url: str, kind: str, at_once: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns, the order changing each round."""
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    count = max(4, 2 * at_once)
    before = {side: steps_of(url, side) for side in SIDES}
    for turn in range(options.rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            speed = asyncio.run(answered(url, side, kind, count, at_once, options.tokens, turn))
            if turn:  # the first round warms up
                speeds[side].append(speed)
    plain, ngram = (steps_of(url, side) - before[side] for side in SIDES)
    found = {side: round(statistics.median(each), 1) for side, each in speeds.items()}
    ratios = {"ratio": round(found["ngram"] / found["plain"], 3), "fewer_steps": round(plain / ngram, 3)}
    return {**found, **ratios, "of_rounds": speeds}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description="n-gram speculation beside the same engine without it.")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "configs/models/arithmetic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/ngrams.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict[str, Any] = {"machine": machine(), "speculation": SPECULATION, "tokens": options.tokens, "results": {}}
    with tempfile.TemporaryDirectory() as folder, muxserve_fleet(fleet(Path(folder), options.checkpoint)) as server:
        for kind in KINDS:
            for at_once in (1, 8):
                row = compare(server.url, kind, at_once, options)
                report["results"][f"{kind}, {at_once} at once"] = row
                print(
                    f"{kind:14s} {at_once} at once: {row['plain']} to {row['ngram']} tokens/s, {row['ratio']}",
                    flush=True,
                )
    write_report(options.out, report)


if __name__ == "__main__":
    main()
