"""Engines that no lease separates: what that costs in simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim_unmanaged import SYSTEMS, Figures, play
from muxserve.costs.roofline import Roofline
from muxserve.simulator import SimUnit, simulate
from muxserve.simulator.setup import SimModel
from muxserve.workload.trace import TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import LARGE, Analytic, one_engine, unit


def gpu(policy: str, share: float = 1.0, **changes: object) -> SimUnit:
    names = ["reads", "writes"]
    shares = {"prefill_share": share, "decode_share": share}
    profiles = [
        profile(n, quota_pages=20_000, floor_pages=20_000, max_num_batched_tokens=2048, **shares) for n in names
    ]
    models = tuple(SimModel(each, LARGE, "bfloat16") for each in profiles)
    return one_engine(unit(profiles, 40_000, models=models, device="A100-80GB"), policy, **changes)


def tpot_beside_a_prompt(simulated: SimUnit) -> float:
    """Seconds per token of an answer while another model computes a long prompt."""
    load = [TraceRequest(0.0, "writes", 8, 20), TraceRequest(0.05, "reads", 2000, 1)]
    answer, prompt = simulate([simulated], load, Roofline()).records
    assert prompt.ok
    assert answer.tpot is not None
    return answer.tpot


def test_a_decode_step_waits_for_the_kernels_of_a_prompt_beside_it() -> None:
    leased, free = tpot_beside_a_prompt(gpu("adbs", 0.5)), tpot_beside_a_prompt(gpu("free"))
    alone = simulate([gpu("free")], [TraceRequest(0.0, "writes", 8, 20)], Roofline()).records[0].tpot
    assert alone is not None
    assert alone < leased < free


def test_without_mps_a_decode_step_takes_half_of_the_time_slices() -> None:
    load = [TraceRequest(0.0, name, 8, 200) for name in ("reads", "writes")]
    alone = simulate([gpu("free")], load[:1], Roofline()).records[0].tpot
    beside = simulate([gpu("free", sharing="time_slices")], load, Roofline()).records[0].tpot
    assert alone is not None
    assert beside == pytest.approx(2 * alone, rel=0.01)


def test_jobs_whose_shares_fit_are_separated() -> None:
    """Under leases nothing but conservation slows them, whatever the policy is called."""
    load = [TraceRequest(0.01 * n, "ab"[n % 2], 40, 30) for n in range(40)]
    half = one_engine(unit([profile(n, decode_share=0.5, prefill_share=0.5) for n in "ab"], 800))
    apart, together = (replace(half, policy=policy) for policy in ("adbs", "free"))
    assert simulate([apart], load, Analytic()).records == simulate([together], load, Analytic()).records


@pytest.mark.parametrize("rate", [6.0, 12.0, 18.0])
def test_leases_serve_three_models_on_two_cores_better_than_no_leases(rate: float) -> None:
    """As live: three compiled stock servers without busy waiting against a fleet (benchmarks/results/
    serving_cpu_sleeping.json)."""
    found: dict[str, Figures] = {name: play(way, rate, seed=0) for name, way in SYSTEMS.items()}
    leases, nothing = found["one engine, leases"], found["one engine, no leases"]
    assert nothing.tpot > leases.tpot
    assert nothing.within_two < leases.within_two
    assert found["split, no leases"].within_two < found["split, leases"].within_two
