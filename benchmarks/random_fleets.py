"""Plans of random fleets beside the simplest alternatives, on workloads that the planner does not see.

    python benchmarks/random_fleets.py [--seeds 40] [--first-seed 0] [--loads 0.3 0.6 0.9] [--out FILE]

The file is written after each point, and points that it has are not measured again.

Each fleet has 3 to 24 models on 2 to 32 GPUs of one of eight kinds. Its requests arrive in one of five patterns: as
declared, in clumps (gamma, cv 4), with rates and lengths off by up to 30 %, with one model at three times its rate, and
in groups of models that take turns with the whole load. Each fleet is planned at three loads, with `muxserve plan` as a
user runs it, and the plan is simulated beside the same fleet on divided GPUs (one stock engine per replica) and with
models in turns. A point counts as best if its SLO attainment is within 1 % of the best alternative's. Requests per
second are those that end within the load's span, so that the last straggler does not count. `plan_core_seconds` is the
processor time of a plan, of all its processes together.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import machine, write_report
from muxserve.workload import Arrivals, Groups, LogNormalLengths, ModelLoad, generate
from muxserve.workload.arrivals import POISSON
from muxserve.workload.shapes import ModelPosition
from muxserve.workload.trace import TraceRequest, write_trace

ROOT = Path(__file__).resolve().parent.parent
# Parameters in billions; the larger ones are rarer.
ARCHITECTURES = {
    "qwen2.5-7b": 7.6,
    "llama-3.1-8b": 8.0,
    "llama-2-13b": 13.0,
    "qwen2.5-14b": 14.8,
    "llama-30b": 32.5,
    "qwen2.5-32b": 32.8,
    "llama-3.1-70b": 70.6,
    "qwen2.5-72b": 72.7,
}
# Bytes of memory (GB), of bandwidth per second (GB), and dense TFLOP/s in 16 bits.
GPUS = {
    "A10": (24, 600, 125),
    "A40-48GB": (48, 696, 150),
    "A100-40GB": (40, 1555, 312),
    "A100-80GB": (80, 2039, 312),
    "H100-80GB": (80, 3350, 989),
    "H200-141GB": (141, 4800, 989),
    "L20-48GB": (48, 864, 119),
    "L40S-48GB": (48, 864, 362),
}
PATTERNS = ("declared", "clumps", "drift", "surge", "groups")
SECONDS = 120.0
# Seconds of a phase in which the same group of models is active, and the least and largest part of the models in it.
PHASE, GROUP = 20.0, (0.2, 0.4)
# Sequences that share the reading of weights in the estimate of a load.
BATCH = 16
TOLERANCE = 0.01
RATE_TOLERANCE = 0.02


def random_fleet(seed: int) -> dict[str, object]:
    """A fleet file without its rates' scale: each model's `rate` is its share of the load."""
    rng = random.Random(f"fleet {seed}")
    kind = rng.choice(list(GPUS))
    memory = GPUS[kind][0]
    count = round(math.exp(rng.uniform(math.log(3), math.log(24))))
    gpus = 2 ** rng.randint(1, 5)
    names = list(ARCHITECTURES)
    # Weights in 16 bits take half of all memory at most.
    budget = 0.5 * gpus * memory
    models: list[dict[str, object]] = []
    alpha = rng.choice((0.5, 0.9, 1.5))
    for number in range(count):
        fitting = [name for name in names if 2 * ARCHITECTURES[name] <= budget and _fits(name, memory, gpus)]
        if not fitting:
            break
        name = rng.choices(fitting, [1 / ARCHITECTURES[each] for each in fitting])[0]
        budget -= 2 * ARCHITECTURES[name]
        prompt = round(math.exp(rng.uniform(math.log(100), math.log(1500))))
        output = round(math.exp(rng.uniform(math.log(40), math.log(350))))
        # A first token within some times that of an empty GPU, tokens at about the speed at which people read.
        models.append(
            {
                "name": f"m{number}",
                "architecture": name,
                "rate": (number + 1) ** -alpha,
                "workload": {"prompt_tokens": prompt, "output_tokens": output},
                "slo": {"ttft_ms": rng.choice((500, 1000, 2000)), "tpot_ms": rng.choice((50, 100))},
            }
        )
    rng.shuffle(models)
    return {"cluster": {"gpus": gpus, "gpu_type": kind}, "models": models}


def _fits(name: str, memory: float, gpus: int) -> bool:
    return 2 * ARCHITECTURES[name] <= 0.7 * memory * min(8, gpus)


def with_load(fleet: Mapping[str, object], load: float) -> dict[str, object]:
    """The fleet with rates that keep its GPUs busy for about that part of the time."""
    cluster = fleet["cluster"]
    _, bandwidth, tflops = GPUS[cluster["gpu_type"]]
    work = 0.0  # GPU seconds for a second of requests at the rates as they are
    for model in fleet["models"]:
        parameters = ARCHITECTURES[model["architecture"]]
        lengths = model["workload"]
        prefill = lengths["prompt_tokens"] * 2 * parameters / (0.5 * tflops * 1000)
        decode = lengths["output_tokens"] * 2 * parameters / (0.6 * bandwidth) / BATCH
        work += model["rate"] * (prefill + decode)
    scale = load * cluster["gpus"] / work
    models = [{**model, "rate": round(model["rate"] * scale, 4)} for model in fleet["models"]]
    return {**fleet, "models": models}


def requests_of(fleet: Mapping[str, object], pattern: str, seed: int) -> list[TraceRequest]:
    """What comes for the fleet's models in that pattern."""
    rng = random.Random(f"{pattern} {seed}")
    arrivals = POISSON
    if pattern == "clumps":
        arrivals = Arrivals(cv=4.0)
    elif pattern == "groups" and len(fleet["models"]) > 1:
        arrivals = Arrivals(shape=groups_in_turns(len(fleet["models"]), seed))
    surge = rng.randrange(len(fleet["models"]))
    loads = {}
    for number, model in enumerate(fleet["models"]):
        rate, lengths = model["rate"], model["workload"]
        off = [rng.uniform(0.7, 1.3) for _ in range(3)] if pattern == "drift" else [1.0] * 3
        if pattern == "surge" and number == surge:
            off[0] = 3.0
        prompt, output = lengths["prompt_tokens"] * off[1], lengths["output_tokens"] * off[2]
        loads[model["name"]] = ModelLoad(rate * off[0], _lengths(prompt), _lengths(output), arrivals)
    return list(generate(loads, SECONDS, seed))


def groups_in_turns(models: int, seed: int) -> Groups:
    """Groups of so many models that take turns: each model is in the group of some phase, and every phase has a group.
    Some draws for few models have phases of none.

    Raises:
        ValueError: there are no such groups of so few models.
    """
    phases, positions = range(round(SECONDS / PHASE)), [ModelPosition(number, models) for number in range(models)]
    for drawn in range(1000 * seed, 1000 * (seed + 1)):
        groups = Groups(PHASE, *GROUP, seed=drawn)
        active = [[groups.active(phase, position) for position in positions] for phase in phases]
        if all(map(any, active)) and all(map(any, zip(*active, strict=True))):
            return groups
    raise ValueError(f"no draw has groups of {models} models that take turns")


def _lengths(mean: float, sigma: float = 0.8) -> LogNormalLengths:
    return LogNormalLengths(mean / math.exp(sigma**2 / 2), sigma, 4, round(8 * mean))


def muxserve(*arguments: str) -> str:
    """The output of a command.

    Raises:
        RuntimeError: it failed; the message is its own.
    """
    command = [str(Path(sys.executable).with_name("muxserve")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3600)
    # 1: some model has no place, or some request was not answered; the figures say how many.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-800:]}")
    return done.stdout


def _core_seconds() -> float:
    """Processor time of all commands so far, which does not depend on what else runs."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def figures(run: Mapping[str, object]) -> dict[str, float]:
    """SLO attainment over all requests, and requests per second that ended within the load's span."""
    overall, line = run["overall"], run["timeline"]
    span = SECONDS - line["start"]
    whole = int(span / line["step"])
    attained = (overall.get("slo") or {}).get("all", 0.0)
    return {"slo": round(attained, 4), "rate": round(sum(line["completed"][:whole]) / span, 3)}


def point(seed: int, load: float, folder: Path) -> dict[str, object]:
    """One fleet at one load: its plan and the alternatives."""
    fleet = with_load(random_fleet(seed), load)
    pattern = PATTERNS[seed % len(PATTERNS)]
    file, divided, trace, plan = (folder / name for name in ("fleet.yaml", "divided.yaml", "load.jsonl", "plan.yaml"))
    file.write_text(yaml.safe_dump(fleet))
    stock = [{**model, "engines": "one"} for model in fleet["models"]]
    divided.write_text(yaml.safe_dump({**fleet, "models": stock}))
    names = [model["name"] for model in fleet["models"]]
    write_trace(trace, names, requests_of(fleet, pattern, seed), duration=SECONDS)
    before = _core_seconds()
    planned = json.loads(muxserve("plan", str(file), "--json", "-o", str(plan)))
    seconds = _core_seconds() - before
    runs = simulated(file, trace, "muxserve", "--plan", str(plan))
    results = {"plan": figures(runs["muxserve"])}
    for name, fleet_file, mode in (("divided", divided, "spatial"), ("turns", file, "temporal")):
        try:
            results[name] = figures(simulated(fleet_file, trace, mode)[mode])
        except RuntimeError as error:
            # Not every model has a place in that way, which is then no alternative.
            if "not every model has a place" not in str(error):
                raise
    cluster = fleet["cluster"]
    return {
        "seed": seed,
        "load": load,
        "pattern": pattern,
        "models": len(fleet["models"]),
        "gpus": f"{cluster['gpus']} x {cluster['gpu_type']}",
        "way": planned["candidates"][0]["way"] if planned["candidates"] else "",
        "missing": len(planned["missing"]),
        "plan_core_seconds": round(seconds, 2),
        "results": results,
    }


def simulated(fleet: Path, trace: Path, mode: str, *more: str) -> Mapping[str, Mapping[str, object]]:
    """The runs of a simulation, by mode."""
    output = muxserve("simulate", str(fleet), "--workload", str(trace), "--mode", mode, "--json", *more)
    runs: Mapping[str, Mapping[str, object]] = json.loads(output)["runs"]
    return runs


def verdict(points: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """In how many points the plan is best or equal, and how far it is behind at most."""
    behind = []
    slower = 0
    for each in points:
        results = each["results"]
        others = [value for name, value in results.items() if name != "plan"]
        behind.append(max((other["slo"] for other in others), default=0.0) - results["plan"]["slo"])
        most = max((other["rate"] for other in others), default=0.0)
        slower += results["plan"]["rate"] < (1 - RATE_TOLERANCE) * most
    return {
        "points": len(points),
        "slo_best_or_equal": round(sum(gap <= TOLERANCE for gap in behind) / len(points), 3),
        "slo_most_behind": round(max(behind), 4),
        "rate_best_or_equal": round(1 - slower / len(points), 3),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="number of fleets")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/random_fleets.json")
    options = parser.parse_args()
    points: list[dict[str, object]] = []
    if options.out.exists():
        points = json.loads(options.out.read_text())["points"]
    known = {(each["seed"], each["load"]) for each in points}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for load in options.loads:
            if (seed, load) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    points.append(point(seed, load, Path(folder)))
                except RuntimeError as error:
                    print(f"seed {seed}, load {load}: {error}", file=sys.stderr)
                    continue
            last = points[-1]
            shown = "  ".join(
                f"{name} {value['slo']:.3f} {value['rate']:.2f}/s" for name, value in last["results"].items()
            )
            print(f"{seed:3} {load} {last['pattern']:9} {last['models']:2} on {last['gpus']:15} {shown}", flush=True)
            write_report(options.out, {"machine": machine(), "summary": verdict(points), "points": points})
    print(json.dumps(verdict(points)))


if __name__ == "__main__":
    main()
