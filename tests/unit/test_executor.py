"""The unit scheduler without sockets: every message in, every message out."""

from __future__ import annotations

import json

import pytest

from muxserve.scheduling.policies import POLICIES
from muxserve.spec import GpuSpec
from muxserve.unit.reconcile import RECONCILE_SECONDS
from muxserve.wire import (
    Abort,
    Admit,
    Cancel,
    EngineDown,
    EngineHello,
    EngineLost,
    EngineSuspect,
    GatewayDown,
    GatewayHello,
    HandOff,
    HandOver,
    HeldRequests,
    Joined,
    Lease,
    Lost,
    Refused,
    RequestTrace,
    Reset,
    Retire,
    Returned,
    Revive,
    ShowRequests,
    StateReply,
    StateRequest,
    StepReport,
    Stop,
    Submit,
    UnitHello,
)
from tests.support.requests import asking
from tests.unit.support import GATEWAY, REPLY_TO, Bench, Sent, model, to, unit_spec


def crowded() -> Bench:
    """Models a and b decode; c's request is handed over, and no compute is left for its decode engine."""
    shares = {"prefill_share": 0.2, "decode_share": 0.4}
    bench = Bench(*(model(name, **shares, quota_pages=300) for name in "abc"))
    for name in "ab":
        bench.decoding(f"r-{name}", name)
    bench.submit("r-c", "c")
    bench.hand_over("r-c", "c")
    return bench


# ---------------------------------------------------------------- a request's way


def test_greetings_are_answered() -> None:
    bench = Bench(up=False)
    (hello,) = to(GATEWAY, UnitHello, bench.say(GATEWAY, GatewayHello("g1", REPLY_TO)))
    assert hello.epoch == "unit-1"
    (reset,) = to("a/prefill", Reset, bench.say(b"a/prefill", EngineHello("a", "prefill", 4711)))
    assert reset.epoch == "unit-1"
    assert bench.state()["engines"]["a/prefill"] == {
        "up": True,
        "suspect": False,
        "pid": 4711,
        "requests": 0,
        "lease": None,
    }
    assert not bench.state()["engines"]["a/decode"]["up"]


@pytest.mark.parametrize("policy", sorted(name for name in POLICIES if name != "rolling"))
def test_a_request_goes_from_queue_to_prefill_to_decode_to_its_end(policy: str) -> None:
    bench = Bench(policy=policy)
    (lease,) = to("a/prefill", Lease, bench.submit("r", output_tokens=[], body=b"opaque"))
    (admit,) = lease.admit
    assert (admit.request_id, admit.body, admit.hand_off, admit.output_tokens) == ("r", b"opaque", None, [])
    assert (admit.gateway_epoch, admit.reply_to, admit.attempt) == ("g1", REPLY_TO, 0)
    handed = HandOver("r", admit.incarnation, key="key", blocks=2, computed_tokens=20, output_tokens=[7])
    sent = bench.say(
        b"a/prefill", StepReport(lease.lease_id, 0, seconds=0.01, tokens=20, running=0, waiting=0, handed=[handed])
    )
    (lease,) = to("a/decode", Lease, sent)
    (adopted,) = lease.admit
    assert (adopted.hand_off, adopted.output_tokens) == (HandOff("key", 20), [7])
    assert adopted.incarnation > admit.incarnation
    bench.say(b"a/decode", StepReport(lease.lease_id, 7, seconds=0.01, tokens=1, running=1, waiting=0))
    bench.say(b"a/decode", StepReport(lease.lease_id, 6, seconds=0.01, tokens=1, running=0, waiting=0, finished=["r"]))
    state = bench.state()
    assert state["models"]["a"]["finished"] == 1
    assert state["budget_used"] == 0.0
    assert not bench.unit.request_table.held
    assert not bench.unit.ledger.requests
    assert bench.memory.dropped == []


def test_a_request_that_ends_with_its_first_token_never_sees_the_decode_engine() -> None:
    bench = Bench()
    bench.submit("r", max_tokens=1)
    bench.report("a/prefill", finished=["r"], running=0)
    assert bench.admitted("a/decode") == []
    assert not bench.unit.request_table.held


def test_tenants_take_turns_by_what_they_were_served() -> None:
    """Who comes is lifted to the level of `flood`, which was there before; then it has had more than they."""
    bench = Bench(model("a", max_num_seqs=1))
    for n in range(3):
        bench.submit(f"flood{n}", prompt=60, tenant="flood")
    bench.submit("calm", tenant="calm")
    bench.submit("gold", prompt=30, tenant="gold", weight=2.0)
    for n in range(5):
        bench.report("a/prefill", left=0, finished=[bench.admitted("a/prefill")[n].request_id], running=0)
    order = [each.request_id for each in bench.admitted("a/prefill")]
    assert order == ["flood0", "flood1", "calm", "gold", "flood2"]


def test_of_a_traced_request_it_is_told_what_it_went_through() -> None:
    bench = Bench()
    bench.submit("r", prompt=40, traced=True)
    bench.submit("untraced")
    bench.now += 1.0
    bench.hand_over("r")
    assert bench.unit.request_table.traced == 1
    bench.now += 1.0
    (trace,) = to(GATEWAY, RequestTrace, bench.report("a/decode", finished=["r"], running=0))
    assert (trace.request_id, trace.attempt, trace.moves) == ("r", 0, 0)
    assert [stage.name for stage in trace.stages][:2] == ["queue", "prefill"]
    assert [stage.name for stage in trace.stages][-2:] == ["hand_over", "decode"]
    ages = [stage.ago for stage in trace.stages]
    assert ages == sorted(ages, reverse=True)
    assert (ages[0], ages[-1]) == (pytest.approx(2.0, abs=0.1), pytest.approx(1.0, abs=0.1))
    assert bench.unit.request_table.traced == 0


@pytest.mark.parametrize("end", ["cancelled", "lost", "returned"])
def test_a_traced_request_that_does_not_end_well(end: str) -> None:
    bench = Bench()
    bench.decoding("r", traced=True)
    if end == "cancelled":
        sent = bench.say(GATEWAY, Cancel(["r"]))
    elif end == "lost":
        sent = bench.say(b"controller/1", EngineDown("a", "decode", "killed"))
    else:
        incarnation = bench.admitted("a/decode")[-1].incarnation
        back = Returned("r", incarnation, output_tokens=[7, 8])
        bench.report("a/decode", returned=[back], running=0)
        sent = bench.say(GATEWAY, Cancel(["r"]))
    (trace,) = to(GATEWAY, RequestTrace, sent)
    names = [stage.name for stage in trace.stages]
    assert names[:4] == ["queue", "prefill", "hand_over", "decode"]
    assert names[4:] == (["queue", "prefill"] if end == "returned" else [])


def test_a_hand_over_during_a_decode_lease_joins_at_once() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.submit("s")
    first = bench.lease("a/decode").lease_id
    bench.hand_over("s")
    lease = bench.lease("a/decode")
    assert lease.lease_id > first
    assert [a.request_id for a in lease.admit] == ["s"]


def test_a_lease_is_renewed_before_it_is_used_up() -> None:
    bench = Bench()
    bench.decoding("r")
    steps = bench.lease("a/decode").steps
    assert bench.report("a/decode", left=steps - 1) == []
    (renewed,) = to("a/decode", Lease, bench.report("a/decode", left=steps // 2))
    assert renewed.steps >= 4
    assert renewed.admit == []


def test_a_returned_request_is_prefilled_again_before_others_with_its_tokens() -> None:
    bench = Bench(model("a", max_num_seqs=1), model("b"))
    admit = bench.decoding("r")
    bench.submit("s")
    assert [a.request_id for a in bench.admitted("a/prefill")] == ["r"], "the seat is taken"
    returned = Returned("r", admit.incarnation, [7, 8, 9])
    sent = bench.report("a/decode", returned=[returned], running=0)
    (lease,) = to("a/prefill", Lease, sent)
    (again,) = lease.admit
    assert (again.request_id, again.output_tokens, again.hand_off) == ("r", [7, 8, 9], None)
    assert again.incarnation > admit.incarnation
    assert bench.state()["models"]["a"]["returned"] == 1


def test_a_resubmission_keeps_its_output_tokens_and_goes_first() -> None:
    bench = Bench(model("a", max_num_seqs=1), model("b"))
    bench.decoding("busy")
    bench.submit("s")
    bench.submit("r", attempt=2, output_tokens=[5, 6])
    bench.report("a/decode", finished=["busy"], running=0)
    again = bench.admitted("a/prefill")[-1]
    assert (again.request_id, again.attempt, again.output_tokens) == ("r", 2, [5, 6])


def test_prompts_of_one_client_request_take_turns_with_others() -> None:
    bench = Bench(model("a", max_num_seqs=1), model("b"))
    bench.decoding("busy")
    for n in range(3):
        bench.submit(f"batch{n}", group="batch")
    bench.submit("single")
    order, inside = [], "busy"
    while len(order) < 4:
        bench.report("a/decode", finished=[inside], running=0)
        inside = bench.admitted("a/prefill")[-1].request_id
        order.append(inside)
        bench.hand_over(inside)
    assert order == ["batch0", "single", "batch1", "batch2"]


# ---------------------------------------------------------------- cancellation


def test_cancelling_where_a_request_is() -> None:
    bench = Bench(model("a", max_num_seqs=3), model("b"))
    bench.decoding("decoding")
    bench.submit("prefilling")
    bench.submit("more", prompt=60)
    bench.submit("queued")
    assert "queued" not in [a.request_id for a in bench.admitted("a/prefill")]
    sent = bench.say(GATEWAY, Cancel(["decoding", "prefilling", "queued", "nobody"]))
    assert [m.request_ids for m in to("a/decode", Abort, sent)] == [["decoding"]]
    assert [m.request_ids for m in to("a/prefill", Abort, sent)] == [["prefilling"]]
    assert set(bench.unit.request_table.held) == {"more"}
    assert bench.state()["models"]["a"]["cancelled"] == 3


def test_a_late_cancellation_spares_the_next_attempt() -> None:
    bench = Bench()
    bench.submit("r", attempt=1)
    bench.submit("s", attempt=1)
    bench.say(GATEWAY, Cancel(["r", "s"], [0, 1]))
    assert set(bench.unit.request_table.held) == {"r"}
    bench.say(GATEWAY, Cancel(["r"], [2]))
    assert not bench.unit.request_table.held


def test_cancelling_a_hand_over_gives_its_pages_up() -> None:
    bench = Bench()
    bench.submit("r")
    incarnation = bench.admitted("a/prefill")[-1].incarnation
    # Handed over while the decode engine is away: it waits there.
    bench.say(b"controller/1", EngineDown("a", "decode", "gone"))
    bench.hand_over("r")
    assert bench.state()["models"]["a"]["handed"] == 1
    bench.say(GATEWAY, Cancel(["r"]))
    assert bench.memory.dropped == [("a", f"key-r-{incarnation}")]


def test_a_hand_over_that_crosses_the_cancellation_is_given_up() -> None:
    bench = Bench()
    bench.submit("r")
    incarnation = bench.admitted("a/prefill")[-1].incarnation
    bench.say(GATEWAY, Cancel(["r"]))
    bench.hand_over("r")
    assert bench.memory.dropped == [("a", f"key-r-{incarnation}")]
    assert bench.admitted("a/decode") == []


def test_compute_of_a_cancelled_request_is_free_when_its_engine_has_answered() -> None:
    bench = crowded()
    lease = bench.lease("a/decode")
    sent = bench.say(GATEWAY, Cancel(["r-a"]))
    assert to("a/decode", Abort, sent)
    assert to("c/decode", Lease, sent) == [], "a may be in the middle of a step"
    sent = bench.say(
        b"a/decode", StepReport(lease.lease_id, 3, seconds=0.0, tokens=0, running=0, waiting=0, finished=["r-a"])
    )
    assert to("c/decode", Lease, sent)


def test_an_engine_that_does_not_answer_a_cancellation_keeps_its_compute_for_a_while_only() -> None:
    bench = crowded()
    bench.say(GATEWAY, Cancel(["r-a"]))
    assert to("c/decode", Lease, bench.turn(after=0.01)) == []
    for _ in range(60):
        bench.turn(after=0.05)
    assert bench.admitted("c/decode")


def test_an_engine_that_lost_what_was_cancelled_has_no_use_for_its_lease() -> None:
    bench = crowded()
    bench.say(GATEWAY, Cancel(["r-a"]))
    sent = bench.say(b"a/decode", EngineLost(["r-a"], "the prefilled blocks are gone"))
    assert to(GATEWAY, Lost, sent) == []
    assert to("c/decode", Lease, sent)


def test_hand_offs_that_nobody_knows_are_given_up_at_the_second_look() -> None:
    bench = crowded()
    known = f"key-r-c-{bench.admitted('c/prefill')[-1].incarnation}"
    bench.memory.waiting = {"c": [known, "orphan"]}
    bench.turn(after=1.1)
    assert bench.memory.dropped == [], "its report may be on the way"
    bench.turn(after=1.1)
    assert bench.memory.dropped == [("c", "orphan")]


def test_nobody_cancels_for_others() -> None:
    bench = Bench()
    bench.say(b"gateway/other", GatewayHello("other", "ipc:///elsewhere", 1))
    bench.submit("r")
    assert to("a/prefill", Abort, bench.say(b"gateway/other", Cancel(["r"]))) == []
    assert "r" in bench.unit.request_table.held


# ---------------------------------------------------------------- engines die


def test_the_death_of_a_prefill_engine() -> None:
    bench = Bench()
    bench.decoding("decoding")
    bench.submit("prefilling")
    sent = bench.say(b"controller/1", EngineDown("a", "prefill", "killed by signal 9"))
    (lost,) = to(GATEWAY, Lost, sent)
    assert lost.request_ids == ["prefilling"]
    assert "killed by signal 9" in lost.reason
    assert bench.submit("prefilling", attempt=1) == [], "it waits for the engine"
    sent = bench.say(b"a/prefill", EngineHello("a", "prefill", 101))
    assert to("a/prefill", Reset, sent)
    assert [a.attempt for a in to("a/prefill", Lease, sent)[0].admit] == [1]
    assert [type(m) for p, m in sent if p == b"a/prefill"] == [Reset, Lease]


def test_the_death_of_a_decode_engine_also_loses_what_waits_for_it() -> None:
    bench = crowded()
    incarnation = bench.admitted("c/prefill")[-1].incarnation
    assert bench.state()["models"]["c"]["handed"] == 1
    sent = bench.say(b"controller/1", EngineDown("c", "decode", "gone"))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r-c"]]
    assert bench.memory.dropped == [("c", f"key-r-c-{incarnation}")]
    sent = bench.say(b"controller/1", EngineDown("a", "decode", "gone"))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r-a"]]
    assert bench.memory.dropped[1:] == [("a", f"key-r-a-{bench.admitted('a/prefill')[0].incarnation}")], (
        "it may have died before it adopted"
    )


def test_an_engine_that_greets_again_has_lost_everything() -> None:
    bench = Bench()
    bench.submit("r")
    sent = bench.say(b"a/prefill", EngineHello("a", "prefill", 100))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r"]]
    assert to("a/prefill", Reset, sent)


def test_last_words_of_a_dead_engine_are_not_believed() -> None:
    bench = Bench()
    bench.submit("r")
    admit, lease = bench.admitted("a/prefill")[-1], bench.lease("a/prefill")
    bench.say(b"controller/1", EngineDown("a", "prefill", "gone"))
    handed = HandOver("r", admit.incarnation, key="late", blocks=2, computed_tokens=20, output_tokens=[7])
    sent = bench.say(
        b"a/prefill", StepReport(lease.lease_id, 0, seconds=0.01, tokens=20, running=0, waiting=0, handed=[handed])
    )
    assert sent == []
    assert bench.memory.dropped == [("a", "late")]


def test_words_under_an_older_lease_do_not_end_the_next_life() -> None:
    bench = Bench()
    bench.submit("r")
    old = bench.lease("a/prefill").lease_id
    bench.submit("r", attempt=1)
    assert [m.request_ids for m in to("a/prefill", Abort, bench.sent)] == [["r"]]
    assert [a.attempt for a in bench.admitted("a/prefill")] == [0, 1]
    bench.say(b"a/prefill", StepReport(old, 1, seconds=0.0, tokens=0, running=0, waiting=0, finished=["r"]))
    assert "r" in bench.unit.request_table.held
    bench.report("a/prefill", finished=["r"], running=0)
    assert "r" not in bench.unit.request_table.held


def test_the_same_submission_twice_is_one_request() -> None:
    bench = Bench()
    bench.submit("r")
    assert bench.submit("r") == []
    assert len(bench.admitted("a/prefill")) == 1


def holds(bench: Bench, engine: str, *admits: Admit, lease: int | None = None) -> Sent:
    """The engine says that it has these; returns what the unit sends."""
    lease = bench.lease(engine).lease_id if lease is None else lease
    said = HeldRequests(lease, [a.request_id for a in admits], [a.incarnation for a in admits])
    return bench.say(engine.encode(), said)


def test_an_engine_that_says_it_has_fewer_requests_than_it_should_is_asked_and_believed() -> None:
    bench = Bench()
    there, gone = bench.decoding("there"), bench.decoding("gone")
    assert to("a/decode", ShowRequests, bench.report("a/decode", running=2)) == []
    assert to("a/decode", ShowRequests, bench.report("a/decode", running=1)) == [ShowRequests()]
    assert to("a/decode", ShowRequests, bench.report("a/decode", running=1)) == [], "it was asked already"
    sent = holds(bench, "a/decode", there)
    (lost,) = to(GATEWAY, Lost, sent)
    assert (lost.request_ids, lost.attempts) == (["gone"], [0])
    # Whatever is left of it there is dropped, and the hand-off in case it had not been adopted.
    assert to("a/decode", Abort, sent) == [Abort(["gone"], [gone.incarnation])]
    assert bench.memory.dropped == [("a", f"key-gone-{bench.admitted('a/prefill')[-1].incarnation}")]
    assert list(bench.unit.request_table.held) == ["there"]
    state = bench.state()["models"]["a"]
    assert (state["missing"], state["lost"], state["strays"]) == (1, 1, 0)
    # It is asked again when there is doubt again.
    assert to("a/decode", ShowRequests, bench.report("a/decode", running=0)) == [ShowRequests()]


@pytest.mark.parametrize("policy", ["adbs", "slack"])
def test_an_engine_that_waits_for_pages_while_another_prefills_is_not_asked_for_over_and_over(policy: str) -> None:
    bench = Bench(policy=policy)
    bench.submit("r")
    bench.report("a/prefill", left=0, tokens=0)
    bench.submit("s", "b")
    assert bench.admitted("b/prefill")
    bench.turn(after=1.0)
    assert bench.unit.wakeup(bench.now) > bench.now


def test_an_engine_that_lost_all_its_requests_keeps_no_compute() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.report("a/decode", running=0)
    assert [m.request_ids for m in to(GATEWAY, Lost, holds(bench, "a/decode"))] == [["r"]]
    assert bench.state()["budget_used"] == 0.0
    assert not bench.unit.ledger.requests


def test_engines_with_requests_are_asked_for_them_at_a_slow_pace() -> None:
    bench = Bench()
    admit = bench.decoding("r")
    assert bench.unit.wakeup(bench.now) <= bench.now + RECONCILE_SECONDS
    for _ in range(3):
        bench.report("a/decode")
        sent = bench.turn(after=RECONCILE_SECONDS)
        assert [peer for peer, message in sent if isinstance(message, ShowRequests)] == [b"a/decode"]
        assert to(GATEWAY, Lost, holds(bench, "a/decode", admit)) == []
    bench.report("a/decode", finished=["r"], running=0)
    assert not any(isinstance(message, ShowRequests) for _, message in bench.turn(after=RECONCILE_SECONDS))


def test_what_was_sent_after_the_question_is_not_missed() -> None:
    bench = Bench()
    first = bench.decoding("first")
    before = bench.lease("a/decode").lease_id
    bench.turn(after=RECONCILE_SECONDS)
    bench.decoding("second")
    assert bench.lease("a/decode").lease_id > before
    assert to(GATEWAY, Lost, holds(bench, "a/decode", first, lease=before)) == []
    # A report from before the lease that brings it in does not count it either.
    bench.sent.clear()
    assert (
        to(
            "a/decode",
            ShowRequests,
            bench.say(b"a/decode", StepReport(before, 5, seconds=0.001, tokens=1, running=1, waiting=0)),
        )
        == []
    )


def test_a_request_that_an_engine_should_not_have_is_aborted_when_it_is_there_twice() -> None:
    bench = Bench()
    admit = bench.decoding("r")
    bench.turn(after=RECONCILE_SECONDS)
    bench.say(GATEWAY, Cancel(["r"]))
    # The list was sent before the engine heard of the cancellation.
    assert to("a/decode", Abort, holds(bench, "a/decode", admit)) == []
    # That one was lost on the way.
    bench.sent = [(b"a/decode", m) for m in to("a/decode", Lease, bench.sent)]
    assert to("a/decode", ShowRequests, bench.turn(after=RECONCILE_SECONDS)) == [ShowRequests()]
    assert to("a/decode", Abort, holds(bench, "a/decode", admit)) == [Abort(["r"], [admit.incarnation])]
    assert bench.state()["models"]["a"]["strays"] == 1
    # It is gone now, and nobody is asked any more.
    bench.turn(after=RECONCILE_SECONDS)
    holds(bench, "a/decode")
    assert to("a/decode", ShowRequests, bench.turn(after=RECONCILE_SECONDS)) == []


def test_an_engine_that_was_started_anew_is_not_asked_about_the_one_before() -> None:
    bench = Bench()
    bench.decoding("r")
    before = bench.lease("a/decode").lease_id
    bench.turn(after=RECONCILE_SECONDS)
    bench.say(b"a/decode", EngineHello("a", "decode", 101))
    bench.decoding("s")
    # The answer of the dead one comes after all.
    assert to(GATEWAY, Lost, holds(bench, "a/decode", lease=before)) == []
    assert to("a/decode", ShowRequests, bench.report("a/decode", running=0)) == [ShowRequests()]


def test_a_lease_that_ran_out_without_a_word_is_asked_after() -> None:
    bench = crowded()
    before = bench.lease("a/decode")
    for _ in range(20):
        bench.turn(after=0.05)
    after = bench.lease("a/decode")
    assert after.lease_id > before.lease_id
    assert after.steps == 1
    sent = bench.report("a/decode", left=0)
    assert to("c/decode", Lease, sent), "its compute is free for others now"


def test_a_hung_engine_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.decoding("r")
    for _ in range(60):
        bench.turn(after=0.5)
    assert sum("has not reported" in r.message for r in caplog.records) <= 1
    bench.submit("s")
    lease_kept = bench.state()["engines"]["a/decode"]["lease"]
    assert lease_kept is not None, "its compute is not given away while it may still run"


# ---------------------------------------------------------------- gateways come and go


def test_a_new_gateway_cancels_what_the_old_one_wanted() -> None:
    bench = Bench()
    bench.decoding("old")
    sent = bench.say(b"gateway/g2", GatewayHello("g2", REPLY_TO))
    assert [m.request_ids for m in to("a/decode", Abort, sent)] == [["old"]]
    assert to(b"gateway/g2", UnitHello, sent)
    assert not bench.unit.request_table.held


def test_a_gateway_that_greets_again_keeps_its_requests() -> None:
    bench = Bench()
    bench.decoding("r")
    sent = bench.say(GATEWAY, GatewayHello("g1", REPLY_TO))
    assert to("a/decode", Abort, sent) == []
    assert "r" in bench.unit.request_table.held


def test_the_controller_saw_the_gateway_die() -> None:
    bench = Bench()
    bench.decoding("r")
    sent = bench.say(b"controller/1", GatewayDown())
    assert [m.request_ids for m in to("a/decode", Abort, sent)] == [["r"]]
    assert bench.state()["gateways"] == 0


def test_a_gateway_that_missed_a_restart_learns_of_it() -> None:
    bench = Bench(up=False)
    for phase in ("prefill", "decode"):
        bench.say(f"a/{phase}".encode(), EngineHello("a", phase, 1))
    sent = bench.submit("r")
    assert [m.epoch for m in to(GATEWAY, UnitHello, sent)] == ["unit-1"]
    assert not bench.unit.request_table.held, "nobody knows yet where its tokens should go"
    bench.say(GATEWAY, GatewayHello("g1", REPLY_TO))
    bench.submit("r")
    (admit,) = bench.admitted("a/prefill")
    assert (admit.reply_to, admit.gateway_epoch) == (REPLY_TO, "g1")


def test_each_gateway_dies_alone() -> None:
    bench = Bench()
    other = b"gateway/g2"
    bench.say(other, GatewayHello("g2", "ipc:///elsewhere", 1))
    bench.submit("r")
    bench.submit("s", gateway=other)
    assert [a.reply_to for a in bench.admitted("a/prefill")] == [REPLY_TO, "ipc:///elsewhere"]
    bench.say(b"controller/1", GatewayDown(1))
    assert set(bench.unit.request_table.held) == {"r"}
    assert bench.state()["gateways"] == 1
    bench.submit("s", gateway=other)
    assert set(bench.unit.request_table.held) == {"r"}
    # The one that is started in its place has its number, and not its epoch.
    bench.say(b"gateway/g3", GatewayHello("g3", "ipc:///elsewhere", 1))
    bench.submit("t", gateway=b"gateway/g3")
    bench.say(b"gateway/g4", GatewayHello("g4", "ipc:///elsewhere", 1))
    assert set(bench.unit.request_table.held) == {"r"}


def test_a_gateway_of_another_machine_needs_keys() -> None:
    bench = Bench()
    assert bench.say(b"gateway/far", GatewayHello("far", "tcp://10.0.0.2:7000", 1)) == []
    assert bench.state()["gateways"] == 1


# ---------------------------------------------------------------- memory manager


def test_hand_overs_die_with_the_memory_manager() -> None:
    bench = Bench()
    bench.submit("r")
    bench.say(b"controller/1", EngineDown("a", "decode", "gone"))
    bench.hand_over("r")
    bench.memory.die()
    (lost,) = to(GATEWAY, Lost, bench.turn(after=0.1))
    assert lost.request_ids == ["r"]
    assert "memory manager" in lost.reason
    assert bench.memory.dropped == []
    assert not bench.state()["memory_connected"]


def test_nothing_is_admitted_without_a_memory_manager() -> None:
    bench = Bench()
    bench.memory.die()
    bench.turn(after=0.1)
    assert to("a/prefill", Lease, bench.submit("r")) == []
    bench.memory.up = True
    assert to("a/prefill", Lease, bench.turn(after=0.1))


def test_quotas_are_set_again_after_the_memory_manager_is_back() -> None:
    bench = Bench()
    bench.memory.used = {"a": 350}
    for index in range(80):
        bench.submit(f"r{index}", prompt=60)
    for _ in range(5):
        bench.turn(after=0.6)
    moved = dict(bench.memory.quotas)
    assert moved["a"] > 400
    assert sum(moved.values()) <= 1000
    bench.memory.die(up=True)
    bench.memory.quotas = {"a": 400, "b": 400}
    bench.turn(after=0.1)
    assert bench.memory.quotas == moved


def test_a_unit_that_meets_a_running_memory_manager_takes_over_its_quotas() -> None:
    bench = Bench(up=False)
    bench.memory.quotas = {"a": 700, "b": 300}
    bench.turn(after=0.01)
    assert bench.memory.set == [] or bench.memory.set[0]["a"] > 500
    assert bench.state()["models"]["a"]["quota_pages"] > 500


def test_what_an_engine_lost_with_its_memory_manager_is_told() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.submit("s")
    bench.memory.up = False
    sent = bench.say(b"a/decode", EngineLost(["r"], "the memory manager died"))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r"]]
    assert not bench.state()["memory_connected"]
    sent = bench.say(b"a/prefill", EngineLost(["s"], "the memory manager died"))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["s"]]
    assert bench.state()["budget_used"] == 0.0


def test_one_expired_hand_over_costs_nobody_else_theirs() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.submit("s")
    bench.say(b"controller/1", EngineDown("b", "decode", "gone"))
    bench.submit("t", "b")
    bench.say(b"a/decode", EngineLost(["r"], "the prefilled blocks are gone"))
    assert [m.request_ids for m in to(GATEWAY, Lost, bench.sent)] == [["r"]]
    assert bench.state()["memory_connected"]


# ---------------------------------------------------------------- bad input, state


def test_what_can_never_fit_is_refused_with_figures() -> None:
    bench = Bench(model("a", quota_pages=200), model("b", floor_pages=800, quota_pages=800))
    (refused,) = to(GATEWAY, Refused, bench.submit("r", prompt=4000, attempt=3))
    assert refused.attempt == 3
    assert "4049 tokens" in refused.message
    assert "'a' has room for" in refused.message
    assert "kv_pool.size" in refused.message
    assert not bench.unit.request_table.held
    assert to(GATEWAY, Refused, bench.submit("s", prompt=700, max_tokens=20)) == []


def test_a_request_that_is_too_long_for_now_waits_for_the_pages_of_others() -> None:
    bench = Bench(model("a", quota_pages=400), model("b", quota_pages=400))
    bench.memory.used["b"] = 600
    assert to(GATEWAY, Refused, bench.submit("r", prompt=2500)) == []
    bench.turn(after=0.1)
    assert bench.state()["models"]["a"]["missing_pages"] > 200
    assert bench.admitted("a/prefill") == []
    bench.memory.used["b"] = 0
    for _ in range(10):
        bench.turn(after=0.1)
    assert [admit.request_id for admit in bench.admitted("a/prefill")] == ["r"]
    assert bench.state()["models"]["a"]["missing_pages"] == 0


def test_a_request_that_outgrew_the_pool_is_refused_when_it_returns() -> None:
    bench = Bench(model("a", max_num_seqs=1, quota_pages=100), model("b", floor_pages=900, quota_pages=900))
    admit = bench.decoding("r")
    sent = bench.report("a/decode", returned=[Returned("r", admit.incarnation, [1] * 4000)], running=0)
    assert [m.request_id for m in to(GATEWAY, Refused, sent)] == ["r"]
    assert not bench.unit.request_table.held


def test_an_unknown_model_is_refused() -> None:
    bench = Bench()
    (refused,) = to(GATEWAY, Refused, bench.submit("r", "nobody"))
    assert "'nobody'" in refused.message


def test_strangers_and_senseless_messages_change_nothing() -> None:
    bench = Bench()
    before = json.dumps(bench.state()["models"])
    assert bench.say(b"x/y", EngineHello("x", "y", 1)) == []
    assert bench.say(b"a/prefill", EngineHello("b", "decode", 1)) == []
    assert bench.say(b"\xff\xfe", StepReport(1, 1, seconds=0.1, tokens=1, running=1, waiting=1)) == []
    assert bench.say(b"\xff\xfe", Submit("r", attempt=0, request=asking("a"), arrival=0.0)) == []
    assert bench.say(b"\xff\xfe", EngineLost(["r"], "")) == []
    assert bench.say(b"controller/1", EngineDown("x", "y", "")) == []
    assert bench.say(GATEWAY, Stop()) == []
    assert json.dumps(bench.state()["models"]) == before


def test_the_state_is_json_and_says_what_there_is() -> None:
    bench = Bench()
    bench.decoding("r")
    bench.submit("s")
    bench.report("a/decode", tokens=1)
    (answer,) = to(b"someone", StateReply, bench.say(b"someone", StateRequest()))
    state = json.loads(json.dumps(answer.state))
    assert state["policy"] == "adbs"
    assert state["cores"] == 2
    assert state["budget_used"] == 1.0
    a = state["models"]["a"]
    assert (a["prefilling"], a["decoding"], a["queued"], a["handed"]) == (1, 1, 0, 0)
    assert a["phases"]["decode"]["jobs"] == 1
    assert a["phases"]["prefill"]["tokens"] == 20
    assert a["phases"]["prefill"]["share"] == 0.5
    assert state["engines"]["a/decode"]["lease"]["left"] > 0
    assert state["pools"]["main"]["total_pages"] == 1000
    assert set(state["pools"]["main"]["usage"]) == {"a", "b"}


# ---------------------------------------------------------------- engines that hang


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_engine_that_gives_no_sign_of_life_gets_no_work(phase: str) -> None:
    bench = Bench(model("a"), model("b"))
    bench.say(b"controller/1", EngineSuspect("a", phase, True))
    assert bench.state()["engines"][f"a/{phase}"]["suspect"]
    # What would have to go through it waits; the other model does not.
    assert to("a/prefill", Lease, bench.submit("r-a", "a")) == []
    assert to("b/prefill", Lease, bench.submit("r-b", "b")) != []
    bench.hand_over("r-b", "b")
    (lease,) = to("a/prefill", Lease, bench.say(b"controller/1", EngineSuspect("a", phase, False)))
    assert [admit.request_id for admit in lease.admit] == ["r-a"]


def test_an_engine_that_was_killed_is_not_suspected_any_more() -> None:
    bench = Bench()
    bench.say(b"controller/1", EngineSuspect("a", "decode", True))
    bench.say(b"controller/1", EngineDown("a", "decode", "hung: no sign of life for 10 s"))
    bench.say(b"a/decode", EngineHello("a", "decode", 4712))
    assert not bench.state()["engines"]["a/decode"]["suspect"]
    assert to("a/prefill", Lease, bench.submit("r")) != []


def test_of_a_death_that_is_heard_late_only_the_engine_that_died_is_down() -> None:
    bench = Bench()
    bench.decoding("r")
    (lost,) = to(GATEWAY, Lost, bench.say(b"a/decode", EngineHello("a", "decode", 4712)))
    assert lost.request_ids == ["r"]
    late = EngineSuspect("a", "decode", True, 100), EngineDown("a", "decode", "killed", pid=100)
    for message in late:
        assert to(GATEWAY, Lost, bench.say(b"controller/1", message)) == []
        assert bench.state()["engines"]["a/decode"]["up"]
        assert not bench.state()["engines"]["a/decode"]["suspect"]
    bench.decoding("r", attempt=1)
    (lost,) = to(GATEWAY, Lost, bench.say(b"controller/1", EngineDown("a", "decode", "killed", pid=4712)))
    assert lost.attempts == [1]
    assert not bench.state()["engines"]["a/decode"]["up"]


def test_of_the_death_of_a_gateway_that_is_heard_late_only_its_own_requests_end() -> None:
    bench = Bench()
    bench.say(GATEWAY, GatewayHello("g1", "ipc:///g1", 0, 31))
    bench.say(b"gateway/g2", GatewayHello("g2", "ipc:///g2", 0, 32))
    bench.submit("r", gateway=b"gateway/g2")
    bench.say(b"controller/1", GatewayDown(0, 31))
    assert set(bench.unit.request_table.held) == {"r"}
    bench.say(b"controller/1", GatewayDown(0, 32))
    assert not bench.unit.request_table.held


# ---------------------------------------------------------------- shares per lease


def test_a_lease_says_on_which_sms_an_engine_computes() -> None:
    """Prefill on those of its share, decode engines on what they have together, as far as engines can change it."""
    shares = {"prefill_share": 0.5, "decode_share": 0.25}
    gpu = GpuSpec(["GPU-a"], "green_contexts")
    bench = Bench(*(model(name, **shares, quota_pages=300) for name in "abc"), policy="slack", gpu=gpu)
    bench.submit("r-a", "a")
    alone = bench.lease("a/prefill")
    assert (alone.share, alone.region) == (1_000_000, 1_000_000)
    bench.hand_over("r-a", "a")
    decode = bench.lease("a/decode")
    assert (decode.share, decode.region) == (1_000_000, 1_000_000)
    # A prompt of another model: decode gives way, and prefill has the rest as soon as it is free.
    bench.submit("r-b", "b")
    smaller = bench.lease("a/decode")
    assert (smaller.share, smaller.region) == (250_000, 250_000)
    bench.say(b"a/decode", StepReport(smaller.lease_id, smaller.steps, 0.0, 0, 1, 0, steps=0))
    prefill = bench.lease("b/prefill")
    assert (prefill.share, prefill.region) == (750_000, 750_000)
    # Two that decode have the unit in common.
    bench.hand_over("r-b", "b")
    bench.report("a/decode")
    half = bench.lease("a/decode")
    bench.say(b"a/decode", StepReport(half.lease_id, half.steps, 0.0, 0, 1, 0, steps=0))
    second = bench.lease("b/decode")
    assert (half.share, second.share) == (500_000, 500_000)
    assert second.region == 1_000_000
    bench.turn(after=0.25)
    bench.report("a/decode", left=half.steps // 2)
    assert (bench.lease("a/decode").share, bench.lease("a/decode").region) == (500_000, 1_000_000)


def test_engines_with_one_share_for_life_get_the_planned_one() -> None:
    bench = Bench(model("a", prefill_share=0.5, decode_share=0.25), policy="slack", gpu=GpuSpec(["GPU-a"], "mps"))
    bench.submit("r-a", "a")
    assert bench.lease("a/prefill").share == 500_000


# ---------------------------------------------------------------- a model joins


def test_a_model_joins_and_disturbs_nobody() -> None:
    shares = {"prefill_share": 0.2, "decode_share": 0.2}
    bench = Bench(model("a", quota_pages=600, **shares), model("b", quota_pages=400, **shares))
    bench.decoding("r-a")
    bench.submit("r-b", "b")
    quotas = {"a": 500, "b": 300, "c": 200}
    bench.planned = unit_spec(*(model(name, quota_pages=pages, **shares) for name, pages in quotas.items()))
    bench.say(b"controller/1", Joined())
    assert quotas in bench.memory.set
    assert not bench.state()["engines"]["c/prefill"]["up"]
    bench.say(b"controller/1", Revive("c"))
    for phase in ("prefill", "decode"):
        bench.say(f"c/{phase}".encode(), EngineHello("c", phase, 101))
    bench.submit("r-c", "c")
    # Who was in the middle of something goes on; then it is the new model's turn.
    bench.hand_over("r-b", "b")
    assert [admit.request_id for admit in bench.admitted("c/prefill")] == ["r-c"]
    assert not [message for _, message in bench.sent if isinstance(message, Lost | Abort)]
    assert {name: bench.state()["models"][name]["decoding"] for name in "abc"} == {"a": 1, "b": 1, "c": 0}


def test_a_model_that_comes_back_gets_what_is_planned_now() -> None:
    bench = Bench(model("a", quota_pages=600), model("b", quota_pages=400))
    bench.say(b"controller/1", Retire("b"))
    bench.planned = unit_spec(model("a", quota_pages=700), model("b", quota_pages=300))
    bench.say(b"controller/1", Joined())
    assert {"a": 700, "b": 0} in bench.memory.set
    bench.say(b"controller/1", Revive("b"))
    assert bench.memory.quotas["b"] > 0
