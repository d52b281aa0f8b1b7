from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from muxserve.gateway.http.body import BodyReplay, ClientGoneError
from muxserve.gateway.http.errors import Message, RequestError
from muxserve.gateway.http.http_request import HttpRequest
from muxserve.gateway.limits.admission import (
    MAX_RETRY_AFTER_SECONDS,
    AdmissionVerdict,
    ApiKeys,
    Gate,
    part_of,
    presented_key,
)
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.limits.priorities import RequestLevels
from muxserve.gateway.status.measure import Measures
from tests.gateway.unit_specs import model
from tests.support.patience import PATIENCE


def test_no_keys_let_everyone_in() -> None:
    assert ApiKeys([]).admit(None)
    assert not ApiKeys([])


@pytest.mark.parametrize(
    ("presented", "allowed"),
    [(b"one", True), (b"two", True), (b"One", False), (b"on", False), (b"oneone", False), (b"", False), (None, False)],
)
def test_only_the_keys_open(presented: bytes | None, allowed: bool) -> None:
    assert (ApiKeys(["one", "two"]).admit(presented) is not None) is allowed


def test_no_key_is_not_the_empty_key() -> None:
    assert not ApiKeys([""]).admit(None)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer abc")], b"abc"),
        ([(b"authorization", b"bearer  abc ")], b"abc"),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"abc")], None),
        ([(b"x-api-key", b"abc")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer def")], b"def"),
        ([], None),
    ],
)
def test_where_a_key_is_looked_for(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert presented_key(headers) == key


def test_gate_serves_in_order_of_arrival() -> None:
    gate = Gate(2, 2)
    assert [gate.arrive(n) for n in range(5)] == [
        AdmissionVerdict.ENTER,
        AdmissionVerdict.ENTER,
        AdmissionVerdict.WAIT,
        AdmissionVerdict.WAIT,
        AdmissionVerdict.REFUSE,
    ]
    assert gate.leave(1.0) == 2
    assert gate.arrive(5) is AdmissionVerdict.WAIT
    assert [gate.leave(1.0), gate.leave(1.0), gate.leave(1.0), gate.leave(1.0)] == [3, 5, None, None]
    assert (gate.inside, gate.waiting) == (0, 0)


def test_no_queue_refuses_at_once() -> None:
    gate = Gate(1, 0)
    assert gate.arrive("a") is AdmissionVerdict.ENTER
    assert gate.arrive("b") is AdmissionVerdict.REFUSE


def test_retry_after_grows_with_the_queue_and_is_bounded() -> None:
    gate = Gate(1, 10_000)
    gate.arrive(0)
    first = gate.retry_after()
    for n in range(20):
        gate.arrive(n)
    assert 1 <= first < gate.retry_after()
    for n in range(5000):
        gate.arrive(n)
    assert gate.retry_after() == MAX_RETRY_AFTER_SECONDS


@given(st.lists(st.sampled_from(["arrive", "leave", "withdraw"]), max_size=60), st.integers(1, 3), st.integers(0, 3))
def test_gate_never_exceeds_its_limits_and_loses_nobody(steps: list[str], most: int, queue: int) -> None:
    gate = Gate(most, queue)
    inside: set[int] = set()
    waiting: list[int] = []
    for number, step in enumerate(steps):
        if step == "arrive":
            verdict = gate.arrive(number)
            if verdict is AdmissionVerdict.ENTER:
                inside.add(number)
            elif verdict is AdmissionVerdict.WAIT:
                waiting.append(number)
        elif step == "leave" and inside:
            inside.pop()
            entered = gate.leave(0.1)
            assert entered == (waiting[0] if waiting else None)
            if waiting:
                inside.add(waiting.pop(0))
        elif step == "withdraw" and waiting:
            assert gate.withdraw(waiting.pop())
        assert gate.inside == len(inside) <= most
        assert gate.waiting == len(waiting) <= queue
        assert not waiting or len(inside) == most


def test_a_tenant_with_fewer_inside_goes_first_and_has_a_part_of_the_queue() -> None:
    gate = Gate(2, 4)
    for n in range(6):
        assert gate.arrive(f"flood{n}", tenant="flood") is not AdmissionVerdict.REFUSE
    assert gate.arrive("flood6", tenant="flood") is AdmissionVerdict.REFUSE
    # The queue is full; two tenants would have two places each.
    assert [gate.arrive(f"calm{n}", tenant="calm") for n in range(3)] == [
        AdmissionVerdict.WAIT,
        AdmissionVerdict.WAIT,
        AdmissionVerdict.REFUSE,
    ]
    assert gate.leave(1.0, tenant="flood") == "calm0"
    assert gate.leave(1.0, tenant="flood") == "flood2"  # one of each is inside, and it came first
    assert gate.leave(1.0, tenant="calm") == "calm1"
    assert gate.leave(1.0, tenant="flood") == "flood3"
    assert gate.withdraw("flood5", tenant="flood")
    assert [gate.leave(1.0, tenant=t) for t in ("calm", "flood", "flood")] == ["flood4", None, None]
    assert (gate.inside, gate.waiting, gate.prompts) == (0, 0, 0)


def test_weights_at_the_gate() -> None:
    gate = Gate(4, 40)
    for _ in range(4):
        gate.arrive(object(), tenant="plain")
    for n in range(20):
        gate.arrive(("plain", n), tenant="plain")
        gate.arrive(("gold", n), tenant="gold", weight=3.0)
    inside = ["plain"] * 4
    for _ in range(8):
        entered = gate.leave(1.0, tenant=inside.pop(0))
        assert isinstance(entered, tuple)
        inside.append(str(entered[0]))
    assert sorted(inside) == ["gold", "gold", "gold", "plain"]


@given(st.integers(0, 300), st.integers(1, 9))
def test_gateways_share_a_limit(limit: int, count: int) -> None:
    parts = [part_of(limit, index, count) for index in range(count)]
    assert sum(parts) == (max(limit, count) if limit else 0)
    assert max(parts) - min(parts) <= 1


class Client:
    """A connection whose request is read and that closes when told."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.http = HttpRequest(0.0)
        self.replay = BodyReplay(self._receive, b"{}", self.http)

    async def _receive(self) -> Message:
        await self.closed.wait()
        return {"type": "http.disconnect"}


def limiter(**limits: float) -> ConcurrencyLimiter:
    models = [model("m", **limits)]
    return ConcurrencyLimiter(models, 0, 1, Measures(models, CollectorRegistry()))


async def test_turns_are_taken_one_after_another() -> None:
    gates = limiter(max_concurrency=1, max_queue=5)
    order: list[int] = []
    doors = [asyncio.Event() for _ in range(3)]

    async def visit(number: int) -> None:
        async with gates.hold("m", Client().replay):
            order.append(number)
            await doors[number].wait()

    visits = [asyncio.ensure_future(visit(n)) for n in range(3)]
    for n in range(3):
        while len(order) <= n:
            await asyncio.sleep(0)
        assert order == list(range(n + 1))
        doors[n].set()
    await asyncio.gather(*visits)
    assert gates.occupied == 0


async def test_full_queue_is_told_when_to_come_back() -> None:
    gates = limiter(max_concurrency=1, max_queue=0)
    async with gates.hold("m", Client().replay):
        with pytest.raises(RequestError) as caught:
            async with gates.hold("m", Client().replay):
                pass
    assert caught.value.status == 429
    assert dict(caught.value.headers)[b"retry-after"].isdigit()
    assert gates.occupied == 0


async def test_a_first_token_that_would_be_late_is_refused_at_once() -> None:
    gates = limiter(max_wait=0.5)
    wait, now = gates.waits["m"], time.monotonic()
    for n in range(100):
        wait.enter(n, 0, 1, now - 1.1)
    for n in range(10):
        wait.answered(n, 20, now - 1.0 + n / 10)
    with pytest.raises(RequestError, match="overloaded: a first token would take about") as caught:
        async with gates.hold("m", Client().replay):
            pass
    assert caught.value.status == 429
    assert int(dict(caught.value.headers)[b"retry-after"]) >= 1
    assert gates.occupied == 0
    urgent = Client()
    urgent.http.priority = RequestLevels(scheduling_step=-1)
    async with gates.hold("m", urgent.replay):
        pass
    gates.add(model("m", max_wait="none"))
    async with gates.hold("m", Client().replay):
        pass


async def test_prompts_are_bounded_together() -> None:
    gates = limiter(max_concurrency=2, max_queue=2)
    async with gates.hold("m", Client().replay, 3), gates.hold("m", Client().replay):
        with pytest.raises(RequestError):
            async with gates.hold("m", Client().replay):
                pass
    assert gates.gates["m"].prompts == 0


def test_one_request_may_bring_a_part_of_the_prompts() -> None:
    assert [Gate(*limits).largest for limits in ((256, 1024), (64, 256), (1, 1), (1, 0))] == [1024, 256, 2, 1]


def test_a_large_request_leaves_room_for_others_at_an_idle_gate() -> None:
    gate = Gate(256, 1024)
    assert gate.arrive("large", gate.largest) is AdmissionVerdict.ENTER
    assert [gate.arrive(n) for n in range(256)].count(AdmissionVerdict.REFUSE) == 0
    assert gate.arrive("one more") is AdmissionVerdict.REFUSE


async def test_a_client_that_leaves_the_queue_makes_room() -> None:
    gates = limiter(max_concurrency=1, max_queue=1)
    client = Client()

    async def visit() -> None:
        async with gates.hold("m", client.replay):
            raise AssertionError("must not enter")

    async with gates.hold("m", Client().replay):
        waiting = asyncio.ensure_future(visit())
        while not gates.gates["m"].waiting:
            await asyncio.sleep(0)
        client.closed.set()
        with pytest.raises(ClientGoneError):
            await waiting
        assert client.http.disconnected
        assert gates.gates["m"].waiting == 0
    assert gates.occupied == 0


async def test_a_turn_given_to_one_who_just_left_goes_to_the_next() -> None:
    gates = limiter(max_concurrency=1, max_queue=2)
    entered = asyncio.Event()

    async def visit(client: Client) -> None:
        async with gates.hold("m", client.replay):
            entered.set()

    first = gates.hold("m", Client().replay)
    await first.__aenter__()
    leaving, staying = asyncio.ensure_future(visit(Client())), asyncio.ensure_future(visit(Client()))
    while gates.gates["m"].waiting < 2:
        await asyncio.sleep(0)
    leaving.cancel()
    await first.__aexit__(None, None, None)  # lets the leaving one in before it has noticed that it is cancelled
    await asyncio.wait_for(entered.wait(), PATIENCE)
    await asyncio.gather(leaving, staying, return_exceptions=True)
    assert gates.occupied == 0


async def test_empty_waits_for_the_last_one() -> None:
    gates = limiter(max_concurrency=2, max_queue=2)
    await gates.empty()
    turn = gates.hold("m", Client().replay)
    await turn.__aenter__()
    empty = asyncio.ensure_future(gates.empty())
    await asyncio.sleep(0)
    assert not empty.done()
    await turn.__aexit__(None, None, None)
    await asyncio.wait_for(empty, PATIENCE)


async def test_replay_gives_the_body_then_the_connection() -> None:
    client = Client()
    assert (await client.replay())["body"] == b"{}"
    client.closed.set()
    assert (await client.replay())["type"] == "http.disconnect"
    assert client.http.disconnected
