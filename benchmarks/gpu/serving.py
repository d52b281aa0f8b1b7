"""Seven models on one GPU under one skewed load, served in three ways in one run:

(a) `spatial`: one stock vLLM server per model, the KV memory divided by their rates;
(b) `temporal`: a MuxServe fleet whose models take turns (`policy: fcfs`);
(c) `muxserve`: a MuxServe fleet with SM shares and the default policy.

    python benchmarks/gpu/serving.py [--alphas 0.9 2.1] [--rates 4 8 16] [--quick] [--out FILE]

All get the same requests. Reported are the throughput weighted by rates, the part of requests within 8 times their
latency alone (measured first, on the stock servers while the others have nothing to do), and p99 of TTFT and TPOT.
Targets: 1.8 times the throughput of the better of (a) and (b) at the best point, never below it. kvcached is not among
them yet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from load import Call, closed_loop
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, free_ports, muxserve_fleet
from serving_cpu import Alone, drive, fit_alone, make_calls, show
from stock_vllm import StockSettings, stock_server

from gpu import checkpoints
from muxserve.gpu import nvml
from muxserve.workload import power_law_rates

SYSTEMS = ("spatial", "temporal", "muxserve")
START_SECONDS = 900.0


def shares_of(names: list[str], alpha: float) -> dict[str, float]:
    """Each model's part of all requests."""
    return power_law_rates(names, 1.0, alpha)


def fleet_file(
    folder: Path, paths: dict[str, Path], rates: dict[str, float], system: str, settings: StockSettings
) -> Path:
    """A fleet of these models on one GPU, that serves all requests, however late."""
    models = [
        {
            "name": name,
            "path": str(path),
            "rate": rates[name],
            "dtype": settings.dtype,
            "max_len": settings.max_len,
            "max_num_seqs": settings.max_num_seqs,
            "limits": {"max_wait": "none"},
            "engine_args": {"load_format": "dummy", "enforce_eager": settings.eager},
        }
        for name, path in paths.items()
    ]
    fleet = {
        "cluster": {"gpus": 1},
        **({"policy": "fcfs"} if system == "temporal" else {}),
        "kv_pool": {"size": settings.kv_bytes},
        "models": models,
    }
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
        if system == "spatial":
            total = sum(rates.values())
            ports = free_ports(len(paths))
            with ThreadPoolExecutor(len(paths)) as starts:
                entered = {
                    name: starts.submit(
                        stack.enter_context,
                        stock_server(
                            path, name, replace(settings, kv_bytes=int(settings.kv_bytes * rates[name] / total)), port
                        ),
                    )
                    for (name, path), port in zip(paths.items(), ports, strict=True)
                }
            servers = {name: each.result() for name, each in entered.items()}
            yield {name: server.url for name, server in servers.items()}, list(servers.values())
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = fleet_file(folder, paths, rates, system, settings)
        fleet = stack.enter_context(muxserve_fleet(file, timeout=START_SECONDS))
        yield dict.fromkeys(paths, fleet.url), [fleet]


def alone_by_model(shapes: dict[str, str], urls: dict[str, str]) -> dict[str, Alone]:
    """What requests take on stock servers while nothing else runs, measured once for each shape.

    Raises:
        ServerError: a request failed.
    """
    of_shape: dict[str, Alone] = {}
    for name, shape in shapes.items():
        if shape not in of_shape:
            calls = [Call(name, p, 48, seed=-100 - i) for i, p in enumerate((16, 64, 256, 1024) * 3)]
            asyncio.run(closed_loop(urls[name], [replace(call, seed=-10) for call in calls[:4]], 1))
            of_shape[shape] = fit_alone(asyncio.run(closed_loop(urls[name], calls, 1)))
    return {name: of_shape[shape] for name, shape in shapes.items()}


def weighted(result: dict[str, Any], shares: dict[str, float]) -> float:
    """Requests per second of the models, averaged with their rates as weights."""
    return sum(share * result["per_model"][name].get("requests_per_second", 0.0) for name, share in shares.items())


def compare(report: dict[str, Any]) -> None:
    """How far ahead of the better of the others muxserve is, at every point."""
    report["ahead"] = {}
    for point in report["results"].get("muxserve", {}):
        others = [report["results"][s][point]["weighted"] for s in SYSTEMS[:2] if point in report["results"].get(s, {})]
        if others and max(others) > 0:
            report["ahead"][point] = report["results"]["muxserve"][point]["weighted"] / max(others)
            print(f"{point}: {report['ahead'][point]:.2f} times the throughput of the better of the others")


def main() -> int:
    """Exit code 1 if a server does not come up."""
    parser = argparse.ArgumentParser(description="Seven models on one GPU, served in three ways.")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.9, 2.1])
    parser.add_argument("--rates", nargs="+", type=float, default=[8.0, 16.0, 32.0], help="requests/s of all models")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--models", type=int, default=len(checkpoints.FLEET), help="so many of the seven")
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="one alpha, two rates, 15 s each")
    parser.add_argument("--kv-gib", type=float, default=48.0, help="KV memory of all models together")
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
    options.prompt, options.output = (128.0, 0.9, 8, 1024), (160.0, 0.8, 8, 768)
    end_cleanly()
    settings = StockSettings(
        eager=False, kv_bytes=int(options.kv_gib * (1 << 30)), dtype="bfloat16", dummy=True, max_num_seqs=128
    )
    report: dict[str, Any] = {
        "machine": machine(),
        "gpus": [gpu.name for gpu in found.gpus],
        "start_seconds": {},
        "results": {},
    }
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        shapes = dict(list(checkpoints.FLEET.items())[: options.models])
        paths = {name: checkpoints.make(Path(folder), name, shape) for name, shape in shapes.items()}
        names = list(paths)
        try:
            alone: dict[str, Alone] = {}
            if "spatial" not in options.systems:
                with serving("spatial", paths, dict.fromkeys(names, 1.0), settings) as (urls, _):
                    alone = alone_by_model(shapes, urls)
            for alpha in options.alphas:
                options.alpha = alpha
                shares = shares_of(names, alpha)
                for system in options.systems:
                    rates = power_law_rates(names, max(options.rates), alpha)
                    with serving(system, paths, rates, settings) as (urls, servers):
                        starts = report["start_seconds"].setdefault(system, [])
                        starts.append(max(server.start_seconds for server in servers))
                        alone = alone or alone_by_model(shapes, urls)
                        for rate in options.rates:
                            result = drive(urls, servers, make_calls(options, names, rate), alone)
                            result["weighted"] = weighted(result, shares)
                            report["results"].setdefault(system, {})[f"alpha {alpha:g}, {rate:g}/s"] = result
                            show(system, rate, result)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            compare(report)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
