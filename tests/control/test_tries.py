"""When a fleet file that is followed is applied again, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from muxserve.control.tries import FIRST_PAUSE, LONGEST_PAUSE, ApplyOutcome, FileTries


def play(tries: FileTries, result: Callable[[float], ApplyOutcome], seconds: int, start: int = 0) -> list[int]:
    """The times of the tries in that many seconds, looked for once a second."""
    tried = []
    for now in range(start, start + seconds):
        if tries.begin(now):
            tried.append(now)
            tries.ended(result(now), now)
    return tried


def test_what_fails_is_tried_again_after_growing_pauses_until_it_succeeds() -> None:
    tries = FileTries()
    assert play(tries, lambda _: ApplyOutcome.FAILED, 100) == []  # it has not changed
    tries.changed(100)
    there = 400
    tried = play(tries, lambda now: ApplyOutcome.DONE if now >= there else ApplyOutcome.FAILED, 10_000, 100)
    assert tried == [100, 105, 115, 135, 175, 255, 415]


def test_a_file_that_is_wrong_or_followed_is_not_tried_again_until_it_changes() -> None:
    for result in (ApplyOutcome.WRONG, ApplyOutcome.DONE):
        tries = FileTries()
        for start in (0, 1000):
            tries.changed(start)
            assert play(tries, lambda _, result=result: result, 1000, start) == [start]


def test_pauses_grow_to_a_longest_one_and_begin_anew_with_the_next_change() -> None:
    tries = FileTries()
    pauses = []
    tries.changed(0)
    for now in range(2000):
        assert tries.begin(1e6 * now)
        pauses.append(tries.ended(ApplyOutcome.FAILED, 1e6 * now))
    assert pauses[:8] == [5, 10, 20, 40, 80, 160, LONGEST_PAUSE, LONGEST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    tries.changed(0)
    assert tries.begin(0)
    assert tries.ended(ApplyOutcome.FAILED, 0) == FIRST_PAUSE


def test_a_try_that_a_users_command_has_made_needless_is_forgotten() -> None:
    tries = FileTries()
    tries.changed(0)
    assert tries.begin(0)
    tries.ended(ApplyOutcome.FAILED, 0)
    tries.forget()
    assert play(tries, lambda _: ApplyOutcome.FAILED, 1000) == []


@given(st.lists(st.tuples(st.floats(0, 1000), st.sampled_from([None, *ApplyOutcome]))))
def test_one_try_for_each_change_or_pause(events: list[tuple[float, ApplyOutcome | None]]) -> None:
    """None: the file changes. Otherwise it is looked whether to try, with that result."""
    tries, now, due = FileTries(), 0.0, None
    for passed, event in events:
        now += passed
        if event is None:
            tries.changed(now)
            due = now
        else:
            assert tries.begin(now) is (due is not None and due <= now)
            if due is not None and due <= now:
                pause = tries.ended(event, now)
                assert (pause is None) is (event is not ApplyOutcome.FAILED)
                due = None if pause is None else now + pause
