"""Engines of several stages, simulated: by hand where a few micro-batches can be followed, and by what must hold on
workloads that nobody chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper.one_phase import OnePhase
from muxserve.costs import Decode, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.scheduling.token_throttling import (
    FixedBudget,
    Throttle,
    TokenBudget,
    TokenThrottling,
)
from muxserve.simulator import (
    Link,
    Options,
    Pipeline,
    SimUnit,
    lone_unit,
    simulate,
)
from muxserve.simulator import unit as simulated_unit
from muxserve.simulator.leased import SimLease
from muxserve.simulator.micro_batches import MicroBatches, Step
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.scheduler import EngineTypes
from muxserve.simulator.stages import PipelineEngine
from muxserve.workload import ModelLoad, generate
from muxserve.workload.lengths import LogNormalLengths
from muxserve.workload.trace import TraceRequest
from placement.demand import Demand
from tests.costs.models import llama
from tests.simulator.support import LARGE
from tests.support.thoroughness import examples

TINY = llama(name="tiny", layers=4, heads=2, kv_heads=2, head_dim=8, hidden=16, intermediate=32, vocab=100)
# What is sent arrives at once.
INSTANT = Link(1e18, 0.0)


class PerLayer:
    """A millisecond per layer and prompt token; a decode step takes ten per layer, whatever it does."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return 1e-3 * self.layers * tokens

    def decode(self, batch: int, context: int) -> Decode:
        return Decode(1e-2 * self.layers, 0.0)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        return Load(1.0, 1.0)

    def decode_load(self, batch: int, context: int) -> Load:
        return Load(1.0, 1.0)


class PerLayerModel:
    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> PerLayer:
        return PerLayer(architecture.layers)

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        return [1.0] * len(loads)


def spec(
    stages: int = 2,
    blocks: int = 1000,
    link: Link = INSTANT,
    links: tuple[Link, ...] | None = None,
    max_num_seqs: int = 1024,
    **changes: object,
) -> SimUnit:
    layers = split_layers(TINY.layers, stages)
    pipeline = Pipeline(layers, links or (link,) * (stages - 1), **changes)  # type: ignore[arg-type]
    served = Demand("tiny", TINY, "float16", max_num_seqs, 2048)
    return lone_unit("u", "fake", tuple(range(stages)), served, blocks, pipeline=pipeline, waiting_tokens=1 << 20)


class Played:
    """What came of one engine."""

    def __init__(
        self, of: SimUnit, latency: LatencyModel, budget: TokenBudget, load: list[TraceRequest], step: float = 0.0
    ) -> None:
        assert of.pipeline is not None
        unit = replace(of, pipeline=replace(of.pipeline, budget=lambda: budget))
        result = simulate([unit], load, latency, Options(Overheads(between=step), sample_seconds=0.0))
        made = result.units[0].micro_batches
        assert made is not None
        self.requests: list[SimRequest] = result.requests
        self.made: MicroBatches = made
        self.seconds = result.seconds
        self.preemptions = sum(request.preemptions for request in self.requests)

    @property
    def steps(self) -> list[Step]:
        return self.made.steps


def play(
    requests: list[tuple[float, int, int]],
    of: SimUnit | None = None,
    budget: TokenBudget | None = None,
    step: float = 0.0,
) -> Played:
    workload = [TraceRequest(arrival, "tiny", prompt, output) for arrival, prompt, output in requests]
    return Played(of or spec(), PerLayerModel(), budget or FixedBudget(100), workload, step)


def batches(result: Played) -> list[tuple[int, int]]:
    return [(step.prefill, step.decode) for step in result.steps]


# ------------------------------------------------------------ by hand


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_a_decode_step_is_counted_once_every_sequence_has_its_token(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[PipelineEngine] = []

    class Seen(PipelineEngine):
        def receive(self, lease: SimLease, now: float) -> None:
            engines[:] = [self]
            super().receive(lease, now)

    monkeypatch.setattr(simulated_unit, "EngineTypes", lambda: EngineTypes(stages=Seen))
    play([(1.0, 10, 13)] * sequences, budget=OnePhase())
    # The first token of each comes with its prompt.
    assert engines[0].steps_by(100.0) == 12


def test_one_request_goes_through_both_stages_for_each_token() -> None:
    result = play([(1.0, 10, 3)])
    (request,) = result.requests
    # 10 tokens x 2 layers x 1 ms on each of two stages; then 2 steps of 20 ms on each.
    assert request.first_token == pytest.approx(1.04)
    assert request.finish == pytest.approx(1.12)
    assert request.made == 3
    assert batches(result) == [(10, 0), (0, 1), (0, 1)]
    assert [step.made for step in result.steps] == pytest.approx([1.0, 1.04, 1.08])


def test_a_single_sequence_keeps_one_stage_busy_at_a_time() -> None:
    result = play([(1.0, 10, 3)])
    assert result.made.active() == pytest.approx(0.12)
    assert result.made.busy() == pytest.approx([0.06, 0.06])
    assert result.made.bubbles() == pytest.approx([0.06, 0.06])
    assert result.made.bubble_fraction() == pytest.approx(0.5)


def test_time_without_work_is_no_bubble() -> None:
    result = play([(0.0, 10, 1), (100.0, 10, 1)])
    assert result.made.active() == pytest.approx(0.08)
    assert result.seconds == pytest.approx(100.04)


def test_the_link_and_both_ends_of_a_step_add_to_each_pass() -> None:
    slow = spec(link=Link(bandwidth=64e3, latency=0.5), return_seconds=0.125)
    # 10 tokens x 2 tensors x 16 values x 2 bytes at 64 kB/s take 10 ms.
    (request,) = play([(0.0, 10, 1)], slow, step=0.25).requests
    assert request.finish == pytest.approx(0.25 + 0.02 + 0.5 + 0.01 + 0.02 + 0.125)


def test_stages_may_be_joined_by_different_links() -> None:
    # One layer on each stage; 10 tokens take 10 ms there, and as long to be sent over the slow link.
    joined = spec(4, links=(INSTANT, Link(bandwidth=64e3, latency=0.5), INSTANT))
    (request,) = play([(0.0, 10, 1)], joined).requests
    assert request.finish == pytest.approx(4 * 0.01 + 0.5 + 0.01)
    with pytest.raises(ValueError, match="4 stages have 3 links between them, not 1"):
        spec(4, links=(INSTANT,))


def test_two_micro_batches_overlap() -> None:
    # Each prompt fills a micro-batch; the second enters the first stage when the first one leaves it.
    result = play([(0.0, 100, 1), (0.0, 100, 1)])
    assert [r.finish for r in result.requests] == pytest.approx([0.4, 0.6])
    assert [step.made for step in result.steps] == pytest.approx([0.0, 0.2])
    assert result.made.bubbles() == pytest.approx([0.2, 0.2])
    # While both have something to do there are none; the first stage waits at the end, the second at the beginning.
    assert result.made.bubbles(0.2, 0.4) == pytest.approx([0.0, 0.0])
    assert result.made.bubbles(0.0, 0.3) == pytest.approx([0.0, 0.2])


def test_a_large_micro_batch_leaves_a_bubble_behind_it_on_the_next_stage() -> None:
    # 100 tokens, then 10: the second stage has done the first one late, the first stage waits for nothing to do.
    result = play([(0.0, 100, 1), (0.0, 10, 1)])
    assert [r.finish for r in result.requests] == pytest.approx([0.4, 0.42])
    assert result.made.busy() == pytest.approx([0.22, 0.22])


def test_no_more_micro_batches_are_in_flight_than_there_are_stages() -> None:
    result = play([(0.0, 100, 1)] * 4)
    assert [step.made for step in result.steps] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    result = play([(0.0, 100, 1)] * 4, spec(depth=1))
    assert [step.made for step in result.steps] == pytest.approx([0.0, 0.4, 0.8, 1.2])


def test_made_ahead_micro_batches_know_less() -> None:
    # The second request comes while the first stage computes: ahead, the second micro-batch is made before that.
    requests = [(0.0, 150, 1), (0.1, 50, 1)]
    assert batches(play(requests)) == [(100, 0), (100, 0)]
    assert batches(play(requests, spec(ahead=True))) == [(100, 0), (50, 0), (50, 0)]


def test_the_next_chunk_of_a_prompt_follows_in_the_pipeline_or_waits() -> None:
    assert play([(0.0, 200, 1)]).requests[0].finish == pytest.approx(0.6)
    assert play([(0.0, 200, 1)], spec(chunk_ahead=False)).requests[0].finish == pytest.approx(0.8)


def test_others_go_ahead_while_a_prompt_waits_for_its_last_chunk() -> None:
    result = play([(0.0, 200, 1), (0.0, 50, 1)], spec(chunk_ahead=False))
    assert batches(result) == [(100, 0), (50, 0), (100, 0)]


def test_uneven_layers_go_to_the_stages_before_the_last() -> None:
    result = play([(0.0, 10, 1)], spec(stages=3))
    assert result.made.busy() == pytest.approx([0.01, 0.02, 0.01])


def test_prompts_wait_for_seats() -> None:
    result = play([(0.0, 10, 2)] * 3, spec(stages=1, max_num_seqs=2))
    assert batches(result)[0] == (20, 0)
    assert batches(result)[-2:] == [(10, 0), (0, 1)]


def test_what_can_never_fit_is_refused() -> None:
    first, second = play([(0.0, 30, 3), (0.0, 20, 13)], spec(blocks=2)).requests
    assert not first.error
    first, second = play([(0.0, 30, 4), (0.0, 20, 13)], spec(blocks=2)).requests
    assert "longer than the 32 tokens that tiny has pages for" in first.error
    assert second.finish is not None


def test_the_stage_with_most_layers_has_most_pages() -> None:
    (model,), (pool,) = spec(stages=3, blocks=10).models, spec(stages=3, blocks=10).pools
    assert model.profile.kv.pages_per_block == 2 * 2
    assert pool.pages == 10 * 4


def test_the_last_to_come_gives_way_and_is_computed_again() -> None:
    # The live rule admits both: a block for each prompt and its first token, and one more for each to grow into.
    result = play([(0.0, 14, 60), (0.0, 14, 60)], spec(stages=1, blocks=6))
    first, second = result.requests
    assert first.preemptions == 0
    assert second.preemptions > 0
    assert [r.made for r in result.requests] == [60, 60]
    assert first.finish is not None
    assert second.finish is not None
    assert first.finish < second.finish


def test_prompts_are_not_admitted_without_room_for_those_that_run_to_grow() -> None:
    # Five blocks: the first takes two and may grow by one, so that the second, which needs three, has to wait for it.
    result = play([(0.0, 30, 10), (0.01, 34, 2)], spec(stages=1, blocks=5))
    first, second = result.requests
    assert first.finish is not None
    assert second.first_token is not None
    assert second.first_token > first.finish
    assert result.preemptions == 0


def test_a_prompt_that_fills_the_cache_is_not_suspended_for_ever() -> None:
    result = play([(0.0, 1599, 1)], spec(blocks=100), TokenThrottling())
    assert result.requests[0].made == 1


def test_prefill_is_suspended_while_the_cache_is_nearly_full() -> None:
    # The first takes 13 of 16 blocks, so that 19 % are free: not over this threshold.
    patient = TokenThrottling(Throttle(kv_threshold=0.2))
    first, second = play([(0.0, 200, 9), (1.0, 10, 1)], spec(stages=1, blocks=16), patient).requests
    assert first.finish is not None
    assert second.first_token is not None
    assert second.first_token > first.finish


# ------------------------------------------------------------ what throttling is for


# Four GPUs, and costs from the roofline.
FOUR = lone_unit(
    "u",
    "L20-48GB",
    (0, 1, 2, 3),
    Demand("large", LARGE, "bfloat16", 1024, 2048),
    40_000,
    pipeline=Pipeline((12,) * 4, (Link(),) * 3),
    waiting_tokens=16384,
)


def chats(rate: float, seconds: float) -> list[TraceRequest]:
    load = ModelLoad(rate, LogNormalLengths(120, 1.0, 4, 1024), LogNormalLengths(80, 0.8, 4, 512))
    return list(generate({"large": load}, seconds, seed=1))


def mean_latency(result: Played) -> float:
    return sum(request.record().latency or 0.0 for request in result.requests) / len(result.requests)


@pytest.mark.parametrize("rate", [8.0, 20.0])
def test_throttling_evens_micro_batches_out_and_fills_bubbles(rate: float) -> None:
    workload = chats(rate, 12.0)
    fixed, throttled = (Played(FOUR, Roofline(), budget, workload) for budget in (FixedBudget(), TokenThrottling()))
    for counted in ("decode", "tokens", "seconds"):
        before, after = (result.made.spread(4.0, 12.0)[counted].variation for result in (fixed, throttled))
        assert after < 0.6 * before, counted
    assert throttled.made.bubble_fraction(4.0, 12.0) < 0.6 * fixed.made.bubble_fraction(4.0, 12.0)
    assert mean_latency(throttled) < mean_latency(fixed)


def test_decoding_sequences_are_dealt_out_evenly() -> None:
    # 40 sequences that decode for long: after the prompts, ten in each of the four micro-batches.
    result = play([(0.0, 10, 200)] * 40, spec(stages=4, blocks=4000), TokenThrottling())
    later = [step.decode for step in result.steps if 3.0 < step.made < 6.0]
    assert set(later) == {10}
    fixed = play([(0.0, 10, 200)] * 40, spec(stages=4, blocks=4000), FixedBudget(400))
    assert set(fixed.made.spread(3.0, 6.0)) == {"prefill", "decode", "tokens", "seconds"}
    assert fixed.made.spread(3.0, 6.0)["decode"].mean == 40
    # All of them are in one micro-batch, so each of the four stages waits for the three others.
    assert fixed.made.bubble_fraction() == pytest.approx(3 / 4)


# ------------------------------------------------------------ whatever comes


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=40),
    stages=st.integers(1, 4),
    blocks=st.integers(4, 40),
    depth=st.integers(1, 6),
    seats=st.integers(1, 20),
    ahead=st.booleans(),
    chunk_ahead=st.booleans(),
    kind=st.sampled_from([TokenThrottling, FixedBudget, OnePhase]),
)
def test_every_request_is_answered_and_the_books_are_right(
    requests: list[tuple[float, int, int]],
    stages: int,
    blocks: int,
    depth: int,
    seats: int,
    ahead: bool,
    chunk_ahead: bool,
    kind: Callable[[], TokenBudget],
) -> None:
    of = spec(stages, blocks, depth=depth, max_num_seqs=seats, ahead=ahead, chunk_ahead=chunk_ahead)
    workload = [TraceRequest(a, "tiny", p, o) for a, p, o in sorted(requests)]

    class Watched(PipelineEngine):
        def kick(self, now: float) -> None:
            super().kick(now)
            assert self.pages.held == sum(r.blocks for r in self.running) * self.pages.per_block <= self.pages.quota
            assert len(self.running) <= seats
            assert 0 <= len(self._flying) <= depth
            waiting = [*self.waiting, *self.begun]
            assert self.holding().waiting_tokens == sum(r.tokens - r.computed for r in waiting)
            for each in self.running:
                assert each.blocks == -(-each.computed // 16)
            assert not any(r.flying for r in self.ready)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_unit, "EngineTypes", lambda: EngineTypes(stages=Watched))
        result = Played(of, PerLayerModel(), kind(), workload)
    for request in result.requests:
        if request.error:
            assert request.prompt + request.output - 1 > blocks * 16
            continue
        assert request.made == request.output
        assert request.first_token is not None
        assert request.finish is not None
        assert request.arrival <= request.first_token <= request.finish
    computed = sum(step.prefill + step.decode for step in result.steps)
    wanted = sum(r.prompt + r.output - 1 for r in result.requests if not r.error)
    assert computed == wanted if not result.preemptions else computed > wanted
    assert all(bubble >= -1e-9 for bubble in result.made.bubbles())
    again = Played(of, PerLayerModel(), kind(), workload)
    assert [r.finish for r in again.requests] == [r.finish for r in result.requests]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"depth": 0}, "depth"),
        ({"return_seconds": -1.0}, "negative"),
        ({"links": (INSTANT,) * 3}, "2 stages have 1 links"),
    ],
)
def test_specs_that_make_no_sense_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth"):
        Link(0.0)
