"""What of a GPU's memory is left for pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.gpu.budget import (
    GRANULARITY,
    RESTING_PART,
    BudgetError,
    Needs,
    budget,
    check,
    check_room,
    estimated,
    measured,
    pool_beside,
    pool_bytes,
    resting_room,
    table,
)
from placement.format import format_size
from placement.memory import MemoryRules
from tests.placement.analytic import demand

GIB, MIB = 1 << 30, 1 << 20
RULES = MemoryRules.served(0.9)


def needs(model: str = "a", rank: int = 0, weights: int = 16 * GIB, activation: int = 2 * GIB) -> Needs:
    return Needs(model, rank, weights, activation, 500 * MIB, 256 * MIB, measured=True)


def test_the_sum_by_hand() -> None:
    made = budget("GPU 0", 100 * GIB, 1 * GIB, [needs(), needs("b", weights=3 * GIB)], 16384, RULES)
    # 90 GiB, weights once, two engines with activations, graphs and contexts each, a GiB in reserve.
    engines = 2 * (2 * GIB + 256 * MIB) + 2 * 500 * MIB
    left = 90 * GIB - (16 + 3) * GIB - 2 * engines - GIB
    tables = left - left * 16384 // (16384 + 8)
    assert made.pool_bytes == (left - tables) // GRANULARITY * GRANULARITY
    assert [line.bytes for line in made.lines] == [90 * GIB, 0, 16 * GIB, engines, 3 * GIB, engines, GIB, tables]


def test_one_engine_takes_half_of_what_two_take() -> None:
    """Beside one with two: its weights, and activations, graphs and a context once."""
    one = replace(needs("b"), engine_count=1)
    engine = 2 * GIB + 256 * MIB + 500 * MIB
    made = budget("GPU 0", 100 * GIB, 0, [needs(), one], 16384, RULES)
    assert [line.bytes for line in made.lines if "engines" in line.what][:2] == [2 * engine, engine]
    assert one.resting(RULES) == 256 * MIB + 500 * MIB
    # Who has loaded the weights keeps a context of its own where memory cannot be exported.
    assert one.engines(replace(RULES, processes=3)) == engine + 500 * MIB


def test_engines_that_capture_nothing_have_no_graphs() -> None:
    demands = [demand("a", graphs="eager"), demand("b")]
    assert [each.graph_bytes for each in estimated(demands, 1, RULES)] == [0, RULES.graph_bytes]


def test_what_others_have_counts_as_far_as_it_is_more_than_is_left_free() -> None:
    free = budget("GPU 0", 100 * GIB, 10 * GIB, [needs()], 16384, RULES)
    taken = budget("GPU 0", 100 * GIB, 15 * GIB, [needs()], 16384, RULES)
    assert free == budget("GPU 0", 100 * GIB, 0, [needs()], 16384, RULES)
    assert free.pool_bytes - taken.pool_bytes == pytest.approx(5 * GIB, abs=4 * MIB)
    assert taken.lines[1].bytes == 5 * GIB


@given(
    st.lists(st.tuples(st.integers(1, 30 * GIB), st.integers(0, 4 * GIB)), min_size=1, max_size=5),
    st.integers(8 * GIB, 141 * GIB),
    st.integers(0, 141 * GIB),
    st.sampled_from([4096, 16384, 65536]),
)
def test_nothing_is_given_away_twice(models: list[tuple[int, int]], total: int, others: int, page: int) -> None:
    all_needs = [needs(str(i), weights=w, activation=a) for i, (w, a) in enumerate(models)]
    others = min(others, total)
    made = budget("GPU", total, others, all_needs, page, RULES)
    if made.pool_bytes <= 0:
        return
    assert made.pool_bytes % GRANULARITY == 0
    ours = sum(each.weights_bytes + each.engines(RULES) for each in all_needs) + RULES.reserve_bytes
    tables = RULES.engines * 4 * (made.pool_bytes // page)
    assert ours + tables + made.pool_bytes <= min(int(total * 0.9), total - others)
    assert sum(line.bytes for line in made.lines[1:]) + made.pool_bytes <= made.lines[0].bytes


def test_the_tightest_gpu_decides_and_is_named() -> None:
    big = budget("GPU 0", 100 * GIB, 0, [needs()], 16384, RULES)
    small = budget("GPU 1", 40 * GIB, 0, [needs(rank=1)], 16384, RULES)
    assert pool_bytes([big, small]) == small.pool_bytes
    check([big, small], [needs(), needs(rank=1)], small.pool_bytes, RULES)
    with pytest.raises(
        BudgetError, match="GPU 1: of 36 GiB that may be used weights take 16 GiB, the reserve 1 GiB and engines"
    ) as caught:
        check([big, small], [needs(), needs(rank=1)], small.pool_bytes + GIB, RULES)
    words = str(caught.value)
    assert "(measured); " in words
    assert "for the KV pool, 1 GiB too little for one sequence of every model" in words
    assert "raise cluster.gpu_memory to 0.93" in words
    assert "lower max_num_batched_tokens of a to 75% of what it is" in words


def test_advice_that_would_not_help_is_not_given() -> None:
    full = budget("GPU 0", 18 * GIB, 0, [needs()], 16384, RULES)
    with pytest.raises(BudgetError, match="nothing is left for the KV pool") as caught:
        check([full], [needs()], GIB, RULES)
    assert "cluster.gpu_memory" not in str(caught.value)
    assert "max_num_batched_tokens" not in str(caught.value)
    assert "give the unit more GPUs" in str(caught.value)


def test_a_table_for_people() -> None:
    rows = table([budget(f"GPU {i}", 100 * GIB, 0, [needs(rank=i)], 16384, RULES) for i in range(2)])
    assert rows[0] == ("may be used (90% of 100 GiB)", "90 GiB", "90 GiB")
    assert rows[2] == ("a: weights", "16 GiB", "16 GiB")
    assert rows[-1][0] == "left for the KV pool"


def test_what_a_holder_says() -> None:
    event = {"event": "measured", "kind": "weights", "model": "m", "rank": 1, "weights_bytes": 5, "activation_bytes": 4}
    with pytest.raises(ValueError, match="context_bytes"):
        measured(event)
    assert measured({**event, "context_bytes": 3, "graph_bytes": 2, "engine_count": 1}) == Needs(
        "m", 1, 5, 4, 3, 2, engine_count=1, measured=True
    )


class TestRoomForOneMore:
    """Pools have been made and stay as they are."""

    def room(self, joining: Needs, pools: int, free: int | None, loaded: bool = False) -> str:
        made = budget("GPU 0 (H)", 100 * GIB, 0, [needs(), joining], 16384, RULES)
        try:
            check_room(made, joining, pools, free, RULES, loaded)
        except BudgetError as error:
            return str(error)
        return ""

    def test_what_is_left_beside_the_pools_is_enough_or_not(self) -> None:
        joining = Needs("b", 0, 16 * GIB, 2 * GIB, 500 * MIB, 256 * MIB)
        most = budget("GPU 0", 100 * GIB, 0, [needs(), joining], 16384, RULES).pool_bytes
        assert self.room(joining, most, None) == ""
        said = self.room(joining, most + 4 * GIB, None)
        assert said.startswith(
            "GPU 0 (H): b needs 21.48 GiB (weights 16 GiB, engines 5.477 GiB, estimated), and of 90 GiB"
        )
        assert "of 90 GiB that may be used 17.48 GiB are left beside the pools (" in said
        assert said.endswith(f"remove one of them first, or deploy with kv_pool.size: {format_size(most)} at most")

    def test_the_driver_must_have_it_free(self) -> None:
        joining = needs("b")
        own = joining.weights_bytes + joining.engines(RULES)
        assert self.room(joining, 4 * GIB, own) == ""
        said = self.room(joining, 4 * GIB, own - MIB)
        assert "measured), and the driver has 21.48 GiB of 100 GiB free; end what else computes there" in said
        # With the weights in place, only its engines are still to come.
        assert self.room(joining, 4 * GIB, joining.engines(RULES), loaded=True) == ""
        assert self.room(joining, 4 * GIB, joining.engines(RULES) - 1, loaded=True) != ""


@given(st.integers(0, 1000), st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(0, 200))
def test_pools_may_take_what_the_largest_sleeping_model_leaves(left: int, sleeping: list[int], least: int) -> None:
    pools = pool_beside(left, sleeping, least)
    assert pools >= least
    if max(sleeping) + least <= left:
        assert left - pools == max(sleeping), "each has room alone, and nothing else is kept from pages"
    else:
        assert pools == least


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=12), st.integers(0, 400), st.integers(1, 500)
)
def test_engines_that_rest_leave_room_for_models(models: list[tuple[int, int]], room: int, gpu: int) -> None:
    taken, resting = [each for each, _ in models], [each for _, each in models]
    scale = GRANULARITY
    sizes = ([each * scale for each in taken], [each * scale for each in resting])
    found = resting_room(*sizes, room * scale, gpu * scale)
    assert found % scale == 0
    if not models or sum(taken) <= room:
        assert found == 0, "all are awake"
        return
    kept, wanted = found // scale, sum(resting)
    assert 0 <= kept <= wanted
    if not kept:
        return
    assert room - kept >= max(taken), "the largest has room"
    if 2 * kept >= wanted:
        few = room - kept >= sum(taken) / len(taken) * int(room * len(taken) / sum(taken)) - 1
        assert few or kept <= RESTING_PART * gpu


def test_engines_rest_as_far_as_two_models_can_be_awake() -> None:
    scale = GRANULARITY

    def of(taken: list[int], resting: int, room: int, gpu: int = 600) -> int:
        sizes = [each * scale for each in taken]
        return resting_room(sizes, [resting * scale] * len(taken), room * scale, gpu * scale) // scale

    assert of([10] * 20, 2, 100) == 40, "all that rest"
    assert of([10] * 20, 4, 90) == 70, "beside two that are awake"
    assert of([10] * 20, 4, 90, gpu=100) == 50, "half of the GPU"
    assert of([40] * 5, 2, 90) == 10, "two of them stay awake"
    assert of([40] * 5, 6, 90) == 10, "too few to be worth an awake model, and all that two leave"
    assert of([40] * 5, 2, 79) == 10, "one is awake either way"
    assert of([10] * 4, 2, 100) == 0, "none sleeps"
    assert of([10] * 11, 1, 100) == 11
