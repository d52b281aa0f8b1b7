"""Arrangements of prefill and decode against each other, live on this machine's CPU, in one run.

    python benchmarks/phases_live.py rolling  [--rates 2 3 4 5] [--duration 30] [--seeds 1]
    python benchmarks/phases_live.py pipeline [--rates 2 3 4 5] [--duration 30] [--seeds 1]

`rolling`: three replicas of one model, whose prefill rolls over them; against three independent ones, to which the
global scheduler sends each request as it finds them freest: `independent`, engines whose steps hold prompts and
sequences that decode, as stock vLLM's; `split`, two engines each. Requests stay where they are.

`pipeline`: one model over two stages with Token Throttling, against one stage with as many threads.

Every system gets the very same requests: arrival, prompt, output length. A request meets its objectives if its time to
first token and its time per token after it are within them. The first token of a rolling replica is followed by a wait
until decoding begins; *with* the wait, TTFT ends with the second token and TPOT counts the tokens after that;
*without*, both begin with the first. Goodput is the largest of the rates at which nine requests of ten meet theirs.
A pipeline's bubbles are seconds of a stage in which it did nothing although a micro-batch was in flight, as a part of
the time of the load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from load import Call, Outcome, closed_loop, open_loop, summary
from report import machine, percentiles, write_report
from servers import ROOT, Server, ServerError, end_cleanly, muxserve_fleet

sys.path.insert(0, str(ROOT))

from muxserve.workload import LogNormalLengths, ModelLoad, generate
from tests.support.tiny_checkpoint import tiny_checkpoint

MODEL = "tiny"
# The tiny checkpoints have a token for each byte.
LAST_TOKEN = 255
BUBBLES = "muxserve_stage_bubble_seconds_total"
SHARE = 0.9


def systems(part: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is compared: the keys of the model that differ."""
    if part == "rolling":
        rolling: dict[str, Any] = {"engines": "one", "dispatch": "rolling"}
        one_stage = {"engines": "one"}
        replicas = {"replicas": options.replicas, "threads": 1}
        return {
            "rolling": rolling | replicas,
            "independent": one_stage | replicas,
            "split": replicas,
        }
    return {
        "stages": {"engines": "one", "stages": 2, "threads": 1},
        "one stage": {"engines": "one", "threads": 2},
    }


def fleet_of(keys: Mapping[str, Any], checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The fleet file of one system."""
    model = {
        "name": MODEL,
        "path": str(checkpoint),
        "dtype": "float32",
        "rate": max(options.rates),
        "max_len": options.max_len,
        "max_num_batched_tokens": options.batch_tokens,
        "slo": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms},
        "limits": {"max_wait": "none"},
        **keys,
    }
    return {"kv_pool": {"size": f"{options.kv_mib}MiB"}, "migration": "off", "models": [model]}


def make_calls(options: argparse.Namespace, rate: float, seed: int) -> list[Call]:
    """The requests of one rate, the same for every system."""
    load = ModelLoad(rate, LogNormalLengths(*options.prompt), LogNormalLengths(*options.output))
    trace = generate({MODEL: load}, options.duration, seed)
    return [
        Call(MODEL, r.prompt_tokens, r.output_tokens, f"{rate}/{seed}/{number}", r.arrival, last_token=LAST_TOKEN)
        for number, r in enumerate(trace)
    ]


def times(outcome: Outcome, with_wait: bool) -> tuple[float, float]:
    """TTFT and TPOT, seconds."""
    if with_wait and outcome.gaps:
        rest = outcome.gaps[1:]
        return outcome.ttft + outcome.gaps[0], sum(rest) / len(rest) if rest else 0.0
    return outcome.ttft, outcome.tpot or 0.0


def judged(outcomes: Sequence[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    """Both countings, failed requests among those that miss."""
    result: dict[str, Any] = {}
    for name, with_wait in (("with_wait", True), ("without_wait", False)):
        both = [times(outcome, with_wait) for outcome in outcomes if outcome.ok]
        met = sum(ttft <= options.ttft_ms / 1e3 and tpot <= options.tpot_ms / 1e3 for ttft, tpot in both)
        result[name] = {
            "attained": round(met / len(outcomes), 4),
            "ttft_ms": percentiles([ttft * 1e3 for ttft, _ in both]),
            "tpot_ms": percentiles([tpot * 1e3 for _, tpot in both]),
        }
    return result


def scrape(server: Server, name: str) -> dict[str, float]:
    """The series of a counter by their labels."""
    lines = server.metrics().splitlines()
    found = (line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
    return {labels: float(value) for labels, value in found}


def drive(server: Server, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one load with each seed, one after the other, and say what came out of all together."""
    bubbles, cpu = scrape(server, BUBBLES), server.cpu_seconds()
    outcomes: list[Outcome] = []
    attained: list[list[float]] = []
    seconds = 0.0
    for seed in range(options.seed, options.seed + options.seeds):
        found = asyncio.run(open_loop({MODEL: server.url}, make_calls(options, rate, seed)))
        if not any(outcome.ok for outcome in found):
            raise ServerError(f"no request was served: {found[0].error}")
        seconds += max(o.last for o in found) - min(o.sent for o in found)
        both = judged(found, options)
        attained.append([both["with_wait"]["attained"], both["without_wait"]["attained"]])
        outcomes += found
    used = server.cpu_seconds() - cpu
    after = scrape(server, BUBBLES)
    result = summary(outcomes) | judged(outcomes, options) | {"server_cpu_seconds": round(used, 1)}
    result["attained_by_seed"] = attained
    if after:
        result["bubbles"] = {
            labels: round((value - bubbles.get(labels, 0.0)) / seconds, 4) for labels, value in after.items()
        }
    return result


def goodput(rows: Mapping[str, Any], counting: str) -> float:
    """The largest rate up to which nine requests of ten met their objectives; 0 if none."""
    kept = itertools.takewhile(lambda rate: rows[rate][counting]["attained"] >= SHARE, sorted(rows, key=float))
    return max(map(float, kept), default=0.0)


def show(system: str, rate: float, row: Mapping[str, Any]) -> None:
    """One line of the table."""
    w, wo = row["with_wait"], row["without_wait"]
    print(
        f"{system:13s} {rate:5.1f}/s: attained {w['attained']:.2f} ({wo['attained']:.2f} without the wait)"
        f"  TTFT p50/p99 {w['ttft_ms']['p50']:.0f}/{w['ttft_ms']['p99']:.0f}"
        f" ({wo['ttft_ms']['p50']:.0f}/{wo['ttft_ms']['p99']:.0f})"
        f"  TPOT p50/p99 {w['tpot_ms']['p50']:.1f}/{w['tpot_ms']['p99']:.1f}"
        f" ({wo['tpot_ms']['p50']:.1f}/{wo['tpot_ms']['p99']:.1f}) ms"
        f"  seeds {' '.join(f'{each[0]:.2f}' for each in row['attained_by_seed'])}"
        f"  {row['output_tokens_per_second']:.0f} tokens/s  failed {row['failed']}  bubbles {row.get('bubbles', '-')}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rolling", "pipeline"))
    parser.add_argument("--systems", nargs="+", help="systems to run (default: all)")
    parser.add_argument("--rates", nargs="+", type=float, default=[2.0, 3.0, 4.0, 5.0, 6.0], help="requests/s")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of load at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from --seed on")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=60.0)
    lengths = {"nargs": 4, "type": float, "metavar": ("MEDIAN", "SIGMA", "MIN", "MAX")}
    parser.add_argument("--prompt", default=[192.0, 0.7, 16, 768], help="prompt tokens", **lengths)
    parser.add_argument("--output", default=[48.0, 0.6, 8, 160], help="output tokens", **lengths)
    parser.add_argument("--shape", nargs=4, type=int, default=[8, 8, 4, 64], metavar=("LAYERS", "HEADS", "KV", "SIZE"))
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--kv-mib", type=int, default=256, help="KV memory of a unit, or stage")
    parser.add_argument(
        "--out", type=Path, help="result file (default: results/rolling_live.json or results/pipeline_live.json)"
    )
    options = parser.parse_args()
    for side in (options.prompt, options.output):
        side[2:] = [int(side[2]), int(side[3])]
    return options


def main() -> int:
    """Run everything; exit code 1 if a fleet does not come up."""
    options = parse()
    end_cleanly()
    checkpoint = tiny_checkpoint("llama", *options.shape, max_len=options.max_len)
    report: dict[str, Any] = {"machine": machine()}
    report["load"] = {k: v for k, v in vars(options).items() if k not in ("out", "systems", "part")}
    report["results"] = {}
    try:
        for system, keys in systems(options.part, options).items():
            if options.systems and system not in options.systems:
                continue
            rows: dict[str, Any] = {}
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "fleet.yaml"
                file.write_text(yaml.safe_dump(fleet_of(keys, checkpoint, options), sort_keys=False))
                with muxserve_fleet(file) as server:
                    warm = [
                        Call(MODEL, 16 + 40 * number, 16, seed=-1 - number, last_token=LAST_TOKEN)
                        for number in range(12)
                    ]
                    asyncio.run(closed_loop(server.url, warm, 4))
                    for rate in options.rates:
                        row = rows[str(rate)] = drive(server, rate, options)
                        show(system, rate, row)
                    started = round(server.start_seconds, 1)
            report["results"][system] = {"keys": keys, "start_seconds": started, "rates": rows}
            report["results"][system]["goodput"] = {c: goodput(rows, c) for c in ("with_wait", "without_wait")}
            print(f"{system:13s} goodput {report['results'][system]['goodput']}", flush=True)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    report["load_average_after"] = machine()["load_average"]
    write_report(options.out or ROOT / f"benchmarks/results/{options.part}_live.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
