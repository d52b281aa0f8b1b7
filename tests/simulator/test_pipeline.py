"""Engines of several stages, simulated: by hand where a few micro-batches can be followed, and by what must hold on
workloads that nobody chose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs import Decode, EngineShape, Load, ModelArchitecture
from muxserve.costs.roofline import Roofline
from muxserve.scheduling.token_throttling import (
    TOKEN_BUDGETS,
    Budget,
    EngineState,
    FixedBudget,
    Throttle,
    TokenBudget,
    TokenThrottling,
    make_token_budget,
)
from muxserve.simulator.pipeline import Link, Pipeline, PipelineResult, PipelineSpec, simulate
from muxserve.workload import ModelLoad, generate
from muxserve.workload.lengths import LogNormalLengths
from muxserve.workload.trace import TraceRequest

TINY = ModelArchitecture("tiny", 4, 2, 2, 8, 16, 32, 100, 4096, 4096, "float16")
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

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        return 1.0


def spec(stages: int = 2, blocks: int = 1000, **changes: object) -> PipelineSpec:
    values: dict[str, object] = {"link": INSTANT, **changes}
    return PipelineSpec(TINY, EngineShape("fake", dtype="float16"), (blocks,) * stages, **values)  # type: ignore[arg-type]


def play(
    requests: list[tuple[float, int, int]], of: PipelineSpec | None = None, budget: TokenBudget | None = None
) -> PipelineResult:
    workload = [TraceRequest(arrival, "tiny", prompt, output) for arrival, prompt, output in requests]
    return simulate(of or spec(), PerLayerModel(), budget or FixedBudget(100), workload)


def batches(result: PipelineResult) -> list[tuple[int, int]]:
    return [(step.prefill, step.decode) for step in result.steps]


# ------------------------------------------------------------ by hand


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
    assert result.active() == pytest.approx(0.12)
    assert result.busy() == pytest.approx([0.06, 0.06])
    assert result.bubbles() == pytest.approx([0.06, 0.06])
    assert result.bubble_fraction() == pytest.approx(0.5)


def test_time_without_work_is_no_bubble() -> None:
    result = play([(0.0, 10, 1), (100.0, 10, 1)])
    assert result.active() == pytest.approx(0.08)
    assert result.seconds == pytest.approx(100.04)


def test_the_link_and_both_ends_of_a_step_add_to_each_pass() -> None:
    slow = spec(link=Link(bandwidth=64e3, latency=0.5), step_seconds=0.25, return_seconds=0.125)
    # 10 tokens x 2 tensors x 16 values x 2 bytes at 64 kB/s take 10 ms.
    (request,) = play([(0.0, 10, 1)], slow).requests
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
    assert result.bubbles() == pytest.approx([0.2, 0.2])
    # While both have something to do there are none; the first stage waits at the end, the second at the beginning.
    assert result.bubbles(0.2, 0.4) == pytest.approx([0.0, 0.0])
    assert result.bubbles(0.0, 0.3) == pytest.approx([0.0, 0.2])


def test_a_large_micro_batch_leaves_a_bubble_behind_it_on_the_next_stage() -> None:
    # 100 tokens, then 10: the second stage has done the first one late, the first stage waits for nothing to do.
    result = play([(0.0, 100, 1), (0.0, 10, 1)])
    assert [r.finish for r in result.requests] == pytest.approx([0.4, 0.42])
    assert result.busy() == pytest.approx([0.22, 0.22])


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
    assert result.busy() == pytest.approx([0.01, 0.02, 0.01])


def test_prompts_wait_for_seats() -> None:
    result = play([(0.0, 10, 2)] * 3, spec(stages=1, max_num_seqs=2))
    assert batches(result)[0] == (20, 0)
    assert batches(result)[-2:] == [(10, 0), (0, 1)]


def test_what_can_never_fit_is_refused() -> None:
    result = play([(0.0, 30, 3), (0.0, 20, 13)], spec(blocks=2))
    assert result.requests[0].error == ""
    result = play([(0.0, 30, 4), (0.0, 20, 13)], spec(blocks=2))
    assert "33 tokens, and the smallest stage has room for 32" in result.requests[0].error
    assert result.requests[1].finish is not None
    assert [record.ok for record in result.records()] == [False, True]


def test_the_smallest_stage_decides_and_each_tells_its_own_peak() -> None:
    uneven = PipelineSpec(TINY, EngineShape("fake", dtype="float16"), (4, 8), link=INSTANT)
    result = play([(0.0, 32, 16)], uneven)
    assert uneven.capacity == 64
    assert result.peak_kv == pytest.approx([3 / 4, 3 / 8])


def test_the_last_to_come_gives_way_and_is_computed_again() -> None:
    result = play([(0.0, 16, 10), (0.0, 16, 10)], spec(stages=1, blocks=3))
    first, second = result.requests
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert result.preemptions == 1
    # The second gives its block to the first, and has its prompt and its output computed again: in the block that is
    # left, and the last token when the first has ended.
    assert batches(result)[:3] == [(32, 0), (0, 1), (16, 1)]
    assert batches(result)[10] == (1, 0)
    assert [r.made for r in result.requests] == [10, 10]


def test_prompts_that_hold_all_blocks_and_cannot_go_on_make_room_for_the_first() -> None:
    class Sparing(TokenBudget):
        """Sixteen tokens for each micro-batch: two prompts begin before either has ended."""

        name = "sparing"

        def next(self, state: EngineState) -> Budget:
            return Budget(16, state.ready)

    result = play([(0.0, 48, 1), (0.0, 48, 1)], spec(blocks=3, chunk_ahead=False), Sparing())
    assert [r.made for r in result.requests] == [1, 1]
    assert [r.preemptions for r in result.requests] == [0, 1]


def test_a_prompt_that_fills_the_cache_is_not_suspended_for_ever() -> None:
    result = play([(0.0, 1600, 1)], spec(blocks=100), TokenThrottling())
    assert result.requests[0].made == 1


def test_prefill_is_suspended_while_the_cache_is_nearly_full() -> None:
    # The first takes 15 of 16 blocks, so that 6 % are free: over the threshold of the default, not over this one.
    patient = TokenThrottling(Throttle(kv_threshold=0.1))
    result = play([(0.0, 240, 4), (5.0, 16, 1)], spec(stages=1, blocks=16), patient)
    assert result.requests[1].began == pytest.approx(5.0)
    result = play([(0.0, 236, 9), (1.0, 10, 1)], spec(stages=1, blocks=16), TokenThrottling(Throttle(kv_threshold=0.1)))
    first, second = result.requests
    assert first.finish is not None
    assert second.began is not None
    assert second.began >= first.finish


# ------------------------------------------------------------ what throttling is for


# The shape of a 14B model, four GPUs, and costs from the roofline.
LARGE = ModelArchitecture("large", 48, 40, 8, 128, 5120, 13824, 152064, 32768, 32768, "bfloat16")
FOUR = PipelineSpec(LARGE, EngineShape("L20-48GB"), (40_000,) * 4)


def chats(rate: float, seconds: float) -> list[TraceRequest]:
    load = ModelLoad(rate, LogNormalLengths(120, 1.0, 4, 1024), LogNormalLengths(80, 0.8, 4, 512))
    return list(generate({"large": load}, seconds, seed=1))


def mean_latency(result: PipelineResult) -> float:
    return sum(record.latency or 0.0 for record in result.records()) / len(result.requests)


@pytest.mark.parametrize("rate", [8.0, 20.0])
def test_throttling_evens_micro_batches_out_and_fills_bubbles(rate: float) -> None:
    workload = chats(rate, 12.0)
    fixed, throttled = (simulate(FOUR, Roofline(), budget, workload) for budget in (FixedBudget(), TokenThrottling()))
    for counted in ("decode", "tokens", "seconds"):
        before, after = (result.spread(4.0, 12.0)[counted].variation for result in (fixed, throttled))
        assert after < 0.6 * before, counted
    assert throttled.bubble_fraction(4.0, 12.0) < 0.6 * fixed.bubble_fraction(4.0, 12.0)
    assert mean_latency(throttled) < mean_latency(fixed)


@pytest.mark.parametrize("without", ["token_throttling_without_wt", "token_throttling_without_ut"])
def test_each_half_of_the_prefill_throttle_has_its_effect(without: str) -> None:
    # A small cache that fills up, and prompts that come faster than they can be answered.
    small = replace(FOUR, blocks=(400,) * 4)
    workload = chats(12.0, 12.0)
    whole, part = (simulate(small, Roofline(), make_token_budget(n), workload) for n in ("token_throttling", without))
    if without.endswith("wt"):
        assert part.spread(2.0, 12.0)["prefill"].variation > 1.2 * whole.spread(2.0, 12.0)["prefill"].variation
    else:
        assert part.preemptions > 1.2 * whole.preemptions


def test_decoding_sequences_are_dealt_out_evenly() -> None:
    # 40 sequences that decode for long: after the prompts, ten in each of the four micro-batches.
    result = play([(0.0, 10, 200)] * 40, spec(stages=4, blocks=4000), TokenThrottling())
    later = [step.decode for step in result.steps if 3.0 < step.made < 6.0]
    assert set(later) == {10}
    fixed = play([(0.0, 10, 200)] * 40, spec(stages=4, blocks=4000), FixedBudget(400))
    assert set(fixed.spread(3.0, 6.0)) == {"prefill", "decode", "tokens", "seconds"}
    assert fixed.spread(3.0, 6.0)["decode"].mean == 40
    assert fixed.bubble_fraction() > 0.7


# ------------------------------------------------------------ whatever comes


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=40),
    stages=st.integers(1, 4),
    blocks=st.integers(4, 40),
    depth=st.integers(1, 6),
    seats=st.integers(1, 20),
    ahead=st.booleans(),
    chunk_ahead=st.booleans(),
    name=st.sampled_from(sorted(TOKEN_BUDGETS)),
)
def test_every_request_is_answered_and_the_books_are_right(
    requests: list[tuple[float, int, int]],
    stages: int,
    blocks: int,
    depth: int,
    seats: int,
    ahead: bool,
    chunk_ahead: bool,
    name: str,
) -> None:
    of = spec(stages, blocks, depth=depth, max_num_seqs=seats, ahead=ahead, chunk_ahead=chunk_ahead)
    workload = [TraceRequest(a, "tiny", p, o) for a, p, o in sorted(requests)]

    class Watched(Pipeline):
        def _fill(self, now: float) -> None:
            super()._fill(now)
            batcher = self.batcher
            assert 0 <= batcher.used <= batcher.blocks
            assert batcher.used == sum(r.blocks for r in batcher.running)
            assert len(batcher.running) <= seats
            assert 0 <= self._in_flight <= depth
            waiting = [*batcher.waiting, *batcher.begun]
            assert batcher.state().waiting_tokens == sum(r.tokens - r.computed for r in waiting)
            for each in batcher.running:
                assert each.blocks == -(-each.computed // 16)
            assert not any(r.flying for r in batcher.ready)
            # Nothing is left lying: with nothing in flight there is nothing to do.
            assert self._in_flight or not (waiting or batcher.ready)

    watched = Watched(of, PerLayerModel(), make_token_budget(name))
    result = watched.run(workload)
    for request in result.requests:
        if request.error:
            assert request.prompt + request.output - 1 > of.capacity
            continue
        assert request.made == request.output
        assert request.first_token is not None
        assert request.finish is not None
        assert request.arrival <= request.first_token <= request.finish
    assert watched.batcher.used == 0
    assert watched.batcher.state()[:3] == (0, 0, 0)
    computed = sum(step.prefill + step.decode for step in result.steps)
    wanted = sum(r.prompt + r.output - 1 for r in result.requests if not r.error)
    assert computed == wanted if not result.preemptions else computed > wanted
    assert all(bubble >= -1e-9 for bubble in result.bubbles())
    again = simulate(of, PerLayerModel(), make_token_budget(name), workload)
    assert [r.finish for r in again.requests] == [r.finish for r in result.requests]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stages": 5}, "4 layers cannot be spread over 5 stages"),
        ({"blocks": 0}, "at least one block"),
        ({"depth": 0}, "depth"),
        ({"step_seconds": -1.0}, "negative"),
    ],
)
def test_specs_that_make_no_sense_are_refused(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth"):
        Link(0.0)
