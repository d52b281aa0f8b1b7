from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.pools import BLOCK_STEP, MAX_BLOCK_TOKENS, KVShape, group_pools, page_bytes

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
SHAPES = st.lists(
    st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(["float32", "bfloat16"])), min_size=1, max_size=8
).map(lambda drawn: [KVShape(f"m{i}", head_dim, dtype) for i, (head_dim, dtype) in enumerate(drawn)])


@given(SHAPES)
def test_every_model_is_in_one_pool_whose_pages_fit_it(shapes: list[KVShape]) -> None:
    groups = group_pools(shapes)
    by_name = {shape.name: shape for shape in shapes}
    assert sorted(name for group in groups for name in group.models) == sorted(by_name)
    for group in groups:
        for name, tokens in zip(group.models, group.block_tokens, strict=True):
            shape = by_name[name]
            assert shape.dtype == group.dtype
            assert tokens % BLOCK_STEP == 0
            assert BLOCK_STEP <= tokens <= MAX_BLOCK_TOKENS
            assert page_bytes(tokens, shape.head_dim, shape.dtype) == group.page_bytes


@given(SHAPES)
def test_a_pool_more_is_only_made_when_needed(shapes: list[KVShape]) -> None:
    """No two pools of one dtype could be one."""
    groups = group_pools(shapes)
    by_name = {shape.name: shape for shape in shapes}
    for i, one in enumerate(groups):
        for other in groups[i + 1 :]:
            if one.dtype != other.dtype:
                continue
            dims = {by_name[name].head_dim for name in (*one.models, *other.models)}
            possible = [
                {dim * tokens for tokens in range(BLOCK_STEP, MAX_BLOCK_TOKENS + 1, BLOCK_STEP)} for dim in dims
            ]
            assert not set.intersection(*possible)


def blocks(*shapes: tuple[int, str]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    named = [KVShape("abcdef"[i], head_dim, dtype) for i, (head_dim, dtype) in enumerate(shapes)]
    return [(group.models, group.block_tokens) for group in group_pools(named)]


def test_head_64_with_64_tokens_and_head_128_with_32_tokens_share() -> None:
    assert blocks((64, "float32"), (64, "float32"), (128, "float32")) == [(("a", "b", "c"), (64, 64, 32))]


def test_one_model_has_the_smallest_blocks() -> None:
    assert blocks((64, "bfloat16")) == [(("a",), (32,))]


def test_head_64_and_96_share_through_larger_blocks() -> None:
    assert blocks((64, "float32"), (96, "float32")) == [(("a", "b"), (96, 64))]


def test_latents_share_with_heads_through_larger_blocks() -> None:
    assert blocks((288, "bfloat16")) == [(("a",), (32,))]
    assert blocks((288, "bfloat16"), (64, "bfloat16")) == [(("a", "b"), (64, 288))]
    assert blocks((128, "bfloat16"), (288, "bfloat16")) == [(("a", "b"), (288, 128))]


def test_pages_are_as_large_as_states_want_them() -> None:
    shapes = [KVShape("a", 64, "bfloat16", least_bytes=30_000), KVShape("b", 128, "bfloat16")]
    (group,) = group_pools(shapes)
    assert group.page_bytes >= 30_000
    assert group.block_tokens == (128, 64)
    (largest,) = group_pools([KVShape("a", 64, "bfloat16", least_bytes=1 << 30)])
    assert largest.block_tokens == (256,)


def test_another_dtype_has_a_pool_of_its_own() -> None:
    assert blocks((64, "float32"), (64, "bfloat16")) == [(("b",), (32,)), (("a",), (32,))]


def test_odd_head_sizes_have_a_pool_of_their_own() -> None:
    # 112 x t1 = 64 x t2 needs blocks beyond the bound
    groups = blocks((64, "float32"), (112, "float32"), (160, "float32"))
    assert len(groups) == 2


def test_many_head_sizes_are_planned_quickly() -> None:
    assert sum(len(models) for models, _ in blocks(*((dim, "float32") for dim in (64, 80, 96, 112, 128, 192)))) == 6
