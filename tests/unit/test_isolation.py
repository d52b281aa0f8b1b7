"""Requests that engines failed with: counted, computed alone, and ended when they are the cause."""

from __future__ import annotations

import pytest

from muxserve.scheduling.quarantine import PROBATION_STEPS
from muxserve.wire import Cause, EngineDown, EngineHello, Failures, Lease, Lost, RequestFailed, StepFailed
from tests.unit.support import GATEWAY, Bench, model, to

HOST = b"controller"
SUSPECT = Failures(crashes=2)


def fail_step(bench: Bench, engine: str, *request_ids: str, lost: tuple[str, ...] = ()) -> list[Lost | RequestFailed]:
    """A step of an engine with these requests raises; what their gateway is told."""
    lives = {admit.request_id: admit.incarnation for admit in bench.admitted(engine)}
    message = StepFailed(list(request_ids), [lives[r] for r in request_ids], "ValueError: no", list(lost))
    sent = bench.say(engine.encode(), message)
    return [*to(GATEWAY, Lost, sent), *to(GATEWAY, RequestFailed, sent)]


def test_a_step_that_failed_costs_those_that_were_in_it_and_counts_against_them() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.decoding("s")
    bench.decoding("t")
    (lost,) = fail_step(bench, "a/decode", "r", "s")
    assert isinstance(lost, Lost)
    assert lost.request_ids == ["r", "s"]
    assert lost.failures == [Failures(crashes=1)] * 2
    assert "ValueError: no" in lost.reason
    assert set(bench.unit.request_table.held) == {"t"}
    state = bench.state()
    assert state["engines"]["a/decode"]["up"]
    assert state["models"]["a"]["failures"] == 1
    # The engine has dropped its lease, and gets another one for the rest.
    assert bench.lease("a/decode").lease_id > 0
    assert bench.state()["engines"]["a/decode"]["lease"]["left"] > 0


def test_what_was_lost_beside_a_step_does_not_count() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.decoding("s")
    (lost,) = fail_step(bench, "a/decode", "r", lost=("s",))
    assert isinstance(lost, Lost)
    assert dict(zip(lost.request_ids, lost.failures, strict=True)) == {"r": Failures(crashes=1), "s": Failures()}


@pytest.mark.parametrize(
    ("cause", "known"), [(Cause.CRASH, Failures(crashes=1)), (Cause.KILL, Failures(kills=1)), (Cause.NONE, None)]
)
def test_the_death_of_an_engine_counts_by_its_cause(cause: Cause, known: Failures | None) -> None:
    bench = Bench()
    bench.decoding("r")
    bench.submit("waits for the other engine")
    (lost,) = to(GATEWAY, Lost, bench.say(HOST, EngineDown("a", "decode", "killed", cause)))
    assert lost.request_ids == ["r"]
    assert lost.failures == ([known] if known else [])


def test_an_engine_without_a_lease_computes_nobody() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.report("a/decode", left=0, tokens=0)  # it waits for pages
    (lost,) = to(GATEWAY, Lost, bench.say(HOST, EngineDown("a", "decode", "killed", Cause.CRASH)))
    assert lost.failures == []


def test_a_suspect_is_computed_alone_in_both_engines_and_then_cleared() -> None:
    bench = Bench()
    bench.decoding("s")
    bench.submit("r", failures=SUSPECT)
    assert bench.lease("a/prefill").alone == "r"
    bench.hand_over("r")
    lease = bench.lease("a/decode")
    assert (lease.alone, [admit.request_id for admit in lease.admit]) == ("r", ["r"])
    assert lease.steps <= PROBATION_STEPS
    steps = 0
    while bench.lease("a/decode").alone:
        steps += bench.lease("a/decode").steps
        bench.report("a/decode", left=0, steps=bench.lease("a/decode").steps, running=2)
        assert steps <= 2 * PROBATION_STEPS
    assert steps >= PROBATION_STEPS
    # From here on all together again; what it had before does not count any more.
    (lost,) = fail_step(bench, "a/decode", "r", "s")
    assert isinstance(lost, Lost)
    known = dict(zip(lost.request_ids, lost.failures, strict=True))
    assert known == {"r": Failures(crashes=1, cleared=1), "s": Failures(crashes=1)}


def test_one_that_fails_alone_is_ended_with_the_reason() -> None:
    bench = Bench()
    bench.decoding("s")
    bench.submit("r", attempt=2, failures=SUSPECT)
    (failed,) = fail_step(bench, "a/prefill", "r")
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.attempt) == ("r", 2)
    assert "ValueError: no" in failed.message
    assert set(bench.unit.request_table.held) == {"s"}
    assert bench.state()["models"]["a"]["culprits"] == 1
    assert bench.state()["models"]["a"]["failures"] == 1


def test_one_whose_engine_dies_while_it_is_alone_is_ended_and_the_others_there_are_not_blamed() -> None:
    bench = Bench()
    bench.decoding("s")
    bench.submit("r", failures=SUSPECT)
    bench.hand_over("r")
    bench.report("a/decode", seconds=0.0, tokens=0, steps=0, running=2)  # it has the lease
    sent = bench.say(HOST, EngineDown("a", "decode", "killed by SIGSEGV", Cause.CRASH))
    (failed,) = to(GATEWAY, RequestFailed, sent)
    assert failed.request_id == "r"
    assert "SIGSEGV" in failed.message
    (lost,) = to(GATEWAY, Lost, sent)
    assert (lost.request_ids, lost.failures) == (["s"], [])
    bench.say(b"a/decode", EngineHello("a", "decode", 4711))
    assert not bench.unit.request_table.quarantine


def test_one_that_is_killed_from_outside_while_it_is_alone_is_tried_again() -> None:
    bench = Bench()
    bench.submit("r", failures=SUSPECT)
    bench.report("a/prefill", seconds=0.0, tokens=0, steps=0)
    (lost,) = to(GATEWAY, Lost, bench.say(HOST, EngineDown("a", "prefill", "killed by SIGKILL", Cause.KILL)))
    assert lost.failures == [Failures(crashes=2, kills=1, kills_alone=1)]


def test_an_engine_that_may_not_have_heard_yet_who_is_alone_tells_nothing_of_that() -> None:
    bench = Bench()
    bench.decoding("s")
    bench.submit("r", failures=SUSPECT)
    bench.hand_over("r")
    (lost,) = to(GATEWAY, Lost, bench.say(HOST, EngineDown("a", "decode", "killed by SIGSEGV", Cause.CRASH)))
    assert dict(zip(lost.request_ids, lost.failures, strict=True)) == {
        "r": Failures(crashes=3),
        "s": Failures(crashes=1),
    }


def test_suspects_go_one_after_the_other_and_other_models_are_not_concerned() -> None:
    shares = {"prefill_share": 0.2, "decode_share": 0.2}
    bench = Bench(model("a", **shares), model("b", **shares))
    bench.decoding("x", "b")
    bench.submit("r", failures=SUSPECT)
    bench.submit("s", failures=SUSPECT)
    bench.submit("t")
    assert bench.lease("a/prefill").alone == "r"
    bench.hand_over("r")
    assert bench.lease("a/prefill").alone == "s"
    bench.hand_over("s")
    assert bench.lease("a/decode").alone == "r"
    assert not bench.lease("b/decode").alone


def test_nothing_is_kept_of_requests_that_ended() -> None:
    bench = Bench()
    bench.submit("r", failures=SUSPECT, max_tokens=1)
    bench.report("a/prefill", finished=["r"], running=0)
    assert not bench.unit.request_table.quarantine
    assert not bench.unit.request_table.quarantine._records


@pytest.mark.parametrize("policy", ["rolling", "free", "slack"])
def test_a_suspect_is_computed_alone_in_an_engine_of_both_phases(policy: str) -> None:
    bench = Bench(model("a", shape="one", rolling=policy == "rolling"), policy=policy)
    bench.submit("r", failures=SUSPECT)
    lease = bench.lease("a/both")
    assert lease.alone == "r"
    bench.submit("s")
    leases = [m for _, m in bench.sent if isinstance(m, Lease)]
    # Others may enter meanwhile, but sit still.
    assert {each.alone for each in leases} == {"r"}
    (failed,) = fail_step(bench, "a/both", "r")
    assert isinstance(failed, RequestFailed)
    assert set(bench.unit.request_table.held) == {"s"}
