"""Every request's tokens reach its client once and in order, whatever happens below."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.gateway.routing.requests import RequestTable, Tracked, cut
from muxserve.vllm.pin import FINISH_ABORT
from tests.gateway.world import Out
from tests.support.requests import asking

STOP, ERROR = 0, 3


class Rows:
    """Stands for vLLM's logprobs: one row per token."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def slice_request(self, start: int, count: int) -> Rows:
        return Rows(self.rows[start : start + count])


def add(table: RequestTable, front_id: str = "front", model: str = "m") -> Tracked:
    request = Tracked(table.new_id(), front_id, asking(model, 7, 100, b"body"), arrival=1.0)
    table.add(request)
    table.assign(request, "u0")
    return request


def lose(table: RequestTable, request: Tracked) -> bool:
    """Its unit has died, and another has it."""
    going_on = table.next_attempt(request, died=True)
    if going_on:
        table.assign(request, "u0")
    return going_on


def give(table: RequestTable, request_id: str, attempt: int, offset: int, output: Out, now: float = 0.0) -> list[Out]:
    return [out for _, out in table.outputs([(request_id, attempt, offset)], [output], now).ready]  # type: ignore[misc]


@pytest.fixture
def table() -> RequestTable:
    return RequestTable("gw", max_tries=3)


def test_tokens_pass_under_the_front_ends_id(table: RequestTable) -> None:
    request = add(table)
    (out,) = give(table, request.request_id, 0, 0, Out(request.request_id, [5]), now=2.0)
    assert (out.request_id, out.new_token_ids) == ("front", [5])
    (out,) = give(table, request.request_id, 0, 1, Out(request.request_id, [6, 7], finish_reason=STOP), now=3.0)
    assert out.new_token_ids == [6, 7]
    assert request.emitted == [5, 6, 7]
    assert (request.first_token_at, request.last_token_at) == (2.0, 3.0)
    assert request.request_id not in table
    assert len(table) == 0


def test_tokens_of_others_are_dropped(table: RequestTable) -> None:
    request = add(table)
    assert give(table, "unknown", 0, 0, Out("unknown", [5])) == []
    assert give(table, request.request_id, 1, 0, Out(request.request_id, [5])) == []
    assert request.emitted == []


def test_lost_requests_go_on_from_what_was_emitted(table: RequestTable) -> None:
    request = add(table)
    give(table, request.request_id, 0, 0, Out(request.request_id, [5, 6]))
    assert lose(table, request)
    submit = request.submit()
    assert (submit.attempt, submit.output_tokens, submit.request) == (1, [5, 6], asking("m", 7, 100, b"body"))
    assert give(table, request.request_id, 0, 2, Out(request.request_id, [99])) == []
    (out,) = give(table, request.request_id, 1, 2, Out(request.request_id, [7]))
    assert out.new_token_ids == [7]


def test_a_submit_does_not_change_with_later_tokens(table: RequestTable) -> None:
    request = add(table)
    submit = request.submit()
    give(table, request.request_id, 0, 0, Out(request.request_id, [5]))
    assert submit.output_tokens == []


def test_decode_tokens_that_overtake_the_first_wait_for_it(table: RequestTable) -> None:
    request = add(table)
    assert give(table, request.request_id, 0, 2, Out(request.request_id, [7], finish_reason=STOP)) == []
    assert give(table, request.request_id, 0, 1, Out(request.request_id, [6])) == []
    assert table._gapped
    outs = give(table, request.request_id, 0, 0, Out(request.request_id, [5]))
    assert [out.new_token_ids for out in outs] == [[5], [6], [7]]
    assert outs[-1].finish_reason == STOP
    assert not table._gapped
    assert len(table) == 0


def test_seen_tokens_are_cut_off_with_their_logprobs(table: RequestTable) -> None:
    request = add(table)
    give(table, request.request_id, 0, 0, Out(request.request_id, [5, 6]))
    (out,) = give(table, request.request_id, 0, 1, Out(request.request_id, [6, 7, 8], Rows([60, 70, 80])))
    assert out.new_token_ids == [7, 8]
    assert out.new_logprobs.rows == [70, 80]
    assert give(table, request.request_id, 0, 0, Out(request.request_id, [5, 6], Rows([50, 60]))) == []
    assert request.emitted == [5, 6, 7, 8]


def test_a_finish_without_new_tokens_still_ends_the_request(table: RequestTable) -> None:
    request = add(table)
    give(table, request.request_id, 0, 0, Out(request.request_id, [5]))
    (out,) = give(table, request.request_id, 0, 0, Out(request.request_id, [5], finish_reason=STOP))
    assert (out.new_token_ids, out.finish_reason) == ([], STOP)
    assert len(table) == 0


def test_prompt_logprobs_are_told_once(table: RequestTable) -> None:
    request = add(table)
    (out,) = give(table, request.request_id, 0, 0, Out(request.request_id, [5], None, "prompt"))
    assert out.new_prompt_logprobs_tensors == "prompt"
    lose(table, request)
    (out,) = give(table, request.request_id, 1, 1, Out(request.request_id, [6], None, "prompt again"))
    assert out.new_prompt_logprobs_tensors is None


def test_a_gap_that_stays_open_is_served_anew_under_another_id(table: RequestTable) -> None:
    request = add(table)
    old_id = request.request_id
    give(table, old_id, 0, 0, Out(old_id, [5]), now=10.0)
    give(table, old_id, 0, 2, Out(old_id, [7]), now=11.0)
    assert table.overdue(11.5) == []
    assert table.overdue(13.0) == [request]
    assert lose(table, request)
    table.rename(request)
    assert request.request_id != old_id
    assert table.get(old_id) is None
    assert (request.submit().attempt, request.submit().output_tokens) == (1, [5])
    assert not table._gapped
    assert give(table, old_id, 0, 1, Out(old_id, [6])) == []
    (out,) = give(table, request.request_id, 1, 1, Out(request.request_id, [6]))
    assert (out.request_id, out.new_token_ids) == ("front", [6])


def test_what_an_engine_drops_is_not_finished(table: RequestTable) -> None:
    request = add(table)
    taken = table.outputs([(request.request_id, 0, 0)], [Out(request.request_id, [5], finish_reason=FINISH_ABORT)], 0.0)
    assert taken.dropped == [request]
    ((_, out),) = taken.ready
    assert (out.new_token_ids, out.finish_reason) == ([5], None)
    assert request.request_id in table


def test_a_request_that_kills_its_engines_is_given_up(table: RequestTable) -> None:
    request = add(table)
    assert lose(table, request)
    assert lose(table, request)
    assert not lose(table, request)
    assert len(table) == 0
    assert table.count("u0") == 0


def test_progress_pardons_earlier_deaths(table: RequestTable) -> None:
    request = add(table)
    for n in range(20):
        assert lose(table, request)
        give(table, request.request_id, request.attempt, n, Out(request.request_id, [n]))
    assert request.emitted == list(range(20))


def test_what_is_only_sent_elsewhere_has_not_failed(table: RequestTable) -> None:
    request = add(table)
    for _ in range(20):
        assert table.next_attempt(request, died=False)
    assert request.submit().attempt == 20
    assert request.tries == 1


def test_units_are_counted(table: RequestTable) -> None:
    first, second, third = add(table, "a"), add(table, "b"), add(table, "c")
    table.assign(second, "u1")
    assert (table.count("u0"), table.count("u1"), table.count("u2")) == (2, 1, 0)
    assert table.at("u0") == [first, third]
    table.next_attempt(first, died=True)
    table.cancel("m", ["b"])
    give(table, third.request_id, 0, 0, Out(third.request_id, [1], finish_reason=STOP))
    assert (table.count("u0"), table.count("u1")) == (0, 0)
    assert table.at("u0") == []


def test_cancel_forgets_and_says_what_was_in_flight(table: RequestTable) -> None:
    mine, other = add(table, "same", "m"), add(table, "same", "n")
    assert table.cancel("m", ["same", "unknown"]) == [mine]
    assert table.cancel("m", ["same"]) == []
    assert give(table, mine.request_id, 0, 0, Out(mine.request_id, [5])) == []
    assert table.all() == [other]


def test_the_unit_is_asked_again_for_what_has_gone_quiet(table: RequestTable) -> None:
    request = add(table)
    table.assign(add(table, "elsewhere"), "u1")
    give(table, request.request_id, 0, 0, Out(request.request_id, [5]), now=10.0)
    assert table.quiet(14.0, {"u0"}) == []
    assert table.quiet(15.0, {"u0"}) == [request]
    assert (request.submit().attempt, request.submit().output_tokens, request.repeated_at) == (0, [5], {"u0"})
    assert table.quiet(24.0, {"u0"}) == []
    assert table.quiet(25.0, {"u0"}) == [request]
    give(table, request.request_id, 0, 1, Out(request.request_id, [6]), now=26.0)
    assert table.quiet(30.0, {"u0"}) == []
    assert table.quiet(31.0, {"u0"}) == [request]


def test_ids_are_short_and_never_reused() -> None:
    table = RequestTable("0123abcd")
    ids = [table.new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert max(map(len, ids)) < 20


def test_cut_keeps_what_was_not_seen() -> None:
    out = Out("r", [1, 2, 3], Rows([1, 2, 3]), new_sampling_mask=Rows([4, 5, 6]))
    cut(out, 2)
    assert (out.new_token_ids, out.new_logprobs.rows, out.new_sampling_mask.rows) == ([3], [3], [6])
    cut(out, 5)
    assert (out.new_token_ids, out.new_logprobs, out.new_sampling_mask) == ([], None, None)


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """A request's tokens, and the messages of each of its attempts in the order in which they come: (from, to).

    Every attempt but the last is cut short. Messages may come in any order, overlap, and repeat.
    """
    tokens = list(range(draw(st.integers(1, 12))))
    attempts = []
    for _ in range(draw(st.integers(1, 4))):
        bounds = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {0, len(tokens)})
        messages = list(pairwise(bounds))
        for start, end in list(messages):
            if draw(st.booleans()):
                messages.append((max(0, start - draw(st.integers(0, 3))), end))
        attempts.append(draw(st.permutations(messages)))
    return tokens, attempts


@settings(max_examples=300, deadline=None)
@given(lives(), st.data())
def test_whatever_comes_in_whatever_order_the_stream_is_whole(
    life: tuple[list[int], list[list[tuple[int, int]]]], data: st.DataObject
) -> None:
    tokens, attempts = life
    table = RequestTable("gw", max_tries=99)
    request = add(table)
    streamed: list[int] = []
    finishes = 0
    stale: list[tuple[str, int, int, list[int]]] = []
    for number, messages in enumerate(attempts):
        last = number == len(attempts) - 1
        begin = len(request.emitted)
        shown = messages if last else messages[: data.draw(st.integers(0, len(messages)))]
        for start, end in shown:
            if end <= begin or request.request_id not in table:
                continue
            if stale and data.draw(st.booleans()):
                request_id, attempt, offset, old = stale.pop()
                assert give(table, request_id, attempt, offset, Out(request_id, old)) == []
            part = tokens[max(start, begin) : end]
            out = Out(request.request_id, list(part), Rows(list(part)))
            if end == len(tokens) and last:
                out.finish_reason = STOP
            for each in give(table, request.request_id, request.attempt, max(start, begin), out):
                assert each.new_logprobs is None or each.new_logprobs.rows == each.new_token_ids
                streamed += each.new_token_ids
                finishes += each.finish_reason is not None
        if not last:
            stale.append((request.request_id, request.attempt, len(request.emitted), [777]))
            assert lose(table, request)
            assert request.submit().output_tokens == streamed
    if len(streamed) == len(tokens) and finishes == 0:
        # The whole text came before the last attempt began; its engine says so at once.
        outs = give(table, request.request_id, request.attempt, len(tokens), Out("", [], finish_reason=STOP))
        finishes += len(outs)
    assert streamed == tokens
    assert finishes == 1
    assert len(table) == 0


def test_a_pooled_answer_is_all_there_is_to_a_request_and_comes_once(table: RequestTable) -> None:
    request = add(table)
    pooled = Out(request.request_id, [], pooling_output=[0.5], finish_reason=STOP)
    assert give(table, request.request_id, 0, 0, pooled, now=3.0) == [pooled]
    assert (request.first_token_at, request.last_token_at) == (3.0, 3.0)
    assert len(table) == 0
    # An engine that is given up may have answered already.
    assert give(table, request.request_id, 0, 0, pooled, now=4.0) == []
