"""What counts before a compiler sees a grammar, and that counting is quick whatever is sent."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.gateway.grammars.size import KINDS, MOST_ELEMENTS, measure, refusal
from muxserve.spec import GrammarLimits

LIMITS = GrammarLimits()
DEEP: dict[str, Any] = {}
for _ in range(5000):
    DEEP = {"type": "array", "items": DEEP}

SMALL: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 100}}}},
    {"json": '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000}'},
    {"json": {"enum": [f"value {i}" for i in range(1000)]}},
    {"json": {"$ref": "#"}},
    {"json": "no JSON"},
    {"regex": r"\d{3}-\d{4}(abc|[^]x]{2,5})*"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= ("a" | [b-d]{3,5}) item*\nitem ::= "x" # a note {999999999}'},
    {"grammar": "start: WORD ~ 3..5\nWORD: /[a-z]{3}/"},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}'},
    {"json_object": True},
    {},
]
LARGE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"enum": [f"value{i}" for i in range(200_000)]}}, "bytes; this server takes at most"),
    ({"json": json.dumps({"enum": [f"value{i}" for i in range(200_000)]})}, "bytes; this server takes at most"),
    ({"json": {"type": "string", "maxLength": 10**9}}, "repetitions written out"),
    ({"json": {"type": "string", "maxLength": 1e300}}, "repetitions written out"),
    ({"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}}, "repetitions written out"),
    (
        {"json": {"items": {"items": {"type": "string", "maxLength": 1000}, "maxItems": 1000}, "maxItems": 1000}},
        "repetitions written out",
    ),
    ({"json": {"type": "string", "pattern": "((a{1000}){1000}){1000}"}}, "repetitions written out"),
    ({"json": {"patternProperties": {"(x{9999}){9999}": {}}}}, "repetitions written out"),
    ({"json": {"additionalProperties": {"maxLength": 10**5}, "maxProperties": 10**5}}, "repetitions written out"),
    ({"json": DEEP}, "nested too deeply"),
    ({"json": "[" * 60_000}, "nested too deeply"),
    ({"regex": "(" * 30_000}, "nested too deeply"),
    ({"regex": "((a{1000}){1000}){1000}"}, "repetitions written out"),
    ({"regex": "a{" + "9" * 5000 + "}"}, "repetitions written out"),
    ({"regex": "|".join(["a"] * 50_000)}, "bytes; this server takes at most"),
    ({"choice": [f"choice {i}" for i in range(100_000)]}, "bytes; this server takes at most"),
    ({"choice": ["x" * 100_000]}, "bytes; this server takes at most"),
    ({"grammar": 'root ::= ("ab"{99999}){99999}'}, "repetitions written out"),
    ({"grammar": 'start: ("ab" ~ 99999) ~ 1..99999'}, "repetitions written out"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    ({"grammar": "root ::= " + " | ".join(f'"rule{i}"' for i in range(50_000))}, "bytes; this server takes at most"),
    ({"structural_tag": json.dumps({"format": {"json_schema": {"maxLength": 10**12}}})}, "repetitions written out"),
]


@pytest.mark.parametrize("structured", SMALL)
def test_what_is_usual_passes(structured: dict[str, Any]) -> None:
    assert refusal(structured, LIMITS) is None


@pytest.mark.parametrize(("structured", "words"), LARGE)
def test_what_is_too_large_is_said(structured: dict[str, Any], words: str) -> None:
    said = refusal(structured, LIMITS)
    assert said is not None
    assert words in said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("kind", "spec", "elements"),
    [
        ("regex", "abc", 3),
        ("regex", "(ab){10}c", 31),
        ("regex", r"\d{2,5}[x-z]{3}", 8),
        ("regex", "a{3,}b{,4}", 7),
        ("regex", "{", 1),
        ("grammar", 'root ::= "ab"{10}', 31),
        ("json", {"type": "string", "maxLength": 50}, 53),
        ("json", {"items": {"type": "integer"}, "maxItems": 7, "minItems": 3}, 17),
    ],
)
def test_repetitions_are_written_out(kind: str, spec: Any, elements: int) -> None:
    assert measure(kind, spec, LIMITS).elements == elements


def test_optional_properties_count_for_each_order_that_they_may_be_left_out_in() -> None:
    properties: dict[str, Any] = {f"p{i}": {} for i in range(100)}
    free = measure("json", {"properties": properties}, LIMITS).elements
    fixed = measure("json", {"properties": properties, "required": list(properties)}, LIMITS).elements
    assert free - fixed == 4900  # half of 100², less the 100 names under `required`


def json_values() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(
        [
            "type",
            "items",
            "maxItems",
            "minItems",
            "maxLength",
            "pattern",
            "enum",
            "properties",
            "anyOf",
            "required",
            "x",
        ]
    )
    leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5))


@settings(deadline=None, max_examples=300)
@given(json_values())
def test_any_json_is_counted_alike_as_text_and_as_a_value(value: Any) -> None:
    as_text = measure("json", json.dumps(value), LIMITS)
    assert 0 <= as_text.elements <= MOST_ELEMENTS
    if isinstance(value, (dict, list)):
        as_value = measure("json", value, LIMITS)
        assert (as_value.depth, as_value.elements) == (as_text.depth, as_text.elements)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["regex", "grammar", "json", "structural_tag"]),
    st.text("ab(){}[]|*+?,~./\"'\\#09\n-^", max_size=200),
)
def test_any_text_is_counted(kind: str, text: str) -> None:
    size = measure(kind, text, LIMITS)
    assert size.bytes == len(text.encode())
    assert 0 <= size.elements <= MOST_ELEMENTS


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["a{", "(", "[", "[^", "\\", '"', "/", "{1,", "~1", "a|", "(a{9}"]),
    st.sampled_from(KINDS[1:2] + KINDS[3:]),
)
def test_counting_takes_no_longer_than_reading(unit: str, kind: str) -> None:
    text = unit * (LIMITS.max_bytes // len(unit))
    began = time.process_time()
    measure(kind, text, LIMITS)
    assert time.process_time() - began < 2.0
