"""How long one scheduling decision takes: 16 models, 1,000 live requests.

    python benchmarks/scheduler.py [--models 16] [--live 1000] [--tenants 1] [--out benchmarks/results/scheduler.json]

Plays a saturated unit on a virtual clock: engines step as fast as a model of a GPU step says, and whenever a request
ends another one arrives, so that the number of live requests stays the same. Timed are each `decide` of the policy and,
apart from it, each event told to the ledger. Decisions are timed on two clocks: the wall's, which on a shared machine
includes being off the core, and the thread's own processor time. The garbage collector is left as the unit scheduler
runs it: frozen once at the start.

Timed as well, on the processor's clock: one report of all replicas to the global scheduler, and the choice of a request
to move away from the model that runs most of them, with no request that the other replica has room for, so that all are
looked at.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

from muxserve.replicas.migration import MigrationRules, choose_request
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels, ServiceClass
from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.loads import load_of, view_of
from muxserve.scheduling.policies import POLICIES, make_policy
from muxserve.scheduling.types import EngineSetup, KvLayout, ModelProfile, Phase, PoolProfile, QueuedRequest, StepsDone

TARGET_P99_US = 100.0


def unit(models: int, live: int) -> tuple[UnitLedger, int]:
    """A unit whose pool holds about half of the live requests, so that some run and some queue."""
    block_pages, tokens = 32 * 8, 16
    per_request = (600 // tokens + 1) * block_pages
    pages = per_request * live // 2
    floor = per_request * 4
    profiles = [
        ModelProfile(
            name=f"model-{index:02d}",
            rate=20.0 / (index + 1) ** 0.9,
            kv=KvLayout("pool", layers=32, kv_heads=8, block_tokens=tokens),
            engines=EngineSetup(0.5, 0.1 + 0.4 / (index + 1), 256, 2048),
            quota_pages=pages // models,
            floor_pages=min(floor, pages // models),
        )
        for index in range(models)
    ]
    return UnitLedger(profiles, [PoolProfile("pool", pages)]), pages


class Run:
    """The unit under load. `decisions` and `events` collect nanoseconds."""

    def __init__(self, policy: str, models: int, live: int, tenants: int, seed: int) -> None:
        self.policy = make_policy(policy)
        self.ledger, self.pages = unit(models, live)
        self.random = random.Random(seed)
        self.live = live
        self.tenants = tenants
        self.now = 0.0
        self.decisions: list[int] = []
        self.decisions_cpu: list[int] = []
        self.rebalances: list[int] = []
        self.events: list[int] = []
        self.queued: list[int] = []
        self.finished = 0
        self.grants = 0
        self._heap: list[tuple[float, int, str, Phase]] = []
        self._running: dict[tuple[str, Phase], int] = {}
        self._steps: dict[tuple[str, Phase], int] = {}
        self._left: dict[str, int] = {}
        self._todo: dict[str, int] = {}
        self._serial = 0
        self._lease_id = 0
        self._names = [m.name for m in self.ledger.models]
        self._weights = [m.profile.rate for m in self.ledger.models]
        for model in self.ledger.models:
            for engine in model.engines:
                self.ledger.engine_up(model.name, engine.phase, 0.0)

    def arrive(self) -> None:
        self._serial += 1
        request_id = f"r{self._serial}"
        (name,) = self.random.choices(self._names, self._weights)
        prompt, output = self.random.randint(50, 600), self.random.randint(20, 200)
        self._left[request_id] = output
        self._todo[request_id] = prompt
        tenant = f"tenant-{self._serial % self.tenants}"
        request = QueuedRequest(request_id, name, prompt, output, self.now, ServiceClass(tenant=tenant))
        began = time.perf_counter_ns()
        self.ledger.arrived(request, self.now)
        self.events.append(time.perf_counter_ns() - began)

    def turn(self) -> None:
        for model in self.ledger.models:
            blocks = sum(r.blocks for r in model.decoding.values()) + sum(r.blocks for r in model.handed.values())
            self.ledger.pages(model.name, blocks * model.pages_per_block, 0, model.quota)
        self.ledger.pool_pages("pool", self.pages - sum(m.used for m in self.ledger.models), 0)
        began = time.perf_counter_ns()
        changes = self.policy.rebalance(self.ledger, self.now)
        spent = time.perf_counter_ns() - began
        if changes:
            self.rebalances.append(spent)
            for change in changes:
                self.ledger.by_name[change.model].quota = change.pages
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        grants = self.policy.decide(self.ledger, self.now)
        cpu = time.thread_time_ns() - cpu
        self.decisions.append(time.perf_counter_ns() - began)
        self.decisions_cpu.append(cpu)
        self.queued.append(len(self.ledger.requests))
        self.grants += len(grants)
        for grant in grants:
            self._lease_id += 1
            began = time.perf_counter_ns()
            self.ledger.granted(grant, self._lease_id, self.now)
            self.events.append(time.perf_counter_ns() - began)
            key = (grant.model, grant.phase)
            self._steps[key] = grant.steps
            if key not in self._running:
                self._begin(*key)

    def _begin(self, name: str, phase: Phase) -> None:
        model = self.ledger.by_name[name]
        if phase is Phase.PREFILL:
            seconds = 0.004 + 0.00008 * min(model.outstanding, model.batch_tokens)
        else:
            seconds = 0.012 + 0.0001 * len(model.decoding)
        lease = model.engine(phase).lease
        assert lease is not None
        self._running[name, phase] = lease.lease_id
        self._serial += 1
        heapq.heappush(self._heap, (self.now + seconds, self._serial, name, phase))

    def step(self) -> None:
        """The next engine ends its step and reports."""
        before = self.now
        self.now, _, name, phase = heapq.heappop(self._heap)
        key = (name, phase)
        self._running.pop(key)
        model, ledger = self.ledger.by_name[name], self.ledger
        engine = model.engine(phase)
        self._steps[key] -= 1
        tokens = 0
        ended: list[str] = []
        handed: list[tuple[str, int]] = []
        if phase is Phase.PREFILL:
            budget = model.batch_tokens
            for request_id, live in engine.inside.items():
                chunk = min(self._todo[request_id], budget)
                self._todo[request_id] -= chunk
                budget -= chunk
                tokens += chunk
                if self._todo[request_id]:
                    break
                self._left[request_id] -= 1
                handed.append((request_id, live.lease_id))
        else:
            for request_id in engine.inside:
                tokens += 1
                self._left[request_id] -= 1
                if not self._left[request_id]:
                    ended.append(request_id)
        left = self._steps[key]
        lease_id = engine.lease.lease_id if engine.lease else 0
        began = time.perf_counter_ns()
        for request_id in ended:
            ledger.finished(request_id, phase, lease_id, self.now)
        for request_id, ticket in handed:
            ledger.handed_over(request_id, ticket, 1, self.now)
        ledger.stepped(
            name, phase, StepsDone(lease_id, left, self.now - before or 1e-6, tokens, len(engine.inside)), self.now
        )
        self.events.append(time.perf_counter_ns() - began)
        self.finished += len(ended)
        if engine.lease is not None and left > 0:
            self._begin(name, phase)
        for _ in ended:
            self.arrive()
        self.turn()

    def play(self, decisions: int) -> None:
        while len(self.ledger.requests) < self.live:
            self.arrive()
        self.turn()
        while len(self.decisions) < decisions:
            self.step()


def replicas(run: Run, times: int = 500) -> dict[str, Any]:
    """What the unit does beside scheduling when it has a global scheduler and a pair."""
    levels, rules = Levels(DEFAULT_LEVELS), MigrationRules(1e9, 1e9)
    most = max(run.ledger.models, key=lambda model: len(model.decoding))
    full = InstanceLoad("other", 1)
    reports, choices = [], []
    for _ in range(times):
        began = time.thread_time_ns()
        for model in run.ledger.models:
            load = load_of("unit", model, run.policy, "layout")
        reports.append(time.thread_time_ns() - began)
        began = time.thread_time_ns()
        load = load_of("unit", most, run.policy, "layout")
        chosen = choose_request(view_of(most, load, levels, ()), full, rules, levels)
        choices.append(time.thread_time_ns() - began)
        assert chosen is None
    return {
        "report_us": percentiles(reports),
        "choose_us": percentiles(choices),
        "choose_among": len(most.decoding),
    }


def percentiles(nanoseconds: list[int]) -> dict[str, float]:
    """Microseconds at p50, p90, p99, p99.9 and the largest."""
    ordered = sorted(nanoseconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    found = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] / 1000 for name, q in at.items()}
    return {**found, "max": ordered[-1] / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=1, help="tenants whose requests come in turn")
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--warm", type=int, default=2_000, help="decisions that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in (name for name in POLICIES if name != "rolling"):  # that is for one engine of both phases
        run = Run(name, args.models, args.live, args.tenants, args.seed)
        run.play(args.warm)
        for series in (run.decisions, run.decisions_cpu, run.events, run.rebalances, run.queued):
            series.clear()
        run.finished = run.grants = 0
        gc.collect()
        gc.freeze()
        run.play(args.decisions)
        gc.unfreeze()
        queue = sum(len(m.queue) for m in run.ledger.models)
        results[name] = {
            "decide_us": percentiles(run.decisions),
            "decide_cpu_us": percentiles(run.decisions_cpu),
            "event_us": percentiles(run.events),
            "rebalance_us": percentiles(run.rebalances) if run.rebalances else None,
            **replicas(run),
            "decisions": len(run.decisions),
            "grants": run.grants,
            "requests_finished": run.finished,
            "live_requests": len(run.ledger.requests),
            "queued_at_the_end": queue,
            "meets_target": {
                "wall": percentiles(run.decisions)["p99"] < TARGET_P99_US,
                "cpu": percentiles(run.decisions_cpu)["p99"] < TARGET_P99_US,
            },
        }
        shown_as = {
            "decide": "decide_us",
            "  on CPU": "decide_cpu_us",
            "event": "event_us",
            "report": "report_us",
            "choose": "choose_us",
        }
        for label, key in shown_as.items():
            shown = "  ".join(f"{k} {v:7.1f}" for k, v in results[name][key].items())
            print(f"{name:12s} {label:9s} {shown}   us")
    if args.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "models": args.models,
            "live": args.live,
            "tenants": args.tenants,
            "target_p99_us": TARGET_P99_US,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_average_1m": round(os.getloadavg()[0], 2),
            "policies": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
