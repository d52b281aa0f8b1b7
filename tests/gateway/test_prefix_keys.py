"""Prompts that begin alike have keys that begin alike, and no others."""

from __future__ import annotations

import random

from muxserve.gateway.routing.prefix_keys import prefix_keys
from muxserve.replicas.prefixes import KEY_BYTES, KEY_TOKENS, MOST_KEYS, keys_of


def test_prompts_that_begin_alike_have_keys_that_begin_alike() -> None:
    chance = random.Random(1)
    prompt = [chance.randrange(150_000) for _ in range(10 * KEY_TOKENS + 5)]
    keys = keys_of(prefix_keys(prompt))
    assert len(keys) == len(set(keys)) == 10
    assert {len(key) for key in keys} == {KEY_BYTES}
    for same in (0, 1, KEY_TOKENS - 1, KEY_TOKENS, 5 * KEY_TOKENS + 3):
        # The same tokens behind another one are another prefix.
        other = keys_of(prefix_keys([*prompt[:same], prompt[same] + 1, *prompt[same + 1 :]]))
        equal = [a == b for a, b in zip(keys, other, strict=True)]
        assert equal == [True] * (same // KEY_TOKENS) + [False] * (10 - same // KEY_TOKENS)
    assert prefix_keys(prompt[: KEY_TOKENS - 1]) == b""
    assert not set(keys) & set(keys_of(prefix_keys(prompt, "adapter/")))


def test_long_prompts_have_a_bounded_number_of_keys() -> None:
    assert len(prefix_keys(list(range(KEY_TOKENS * (MOST_KEYS + 3))))) == KEY_BYTES * MOST_KEYS


def test_prompts_with_other_images_are_alike_before_them() -> None:
    prompt = [7] * (6 * KEY_TOKENS)
    place = 2 * KEY_TOKENS + 1
    one, other = (keys_of(prefix_keys(prompt, images=[(place, name)])) for name in ("one", "other"))
    assert one == keys_of(prefix_keys(prompt, images=[(place, "one"), (len(prompt) * MOST_KEYS, "late")]))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 2 + [False] * 4
