"""Units whose model has one engine of both phases: every message in, every message out."""

from __future__ import annotations

from typing import Any

import pytest

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.views import InstanceLoad
from muxserve.wire import (
    Abort,
    Admit,
    Blocks,
    Cancel,
    Detach,
    Detached,
    EngineDown,
    EngineHello,
    EngineLost,
    HandOff,
    Lease,
    Loads,
    Lost,
    MigratorHello,
    MoveCommit,
    MoveCommitted,
    MoveStage,
    MoveStaged,
    Moving,
    Paired,
    Prefilled,
    Retire,
    Returned,
    Revive,
    RollingReport,
    RollingRequest,
    SchedulerHello,
    ShowBlocks,
    TakenOver,
    TakeOver,
)
from tests.support.requests import asking
from tests.unit.support import GATEWAY, Bench, Sent, model, to, unit_spec

ENGINE = b"a/both"
SCHEDULER = b"scheduler/s1"
# Whatever runs is to move as soon as a pair is there.
RULES = MigrationRules(source_below=5000, destination_above=5000, in_flight=3)


def unit(policy: str = "rolling", up: bool = True, **changes: Any) -> Bench:
    rolling = policy == "rolling"
    one = model("a", shape="one", rolling=rolling, decode_share=1.0, prefill_share=1.0, **changes)
    return Bench(one, policy=policy, up=up)


def admitted(bench: Bench, request_id: str) -> Admit:
    return [admit for admit in bench.admitted("a/both") if admit.request_id == request_id][-1]


def prefill(bench: Bench, *ids: str, left: int = 0, seconds: float = 0.02) -> Sent:
    """The engine has the first token of these requests."""
    done = [Prefilled(each, admitted(bench, each).incarnation, [7]) for each in ids]
    tokens = 20 * len(ids)
    running = len(bench.unit.ledger.by_name["a"].decode.inside)
    return bench.report(
        "a/both",
        left=left,
        seconds=seconds,
        tokens=tokens,
        running=running,
        prefilled=done,
        prefill_tokens=tokens,
        prefill_seconds=seconds,
    )


def decoding(bench: Bench, request_id: str) -> Admit:
    bench.submit(request_id)
    prefill(bench, request_id)
    return admitted(bench, request_id)


# ---------------------------------------------------------------- a request's way


def test_a_request_is_prefilled_and_decodes_in_one_engine() -> None:
    bench = unit()
    (lease,) = to(ENGINE, Lease, bench.submit("r"))
    assert lease.phase == "prefill"
    (admit,) = lease.admit
    assert (admit.request_id, admit.hand_off, admit.output_tokens) == ("r", None, [])
    (lease,) = to(ENGINE, Lease, prefill(bench, "r"))
    assert (lease.phase, lease.admit) == ("decode", [])
    assert bench.unit.request_table.held["r"].output_tokens == [7]
    bench.report("a/both", running=0, finished=["r"])
    state = bench.state()
    assert state["models"]["a"]["finished"] == 1
    assert state["budget_used"] == 0.0
    assert not bench.unit.request_table.held


def test_a_prompt_cuts_decoding_at_the_next_step() -> None:
    bench = unit()
    decoding(bench, "r")
    (lease,) = to(ENGINE, Lease, bench.submit("s"))
    assert (lease.phase, [a.request_id for a in lease.admit]) == ("prefill", ["s"])
    (lease,) = to(ENGINE, Lease, prefill(bench, "s"))
    assert lease.phase == "decode"


def test_pipelined_steps_hold_both() -> None:
    bench = unit("free")
    (lease,) = to(ENGINE, Lease, bench.submit("r"))
    assert (lease.phase, [a.request_id for a in lease.admit]) == ("both", ["r"])
    (lease,) = to(ENGINE, Lease, bench.submit("s"))
    assert (lease.phase, [a.request_id for a in lease.admit]) == ("both", ["s"])
    done = [Prefilled("r", admitted(bench, "r").incarnation, [7])]
    bench.report("a/both", tokens=20, running=2, prefilled=done, prefill_tokens=20, bubbles=[0.0, 0.01])
    bench.report("a/both", left=lease.steps - 2, tokens=21, running=2, prefill_tokens=20, bubbles=[0.002, 0.01])
    state = bench.state()["models"]["a"]
    assert state["bubbles"] == [0.002, 0.02]
    assert state["phase_switches"] == 0
    assert (state["prefilling"], state["decoding"]) == (1, 1)
    phase = state["phases"]["both"]
    assert (phase["jobs"], phase["tokens"], phase["prefill_tokens"]) == (2, 41, 40)


def test_a_request_without_pages_is_prefilled_again_first() -> None:
    bench = unit(max_num_seqs=1)
    admit = decoding(bench, "r")
    bench.submit("s")
    sent = bench.report("a/both", running=0, returned=[Returned("r", admit.incarnation, [7, 8])])
    (lease,) = to(ENGINE, Lease, sent)
    assert lease.phase == "prefill"
    (again,) = lease.admit
    assert (again.request_id, again.output_tokens) == ("r", [7, 8])
    assert again.incarnation > admit.incarnation


def test_cancelling_wherever_a_request_is() -> None:
    bench = unit()
    decoding(bench, "decoding")
    bench.submit("prefilling")
    sent = bench.say(GATEWAY, Cancel(["decoding", "prefilling"]))
    assert [m.request_ids for m in to(ENGINE, Abort, sent)] == [["decoding", "prefilling"]]
    late = Prefilled("prefilling", admitted(bench, "prefilling").incarnation, [7])
    bench.report("a/both", running=0, prefilled=[late], tokens=20, prefill_tokens=20, prefill_seconds=0.002)
    assert not bench.unit.request_table.held
    assert bench.state()["budget_used"] == 0.0


def test_deaths_lose_what_is_inside_and_nothing_else() -> None:
    bench = unit(max_num_seqs=2)
    decoding(bench, "decoding")
    bench.submit("prefilling")
    bench.submit("queued")
    sent = bench.say(b"controller/1", EngineDown("a", "both", "killed"))
    (lost,) = to(GATEWAY, Lost, sent)
    assert sorted(lost.request_ids) == ["decoding", "prefilling"]
    assert "a/both" in lost.reason
    (lease,) = to(ENGINE, Lease, bench.say(ENGINE, EngineHello("a", "both", 7)))
    assert [a.request_id for a in lease.admit] == ["queued"]
    assert bench.state()["engines"]["a/both"]["pid"] == 7


def test_the_memory_manager_dies_under_it() -> None:
    bench = unit()
    decoding(bench, "r")
    bench.memory.die(up=False)
    sent = bench.say(ENGINE, EngineLost(["r"], "the memory manager died"))
    assert [m.request_ids for m in to(GATEWAY, Lost, sent)] == [["r"]]
    assert bench.state()["budget_used"] == 0.0
    bench.submit("s")
    bench.memory.up = True
    (lease,) = to(ENGINE, Lease, bench.turn(after=0.1))
    assert [a.request_id for a in lease.admit] == ["s"]


def test_an_engine_that_is_silent_is_asked_again_for_what_it_was_doing() -> None:
    bench = unit()
    bench.submit("r")
    lease = bench.lease("a/both")
    sent: Sent = []
    for _ in range(3 + int(lease.seconds / 0.05) + 10):
        sent += bench.turn(after=0.05)
    assert {m.phase for m in to(ENGINE, Lease, sent)} == {"prefill"}


def test_what_an_engine_is_to_have_waiting_follows_the_budget() -> None:
    from muxserve.unit.state import unit_ledger

    def waiting(**changes: Any) -> int:
        made = unit_spec(model("a", shape="one", **changes), policy="free")
        return unit_ledger(made).models[0].profile.engines.waiting_tokens

    assert waiting() == 2 * 64, "a step under way and one more"
    assert waiting(stages=3) == 8 * 2048, "as many as Token Throttling looks at"


# ---------------------------------------------------------------- waits for the phase switch


def test_waits_for_the_phase_switch_are_counted() -> None:
    bench = unit(max_num_batched_tokens=20)
    bench.submit("r")
    bench.submit("s")
    began = bench.now
    prefill(bench, "r", left=2)
    first = bench.now
    bench.turn(after=0.5)
    prefill(bench, "s")
    state = bench.state()["models"]["a"]
    assert state["phase_switches"] == 2
    assert state["phase_switch_seconds"] == pytest.approx(bench.now - first)
    assert bench.now - began > 0.5


# ---------------------------------------------------------------- moves


def test_a_request_moves_out_of_the_engine() -> None:
    bench = Bench(
        model("a", shape="one", rolling=True, decode_share=1.0),
        policy="rolling",
        migration=RULES,
    )
    bench.say(b"migrator", MigratorHello("m1", 1))
    admit = decoding(bench, "r")
    sent = bench.say(SCHEDULER, Paired("a", "other", "ipc:///other", InstanceLoad("", 100_000_000, "a")))
    (show,) = to(ENGINE, ShowBlocks, sent)
    bench.say(ENGINE, Blocks("r", show.incarnation, 0, [0, 1], 21))
    (stage,) = to(b"migrator", MoveStage, bench.sent)
    (detach,) = to(ENGINE, Detach, bench.say(b"migrator", MoveStaged(stage.move, 1, 0.001, 1)))
    assert detach.incarnation == admit.incarnation
    bench.say(
        ENGINE,
        Detached("r", detach.incarnation, detach.key, since=1, blocks=[1], computed_tokens=22, output_tokens=[7, 8]),
    )
    bench.say(b"migrator", MoveStaged(stage.move, 2, 0.001, 1))
    (commit,) = to(b"migrator", MoveCommit, bench.sent)
    assert commit.request.output_tokens == [7, 8]
    bench.say(b"migrator", MoveCommitted(stage.move))
    assert bench.state()["models"]["a"]["moved_out"] == 1
    assert bench.state()["budget_used"] == 0.0


MOVES_IN = TakeOver(
    "m",
    "key",
    2,
    Moving("in", 0, gateway_epoch="g1", request=asking("a"), waited=0.0, output_tokens=[1, 2], computed_tokens=21),
)


def test_a_request_moves_in_and_is_adopted_by_the_next_decode_lease() -> None:
    bench = unit()
    bench.submit("prompt")
    (answer,) = to(b"migrator", TakenOver, bench.say(b"migrator", MOVES_IN))
    assert answer.reason == ""
    (lease,) = to(ENGINE, Lease, prefill(bench, "prompt"))
    assert lease.phase == "decode"
    (admit,) = lease.admit
    assert (admit.request_id, admit.hand_off) == ("in", HandOff("key", 21, foreign=True))


# ---------------------------------------------------------------- reports to the global scheduler


def reports(sent: Sent) -> list[RollingReport]:
    return to(SCHEDULER, RollingReport, sent)


def greeted(**changes: Any) -> Bench:
    bench = unit(**changes)
    bench.say(SCHEDULER, SchedulerHello("s1"))
    return bench


def test_the_first_report_is_whole_and_comes_before_the_load() -> None:
    bench = unit(max_num_seqs=3, max_num_batched_tokens=24)
    decoding(bench, "decoding")
    bench.submit("prefilling", output_tokens=[1, 2, 3], max_tokens=10)
    bench.submit("prefilled")
    prefill(bench, "prefilled", left=2)
    bench.submit("queued")
    since = bench.unit.ledger.requests["decoding"].decoding_since
    assert since is not None
    sent = bench.say(SCHEDULER, SchedulerHello("s1"))
    kinds = [type(m).__name__ for peer, m in sent if peer == SCHEDULER]
    assert kinds == ["RollingReport", "Loads"]
    (report,) = reports(sent)
    assert (report.unit, report.epoch, report.model, report.whole) == ("unit", "unit-1", "a", True)
    found = {each.request_id: each for each in report.requests}
    assert found["queued"] == RollingRequest("queued", 20, 50)
    assert found["prefilling"] == RollingRequest("prefilling", 23, 7)
    assert found["prefilled"] == RollingRequest("prefilled", 21, 49, True)
    decodes = found["decoding"]
    assert (decodes.tokens, decodes.max_tokens, decodes.prefilled) == (21, 49, True)
    assert decodes.decoding_seconds == pytest.approx(bench.now - since)
    assert reports(bench.turn(after=0.5)) == [], "nothing has happened"


def test_what_makes_room_is_told_at_once_and_arrivals_soon() -> None:
    bench = greeted()
    assert reports(bench.turn(after=0.1)) == []
    (came,) = reports(bench.submit("r", max_tokens=30))
    assert (came.whole, came.requests, came.prefilled) == (False, [RollingRequest("r", 20, 30)], [])
    assert reports(bench.submit("s")) == [], "within 20 ms of the last report"
    (done,) = reports(prefill(bench, "r", left=1))
    assert ([each.request_id for each in done.requests], done.prefilled, done.left) == (["s"], ["r"], [])
    assert (done.prefill_tokens, done.prefill_seconds) == (20, 0.02)
    (done,) = reports(prefill(bench, "s"))
    assert (done.prefilled, done.prefill_tokens, done.steps) == (["s"], 20, 0)
    (ended,) = reports(bench.report("a/both", running=1, tokens=2, finished=["r"]))
    assert (ended.left, ended.over, ended.decoded, ended.steps, ended.prefill_tokens) == (["r"], 1, 2, 1, 0)
    (gone,) = reports(bench.say(GATEWAY, Cancel(["s"])))
    assert (gone.left, gone.over) == (["s"], 1)


def test_steps_alone_are_told_every_twenty_milliseconds() -> None:
    bench = greeted()
    decoding(bench, "r")
    assert reports(bench.report("a/both", left=7, steps=2)) == []
    assert bench.unit.wakeup(bench.now) <= bench.now + 0.02
    (told,) = reports(bench.turn(after=0.02))
    assert (told.steps, told.requests, told.left) == (2, [], [])
    assert reports(bench.turn(after=0.1)) == []


def test_one_that_left_and_came_again_is_told_in_two_reports() -> None:
    bench = greeted()
    admit = decoding(bench, "r")
    first, second = reports(bench.report("a/both", running=0, returned=[Returned("r", admit.incarnation, [7, 8, 9])]))
    assert (first.left, first.requests) == (["r"], [])
    assert (second.left, second.requests) == ([], [RollingRequest("r", 23, 47)])


def test_after_a_loss_everything_is_told_anew() -> None:
    bench = greeted(max_num_seqs=1)
    decoding(bench, "r")
    bench.submit("queued")
    assert reports(bench.say(b"controller/1", EngineDown("a", "both", "killed"))) == [], "it serves nothing now"
    sent = bench.say(ENGINE, EngineHello("a", "both", 7))
    kinds = [type(m).__name__ for peer, m in sent if peer == SCHEDULER]
    assert kinds == ["RollingReport", "Loads"]
    (report,) = reports(sent)
    assert report.whole
    assert [each.request_id for each in report.requests] == ["queued"]
    assert report.steps == 0, "decode steps since the engine is up"


def test_a_request_that_its_engine_lost_is_told_of_as_a_whole() -> None:
    bench = greeted()
    decoding(bench, "r")
    bench.submit("s")
    (report,) = reports(bench.say(ENGINE, EngineLost(["r"], "the blocks are gone")))
    assert report.whole
    assert [each.request_id for each in report.requests] == ["s"]


def test_a_replica_out_of_service_reports_when_it_is_back() -> None:
    bench = greeted()
    bench.say(b"controller/1", Retire("a"))
    assert reports(bench.turn(after=0.1)) == []
    (report,) = reports(bench.say(b"controller/1", Revive("a")))
    assert report.whole


def test_what_comes_with_its_kv_decodes() -> None:
    bench = greeted()
    bench.turn(after=0.1)
    (report,) = reports(bench.say(b"migrator", MOVES_IN))
    assert report.requests == [RollingRequest("in", 22, 48, True, 0.0)]


def test_other_replicas_send_no_such_reports() -> None:
    bench = unit("free")
    sent = bench.say(SCHEDULER, SchedulerHello("s1"))
    assert reports(sent) == []
    assert to(SCHEDULER, Loads, sent)
    sent = bench.submit("r") + bench.turn(after=1.0)
    assert reports(sent) == []
    assert bench.unit.ledger.by_name["a"].journal is None
