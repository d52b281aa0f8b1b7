"""What every policy must keep to, over random loads on the virtual machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.scheduling.adbs import Adbs
from muxserve.scheduling.fcfs import Fcfs
from muxserve.scheduling.policies import POLICIES, make_policy
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.quotas import demand_weight
from muxserve.scheduling.types import Grant, ModelProfile, Phase
from tests.scheduling.machine import Job, Machine, idle_although_possible, profile
from tests.support.thoroughness import examples

PAIRS = sorted(name for name, policy in POLICIES.items() if not policy.both)
PHASES = [Phase.PREFILL, Phase.DECODE]
SHARES = [0.25, 0.5, 1.0]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ModelProfile], int]:
    count = draw(st.integers(1, 4))
    drawn = []
    for index in range(count):
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
                decode_share=draw(st.sampled_from(SHARES)),
                max_num_seqs=draw(st.integers(1, 6)),
                max_num_batched_tokens=draw(st.sampled_from([16, 64])),
            )
        )
    spare = draw(st.integers(0, 150))
    pages = sum(p.floor_pages for p in drawn) + spare
    extra = spare // count
    return [p.__class__(**{**_fields(p), "quota_pages": p.floor_pages + extra}) for p in drawn], pages


def _fields(p: ModelProfile) -> dict[str, object]:
    return {each.name: getattr(p, each.name) for each in fields(p)}


def requests(names: list[str]) -> st.SearchStrategy[list[Job]]:
    one = st.tuples(
        st.sampled_from(names), st.integers(1, 60), st.integers(1, 30), st.floats(0, 1), st.sampled_from([0, 0, 1])
    )
    return st.lists(one, min_size=1, max_size=25).map(
        lambda drawn: [Job(f"r{i}", m, p, o, a, priority) for i, (m, p, o, a, priority) in enumerate(drawn)]
    )


def serial_seconds(machine: Machine) -> float:
    """Time that everything would take one request after the other, one token a step."""
    return sum(
        sum(machine.prefill_seconds(1) for _ in range(1))
        + machine.prefill_seconds(job.prompt + job.output)
        + job.output * machine.decode_seconds(1)
        for job in machine.jobs.values()
    )


def never_idle(machine: Machine, grants: list[Grant]) -> None:
    idle = idle_although_possible(machine)
    assert idle is None, f"idle at {machine.now:.4f} although {idle} could run: {machine.describe()}"


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_request_is_served_within_a_bound(name: str, data: st.DataObject) -> None:
    profiles, pages = data.draw(models())
    machine = Machine(make_policy(name), profiles, pages)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)
    machine.run()
    assert not machine.unfinished()
    # Preemption computes again what was computed; beyond that, sharing must not cost more than taking turns would.
    bound = 1.0 + (2 + machine.preemptions) * serial_seconds(machine) + 0.1 * len(profiles)
    assert max(job.done or 0.0 for job in machine.jobs.values()) <= bound
    assert not machine.ledger.requests
    assert machine.ledger.share_used == 0
    assert all(machine.used(p.name) == 0 for p in profiles)
    for model in machine.ledger.models:
        assert model.promised == model.outstanding == model.prefill_tokens == 0
        assert model.tally.arrived == model.tally.finished


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_whatever_dies_or_is_cancelled_no_request_is_lost_or_counted_twice(name: str, data: st.DataObject) -> None:
    profiles, pages = data.draw(models())
    names = [p.name for p in profiles]
    machine = Machine(make_policy(name), profiles, pages)
    jobs = data.draw(requests(names))
    for job in jobs:
        machine.submit(job)
    for at, model, phase in data.draw(
        st.lists(st.tuples(st.floats(0, 2), st.sampled_from(names), st.sampled_from(PHASES)), max_size=4)
    ):
        machine.at(at, lambda m=model, p=phase: machine.kill(m, p) if machine.engines[m, p].up else None)
    for at, index in data.draw(st.lists(st.tuples(st.floats(0, 2), st.integers(0, len(jobs) - 1)), max_size=6)):
        job = jobs[index]
        machine.at(
            max(at, job.arrival + 1e-9),
            lambda j=job: (
                machine.cancel(j.request_id)
                if j.done is None and j.request_id not in machine.cancelled and j.request_id in machine.ledger.requests
                else None
            ),
        )
    machine.run(most_turns=400_000)
    assert not machine.unfinished()
    assert not machine.ledger.requests
    arrived = sum(m.tally.arrived for m in machine.ledger.models)
    ended = sum(m.tally.finished + m.tally.cancelled + m.tally.lost for m in machine.ledger.models)
    assert arrived == ended == len(jobs) + len(machine.lost)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_requests_that_move_are_in_one_place_whatever_dies_meanwhile(name: str, data: st.DataObject) -> None:
    profiles, pages = data.draw(models())
    names = [p.name for p in profiles]
    machine = Machine(make_policy(name), profiles, pages)
    jobs = data.draw(requests(names))
    for job in jobs:
        machine.submit(job)
    instants = st.floats(0, 0.5)
    chosen = st.integers(0, len(jobs) - 1)
    for at, index, lasts, arrives in data.draw(
        st.lists(st.tuples(instants, chosen, st.sampled_from([0.0, 0.01, 0.2]), st.booleans()), max_size=12)
    ):
        machine.at(at, lambda r=jobs[index].request_id, u=at + lasts, a=arrives: machine.detach(r, u, a))
    coming = []
    for at, index, made in data.draw(st.lists(st.tuples(instants, chosen, st.integers(1, 5)), max_size=4)):
        like = jobs[index]
        coming.append(Job(f"in{len(coming)}", like.model, like.prompt, like.output + made, at, made=made))
        machine.at(at, lambda j=coming[-1]: machine.take_over(j))
    for at, model, phase in data.draw(
        st.lists(st.tuples(instants, st.sampled_from(names), st.sampled_from(PHASES)), max_size=3)
    ):
        machine.at(at, lambda m=model, p=phase: machine.kill(m, p) if machine.engines[m, p].up else None)
    for at, index in data.draw(st.lists(st.tuples(instants, chosen), max_size=4)):
        machine.at(
            max(at, jobs[index].arrival + 1e-9),
            lambda j=jobs[index]: (
                machine.cancel(j.request_id)
                if j.request_id not in machine.cancelled and j.request_id in machine.ledger.requests
                else None
            ),
        )
    machine.run(most_turns=400_000)
    assert not machine.unfinished()
    assert not machine.ledger.requests
    assert not any(model.levels for model in machine.ledger.models)
    assert not machine.moving
    assert sum(m.tally.moved_out for m in machine.ledger.models) == len(machine.moved)


@pytest.mark.parametrize("name", ["adbs", "round_robin"])
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_no_compute_is_idle_while_something_could_run(name: str, data: st.DataObject) -> None:
    profiles, pages = data.draw(models())
    machine = Machine(make_policy(name), profiles, pages)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)
    machine.watch = never_idle
    machine.run()


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_fcfs_runs_one_engine_at_a_time_and_never_idles(data: st.DataObject) -> None:
    profiles, pages = data.draw(models())
    machine = Machine(Fcfs(), profiles, pages)
    for job in data.draw(requests([p.name for p in profiles])):
        machine.submit(job)
    machine.watch = never_idle_one_at_a_time
    machine.run()
    steps = sorted(span for engine in machine.engines.values() for span in engine.ran)
    for (_, ends), (begins, _) in pairwise(steps):
        assert begins >= ends


def never_idle_one_at_a_time(machine: Machine, grants: list[Grant]) -> None:
    if machine.ledger.share_used == 0:
        never_idle(machine, grants)


# ---------------------------------------------------------------- unending load


def backlog(
    machine: Machine, names: list[str], seconds: float, every: float, prompt: int = 40, output: int = 20
) -> None:
    """More work for `names` than the machine can do."""
    count = int(seconds / every)
    for index in range(count):
        for name in names:
            machine.submit(Job(f"{name}-{index}", name, prompt, output, index * every))


def policies_for_starvation() -> list[Callable[[], Policy]]:
    return [lambda name=name: make_policy(name) for name in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize("make", policies_for_starvation())
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_quiet_model_is_served_soon_beside_flooded_ones(make: Callable[[], Policy], share: float) -> None:
    profiles = [
        profile(n, prefill_share=share, decode_share=share, quota_pages=300) for n in ("loud", "noisy", "quiet")
    ]
    machine = Machine(make(), profiles, 900)
    backlog(machine, ["loud", "noisy"], seconds=3.5, every=0.02)
    for index in range(8):
        machine.submit(Job(f"quiet-{index}", "quiet", 30, 10, 0.4 * index + 0.3))
    machine.run(until=5.0)
    quiet = [job for job in machine.jobs.values() if job.model == "quiet"]
    assert all(job.done is not None for job in quiet), machine.describe()
    assert max((job.first_token or 9.0) - job.arrival for job in quiet) < 1.0
    assert max((job.done or 9.0) - job.arrival for job in quiet) < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_stream_of_prompts_does_not_starve_decode(name: str) -> None:
    profiles = [profile("prompts", prefill_share=1.0), profile("chat", prefill_share=1.0, decode_share=1.0)]
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
