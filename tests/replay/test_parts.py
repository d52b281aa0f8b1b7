"""Prompts, bodies, the fit of latencies alone, and what counts as a late client."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.metrics import RequestRecord
from muxserve.replay.alone import fit
from muxserve.replay.dialect import DIALECTS, Choice, Delta, Dialect, error_words
from muxserve.replay.endpoint import EndpointAnswer
from muxserve.replay.prompts import Prompts
from muxserve.replay.run import Lateness

PROMPTS = Prompts(7)


@given(st.integers(-100, 10_000_000), st.integers(1, 40_000))
def test_prompts_have_their_length_and_ids_their_range(number: int, tokens: int) -> None:
    ids = PROMPTS.ids(number, tokens)
    assert len(ids) == tokens
    assert all(10 <= token <= 400 for token in ids)
    assert len(PROMPTS.text(number, tokens).split()) == tokens


def test_prompts_share_no_prefix() -> None:
    starts = {tuple(PROMPTS.ids(number, 50)[:4]) for number in range(-10, 50_000)}
    assert len(starts) == 50_010
    # Beyond the mark they are cut from different places.
    assert len({tuple(PROMPTS.ids(number, 50)[4:20]) for number in range(1000)}) > 950
    assert PROMPTS.ids(5, 30) == Prompts(7).ids(5, 30) != Prompts(8).ids(5, 30)


@pytest.mark.parametrize("bounds", [(5, 5), (-1, 4)])
def test_ids_need_a_range(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="token ids need"):
        Prompts(0, *bounds)


@pytest.mark.parametrize("dialect", DIALECTS, ids=Dialect.words)
def test_bodies(dialect: Dialect) -> None:
    body = json.loads(dialect.body(PROMPTS, 3, "m", 20, 9))
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 9, True)
    assert body.get("ignore_eos", False) is dialect.ignore_eos
    if dialect.chat:
        assert len(body["messages"][0]["content"].split()) == 20
    elif dialect.ids:
        assert body["prompt"] == PROMPTS.ids(3, 20)
    else:
        assert len(body["prompt"].split()) == 20
    assert "chat" in dialect.path if dialect.chat else "chat" not in dialect.path


def test_words_follow_what_the_server_counts() -> None:
    dialect = Dialect(ids=False, ignore_eos=True, words_per_token=0.5)
    assert len(json.loads(dialect.body(PROMPTS, 1, "m", 100, 1))["prompt"].split()) == 50


def test_a_role_is_no_token() -> None:
    assert not Choice(delta=Delta(content="")).has_token
    assert Choice(delta=Delta(content="x")).has_token
    assert Choice(delta=Delta(reasoning_content="x")).has_token
    # A piece of a completion stands for a token even if its text is still empty (half a character).
    assert Choice(text="").has_token
    assert Choice(text="x", finish_reason="length").has_token
    assert not Choice(text="", finish_reason="length").has_token
    assert not Choice(delta=Delta(), finish_reason="stop").has_token


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no\\n such", "type": "x"}}', "no such"),
        (b'{"object": "error", "message": "no"}', "no"),
        (b'{"detail": [{"msg": "bad"}]}', "[{'msg': 'bad'}]"),
        (b"<html>oops</html>", "<html>oops</html>"),
        (b"", ""),
    ],
)
def test_errors_in_words(body: bytes, words: str) -> None:
    assert error_words(body) == words


def test_fit_of_latencies_alone() -> None:
    def answer(prompt: int, disturbance: float = 0.0) -> EndpointAnswer:
        first = 10.02 + 0.001 * prompt + disturbance
        return EndpointAnswer(10.0, first, first + 15 * 0.005, tokens=16)

    alone = fit({20: [answer(20), answer(20), answer(20, 0.5)], 220: [answer(220)] * 3})
    reference = alone.of(RequestRecord("m", 0.0, 120, 101))
    assert reference == pytest.approx((0.14 + 0.5, 0.14, 0.005))
    # One length only: nothing is known of the slope.
    flat = fit({20: [answer(20)]})
    assert flat.of(RequestRecord("m", 0.0, 5000, 1)).ttft == pytest.approx(0.04)


def test_of_answers_of_one_token_no_time_per_token_is_known() -> None:
    alone = fit({20: [EndpointAnswer(10.0, 10.5, 10.5, tokens=1)]})
    assert alone.of(RequestRecord("m", 0.0, 20, 1)) == (pytest.approx(0.5), pytest.approx(0.5), None)


def test_lateness() -> None:
    assert Lateness.of([]) is None
    late = Lateness.of([0.001] * 95 + [0.02] * 5)
    assert late is not None
    assert late.p99 == pytest.approx(0.02)
    assert late.max == 0.02
    assert late.disturbs(latency_p50=0.1)
    assert not late.disturbs(latency_p50=1.0)
    assert not Lateness.of([0.004] * 10).disturbs(latency_p50=0.0)
