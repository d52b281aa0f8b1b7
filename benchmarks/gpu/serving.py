"""Several models on one GPU under one skewed load, served in several ways:

`stock-alone`   the most popular model's stock server, while the others have nothing to do;
`stock-mps`     one stock vLLM server per model under one MPS server, the KV memory divided by their rates;
`stock`         the same without MPS;
`split-green`   a MuxServe fleet with two engines per model, and green contexts under MPS;
`one-free`      one engine per model, which runs when it has work (`policy: free`), under MPS without percentages;
`one-turns`     one engine per model, one at a time (`policy: fcfs`, `mps: off`);
`split-turns`   two engines per model, one at a time.

    python benchmarks/gpu/serving.py [--systems stock-alone one-free ...] [--shapes llama-1b llama-3b llama-8b]
        [--alphas 0.9 2.1] [--rates 4 8 16] [--quick] [--out FILE]

All get the same requests. Reported are the throughput weighted by rates, the part of requests within 8 times their
latency alone (measured first, on the stock servers while the others have nothing to do), p99 of TTFT and TPOT, tokens
per second, and what the GPU's memory has before, with everything started, and after the load; of that the KV pool, the
weights, and the rest, which is contexts, graphs and activations. Results are added to those that the file has, whose
latencies alone count for other systems, too. `decision` in the file says what `engines: auto` and `sm_sharing: auto`
should be by all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from load import Call, closed_loop
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, free_ports, muxserve_fleet
from serving_cpu import Alone, drive, fit_alone, make_calls, show
from stock_vllm import StockSettings, stock_server

from gpu import checkpoints
from muxserve.cli.http import get_json
from muxserve.gpu import nvml
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.workload import power_law_rates
from tests.gpu.run import way_of_sharing
from tests.gpu.trial.runner import finding
from tests.gpu.trial.under_mps import mps_server

STOCK = ("stock-alone", "stock-mps", "stock")
UNDER_MPS = {"gpus": 1, "mps": "on"}
# What the fleet file says beside its models, and which engines these have.
FLEETS: dict[str, tuple[dict[str, Any], str]] = {
    "split-green": ({"cluster": {**UNDER_MPS, "sm_sharing": "green_contexts"}}, "split"),
    "one-free": ({"cluster": {**UNDER_MPS, "sm_sharing": "mps"}, "policy": "free"}, "one"),
    "one-turns": ({"cluster": {"gpus": 1, "mps": "off"}, "policy": "fcfs"}, "one"),
    "split-turns": ({"cluster": {"gpus": 1, "mps": "off"}, "policy": "fcfs"}, "split"),
}
SYSTEMS = (*STOCK, *FLEETS)
# What the keys of a fleet file would be that is served so, and how its engines have to share the GPU for that.
KEYS = {
    "split-green": ("engines: split, sm_sharing: green_contexts", "green_contexts"),
    "one-free": ("engines: one, policy: free under MPS without percentages", "mps"),
    "one-turns": ("engines: one, one at a time", "off"),
    "split-turns": ("engines: split, one at a time", "off"),
}
START_SECONDS = 900.0
# A smaller part of all requests within their objective is no difference.
CLEAR = 0.02
SCALE = "8"


def shares_of(names: list[str], alpha: float) -> dict[str, float]:
    """Each model's part of all requests."""
    return power_law_rates(names, 1.0, alpha)


def fleet_file(
    folder: Path, paths: dict[str, Path], rates: dict[str, float], system: str, settings: StockSettings
) -> Path:
    """A fleet of these models on one GPU, that serves all requests, however late."""
    top, engines = FLEETS[system]
    models = [
        {
            "name": name,
            "path": str(path),
            "rate": rates[name],
            "engines": engines,
            "dtype": settings.dtype,
            "max_len": settings.max_len,
            "max_num_seqs": settings.max_num_seqs,
            "limits": {"max_wait": "none"},
            "engine_args": {"load_format": "dummy", "enforce_eager": settings.eager},
        }
        for name, path in paths.items()
    ]
    fleet = {**top, "kv_pool": {"size": settings.kv_bytes}, "models": models}
    path = folder / f"{system}.yaml"
    path.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return path


@contextlib.contextmanager
def serving(
    system: str, paths: dict[str, Path], rates: dict[str, float], settings: StockSettings
) -> Iterator[tuple[dict[str, str], list[Server]]]:
    """Addresses by model, and the servers behind them.

    Raises:
        ServerError: one did not come up.
    """
    with contextlib.ExitStack() as stack:
        if system in STOCK:
            if system == "stock-mps":
                stack.enter_context(mock.patch.dict(os.environ, stack.enter_context(mps_server())))
            total = sum(rates.values())
            ports = free_ports(len(paths))
            with ThreadPoolExecutor(len(paths)) as starts:
                entered = {
                    name: starts.submit(
                        stack.enter_context,
                        stock_server(
                            path,
                            name,
                            replace(settings, kv_bytes=int(settings.kv_bytes * rates[name] / total)),
                            port,
                            START_SECONDS,
                        ),
                    )
                    for (name, path), port in zip(paths.items(), ports, strict=True)
                }
            servers = {name: each.result() for name, each in entered.items()}
            yield {name: server.url for name, server in servers.items()}, list(servers.values())
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = fleet_file(folder, paths, rates, system, settings)
        fleet = stack.enter_context(muxserve_fleet(file, timeout=START_SECONDS, options=["--no-probe"]))
        yield dict.fromkeys(paths, fleet.url), [fleet]


def alone_by_model(shapes: dict[str, str], urls: dict[str, str], longest: int) -> dict[str, Alone]:
    """What requests take on stock servers while nothing else runs, measured once for each shape.

    Raises:
        ServerError: a request failed.
    """
    of_shape: dict[str, Alone] = {}
    prompts = tuple(min(each, longest) for each in (16, 64, 256, longest))
    for name, shape in shapes.items():
        if shape not in of_shape:
            calls = [Call(name, p, 48, seed=-100 - i) for i, p in enumerate(prompts * 3)]
            asyncio.run(closed_loop(urls[name], [replace(call, seed=-10) for call in calls[:4]], 1))
            of_shape[shape] = fit_alone(asyncio.run(closed_loop(urls[name], calls, 1)))
    return {name: of_shape[shape] for name, shape in shapes.items()}


def weighted(result: dict[str, Any], shares: dict[str, float]) -> float:
    """Requests per second of the models, averaged with their rates as weights."""
    rates = {name: each.get("requests_per_second", 0.0) for name, each in result["per_model"].items()}
    return sum(share * rates.get(name, 0.0) for name, share in shares.items())


def compare(report: dict[str, Any]) -> None:
    """How far ahead of the best stock servers of all models each fleet is, at every point."""
    report["ahead"] = {}
    results = report["results"]
    for system in FLEETS:
        for point, result in results.get(system, {}).items():
            others = [results[s][point]["weighted"] for s in ("stock-mps", "stock") if point in results.get(s, {})]
            if others and max(others) > 0:
                report["ahead"].setdefault(system, {})[point] = result["weighted"] / max(others)
                print(f"{system}, {point}: {report['ahead'][system][point]:.2f} times the best stock servers'")


def figures(points: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Over these points: the part of the requests that met 8 times their latency alone, and tokens per second."""
    found = list(points)
    return (
        statistics.mean(each["slo_attainment"]["e2e"][SCALE] for each in found),
        statistics.mean(each.get("output_tokens_per_second", 0.0) for each in found),
    )


def decision(report: Mapping[str, Any]) -> list[str]:
    """What `engines: auto` and `sm_sharing: auto` should be by these results, in sentences.

    Ways are compared by attainment over the points that all of them have, and where that is no clear difference by
    tokens per second. A fleet that `deploy` has made share the GPU otherwise than its name says does not count.
    """
    results: Mapping[str, dict[str, Any]] = report["results"]
    words, ways = [], {}
    for system, points in results.items():
        how = report.get("sharing", {}).get(system)
        if system in KEYS and how != KEYS[system][1]:
            words.append(f"{system} does not count: its engines shared the GPU by {how}")
        elif system in KEYS or system == "stock-mps":
            ways[system] = points
    common = [point for point in next(iter(ways.values()), {}) if all(point in points for points in ways.values())]
    shown = {system: figures(points[point] for point in common) for system, points in ways.items() if common}
    # One model's requests only, which nothing else is compared with.
    lone = {"stock-alone": figures(results["stock-alone"].values())} if "stock-alone" in results else {}
    for system, (part, speed) in (lone | shown).items():
        objective = f"{SCALE} times their latency alone"
        words.append(f"{system}: {part:.0%} of the requests within {objective}, {speed:.0f} tokens/s")
    fleets = {system: each for system, each in shown.items() if system in KEYS}
    if len(fleets) < 2:
        return words
    most = max(part for part, _ in fleets.values())
    best = max((system for system in fleets if fleets[system][0] >= most - CLEAR), key=lambda name: fleets[name][1])
    words.append(f"best of the fleets is {best}: {KEYS[best][0]}; that `auto` should be")
    if "stock-mps" in shown and shown["stock-mps"][0] > fleets[best][0] + CLEAR:
        words.append("stock servers under MPS attain more than any fleet")
    return words


def used_bytes() -> int:
    """Memory that is taken of all visible GPUs."""
    return sum(gpu.used_bytes for gpu in nvml.visible(nvml.machine(), os.environ).gpus)


def memory_of(
    system: str, urls: Mapping[str, str], settings: StockSettings, paths: Mapping[str, Path]
) -> dict[str, int]:
    """Bytes of the KV memory and of one copy of all weights; the first as the fleet has measured it."""
    pool = settings.kv_bytes
    if system in FLEETS:
        pool = min(int(gpu["pool_bytes"]) for gpu in get_json(next(iter(urls.values())), "/fleet")[1]["gpus"])
    weights = sum(planned_architecture(str(path), Path()).weight_bytes(settings.dtype) for path in paths.values())
    return {"pool": pool, "weights": int(weights)}


def checkpoints_of(folder: Path, shapes: dict[str, str]) -> dict[str, Path]:
    """A checkpoint for each model: made of a shape of configs/gpu, or a directory that is given."""
    return {
        name: Path(shape).resolve() if Path(shape).is_dir() else checkpoints.make(folder, name, shape)
        for name, shape in shapes.items()
    }


def main() -> int:
    """Exit code 1 if a server does not come up."""
    parser = argparse.ArgumentParser(description="Several models on one GPU, served in several ways.")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.9, 2.1])
    parser.add_argument("--rates", nargs="+", type=float, default=[8.0, 16.0, 32.0], help="requests/s of all models")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--shapes", nargs="+", help="names in configs/gpu, or directories; most popular first (default: 7)"
    )
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="one alpha, two rates, 15 s each")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--kv-gib", type=float, default=48.0, help="KV memory of all models together")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, and of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu"))
    parser.add_argument("--out", type=Path, default=default / "serving.json")
    options = parser.parse_args()
    found = nvml.visible(nvml.machine(), os.environ)
    if not found.gpus:
        print(f"nothing was measured: {found.why_none or 'no GPU is visible'}")
        return 0
    if options.quick:
        options.alphas, options.rates, options.duration = options.alphas[-1:], options.rates[::2], 15.0
    # ShareGPT's means, with the tails that chats have.
    most = options.longest
    options.prompt, options.output = (min(128.0, most / 8), 0.9, 8, most), (min(160.0, most / 6), 0.8, 8, most * 3 // 4)
    end_cleanly()
    settings = StockSettings(
        eager=options.eager,
        kv_bytes=int(options.kv_gib * (1 << 30)),
        max_len=2 * most,
        dtype="bfloat16",
        dummy=True,
        max_num_seqs=128,
    )
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"results": {}}
    report |= {"machine": machine(), "gpus": [gpu.name for gpu in found.gpus]}
    alone = {name: Alone(**figures) for name, figures in report.get("alone", {}).items()}
    shapes = {f"m{n}": shape for n, shape in enumerate(options.shapes)} if options.shapes else checkpoints.FLEET
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        paths = checkpoints_of(Path(folder), shapes)
        names = list(paths)
        try:
            if not alone and options.systems[0] not in STOCK:
                with serving("stock", paths, dict.fromkeys(names, 1.0), settings) as (urls, _):
                    alone = alone_by_model(shapes, urls, most)
            for alpha in options.alphas:
                options.alpha = alpha
                shares = shares_of(names, alpha)
                for system in options.systems:
                    rates = power_law_rates(names, max(options.rates), alpha)
                    before = used_bytes()
                    with serving(system, paths, rates, settings) as (urls, servers):
                        memory = {"before": before, "started": used_bytes()}
                        memory |= memory_of(system, urls, settings, paths)
                        memory["engines"] = memory["started"] - before - memory["pool"] - memory["weights"]
                        if system in FLEETS:
                            report.setdefault("sharing", {})[system] = way_of_sharing(servers[0].pid)
                        starts = report.setdefault("start_seconds", {}).setdefault(system, [])
                        starts.append(max(server.start_seconds for server in servers))
                        if not alone:
                            alone = alone_by_model(shapes, urls, most)
                            report["alone"] = {name: asdict(each) for name, each in alone.items()}
                        for rate in options.rates:
                            calls = make_calls(options, names, rate)
                            if system == "stock-alone":
                                calls = [call for call in calls if call.model == names[0]]
                                urls = {names[0]: urls[names[0]]}
                            result = drive(urls, servers, calls, alone)
                            result["weighted"] = weighted(result, shares)
                            result["memory_bytes"] = {**memory, "loaded": used_bytes()}
                            report["results"].setdefault(system, {})[f"alpha {alpha:g}, {rate:g}/s"] = result
                            show(system, rate, result)
                            write_report(options.out, report)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            compare(report)
            report["decision"] = decision(report)
            for words in report["decision"]:
                finding(words)
            write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
