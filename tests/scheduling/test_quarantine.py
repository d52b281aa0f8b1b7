"""Who is suspected of making engines fail, who is computed alone, and who is the culprit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.scheduling.quarantine import (
    ALONE_SECONDS,
    LONGEST_PROBATION_STEPS,
    PROBATION_STEPS,
    Quarantine,
    failed,
    is_culprit,
    is_suspect,
    submitted,
)
from muxserve.wire import Cause, Failures

CRASH, KILL = Cause.CRASH, Cause.KILL


def after(*failures: tuple[Cause, int], before: Failures | None = None) -> Failures:
    """The record of a request after these failures, each with the size of its batch."""
    record = before or Failures()
    for cause, among in failures:
        record = failed(record, cause, among)
    return record


def test_two_crashes_among_others_make_a_suspect_and_one_alone_the_culprit() -> None:
    once = after((CRASH, 8))
    assert not is_suspect(once)
    twice = after((CRASH, 8), (CRASH, 3))
    assert is_suspect(twice)
    assert not is_culprit(twice)
    assert is_culprit(after((CRASH, 1), before=twice))


def test_whoever_just_happens_to_be_the_only_one_is_not_yet_the_culprit() -> None:
    assert not is_culprit(after((CRASH, 1)))
    assert not is_culprit(after((CRASH, 1), (CRASH, 1)))
    assert is_culprit(after((CRASH, 1), (CRASH, 1), (CRASH, 1)))


def test_kills_from_outside_need_more_evidence() -> None:
    assert not is_suspect(after(*[(KILL, 8)] * 2))
    assert is_suspect(after(*[(KILL, 8)] * 3))
    assert not is_culprit(after(*[(KILL, 8)] * 3, (KILL, 1), (KILL, 1)))
    assert is_culprit(after(*[(KILL, 8)] * 3, *[(KILL, 1)] * 3))
    assert is_suspect(after((CRASH, 8), (KILL, 8), (KILL, 8)))
    assert after((Cause.NONE, 1)) == Failures()


def test_kills_before_a_token_that_has_come_since_do_not_count() -> None:
    record = Failures()
    for tokens in range(1, 50):
        record = submitted(failed(record, KILL, 1), tokens)
        assert not is_suspect(record)
    # Crashes do.
    record = submitted(after((CRASH, 4), (CRASH, 4)), 10)
    assert is_suspect(record)


@given(st.lists(st.tuples(st.sampled_from([CRASH, KILL]), st.integers(2, 9)), max_size=20))
def test_nobody_is_condemned_who_was_never_alone(failures: list[tuple[Cause, int]]) -> None:
    assert not is_culprit(after(*failures))


# ---------------------------------------------------------------- who is alone

SUSPECT = Failures(crashes=2)


def quarantine(*names: str, record: Failures = SUSPECT) -> Quarantine:
    made = Quarantine()
    for name in names:
        made.came(name, record, 0)
    return made


def test_without_suspects_nobody_is_alone() -> None:
    made = quarantine("r", record=Failures(crashes=1))
    assert not made
    assert made.alone({"r"}, 0.0) is None
    made.failed(["r", "s"], CRASH)
    assert made.record("r").crashes == 2
    assert made.record("s").crashes == 1


def test_suspects_are_alone_one_after_the_other_in_the_engine_that_has_them() -> None:
    made = quarantine("r", "s")
    assert made.alone({"x"}, 0.0) is None
    assert made.alone({"x", "s"}, 0.0) == ("s", PROBATION_STEPS)
    assert made.alone({"r", "s"}, 0.0) == ("r", PROBATION_STEPS)
    made.decoded("r", 10)
    assert made.alone({"r", "s"}, 0.1) == ("r", PROBATION_STEPS - 10)
    made.decoded("r", 6)
    assert made.alone({"r", "s"}, 0.2) == ("s", PROBATION_STEPS)
    assert made.record("r") == Failures(cleared=1)
    made.left("s")
    assert not made
    assert made.alone({"r", "s"}, 0.3) is None


def test_a_suspect_holds_an_engine_for_a_bounded_time() -> None:
    made = quarantine("r")
    assert made.alone({"r"}, 5.0) is not None
    assert made.alone({"r"}, 5.0 + ALONE_SECONDS - 0.1) is not None
    assert made.alone({"r"}, 5.0 + ALONE_SECONDS) is None
    assert not made


def test_who_was_cleared_and_is_suspected_again_has_to_show_more() -> None:
    steps = []
    for cleared in range(8):
        alone = quarantine("r", record=Failures(crashes=2, cleared=cleared)).alone({"r"}, 0.0)
        assert alone is not None
        steps.append(alone.steps)
    assert steps[:3] == [16, 32, 64]
    assert max(steps) == LONGEST_PROBATION_STEPS


def test_nothing_is_kept_of_those_that_left() -> None:
    made = quarantine("r", "s")
    made.failed(["r", "t"], KILL)
    for name in "rst":
        made.left(name)
    assert (made._records, made._suspects) == ({}, {})


# ---------------------------------------------------------------- a machine with poison in it


@pytest.mark.parametrize("cause", [CRASH, KILL])
@given(poison=st.sets(st.integers(0, 19), max_size=4), seats=st.integers(2, 20))
def test_all_culprits_and_nobody_else_are_found(cause: Cause, poison: set[int], seats: int) -> None:
    """An engine that fails whenever it computes one of the `poison`; whoever gets past that is done in 20 steps."""
    waiting = [str(index) for index in range(20)]
    records = dict.fromkeys(waiting, Failures())
    done: dict[str, int] = {}
    found: set[str] = set()
    made = Quarantine()
    batch: list[str] = []
    failures = 0
    for now in range(10_000):
        while waiting and len(batch) < seats:
            name = waiting.pop(0)
            made.came(name, records[name], done.get(name, 0))
            batch.append(name)
        if not batch:
            break
        alone = made.alone(set(batch), float(now) / 1000)
        step = [alone.request_id] if alone else list(batch)
        if any(int(name) in poison for name in step):
            failures += 1
            made.failed(step, cause)
            for name in step:
                records[name] = made.record(name)
                made.left(name)
                batch.remove(name)
                if is_culprit(records[name]):
                    found.add(name)
                else:
                    waiting.append(name)
            continue
        for name in step:
            done[name] = done.get(name, 0) + 1
            if alone:
                made.decoded(name, 1)
            if done[name] >= 20:
                made.left(name)
                batch.remove(name)
    assert not batch
    assert found == {str(index) for index in poison}
    assert failures <= len(poison) * (3 if cause is CRASH else 6)


def test_a_record_is_small_on_the_wire() -> None:
    assert len(msgspec.msgpack.encode(Failures())) == 1
