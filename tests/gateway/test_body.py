"""What is looked at in a body before anything else reads it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.gateway.http import body
from muxserve.gateway.http.body import MOST_PARTS, asked_by, check_tokens
from muxserve.gateway.http.errors import RequestError

MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [MESSAGE] * MOST_PARTS},
        {"messages": [[MESSAGE]] * 20_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MOST_PARTS}]},
        {"input": [MESSAGE] * MOST_PARTS},
        {"prompt": [[1]] * MOST_PARTS},
        {"tools": [{}] * MOST_PARTS},
        {"metadata": [[]] * MOST_PARTS},
    ],
)
def test_a_body_of_too_many_parts_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="more than 16384 objects and lists") as caught:
        asked_by(json.dumps(asked).encode())
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [[MESSAGE] * 5] * 1024},
        {"prompt": list(range(100_000))},
        {"prompt": "[{" * 100_000},
        {"prompt": '\\"[{' * 100_000},
        {"prompt": '\\\\"[{\\' * 100_000},
    ],
)
def test_a_long_text_is_one_part(asked: dict[str, object]) -> None:
    asked_by(json.dumps(asked).encode())


def _parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(_parts(each) for each in value.values())
    return 1 + sum(_parts(each) for each in value) if isinstance(value, list) else 0


_TEXT = st.text('ab"\\[{\n\N{SNOWMAN}', max_size=6)
_JSON = st.recursive(
    st.none() | _TEXT | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(_JSON, st.booleans())
def test_parts_are_counted_outside_of_strings(value: object, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(body, "MOST_PARTS", -1)
        patched.setattr(body, "_FIRST_QUOTES", -1)
        assert body._parts_of(json.dumps(value, ensure_ascii=ascii_only).encode()) == _parts(value)


@pytest.mark.parametrize(
    "asked",
    [
        {"tokens": [9] * 101},
        {"prompt": [9] * 101},
        {"input": [9] * 101},
        {"prompt": [[9] * 150, [8] * 150]},
        {"tokens": [-1] * 101},
    ],
)
def test_a_list_of_more_tokens_than_any_context_has_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="has a list of more than 100 tokens") as caught:
        check_tokens(asked_by(json.dumps(asked).encode()), 100)
    assert (caught.value.status, caught.value.param) == (400, next(iter(asked)))


@pytest.mark.parametrize(
    "asked",
    [
        {"tokens": [9] * 100},
        {"prompt": [[9] * 100, [8] * 100]},
        {"prompt": ["9," * 100]},
        {"prompt": "[9" + ",9" * 100},
        {"input": [{"content": "9," * 100}]},
        {"messages": [9] * 101},
    ],
)
def test_other_lists_are_none_of_tokens(asked: dict[str, object]) -> None:
    check_tokens(asked_by(json.dumps(asked).encode()), 100)
