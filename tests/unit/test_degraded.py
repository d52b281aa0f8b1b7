"""Models whose engines fail at each start: who is told, and what becomes of their requests."""

from __future__ import annotations

from muxserve.wire import Degraded, Elsewhere, EngineDown, EngineHello, GatewayHello, Lease, Lost
from tests.unit.support import GATEWAY, REPLY_TO, Bench, model, to

HOST = b"controller"
WHY = "engine a/decode cannot start: no weights"


def broken(engine: str = "decode") -> Bench:
    """An engine of model a has died, and fails at each start."""
    bench = Bench(model("a"), model("b"))
    bench.say(HOST, EngineDown("a", engine, "exited with status 1"))
    bench.sent = bench.say(HOST, Degraded("a", WHY, 5.0))
    return bench


def test_gateways_are_told_also_those_that_greet_later() -> None:
    bench = broken()
    assert to(GATEWAY, Degraded, bench.sent) == [Degraded("a", WHY, 5.0)]
    bench.now += 2.0
    other = b"gateway/g2"
    (told,) = to(other, Degraded, bench.say(other, GatewayHello("g2", REPLY_TO, 1)))
    assert (told.model, told.reason, round(told.retry_in, 1)) == ("a", WHY, 3.0)
    assert bench.state()["models"]["a"]["degraded"] == 1
    assert bench.state()["models"]["a"]["degraded_reason"] == WHY
    assert bench.state()["models"]["b"]["degraded"] == 0


def test_what_waits_is_given_back_and_other_models_serve() -> None:
    bench = broken("prefill")
    (back,) = to(GATEWAY, Elsewhere, bench.submit("r"))
    assert back.request_ids == ["r"]
    assert not bench.unit.request_table.held
    assert to("b/prefill", Lease, bench.submit("s", "b"))


def test_what_was_prefilled_for_a_decode_engine_that_is_gone_is_lost() -> None:
    bench = Bench(model("a"))
    bench.submit("r")
    bench.say(HOST, EngineDown("a", "decode", "exited with status 1"))
    bench.hand_over("r")
    (lost,) = to(GATEWAY, Lost, bench.say(HOST, Degraded("a", WHY, 5.0)))
    assert lost.request_ids == ["r"]


def test_requests_that_still_run_are_left_alone() -> None:
    bench = Bench(model("a"))
    bench.decoding("r")
    bench.say(HOST, EngineDown("a", "prefill", "exited with status 1"))
    sent = bench.say(HOST, Degraded("a", "engine a/prefill cannot start: no weights", 5.0))
    assert not to(GATEWAY, Lost, sent)
    assert not to(GATEWAY, Elsewhere, sent)
    assert "r" in bench.unit.request_table.held


def test_it_is_over_when_all_engines_are_up() -> None:
    bench = broken()
    sent = bench.say(b"a/decode", EngineHello("a", "decode", 4712))
    assert to(GATEWAY, Degraded, sent) == [Degraded("a", "")]
    assert to("a/prefill", Lease, bench.submit("r"))
    assert bench.state()["models"]["a"]["degraded"] == 0


def test_a_model_of_another_unit_is_nobody_here() -> None:
    bench = Bench(model("a"))
    assert not to(GATEWAY, Degraded, bench.say(HOST, Degraded("x", WHY, 5.0)))
