"""What every policy must keep to, over random loads on the virtual machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.scheduling.adbs import Adbs
from muxserve.scheduling.admission import head_fits
from muxserve.scheduling.policies import POLICIES, make_policy
from muxserve.scheduling.quotas import demand_weight
from muxserve.scheduling.types import Grant, ModelProfile, Phase
from tests.scheduling.machine import Job, Machine, could_run, idle_although_possible, profile
from tests.support.thoroughness import examples

# One of them is for units of one model with one engine.
MIXES = sorted(set(POLICIES) - {"rolling"})
PHASES = [Phase.PREFILL, Phase.DECODE]
SHARES = [0.25, 0.5, 1.0]
# To make an example smaller takes minutes.
UNSHRUNK = [Phases.explicit, Phases.reuse, Phases.generate]


@st.composite
def models(draw: st.DrawFn, policy: str, elastic: bool | None = None) -> tuple[list[ModelProfile], int]:
    """Models of both shapes as `policy` takes them, and the pages of their pool."""
    alone = policy == "rolling"
    elastic = draw(st.booleans()) if elastic is None else elastic
    drawn = []
    for index in range(1 if alone else draw(st.integers(1, 4))):
        layers, heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1)]))
        block = draw(st.sampled_from([8, 16]))
        # The longest sequence (prompt 60 + output 30) must fit into the floor.
        floor = (90 // block + 1) * layers * heads
        drawn.append(
            profile(
                f"m{index}",
                rate=draw(st.sampled_from([0.2, 1.0, 5.0])),
                layers=layers,
                kv_heads=heads,
                block_tokens=block,
                floor_pages=floor,
                quota_pages=floor,
                prefill_share=draw(st.sampled_from(SHARES)),
                decode_share=1.0 if alone else draw(st.sampled_from(SHARES)),
                max_num_seqs=draw(st.integers(1, 6)),
                max_num_batched_tokens=draw(st.sampled_from([16, 64])),
                both=alone or draw(st.booleans()),
                waiting_tokens=draw(st.sampled_from([0, 500])),
                elastic=elastic,
            )
        )
    spare = draw(st.integers(0, 150))
    pages = sum(p.floor_pages for p in drawn) + spare
    extra = spare // len(drawn)
    return [replace(p, quota_pages=p.floor_pages + extra) for p in drawn], pages


def requests(names: list[str]) -> st.SearchStrategy[list[Job]]:
    one = st.tuples(
        st.sampled_from(names), st.integers(1, 60), st.integers(1, 30), st.floats(0, 1), st.sampled_from([0, 0, 1])
    )
    return st.lists(one, min_size=1, max_size=25).map(
        lambda drawn: [Job(f"r{i}", m, p, o, a, priority) for i, (m, p, o, a, priority) in enumerate(drawn)]
    )


def loaded(name: str, data: st.DataObject) -> Machine:
    """A machine with random models and requests, watched by what `name` promises."""
    profiles, pages = data.draw(models(name))
    machine = Machine(make_policy(name), profiles, pages)
    machine.watch = WATCHES.get(name)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)
    return machine


def deaths(machine: Machine, data: st.DataObject, until: float) -> None:
    """Some engines die before `until` seconds."""
    names = st.sampled_from(sorted(machine.profiles))
    drawn = data.draw(st.lists(st.tuples(st.floats(0, until), names, st.sampled_from(PHASES)), max_size=4))
    for at, model, phase in drawn:
        machine.at(at, lambda m=model, p=phase: machine.kill(m, p))


def cancellations(machine: Machine, data: st.DataObject, until: float) -> None:
    """Some requests are cancelled before `until` seconds, after they have come."""
    jobs = list(machine.jobs.values())
    for at, job in data.draw(st.lists(st.tuples(st.floats(0, until), st.sampled_from(jobs)), max_size=6)):
        machine.at(
            max(at, job.arrival + 1e-9),
            lambda j=job: (
                machine.cancel(j.request_id)
                if j.request_id not in machine.cancelled and j.request_id in machine.ledger.requests
                else None
            ),
        )


def ended(machine: Machine) -> None:
    """Nothing is left, and every request was counted once."""
    assert not machine.unfinished()
    assert not machine.ledger.requests
    assert not machine.moving
    for model in machine.ledger.models:
        assert model.promised == model.outstanding == model.prefill_tokens == 0
        assert not model.levels
        assert not model.fresh
        tally = model.tally
        gone = tally.finished + tally.cancelled + tally.lost + tally.moved_out
        assert tally.arrived + tally.moved_in == gone


def serial_seconds(machine: Machine) -> float:
    """Time that everything would take one request after the other, one token a step."""
    return sum(
        sum(machine.prefill_seconds(1) for _ in range(1))
        + machine.prefill_seconds(job.prompt + job.output)
        + job.output * machine.decode_seconds(1)
        for job in machine.jobs.values()
    )


# ---------------------------------------------------------------- what each policy promises


def never_idle(machine: Machine, grants: list[Grant]) -> None:
    idle = idle_although_possible(machine)
    assert idle is None, f"idle at {machine.now:.4f} although {idle} could run: {machine.describe()}"


def never_idle_one_at_a_time(machine: Machine, grants: list[Grant]) -> None:
    if machine.ledger.share_used == 0:
        never_idle(machine, grants)


def nothing_is_withheld(machine: Machine, _: list[Grant]) -> None:
    assert could_run(machine) == [], machine.describe()


def one_phase_at_a_time(machine: Machine, _: list[Grant]) -> None:
    """Prompts go first, decoding goes on as soon as there are none, and the engine never idles."""
    (model,) = machine.ledger.models
    lease = model.decode.lease
    phase = lease.phase if lease is not None else None
    starved = model.prefill.of(Phase.PREFILL).retry_at > machine.now
    if model.decode.up and (
        (model.prefilling and not starved) or (not model.prefilling and head_fits(machine.ledger, model))
    ):
        assert phase is Phase.PREFILL, machine.describe()
    elif model.decode.up and (model.decoding or model.handed) and model.decode.retry_at <= machine.now:
        assert phase is Phase.DECODE, machine.describe()
    assert phase is not Phase.BOTH


WATCHES: dict[str, Callable[[Machine, list[Grant]], None]] = {
    "adbs": never_idle,
    "fcfs": never_idle_one_at_a_time,
    "free": nothing_is_withheld,
    "rolling": one_phase_at_a_time,
}


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=examples(40), deadline=None, phases=UNSHRUNK)
@given(data=st.data())
def test_every_request_is_served_within_a_bound(name: str, data: st.DataObject) -> None:
    machine = loaded(name, data)
    machine.run()
    ended(machine)
    assert machine.ledger.share_used == 0
    assert not any(machine.used(name) for name in machine.profiles)
    # Preemption computes again what was computed; beyond that, sharing must not cost more than taking turns would.
    jobs = machine.jobs.values()
    bound = 1.0 + (2 + machine.preemptions) * serial_seconds(machine) + 0.1 * len(machine.profiles)
    assert max(job.done or 0.0 for job in jobs) <= bound
    # Nor are there more decisions than these steps, each of which may fail for want of pages a few times, call for.
    steps = sum(2 + (job.prompt + job.output) // 16 + job.output for job in jobs)
    assert machine.turns <= 1000 + 10 * (1 + machine.preemptions) * steps


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=examples(25), deadline=None, phases=UNSHRUNK)
@given(data=st.data())
def test_whatever_dies_or_is_cancelled_no_request_is_lost_or_counted_twice(name: str, data: st.DataObject) -> None:
    machine = loaded(name, data)
    deaths(machine, data, 2.0)
    cancellations(machine, data, 2.0)
    machine.run(most_turns=400_000)
    ended(machine)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=examples(40), deadline=None, phases=UNSHRUNK)
@given(data=st.data())
def test_requests_that_move_are_in_one_place_whatever_dies_meanwhile(name: str, data: st.DataObject) -> None:
    machine = loaded(name, data)
    jobs = list(machine.jobs.values())
    instants, chosen = st.floats(0, 0.5), st.sampled_from(jobs)
    for at, job, lasts, arrives in data.draw(
        st.lists(st.tuples(instants, chosen, st.sampled_from([0.0, 0.01, 0.2]), st.booleans()), max_size=12)
    ):
        machine.at(at, lambda r=job.request_id, u=at + lasts, a=arrives: machine.detach(r, u, a))
    drawn = data.draw(st.lists(st.tuples(instants, chosen, st.integers(1, 5)), max_size=4))
    for number, (at, like, made) in enumerate(drawn):
        coming = Job(f"in{number}", like.model, like.prompt, like.output + made, at, made=made)
        machine.at(at, lambda j=coming: machine.take_over(j))
    deaths(machine, data, 0.5)
    cancellations(machine, data, 0.5)
    machine.run(most_turns=400_000)
    ended(machine)
    assert sum(m.tally.moved_out for m in machine.ledger.models) == len(machine.moved)


@settings(max_examples=examples(25), deadline=None, phases=UNSHRUNK)
@given(data=st.data())
def test_fcfs_runs_one_engine_at_a_time(data: st.DataObject) -> None:
    machine = loaded("fcfs", data)
    machine.run()
    steps = sorted(span for engine in machine.engines.values() for span in engine.ran)
    for (_, ends), (begins, _) in pairwise(steps):
        assert begins >= ends


# ---------------------------------------------------------------- unending load


def backlog(
    machine: Machine, names: list[str], seconds: float, every: float, prompt: int = 40, output: int = 20
) -> None:
    """More work for `names` than the machine can do."""
    count = int(seconds / every)
    for index in range(count):
        for name in names:
            machine.submit(Job(f"{name}-{index}", name, prompt, output, index * every))


SHAPES = {"split": (False, False, False), "one": (True, True, True), "quiet is one": (False, False, True)}
SHAPES["quiet is split"] = (True, True, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_quiet_model_is_served_soon_beside_flooded_ones(
    name: str, share: float, shapes: tuple[bool, bool, bool]
) -> None:
    profiles = [
        profile(n, prefill_share=share, decode_share=share, quota_pages=300, both=both)
        for n, both in zip(("loud", "noisy", "quiet"), shapes, strict=True)
    ]
    machine = Machine(make_policy(name), profiles, 900)
    backlog(machine, ["loud", "noisy"], seconds=3.5, every=0.02)
    for index in range(8):
        machine.submit(Job(f"quiet-{index}", "quiet", 30, 10, 0.4 * index + 0.3))
    machine.run(until=5.0)
    quiet = [job for job in machine.jobs.values() if job.model == "quiet"]
    assert all(job.done is not None for job in quiet), machine.describe()
    assert max((job.first_token or 9.0) - job.arrival for job in quiet) < 1.0
    assert max((job.done or 9.0) - job.arrival for job in quiet) < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("both", [False, True])
def test_a_stream_of_prompts_does_not_starve_decode(name: str, both: bool) -> None:
    profiles = [profile("prompts", prefill_share=1.0), profile("chat", prefill_share=1.0, decode_share=1.0, both=both)]
    machine = Machine(make_policy(name), profiles, 800)
    backlog(machine, ["prompts"], seconds=3.0, every=0.003, prompt=60, output=1)
    machine.submit(Job("chat", "chat", 30, 50, 0.1))
    machine.run(until=3.0)
    assert machine.jobs["chat"].done is not None


@pytest.mark.slow
def test_a_model_that_needs_much_compute_is_not_passed_over_for_ever() -> None:
    profiles = [profile(n, decode_share=0.25, prefill_share=0.25) for n in "abcd"]
    profiles.append(profile("big", decode_share=1.0, prefill_share=1.0))
    machine = Machine(Adbs(), profiles, 2000)
    backlog(machine, list("abcd"), seconds=3.0, every=0.01)
    machine.submit(Job("big", "big", 30, 20, 0.2))
    machine.run(until=3.0)
    assert machine.jobs["big"].done is not None


# ---------------------------------------------------------------- Eq. 2


def usage(machine: Machine) -> dict[str, float]:
    """R of Eq. 2: pages held over the share of the pool that the model's weight gives it."""
    whole = sum(demand_weight(p) for p in machine.profiles.values())
    return {
        name: machine.used(name) * whole / (demand_weight(p) * machine.pages) for name, p in machine.profiles.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("start", [(560, 120, 120), (120, 120, 560), (270, 270, 260)])
def test_backlogged_models_hold_pages_in_proportion_to_their_weight(start: tuple[int, int, int]) -> None:
    rates = (4.0, 2.0, 1.0)
    profiles = [
        profile(f"m{i}", rate=rate, quota_pages=quota, floor_pages=40, max_num_seqs=64)
        for i, (rate, quota) in enumerate(zip(rates, start, strict=True))
    ]
    machine = Machine(Adbs(), profiles, 800)
    backlog(machine, [p.name for p in profiles], seconds=8.0, every=0.02, prompt=50, output=60)
    samples: list[dict[str, float]] = []
    # Quotas have moved to where they belong by then; before, pages are where they were at the start.
    for tick in range(160):
        machine.at(4.0 + tick * 0.025, lambda: samples.append(usage(machine)))
    machine.run(until=8.0)
    # At one moment, one sequence of the model with the least weight is 28 of its 114 pages: nothing finer can be asked
    # for. On average it does not matter.
    epsilon = 0.25 + 28 / 114
    spreads = [max(each.values()) - min(each.values()) for each in samples]
    assert sum(spreads) / len(spreads) < epsilon
    assert max(spreads) < 2 * epsilon
    means = [sum(each[name] for each in samples) / len(samples) for name in machine.profiles]
    assert max(means) - min(means) < 0.1
    assert all(len(model.queue) > 10 for model in machine.ledger.models), "no backlog: nothing was measured"
    machine.check_quotas()


def test_quota_moves_to_the_model_that_uses_it_and_comes_back() -> None:
    profiles = [profile(n, quota_pages=400, floor_pages=40, max_num_seqs=64) for n in ("busy", "idle")]
    machine = Machine(Adbs(), profiles, 800)
    backlog(machine, ["busy"], seconds=3.0, every=0.007, prompt=50, output=60)
    machine.run(until=3.0)
    assert machine.quotas["busy"] > 600
    for index in range(150):
        machine.submit(Job(f"idle-{index}", "idle", 50, 60, 3.0 + index * 0.015))
        machine.submit(Job(f"more-{index}", "busy", 50, 60, 3.0 + index * 0.015))
    machine.run(until=6.0)
    assert 300 <= machine.quotas["idle"] <= 500
    assert machine.used("idle") > 200
