"""Fleets one after another, each alone on the GPU, and every wrong answer of each.

    python -m tests.gpu.trial.fleets --out FILE.json WAY ... [--models NAME ...]

A fleet is asked all requests of the reference 32 at once, one at a time, and 32 at once again: from the second pass on
prompts are in the prefix cache. A wrong answer has its model, its prompt's length, its place, and whose token came. The
file is written after each pass; what it has by now is not done again.

Fleets with percentages or green contexts get them whatever probes have found: `deploy` would take another way where
they were found to compute wrongly, which is what is looked at here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.fleet import fleet_file, running
from tests.gpu import stock
from tests.gpu.load import CLUSTER, MODEL, NEAR_TIE, all_answers
from tests.gpu.run import way_of_sharing
from tests.gpu.trial.runner import finding

PERCENTAGES = {**CLUSTER, "mps": "on", "sm_sharing": "mps"}
# As the fleets had them that answered wrongly.
SHARES = {**MODEL, "sm": {"prefill": 0.7, "decode": 0.1}}
GRAPHS = {**MODEL, "engine_args": {"enforce_eager": False}}
WAYS: dict[str, dict[str, Any]] = {
    "percentages": {"cluster": PERCENTAGES, "model_changes": SHARES},
    "percentages-without-prefixes": {"cluster": PERCENTAGES, "model_changes": {**SHARES, "prefix_caching": False}},
    "percentages-70-each": {
        "cluster": PERCENTAGES,
        "model_changes": {**MODEL, "sm": {"prefill": 0.7, "decode": 0.7}},
    },
    "one-free": {"cluster": PERCENTAGES, "policy": "free", "model_changes": {**MODEL, "engines": "one"}},
    "turns": {"cluster": {**CLUSTER, "mps": "off"}},
    "green-contexts": {"cluster": {**CLUSTER, "mps": "on", "sm_sharing": "green_contexts"}},
    "graphs": {"cluster": {**CLUSTER, "mps": "on", "sm_sharing": "green_contexts"}, "model_changes": GRAPHS},
}
# Tokens of a prompt at which the next class begins.
LENGTHS = (32, 64, 128)
# Fleets that do what was found to work, such as graphs with attention.
FOUND = ("graphs",)
PASSES = (("in batches", 32), ("one at a time", 1), ("in batches again", 32))


def judged(answers: Sequence[tuple[str, int, list[int]]], reference: dict[str, Any]) -> dict[str, Any]:
    """Which answers are wrong, in the order in which they came; how many by model and by length of the prompt."""
    wrong = []
    for order, (model, index, tokens) in enumerate(answers):
        expected = reference[model][index]
        difference = stock.first_difference(tokens, expected)
        if difference is None or difference[1] <= NEAR_TIE:
            continue
        words = stock.words_of(tokens, expected, difference, reference[model])
        others = [
            name
            for name in reference
            if name != model and any(each["tokens"][0] == tokens[difference[0]] for each in reference[name])
        ]
        wrong.append({"order": order, "model": model, "index": index, **words, "first_token_of_models": others})
    return {
        "answers": len(answers),
        "wrong": len(wrong),
        "at_first_token": sum(each["place"] == 0 for each in wrong),
        "by_model": dict(Counter(each["model"] for each in wrong)),
        "by_prompt_tokens": dict(Counter(class_of(each["prompt_tokens"]) for each in wrong)),
        "rows": wrong,
    }


def class_of(tokens: int) -> str:
    """The class of a prompt's length."""
    longer = [each for each in LENGTHS if each > tokens]
    return f"below {longer[0]}" if longer else f"{LENGTHS[-1]} and more"


def said_of(way: str, row: Mapping[str, Any]) -> str:
    """What came of a fleet, in words."""
    if "error" in row:
        return f"{way}: it did not serve"
    passes = {name: row[name] for name, _ in PASSES}
    each = ", ".join(f"{found['wrong']} of {found['answers']} {name}" for name, found in passes.items())
    total = {
        by: dict(sum((Counter(found[by]) for found in passes.values()), Counter()))
        for by in ("by_model", "by_prompt_tokens")
    }
    more = f"; {total['by_model']}; by tokens of the prompt: {total['by_prompt_tokens']}" if total["by_model"] else ""
    return f"{way} (SMs shared by {row['sharing']}), wrong answers: {each}{more}"


def main() -> int:
    """Exit code 1 if a fleet did not serve; wrong answers are a result."""
    parser = argparse.ArgumentParser(description="Every wrong answer of fleets, one fleet after another.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=float, default=240.0, help="seconds for a fleet to be ready")
    parser.add_argument("--models", nargs="+", choices=stock.MODELS, default=list(stock.MODELS))
    parser.add_argument("ways", nargs="+", choices=WAYS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the fleet is ended
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept = os.environ.get("MUXSERVE_GPU_REFERENCE")
    reference = stock.reference_answers(Path(kept or tempfile.mkdtemp()))
    asked = {model: reference[model] for model in options.models}
    without = reference.keys() - asked.keys()
    for way in options.ways:
        if all(name in report.get(way, {}) for name, _ in PASSES) and "error" not in report[way]:
            continue
        row: dict[str, Any] = {}
        report[way] = row
        changes = dict(WAYS[way])
        chosen = changes["cluster"].get("sm_sharing")
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            began = time.monotonic()
            file = fleet_file(Path(folder), changes.pop("model_changes", MODEL), without=without, **changes)
            # Findings lie there, and what vLLM and Triton have compiled.
            nothing_found = {"XDG_CACHE_HOME": folder} if chosen and way not in FOUND else {}
            try:
                with running(file, options.start, nothing_found, options=["--no-probe"]) as fleet:
                    row["ready_after"] = round(time.monotonic() - began, 1)
                    row["sharing"] = way_of_sharing(fleet.process.pid)
                    for name, concurrency in PASSES:
                        row[name] = judged(asyncio.run(all_answers(fleet, asked, concurrency=concurrency)), asked)
                        options.out.write_text(json.dumps(report, indent=1))
                        print(way, name, {k: v for k, v in row[name].items() if k != "rows"}, flush=True)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[-1500:]
                print(way, row["error"], flush=True)
            options.out.write_text(json.dumps(report, indent=1))
        finding(said_of(way, row))
    return 1 if any("error" in each for each in report.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
