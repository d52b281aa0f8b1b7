# ruff: noqa: E501 -- one case, one line
from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from muxserve.costs.architecture import ModelArchitecture
from placement import Machine, ModelDemand, PlanError, UnitPlan, awake_together, plan_unit
from tests.costs.models import llama

MIB = 1 << 20
GIB = 1 << 30
MACHINE = Machine(cores=2, memory_bytes=24 * GIB, shared_memory_bytes=12 * GIB)


def architecture(layers: int = 4, kv_heads: int = 4, head_dim: int = 64, max_len: int = 2048) -> ModelArchitecture:
    hidden = 4 * head_dim
    sizes = {"layers": layers, "heads": 4, "kv_heads": kv_heads, "head_dim": head_dim, "max_len": max_len}
    return llama(hidden=hidden, intermediate=4 * hidden, vocab=512, dtype="float32", **sizes)


def demand(name: str, rate: float = 1.0, asked: int | None = None, **shape: int) -> ModelDemand:
    """`asked`: the max_len that the user gave."""
    return ModelDemand(name, architecture(**shape), "float32", max_num_seqs=64, rate=rate, max_len=asked)


QUICKSTART = [
    demand("arithmetic", 8.0),
    demand("atlas", 3.0, layers=3, kv_heads=2),
    demand("frontdesk", 1.0, layers=2, kv_heads=2, head_dim=128),
]


@st.composite
def fleets(draw: st.DrawFn) -> list[ModelDemand]:
    models = []
    for index in range(draw(st.integers(1, 6))):
        shape = {
            "layers": draw(st.integers(1, 40)),
            "kv_heads": draw(st.sampled_from([1, 2, 4])),
            "head_dim": draw(st.sampled_from([64, 80, 96, 128, 256])),
            "max_len": draw(st.integers(32, 40000)),
        }
        model = demand(f"m{index}", draw(st.floats(0.01, 100)), None, **shape)
        asked = draw(st.one_of(st.none(), st.integers(1, shape["max_len"])))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        models.append(dataclasses.replace(model, max_len=asked, dtype=dtype))
    return models


def check(plan: UnitPlan, models: list[ModelDemand]) -> None:
    """What every plan must keep."""
    assert [model.name for model in plan.models] == [model.name for model in models]
    pools = {pool.name: pool for pool in plan.pools}
    for pool in plan.pools:
        members = [model for model in plan.models if model.pool == pool.name]
        assert sorted(pool.models) == sorted(model.name for model in members)
        # Page 0 is the null page; every other page is in somebody's quota.
        assert sum(model.quota_pages for model in members) == pool.num_pages - 1
    for wanted, model in zip(models, plan.models, strict=True):
        shape, pool = wanted.architecture, pools[model.pool]
        item = 2 if wanted.dtype == "bfloat16" else 4
        assert pool.page_bytes == 2 * model.table.block_tokens * shape.head_dim * item
        longest = math.ceil(model.max_len / model.table.block_tokens) * shape.pages_per_block
        assert model.floor_pages <= longest <= pool.num_pages - 1, "the pool must hold one sequence of max_len"
        assert model.quota_pages >= model.floor_pages > 0
        assert 1 <= model.max_len <= shape.max_len
        assert wanted.max_len in (None, model.max_len)
        assert (model.table.num_blocks - 1) * shape.pages_per_block <= pool.num_pages - 1
        assert (model.table.num_blocks - 1) * shape.pages_per_block >= model.floor_pages
        assert 0 < model.share <= 1
        assert model.threads == round(model.share * plan.cores)


@pytest.mark.slow
@given(fleets(), st.integers(1, 4096), st.integers(1, 64))
def test_every_plan_keeps_the_invariants(models: list[ModelDemand], pool_mib: int, cores: int) -> None:
    machine = Machine(cores, 512 * GIB, 256 * GIB)
    try:
        plan = plan_unit(models, machine, pool_bytes=pool_mib * MIB)
    except PlanError as error:
        keys = {problem.key for problem in error.problems}
        assume(keys != {"kv_pool.size"})  # too small a pool is refused; nothing else may be
        raise
    assert plan.pool_bytes <= pool_mib * MIB
    check(plan, models)


@given(fleets())
def test_an_auto_pool_always_holds_one_sequence_of_each_model(models: list[ModelDemand]) -> None:
    machine = Machine(8, 512 * GIB, 256 * GIB)
    plan = plan_unit(models, machine)
    check(plan, models)
    assert plan.pool_bytes <= machine.memory_bytes // 2


@pytest.mark.slow
@given(fleets())
def test_the_size_that_an_error_asks_for_is_enough(models: list[ModelDemand]) -> None:
    machine = Machine(8, 512 * GIB, 256 * GIB)
    with pytest.raises(PlanError) as caught:
        plan_unit(models, machine, pool_bytes=1)
    asked = int(caught.value.problems[0].message.partition("at least ")[2].partition("MiB")[0])
    check(plan_unit(models, machine, pool_bytes=asked * MIB), models)


@given(fleets(), st.integers(1, 6), st.integers(0, 6))
def test_of_models_that_sleep_those_awake_together_have_room(
    models: list[ModelDemand], together: int, awake: int
) -> None:
    """Whichever they are: for a sequence of each. The fewer, the longer it is; the longest one is as long as before."""
    machine, size = Machine(8, 512 * GIB, 256 * GIB), 64 * GIB
    models = [dataclasses.replace(model, sleeps=index >= awake) for index, model in enumerate(models)]
    plan = plan_unit(models, machine, pool_bytes=size, together=together)
    sleeping = {model.name for model in models if model.sleeps}
    for pool in plan.pools:
        members = [model for model in plan.models if model.pool == pool.name]
        floors = sorted((model.floor_pages for model in members if model.name in sleeping), reverse=True)
        always = [model for model in members if model.name not in sleeping]
        assert sum(model.floor_pages for model in always) + sum(floors[:together]) <= pool.num_pages - 1
        assert all(model.quota_pages >= model.floor_pages for model in always)
        assert sum(model.quota_pages for model in members) == pool.num_pages - 1
    every = plan_unit(models, machine, pool_bytes=size, together=len(models))
    for one, other in zip(plan.models, every.models, strict=True):
        assert one.floor_pages >= other.floor_pages
        assert one.max_len == other.max_len


@pytest.mark.parametrize("sleeps", [False, True])
def test_nobodys_length_depends_on_who_is_declared(sleeps: bool) -> None:
    models = [dataclasses.replace(demand(f"m{n}", max_len=131072), sleeps=sleeps) for n in range(24)]
    (alone,) = plan_unit(models[:1], MACHINE, pool_bytes=256 * MIB).models
    many = plan_unit(models, MACHINE, pool_bytes=256 * MIB, together=3)
    assert [model.max_len for model in many.models] == [alone.max_len] * 24
    pages = math.ceil(alone.max_len / alone.table.block_tokens) * models[0].architecture.pages_per_block
    assert (
        0
        <= many.pools[0].num_pages - 1 - pages
        < models[0].architecture.pages_per_block * (1 + 32 // alone.table.block_tokens)
    )
    # What a model can count on is for those that are awake together.
    few = plan_unit(models[:3], MACHINE, pool_bytes=256 * MIB)
    every = many if not sleeps else plan_unit(models, MACHINE, pool_bytes=256 * MIB)
    assert every.models[0].floor_pages < few.models[0].floor_pages // 7
    assert not sleeps or [model.floor_pages for model in many.models] == [few.models[0].floor_pages] * 24


def test_as_many_are_awake_as_their_weights_have_room() -> None:
    wide = dataclasses.replace(architecture(), intermediate=64 * 256)
    models = [dataclasses.replace(demand(f"m{n}"), architecture=wide) for n in range(6)]
    weights = models[0].architecture.weight_bytes("float32")
    asleep = [dataclasses.replace(model, sleeps=n > 0) for n, model in enumerate(models)]
    for room, count in ((0, 1), (2 * weights, 1), (3 * weights, 2), (4 * weights - 1, 2), (99 * weights, 5)):
        assert awake_together(asleep, room) == count
    # On a CPU the machine's memory says it.
    here = dataclasses.replace(MACHINE, memory_bytes=4 * weights + weights // 2)
    plan = plan_unit(asleep, here, pool_bytes=32 * MIB)
    assert plan.models == plan_unit(asleep, here, pool_bytes=32 * MIB, together=3).models
    assert plan.models != plan_unit(asleep, here, pool_bytes=32 * MIB, together=2).models


def test_quickstart() -> None:
    plan = plan_unit(QUICKSTART, MACHINE, pool_bytes=256 * MIB)
    check(plan, QUICKSTART)
    assert len(plan.pools) == 1
    assert [model.table.block_tokens for model in plan.models] == [64, 64, 32]
    assert [model.max_len for model in plan.models] == [2048] * 3
    assert [(model.threads, model.share) for model in plan.models] == [(1, 0.5)] * 3
    assert "256 MiB in 8192 pages of 32 KiB" in plan.notes[0]


def test_quotas_follow_rate_times_layers_times_heads() -> None:
    models = [demand("a", 8.0, 64), demand("b", 3.0, 64, layers=3, kv_heads=2), demand("c", 1.0, 64)]
    plan = plan_unit(models, MACHINE, pool_bytes=256 * MIB)
    weights = [model.rate * model.architecture.pages_per_block for model in models]
    for model, weight in zip(plan.models, weights, strict=True):
        assert model.quota_pages == pytest.approx((plan.pools[0].num_pages - 1) * weight / sum(weights), abs=1.5)


def test_quotas_follow_the_lengths_of_requests() -> None:
    models = [
        dataclasses.replace(demand(name, 1.0, 64), prompt_tokens=tokens, output_tokens=1)
        for name, tokens in (("a", 199), ("b", 599))
    ]
    plan = plan_unit(models, MACHINE, pool_bytes=256 * MIB)
    quarter = (plan.pools[0].num_pages - 1) / 4
    assert [model.quota_pages for model in plan.models] == pytest.approx([quarter, 3 * quarter], abs=1.5)


def test_pools_share_memory_by_demand_and_it_is_told() -> None:
    models = [demand("a", 3.0, 64), dataclasses.replace(demand("b", 1.0, 64), dtype="bfloat16")]
    plan = plan_unit(models, MACHINE, pool_bytes=700 * MIB)
    by_dtype = {pool.dtype: pool.num_pages * pool.page_bytes for pool in plan.pools}
    assert by_dtype["float32"] == pytest.approx(600 * MIB, rel=0.001)
    assert by_dtype["bfloat16"] == pytest.approx(100 * MIB, rel=0.001)
    assert "pools of their own" in plan.notes[-1]


def test_auto_lengths_are_cut_to_what_the_pool_holds_and_it_is_told() -> None:
    models = [
        demand("short"),
        dataclasses.replace(demand("long"), architecture=architecture(max_len=131072)),
    ]
    plan = plan_unit(models, MACHINE, pool_bytes=256 * MIB)
    short, long = plan.models
    assert short.max_len == 2048
    assert 2048 <= long.max_len < 131072
    assert long.max_len % 32 == 0
    assert any(f"max_len of long is {long.max_len} tokens instead of 131072" in note for note in plan.notes)
    assert (plan.pools[0].num_pages - 1) // long.table.block_tokens < long.max_len <= plan.pools[0].num_pages * 32
    # both floors take at most half, so that quota can move
    assert short.floor_pages + long.floor_pages <= plan.pools[0].num_pages // 2


@pytest.mark.parametrize(
    ("models", "machine", "arguments", "key", "words"),
    [
        ([demand("a", asked=2048)], MACHINE, {"pool_bytes": MIB}, "kv_pool.size", "must be at least 17MiB"),
        ([demand("a", asked=2048)], MACHINE, {"pool_bytes": MIB}, "kv_pool.size", "2048 tokens of a alone take 16 MiB"),
        ([demand("a", asked=4096)], MACHINE, {}, "max_len", "4096 tokens are more than the model was made for (2048)"),
        ([demand("a", head_dim=72)], MACHINE, {}, "path", "head size 72"),
        ([demand("a")], MACHINE, {"cores": 3}, "cluster.cores", "3 cores are asked for, but this machine has 2"),
        ([dataclasses.replace(demand("a"), threads=4)], MACHINE, {}, "threads", "4 threads are more than the 2 cores"),
        ([demand("a")], Machine(2, 8 * GIB, 64 * MIB), {"pool_bytes": 256 * MIB}, "kv_pool.size", "/dev/shm"),
        ([demand("a", layers=400, kv_heads=64)], Machine(2, 3 * GIB), {}, "kv_pool.size", "more than half of the memory"),
        ([demand("a", layers=4000)], Machine(2, 4 * GIB), {"pool_bytes": 2 * GIB}, "models", "do not fit into the memory"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_change(
    models: list[ModelDemand], machine: Machine, arguments: dict[str, int], key: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_unit(models, machine, **arguments)
    assert key in {problem.key for problem in caught.value.problems}
    assert words in str(caught.value)


def test_an_auto_pool_stays_within_a_tenth_of_the_memory_and_the_shared_memory() -> None:
    models = [demand("a", 1000.0, layers=32, kv_heads=4)]
    assert plan_unit(models, Machine(2, 40 * GIB)).pool_bytes <= 4 * GIB
    assert plan_unit(models, Machine(2, 40 * GIB, GIB)).pool_bytes <= 0.8 * GIB + MIB
    # One of four units takes its part.
    assert GIB - MIB <= plan_unit(models, Machine(2, 40 * GIB), units=4).pool_bytes <= GIB + MIB


def test_what_is_given_back_behind_a_window_has_no_room_in_an_auto_pool() -> None:
    """A quarter of the layers keeps all of 8,192 tokens, the others 1,024 of them: 11 of 32 parts."""
    whole = demand("a", 4.0, layers=32, kv_heads=4, max_len=8192)
    windowed = dataclasses.replace(
        whole, architecture=dataclasses.replace(whole.architecture, window=1024, windowed=tuple(range(24)))
    )
    machine = Machine(2, 1024 * GIB)
    kept = plan_unit([windowed], machine).pool_bytes / plan_unit([whole], machine).pool_bytes
    assert kept == pytest.approx(11 / 32, rel=0.01)
    on_gpus = [dataclasses.replace(model, device="cuda") for model in (windowed, whole)]
    assert on_gpus[0].demand == on_gpus[1].demand, "engines on GPUs keep all pages"
    # The one that holds less of each sequence has the smaller part of what is shared.
    long = [
        dataclasses.replace(model, name=name, prompt_tokens=8191, output_tokens=1)
        for name, model in (("a", windowed), ("b", whole))
    ]
    assert long[0].demand / long[1].demand == pytest.approx(11 / 32)


@pytest.mark.slow
@given(fleets(), st.data())
def test_a_part_of_a_fleet_can_have_the_blocks_of_the_whole(models: list[ModelDemand], data: st.DataObject) -> None:
    """Replicas in other units exchange pages only if blocks are equal."""
    machine = Machine(8, 512 * GIB, 256 * GIB)
    whole = {model.name: model for model in plan_unit(models, machine).models}
    pages = {pool.name: pool.page_bytes for pool in plan_unit(models, machine).pools}
    some = data.draw(st.lists(st.sampled_from(models), min_size=1, unique_by=lambda model: model.name))
    part = [dataclasses.replace(model, block_tokens=whole[model.name].table.block_tokens) for model in some]
    plan = plan_unit(part, machine)
    check(plan, part)
    of = {pool.name: pool.page_bytes for pool in plan.pools}
    for model in plan.models:
        assert model.table.block_tokens == whole[model.name].table.block_tokens
        assert of[model.pool] == pages[whole[model.name].pool]


@pytest.mark.parametrize(("cores", "models", "threads"), [(1, 1, 1), (2, 3, 1), (8, 1, 4), (8, 3, 2), (32, 3, 8)])
def test_threads_leave_room_for_a_prefill_beside_every_decode(cores: int, models: int, threads: int) -> None:
    plan = plan_unit([demand(f"m{i}") for i in range(models)], Machine(cores, 24 * GIB))
    assert {model.threads for model in plan.models} == {threads}


def test_nothing_to_plan() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        plan_unit([], MACHINE)


def test_a_model_that_keeps_no_kv_takes_no_pages_and_leaves_the_pool_to_the_others() -> None:
    encoder = ModelDemand(
        "encoder", dataclasses.replace(architecture(head_dim=32), pooling=True, causal=False), "float32"
    )
    alone = plan_unit(QUICKSTART, MACHINE, pool_bytes=64 * MIB)
    plan = plan_unit([*QUICKSTART, encoder], MACHINE, pool_bytes=64 * MIB)
    assert plan.pools == alone.pools
    assert [model.quota_pages for model in plan.models] == [*(model.quota_pages for model in alone.models), 0]
    assert "encoder keeps no KV and takes no pages" in plan.notes
    # Without others there is the smallest pool that a memory manager takes.
    (pool,) = plan_unit([encoder], MACHINE).pools
    assert (pool.num_pages, pool.models) == (2, ())
    with pytest.raises(PlanError, match="served on CPU only"):
        plan_unit([dataclasses.replace(encoder, device="cuda")], MACHINE, pool_bytes=64 * MIB)
