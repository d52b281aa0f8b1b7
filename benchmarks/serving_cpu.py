"""One skewed Poisson load on three models, served in several ways on the same machine:

(a) `stock`: one stock vLLM server per model, the KV memory split between them and one thread each, eager as our
    engines are; `stock-compiled`: the same with compiled models, the faster setting of stock; `stock-sleeping`,
    `stock-sleeping-compiled`: the same without stock's busy waiting (`stock_vllm.py`);
(b) `fcfs`, `adbs`, `slack`, `free`: a MuxServe fleet under that policy, with an engine per phase of each model;
    `fcfs-one`, `adbs-one`, `slack-one`, `free-one`: with one engine per model; `...-compiled`: compiled models.

    python benchmarks/serving_cpu.py [--systems stock stock-compiled slack free-one ...] [--rates 6 12 18 24]
        [--models 10]

Each system gets the very same requests (arrival, model, prompt, output length). Reported are throughput, SLO attainment
and percentiles of TTFT, TPOT and end-to-end latency. A request meets its SLO at scale s when it ends within s times
the latency that a stock server alone on the machine needs for a request of its lengths, measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from load import Call, Outcome, closed_loop, open_loop, summary
from report import machine, write_report
from servers import ROOT, Server, ServerError, end_cleanly, fleet_with, muxserve_fleet
from stock_vllm import StockSettings, stock_server

from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates

SCALES = (2, 4, 8, 16, 32)
STOCK = ("stock", "stock-compiled", "stock-sleeping", "stock-sleeping-compiled")
SYSTEMS = (
    *STOCK,
    *(
        f"{policy}{shape}{models}"
        for policy in ("fcfs", "adbs", "slack", "free")
        for shape in ("", "-one")
        for models in ("", "-compiled")
    ),
)


@dataclass(frozen=True)
class Alone:
    """Latency of one request alone, seconds: first token after `base + prompt * per_prompt`, then `per_output` each."""

    base: float
    per_prompt: float
    per_output: float

    def ttft(self, call: Call) -> float:
        return self.base + self.per_prompt * call.prompt_tokens

    def e2e(self, call: Call) -> float:
        return self.ttft(call) + self.per_output * (call.output_tokens - 1)


def fit_alone(outcomes: Sequence[Outcome]) -> Alone:
    """Least squares over requests that ran one after the other.

    Raises:
        ServerError: a request failed.
    """
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is not None:
        raise ServerError(f"a request failed while nothing else ran: {failed.error}")
    prompts = np.array([[1.0, outcome.call.prompt_tokens] for outcome in outcomes])
    ttfts = np.array([outcome.ttft for outcome in outcomes])
    (base, slope), *_ = np.linalg.lstsq(prompts, ttfts, rcond=None)
    if slope < 0 or base < 0:  # too little spread to tell: charge it all to one of the two
        base, slope = float(np.median(ttfts)), 0.0
    tpots = [outcome.tpot for outcome in outcomes if outcome.tpot is not None]
    return Alone(float(base), float(slope), float(np.median(tpots)))


def attainment(outcomes: Sequence[Outcome], alone: dict[str, Alone]) -> dict[str, dict[str, float]]:
    """Share of all requests, failed ones included, that met the SLO at each scale: end to end, and TTFT and TPOT
    together."""
    result: dict[str, dict[str, float]] = {"e2e": {}, "ttft_and_tpot": {}}
    for scale in SCALES:
        e2e = both = 0
        for outcome in outcomes:
            if not outcome.ok:
                continue
            single = alone[outcome.call.model]
            e2e += outcome.e2e <= scale * single.e2e(outcome.call)
            first = outcome.ttft <= scale * single.ttft(outcome.call)
            both += first and (outcome.tpot is None or outcome.tpot <= scale * single.per_output)
        result["e2e"][str(scale)] = round(e2e / len(outcomes), 4)
        result["ttft_and_tpot"][str(scale)] = round(both / len(outcomes), 4)
    return result


def make_calls(options: argparse.Namespace, models: Sequence[str], rate: float) -> list[Call]:
    """The requests of one rate, the same for every system."""
    prompt = LogNormalLengths(*options.prompt)
    output = LogNormalLengths(*options.output)
    rates = power_law_rates(models, rate, options.alpha)
    loads = {model: ModelLoad(share, prompt, output) for model, share in rates.items()}
    trace = generate(loads, options.duration, options.seed)
    return [
        Call(r.model, r.prompt_tokens, r.output_tokens, f"{rate}/{number}", r.arrival) for number, r in enumerate(trace)
    ]


@contextlib.contextmanager
def stock_servers(paths: dict[str, Path], settings: StockSettings) -> Iterator[dict[str, Server]]:
    """One stock server per model, each with its part of the KV memory."""
    share = replace(settings, kv_bytes=settings.kv_bytes // len(paths))
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(stock_server(path, name, share)) for name, path in paths.items()}


def repeated(source: Path, target: Path, count: int) -> Path:
    """A fleet file with the models of `source` over and over, `count` in all, as `m0`, `m1` and so on."""
    fleet = yaml.safe_load(source.read_text())
    models = fleet["models"]
    fleet["models"] = [
        {
            **models[number % len(models)],
            "name": f"m{number}",
            "path": str((source.parent / models[number % len(models)]["path"]).resolve()),
            "rate": count - number,
        }
        for number in range(count)
    ]
    target.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return target


def drive(urls: dict[str, str], servers: Sequence[Server], calls: Sequence[Call], alone: dict[str, Alone]) -> dict:
    """Warm every model up, run the load, and say what came out."""
    for model, url in urls.items():
        rng = random.Random(model)
        warm = [Call(model, rng.randint(16, 256), 16, seed=-1 - number) for number in range(12)]
        asyncio.run(closed_loop(url, warm, 4))
    before = sum(server.cpu_seconds() for server in servers)
    outcomes = asyncio.run(open_loop(urls, calls))
    cpu = sum(server.cpu_seconds() for server in servers) - before
    return {
        **summary(outcomes),
        "slo_attainment": attainment(outcomes, alone),
        "per_model": {m: summary([o for o in outcomes if o.call.model == m]) for m in urls},
        "server_cpu_seconds": round(cpu, 1),
        "server_pss_mib": round(sum(server.pss_bytes() for server in servers) / (1 << 20)),
    }


def show(system: str, rate: float, result: dict) -> None:
    """One line of the table."""
    if "e2e_ms" not in result:
        print(f"{system:14s} rate {rate:5.1f}: no request was served: {result.get('errors')}", flush=True)
        return
    slo = result["slo_attainment"]["e2e"]
    print(
        f"{system:14s} rate {rate:5.1f}: {result['requests_per_second']:6.2f} requests/s "
        f"{result['output_tokens_per_second']:7.1f} tokens/s"
        f"  SLO x4 {slo['4']:.2f} x8 {slo['8']:.2f} x16 {slo['16']:.2f}"
        f"  TTFT p50/p99 {result['ttft_ms']['p50']:.0f}/{result['ttft_ms']['p99']:.0f}"
        f"  TPOT {result['tpot_ms']['p50']:.1f}/{result['tpot_ms']['p99']:.1f}"
        f"  e2e {result['e2e_ms']['p50']:.0f}/{result['e2e_ms']['p99']:.0f} ms  failed {result['failed']}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare ways of serving three models on one machine.")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--models",
        type=int,
        default=0,
        help="number of copies of the fleet's models, under names of their own; 0: the fleet's models",
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[6.0, 12.0, 18.0, 24.0], help="requests/s in all")
    parser.add_argument("--alpha", type=float, default=2.1, help="skew of the rates over the models")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of load at each rate")
    parser.add_argument("--seed", type=int, default=0)
    lengths = {"nargs": 4, "type": float, "metavar": ("MEDIAN", "SIGMA", "MIN", "MAX")}
    parser.add_argument("--prompt", default=[96.0, 0.8, 8, 768], help="prompt tokens", **lengths)
    parser.add_argument("--output", default=[96.0, 0.6, 8, 384], help="output tokens", **lengths)
    parser.add_argument("--kv-mib", type=int, default=256, help="KV memory of all models together")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serving_cpu.json")
    options = parser.parse_args()
    for side in (options.prompt, options.output):
        side[2:] = [int(side[2]), int(side[3])]
    return options


def main() -> int:
    """Run everything; exit code 1 if a server does not come up."""
    options = parse()
    end_cleanly()
    scratch = contextlib.ExitStack()
    if options.models:
        folder = Path(scratch.enter_context(tempfile.TemporaryDirectory()))
        options.fleet = repeated(options.fleet, folder / "repeated.yaml", options.models)
    fleet = yaml.safe_load(options.fleet.read_text())
    # Most popular first, as the fleet file expects them.
    declared = sorted(fleet["models"], key=lambda model: -model.get("rate", 1.0))
    paths = {model["name"]: (options.fleet.parent / model["path"]).resolve() for model in declared}
    settings = StockSettings(kv_bytes=options.kv_mib << 20)
    report: dict = {"machine": machine(), "stock_settings": asdict(settings), "slo_scales": SCALES}
    report["load"] = {
        key: getattr(options, key) for key in ("rates", "alpha", "duration", "seed", "prompt", "output", "kv_mib")
    }
    report["load"]["rate_shares"] = power_law_rates(list(paths), 1.0, options.alpha)
    calls = {rate: make_calls(options, list(paths), rate) for rate in options.rates}
    try:
        print("latency of single requests, each stock server alone", flush=True)
        alone: dict[str, Alone] = {}
        for name, path in paths.items():
            with stock_server(path, name, settings) as stock:
                sizes = [(p, 48) for p in (16, 32, 64, 128, 256, 512, 768)]
                single = [Call(name, p, n, seed=-100 - i) for i, (p, n) in enumerate(sizes * 3)]
                asyncio.run(closed_loop(stock.url, [replace(call, seed=-10) for call in single[:4]], 1))
                alone[name] = fit_alone(asyncio.run(closed_loop(stock.url, single, 1)))
            print(f"  {name}: {alone[name]}", flush=True)
        report["alone"] = {name: asdict(value) for name, value in alone.items()}
        report["results"] = {}
        for system in options.systems:
            rows = report["results"][system] = {}
            with contextlib.ExitStack() as stack:
                if system in STOCK:
                    variant = replace(settings, eager=not system.endswith("-compiled"), polls="sleeping" not in system)
                    servers = stack.enter_context(stock_servers(paths, variant))
                    urls = {name: server.url for name, server in servers.items()}
                    running = list(servers.values())
                else:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    pool = {"size": f"{options.kv_mib}MiB"}
                    shares = power_law_rates(list(paths), max(options.rates), options.alpha)
                    policy, *options_of = system.split("-")
                    file = fleet_with(
                        options.fleet,
                        folder / "fleet.yaml",
                        rates=shares,
                        engine_args={"enforce_eager": "compiled" not in options_of},
                        engines="one" if "one" in options_of else "split",
                        policy=policy,
                        kv_pool=pool,
                    )
                    running = [stack.enter_context(muxserve_fleet(file))]
                    urls = dict.fromkeys(paths, running[0].url)
                rows["start_seconds"] = [round(server.start_seconds, 1) for server in running]
                for rate in options.rates:
                    rows[str(rate)] = drive(urls, running, calls[rate], alone)
                    show(system, rate, rows[str(rate)])
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        scratch.close()
    write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
