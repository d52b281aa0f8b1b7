"""A fleet whose engines only pretend to compute, against the simulator: the same fleet file, costs and requests.

    python benchmarks/simulated_deploy.py [--rates 1 2] [--duration 60] [--out FILE]

`muxserve deploy --simulated` serves three models of about 0.2 billion weights, of which there are none, and `muxserve
replay` sends a Poisson workload; `muxserve simulate` gets the same file. Costs are the roofline's on both sides.
Compared are throughput and mean latencies (target: within 5 %). The simulator does not know what gateway and engines
themselves cost; a lone request of each model tells that, and is in the report beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from report import machine, write_report
from servers import ROOT, ServerError, end_cleanly, muxserve_fleet

from muxserve.metrics.report import read_json
from muxserve.metrics.summary import Summary
from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates
from muxserve.workload.trace import TraceRequest, write_trace

MUXSERVE = Path(sys.executable).parent / "muxserve"
NAMES = ("large", "middle", "small")
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
PROMPT, OUTPUT = LogNormalLengths(96, 0.8, 8, 512), LogNormalLengths(64, 0.6, 8, 256)
JUDGED = ("requests_per_second", "output_tokens_per_second", "ttft_mean", "tpot_mean", "latency_mean")
TARGET = 0.05


def fleet_file(folder: Path, rate: float) -> Path:
    """Three models without weights."""
    models = []
    for name, share in power_law_rates(list(NAMES), rate, 1.3).items():
        path = folder / name
        if not path.exists():
            shutil.copytree(ROOT / "configs/models/atlas", path, ignore=shutil.ignore_patterns("*.safetensors"))
            config = json.loads((path / "config.json").read_text()) | SHAPE
            (path / "config.json").write_text(json.dumps(config))
        models.append(
            {
                "name": name,
                "path": str(path),
                "rate": share,
                "max_len": 1024,
                "limits": {"max_wait": "none"},
                "engine_args": {"load_format": "dummy"},
            }
        )
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump({"kv_pool": {"size": "512MiB"}, "models": models}))
    return file


def run(*words: str | Path) -> None:
    """A command of MuxServe."""
    subprocess.run([str(MUXSERVE), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def summary_of(file: Path) -> Summary:
    """The only run of a report."""
    (summary,) = read_json(file).runs.values()
    return summary


def compared(live: Summary, simulated: Summary) -> dict[str, Any]:
    """Served, simulated and the relative error of each figure."""
    a, b = live.overall, simulated.overall
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in JUDGED[:2]}
    for name in ("ttft", "tpot", "latency"):
        for statistic in ("mean", "p50", "p90"):
            pairs[f"{name}_{statistic}"] = tuple(getattr(getattr(each, name), statistic) for each in (a, b))
    return {
        name: {"served": round(was, 5), "simulated": round(is_, 5), "error": round(is_ / was - 1, 4)}
        for name, (was, is_) in pairs.items()
    }


def main() -> int:
    """Run everything; exit code 1 if a mean or a throughput is off by more than the target."""
    parser = argparse.ArgumentParser(description="deploy --simulated against the simulator.")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 2.0], help="requests/s in all")
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/simulated_deploy.json")
    options = parser.parse_args()
    end_cleanly()
    report: dict[str, Any] = {"machine": machine(), "duration": options.duration, "seed": options.seed, "rates": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = fleet_file(folder, max(options.rates))
        lone = [TraceRequest(3.0 * number, model, 64, 16) for number, model in enumerate(NAMES)]
        traces = {"lone": [*lone, *(TraceRequest(r.arrival + 9.0, r.model, 64, 16) for r in lone)]}
        for rate in options.rates:
            loads = {m: ModelLoad(r, PROMPT, OUTPUT) for m, r in power_law_rates(list(NAMES), rate, 1.3).items()}
            traces[f"{rate:g}"] = list(generate(loads, options.duration, options.seed))
        try:
            with muxserve_fleet(file, options=("--simulated",)) as server:
                report["start_seconds"] = round(server.start_seconds, 1)
                report["pss_mib"] = {part: round(size, 1) for part, size in server.pss_by_part().items()}
                for label, requests in traces.items():
                    trace = folder / f"{label}.jsonl"
                    write_trace(trace, list(NAMES), requests)
                    before = server.cpu_seconds()
                    run("replay", "--url", server.url, "-w", trace, "-o", folder / "live.json")
                    used = server.cpu_seconds() - before
                    run("simulate", file, "--workload", trace, "-o", folder / "simulated.json")
                    live = summary_of(folder / "live.json")
                    rows = compared(live, summary_of(folder / "simulated.json"))
                    report["rates"][label] = {"requests": len(requests), "core_seconds": round(used, 1), **rows}
                    print(f"\n{label}: {len(requests)} requests, {live.overall.failed} failed")
                    for key, row in rows.items():
                        was, is_, error = row["served"], row["simulated"], row["error"]
                        print(f"  {key:26s} served {was:9.4f}  simulated {is_:9.4f}  {error:+.1%}")
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    loaded = [rows for label, rows in report["rates"].items() if label != "lone"]
    report["worst_error"] = max(abs(rows[key]["error"]) for rows in loaded for key in JUDGED)
    report["within_target"] = report["worst_error"] <= TARGET
    write_report(options.out, report)
    return 0 if report["within_target"] else 1


if __name__ == "__main__":
    sys.exit(main())
