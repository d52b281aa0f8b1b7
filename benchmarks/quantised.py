"""Quantised weights beside the same model in bfloat16: tokens per second and memory of one fleet each.

    python benchmarks/quantised.py [--layers 8] [--rounds 5] [--out benchmarks/results/quantised.json]

The model is a Llama with random weights, large enough that a step is mostly its weights, and the tokenizer of `atlas`;
`configs/models/quantise.py` makes the versions with 8 and 4 bits. All fleets are up at once and measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import yaml
from load import Call, closed_loop, summary
from report import machine, write_report
from servers import ROOT, ServerError, end_cleanly, muxserve_fleet

from muxserve.planning.demand.checkpoints import stored_weights

sys.path.insert(0, str(ROOT / "configs/models"))
from quantise import SCHEMES, quantise

PLAIN = "bfloat16"
PROMPT, OUTPUT = 64, 64


def random_llama(directory: Path, layers: int) -> None:
    """A checkpoint with random weights in bfloat16, the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(ROOT / "configs/models/atlas" / name, directory / name)


def fleet_of(checkpoint: Path, name: str) -> Path:
    """A fleet file with that model alone, beside the checkpoint."""
    model = {"name": name, "path": str(checkpoint), "dtype": PLAIN, "limits": {"max_wait": "none"}}
    path = checkpoint.parent / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"kv_pool": {"size": "64MiB"}, "models": [model]}))
    return path


def main() -> int:
    """Run everything; exit code 1 if a fleet does not come up or a request fails."""
    parser = argparse.ArgumentParser(description="Compare quantised weights with the same in bfloat16.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quantised.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict = {"machine": machine(), "layers": options.layers, "rounds": options.rounds, "versions": {}}
    failed = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        base = Path(folder) / PLAIN
        random_llama(base, options.layers)
        for scheme in SCHEMES:
            quantise(base, Path(folder) / scheme, scheme)
        urls = {}
        for version in (PLAIN, *SCHEMES):
            try:
                server = stack.enter_context(muxserve_fleet(fleet_of(Path(folder) / version, version)))
            except ServerError as error:
                print(error, file=sys.stderr)
                return 1
            urls[version] = server
            stored = stored_weights(Path(folder) / version)
            assert stored is not None
            report["versions"][version] = {"weights_mib": round((2 * stored.elements + stored.packed_bytes) / 2**20, 1)}
        for version, server in urls.items():
            asyncio.run(closed_loop(server.url, [Call(version, PROMPT, 8, seed=-1 - i) for i in range(16)], 8))
            report["versions"][version]["pss_mib"] = server.pss_bytes() >> 20
        for concurrency in (1, 8):
            speeds: dict[str, list[float]] = {version: [] for version in urls}
            for turn in range(options.rounds):
                for version in list(urls) if turn % 2 == 0 else list(urls)[::-1]:
                    first = (concurrency * options.rounds + turn) * 100
                    calls = [Call(version, PROMPT, OUTPUT, seed=first + i) for i in range(max(2, 2 * concurrency))]
                    figures = summary(asyncio.run(closed_loop(urls[version].url, calls, concurrency)))
                    failed += int(str(figures["failed"]))
                    speeds[version].append(float(str(figures.get("output_tokens_per_second", 0.0))))
            for version in urls:
                # Both sides of a ratio are of the same turn.
                ratios = [mine / plain for mine, plain in zip(speeds[version], speeds[PLAIN], strict=True)]
                report["versions"][version][f"concurrency {concurrency}"] = {
                    "output_tokens_per_second": statistics.median(speeds[version]),
                    f"to {PLAIN}": round(statistics.median(ratios), 3),
                }
    for version, figures in report["versions"].items():
        print(f"{version:10s} {figures}", flush=True)
    write_report(options.out, report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
