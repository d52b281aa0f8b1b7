"""What each policy decides in plain situations."""

from __future__ import annotations

import pytest

from muxserve.scheduling.adbs import Adbs, AdbsConfig
from muxserve.scheduling.fcfs import Fcfs
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import POLICIES, make_policy
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.types import WHOLE, Grant, ModelProfile, Phase, PoolProfile, QueuedRequest, StepsDone
from tests.scheduling.machine import profile


class Table:
    """A ledger and a policy on one table; leases are numbered as they are given."""

    def __init__(self, policy: Policy, *profiles: ModelProfile) -> None:
        self.policy = policy
        self.ledger = UnitLedger(profiles, [PoolProfile("pool", 2000)])
        self.lease_ids: dict[tuple[str, Phase], int] = {}
        self.last = 0
        for p in profiles:
            for engine in self.ledger.by_name[p.name].engines:
                self.ledger.engine_up(p.name, engine.phase, 0.0)

    def arrive(self, request_id: str, model: str, prompt: int = 20, now: float = 0.0) -> None:
        self.ledger.arrived(QueuedRequest(request_id, model, prompt, 50, now), now)

    def decide(self, now: float) -> list[Grant]:
        grants = self.policy.decide(self.ledger, now)
        for grant in grants:
            self.last += 1
            self.lease_ids[grant.model, grant.phase] = self.last
            self.ledger.granted(grant, self.last, now)
        assert self.policy.name == "free" or self.ledger.share_used <= WHOLE
        return grants

    def step(
        self,
        model: str,
        phase: Phase,
        now: float,
        left: int,
        *,
        tokens: int = 4,
        seconds: float = 0.002,
        handed: tuple[str, ...] = (),
        remaining: int | None = None,
    ) -> list[Grant]:
        lease = self.lease_ids[model, phase]
        for request_id in handed:
            self.ledger.handed_over(request_id, self.ledger.requests[request_id].lease_id, 1, now)
        inside = len(self.ledger.by_name[model].engine(phase).inside) if remaining is None else remaining
        self.ledger.stepped(model, phase, StepsDone(lease, left, seconds=seconds, tokens=tokens, remaining=inside), now)
        return self.decide(now)

    def decoding(self, request_id: str, model: str, now: float = 0.0) -> list[Grant]:
        """Put a request where its prefill is done; returns what is granted then."""
        self.arrive(request_id, model, now=now)
        self.last += 1
        self.ledger.granted(Grant(model, Phase.PREFILL, 1, 1.0, 0, (request_id,)), self.last, now)
        self.ledger.handed_over(request_id, self.last, 1, now)
        left = len(self.ledger.by_name[model].prefilling)
        self.ledger.stepped(
            model, Phase.PREFILL, StepsDone(self.last, 0, seconds=0.002, tokens=20, remaining=left), now
        )
        return self.decide(now)


def brief(grants: list[Grant]) -> set[tuple[str, str]]:
    return {(g.model, str(g.phase)) for g in grants}


ALL = sorted(set(POLICIES) - {"rolling"})


@pytest.mark.parametrize("name", ALL)
def test_an_arrival_to_an_idle_unit_is_granted_at_once(name: str) -> None:
    table = Table(make_policy(name), profile("a"), profile("b"))
    assert table.decide(0.0) == []
    table.arrive("r", "b")
    (grant,) = table.decide(0.0)
    assert (grant.model, grant.phase, grant.admit) == ("b", Phase.PREFILL, ("r",))
    assert table.decide(0.0) == [], "nothing is granted twice"


@pytest.mark.parametrize("name", ALL)
def test_a_hand_over_is_decoded_at_once(name: str) -> None:
    table = Table(make_policy(name), profile("a"))
    (grant,) = table.decoding("r", "a")
    assert (grant.phase, grant.admit) == (Phase.DECODE, ("r",))


@pytest.mark.parametrize("name", ALL)
def test_a_lease_is_renewed_before_it_ends_while_nobody_waits(name: str) -> None:
    table = Table(make_policy(name), profile("a"), profile("b"))
    (grant,) = table.decoding("r", "a")
    steps = grant.steps
    assert table.step("a", Phase.DECODE, 0.002, steps - 1) == []
    (renewal,) = table.step("a", Phase.DECODE, 0.01, steps // 2)
    assert renewal.phase is Phase.DECODE
    assert renewal.admit == ()
    assert renewal.steps >= 4


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_granted_to_an_engine_that_is_down(name: str) -> None:
    table = Table(make_policy(name), profile("a"))
    table.ledger.engine_down("a", Phase.PREFILL, 0.0)
    table.arrive("r", "a")
    assert table.decide(0.0) == []
    table.ledger.engine_up("a", Phase.PREFILL, 1.0)
    assert brief(table.decide(1.0)) == {("a", "prefill")}


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ValueError, match="adbs, fcfs, free, rolling, slack"):
        make_policy("lottery")


# ---------------------------------------------------------------- adbs


def test_adbs_runs_prefill_beside_decode_of_others_and_of_the_same_model() -> None:
    table = Table(Adbs(), profile("a"), profile("b"))
    table.decoding("r", "a")
    table.arrive("s", "b")
    assert brief(table.decide(0.0)) == {("b", "prefill")}
    table = Table(Adbs(), profile("a"), profile("b"))
    table.decoding("r", "a")
    table.arrive("s", "a")
    assert brief(table.decide(0.0)) == {("a", "prefill")}


def test_adbs_has_one_prefill_job_at_a_time_and_takes_turns() -> None:
    table = Table(Adbs(), *(profile(n, prefill_share=0.25, decode_share=0.25) for n in "abc"))
    for name in "abc":
        for index in range(2):
            table.arrive(f"{name}{index}", name, prompt=64)
    order, now, grants = [], 0.0, table.decide(0.0)
    while grants:
        (grant,) = [g for g in grants if g.phase is Phase.PREFILL]
        order.append(grant.model)
        now += 0.005
        # Each request ends with its first token, so that nothing but prefill is to be seen.
        for request_id in grant.admit:
            table.ledger.finished(request_id, Phase.PREFILL, table.last, now)
        grants = table.step(grant.model, Phase.PREFILL, now, 1, tokens=64)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_adbs_recalls_just_enough_decode_for_a_waiting_prefill() -> None:
    table = Table(Adbs(), profile("a"), profile("b"), profile("c"))
    table.decoding("r", "a", 0.0)
    table.decoding("s", "b", 0.001)
    assert table.ledger.share_free == 0
    table.arrive("t", "c", now=0.002)
    (recall,) = table.decide(0.002)
    assert (recall.model, recall.phase, recall.steps, recall.renewable) == ("a", Phase.DECODE, 1, False)
    assert table.decide(0.003) == [], "one is recalled, once"
    steps = table.ledger.by_name["b"].decode.lease.steps  # type: ignore[union-attr]
    (renewal,) = table.step("b", Phase.DECODE, 0.004, steps // 2)
    assert renewal.model == "b", "the other goes on"
    launched = {(g.model, g.phase): g for g in table.step("a", Phase.DECODE, 0.006, 0)}
    assert launched.keys() == {("c", Phase.PREFILL), ("b", Phase.DECODE)}
    assert launched["b", Phase.DECODE].steps <= Quanta().contended_steps, "a waits now, so b's turn is cut to a turn"


def test_adbs_does_not_hold_decode_back_for_a_prefill_that_waits_for_pages() -> None:
    table = Table(Adbs(), profile("a", quota_pages=80), profile("b"))
    table.decoding("r", "a", 0.0)
    table.ledger.pages("a", 76, 0, 80)
    table.arrive("big", "a", prompt=200, now=0.001)
    steps = table.ledger.by_name["a"].decode.lease.steps  # type: ignore[union-attr]
    assert table.decide(0.001) == []
    (renewal,) = table.step("a", Phase.DECODE, 0.002, steps // 2)
    assert renewal.model == "a"
    assert renewal.renewable


def test_adbs_decode_engines_take_turns_when_not_all_fit() -> None:
    table = Table(Adbs(), *(profile(n) for n in "abc"))
    for index, name in enumerate("abc"):
        table.decoding(f"r-{name}", name, 0.001 * index)
    now, order = 0.01, []
    for _ in range(12):
        now += 0.01
        running = [m.name for m in table.ledger.models if m.decode.lease is not None]
        assert len(running) == 2
        oldest = min(running, key=lambda n: table.ledger.by_name[n].decode.lease.granted_at)  # type: ignore[union-attr]
        (grant,) = [g for g in table.step(oldest, Phase.DECODE, now, 0) if g.model != oldest]
        assert grant.steps <= Quanta().contended_steps
        order.append(grant.model)
    assert all(order[i] != order[i + 1] for i in range(11))
    assert {name: order.count(name) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_adbs_cuts_long_leases_short_when_others_come() -> None:
    table = Table(Adbs(), profile("a", decode_share=1.0), profile("b", decode_share=1.0, prefill_share=0.5))
    (grant,) = table.decoding("r", "a")
    (renewal,) = table.step("a", Phase.DECODE, 0.002, grant.steps // 2)
    assert renewal.steps > 2 * Quanta().contended_steps
    (cut,) = table.decoding("s", "b", 0.004)
    assert cut.model == "a"
    assert cut.steps <= Quanta().contended_steps


def test_adbs_lets_a_running_prefill_take_in_more_only_while_nobody_else_wants_to() -> None:
    table = Table(Adbs(), profile("a"), profile("b"))
    table.arrive("first", "a", prompt=64)
    table.decide(0.0)
    table.arrive("second", "a", prompt=64, now=0.001)
    (more,) = table.decide(0.001)
    assert more.admit == ("second",)
    assert more.steps >= 2
    table.arrive("third", "a", prompt=64, now=0.002)
    assert table.decide(0.002) == [], "one step ahead is enough"
    table.arrive("other", "b", now=0.003)
    grants = table.step("a", Phase.PREFILL, 0.004, 2, tokens=64, handed=("first",))
    assert ("a", "prefill") not in brief(grants)
    grants = table.step("a", Phase.PREFILL, 0.006, 1, tokens=64, handed=("second",))
    assert ("b", "prefill") in brief(grants)


def test_adbs_hand_overs_join_a_running_batch_without_prolonging_it_while_others_wait() -> None:
    table = Table(Adbs(), profile("a"), profile("b"), profile("c"))
    for index, name in enumerate("abc"):
        table.decoding(f"r-{name}", name, 0.001 * index)
    waiting = next(m for m in table.ledger.models if m.decode.lease is None)
    runner = next(m for m in table.ledger.models if m.decode.lease is not None)
    lease = runner.decode.lease
    assert lease is not None
    left, deadline = lease.left, lease.deadline
    (joined,) = [g for g in table.decoding("s", runner.name, 0.011) if g.model == runner.name]
    assert joined.admit == ("s",)
    assert joined.steps <= left
    assert 0.011 + joined.seconds == pytest.approx(deadline)
    assert waiting.decode.lease is None


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_for_which_there_are_no_pages_changes_nothing(name: str) -> None:
    table = Table(make_policy(name), profile("a", quota_pages=80))
    table.decoding("r", "a")
    table.ledger.pages("a", 76, 0, 80)
    table.arrive("big", "a", prompt=200, now=0.001)
    assert table.decide(0.001) == []
    table.ledger.pages("a", 10, 0, 80)
    assert table.decide(0.001), "now there are"


def test_fcfs_renews_until_the_turn_ends() -> None:
    table = Table(Fcfs(slice_seconds=0.1), profile("a"), profile("b"))
    table.decoding("r", "a", now=0.05)
    table.arrive("s", "b", now=0.06)
    assert table.decide(0.06) == []
    lease = table.ledger.by_name["a"].decode.lease
    assert lease is not None
    (renewal,) = table.step("a", Phase.DECODE, 0.149, lease.steps // 2)
    assert renewal.renewable
    (recall,) = table.decide(0.151)
    assert not recall.renewable


def test_adbs_has_no_quotas_to_adapt_where_one_model_has_the_pool() -> None:
    alone = Table(Adbs(), profile("a", quota_pages=2000))
    assert alone.policy.rebalance(alone.ledger, 0.0) == []
    model = alone.ledger.by_name["a"]
    model.retired = True
    (change,) = alone.policy.rebalance(alone.ledger, 1.0)
    assert change.pages < 2000
    alone.ledger.pages("a", 0, 0, change.pages)
    model.retired = False
    for now in range(2, 40):
        for change in alone.policy.rebalance(alone.ledger, float(now)):
            alone.ledger.pages("a", 0, 0, change.pages)
    assert (model.quota, alone.policy.limit(model)) == (2000, 2000)


# ---------------------------------------------------------------- fcfs and round robin


def test_fcfs_gives_the_unit_to_one_model_in_order_of_arrival() -> None:
    table = Table(Fcfs(), profile("a"), profile("b"), profile("c"))
    table.arrive("late", "a", now=0.2)
    table.arrive("early", "c", now=0.1)
    table.arrive("last", "b", now=0.3)
    (grant,) = table.decide(0.3)
    assert (grant.model, grant.share) == ("c", WHOLE)
    (grant,) = table.step("c", Phase.PREFILL, 0.31, 1, tokens=20, handed=("early",))
    assert (grant.model, grant.phase, grant.share) == ("c", Phase.DECODE, WHOLE)
    table.ledger.finished("early", Phase.DECODE, table.last, 0.32)
    (grant,) = table.step("c", Phase.DECODE, 0.32, 3)
    assert grant.model == "a"


def test_fcfs_ends_a_turn_when_others_wait_and_comes_back() -> None:
    table = Table(Fcfs(slice_seconds=0.1), profile("a"), profile("b"), profile("c"))
    for name in "abc":
        table.arrive(f"r-{name}", name, now=0.0)
    order, now, grants = [], 0.0, table.decide(0.0)
    for _ in range(200):
        if not grants:
            model = next(m for m in table.ledger.models if m.prefill.lease or m.decode.lease)
            phase = Phase.PREFILL if model.prefill.lease else Phase.DECODE
            name = model.name
        else:
            name, phase = grants[-1].model, grants[-1].phase
        if not order or order[-1] != name:
            order.append(name)
        lease = table.ledger.by_name[name].engine(phase).lease
        assert lease is not None
        now += 0.01
        handed = (f"r-{name}",) if phase is Phase.PREFILL else ()
        grants = table.step(name, phase, now, lease.left - 1, handed=handed)
    assert order[:7] == ["a", "b", "c", "a", "b", "c", "a"]


def test_fcfs_decodes_before_it_tries_a_prefill_again_that_found_too_few_pages() -> None:
    table = Table(Fcfs(), profile("a"))
    table.decoding("r", "a")
    table.arrive("s", "a")
    table.decide(0.001)
    (grant,) = table.step("a", Phase.DECODE, 0.002, 0)
    for now in (0.01, 0.02):
        assert grant.phase is Phase.PREFILL
        # The first chunk finds pages; the next does not, and the engine gives them up again.
        table.ledger.pages("a", 400, 0, 400)
        assert table.step("a", Phase.PREFILL, now, 1) == []
        table.ledger.stepped(
            "a",
            Phase.PREFILL,
            StepsDone(table.lease_ids["a", Phase.PREFILL], 0, seconds=0.001, tokens=0, remaining=1),
            now + 0.001,
        )
        table.ledger.pages("a", 300, 0, 400)
        (grant,) = table.decide(now + 0.001)
        assert grant.phase is Phase.DECODE
        assert table.step("a", Phase.DECODE, now + 0.002, 1) == [], "it is neither recalled nor renewed"
        (grant,) = table.step("a", Phase.DECODE, now + 0.003, 0)


# ---------------------------------------------------------------- engines of both phases beside others


def one(name: str, **changes: object) -> ModelProfile:
    return profile(name, both=True, **changes)


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_enters_an_engine_of_both_phases_and_its_running_lease(name: str) -> None:
    table = Table(make_policy(name), one("a"), profile("b"))
    table.arrive("r", "a")
    (grant,) = table.decide(0.0)
    assert (grant.model, grant.phase, grant.admit) == ("a", Phase.BOTH, ("r",))
    assert grant.share == (WHOLE if name in ("slack", "free", "fcfs") else WHOLE // 2)
    assert table.decide(0.0) == [], "nothing is granted twice"
    table.arrive("s", "a", now=0.001)
    (more,) = table.decide(0.001)
    assert (more.phase, more.admit) == (Phase.BOTH, ("s",))


def test_adbs_recalls_an_engine_of_both_phases_for_a_prefill_job() -> None:
    table = Table(Adbs(), one("a", decode_share=1.0), profile("b", prefill_share=0.5))
    table.arrive("r", "a")
    table.decide(0.0)
    table.arrive("s", "b", now=0.001)
    (recall,) = table.decide(0.001)
    assert (recall.model, recall.phase, recall.steps, recall.renewable) == ("a", Phase.BOTH, 1, False)
    table.ledger.prefilled("r", table.lease_ids["a", Phase.BOTH] - 1, 1, 0.002)
    (prefill,) = table.step("a", Phase.BOTH, 0.002, 0)
    assert (prefill.model, prefill.phase) == ("b", Phase.PREFILL)


def test_adbs_gives_an_engine_of_both_phases_that_waited_long_the_precedence() -> None:
    table = Table(Adbs(AdbsConfig(patience=0.1)), one("a", decode_share=1.0), profile("b", decode_share=1.0))
    table.decoding("r", "b")
    table.arrive("s", "a", now=0.001)
    assert table.decide(0.001)[0].model == "b", "its lease is cut"
    assert table.ledger.by_name["a"].decode.wait_since == 0.001
    lease = table.ledger.by_name["b"].decode.lease
    assert lease is not None
    (grant,) = table.step("b", Phase.DECODE, 0.2, 0)
    assert (grant.model, grant.admit) == ("a", ("s",))
    assert table.ledger.by_name["a"].decode.waits == 1


def test_slack_divides_between_a_prefill_job_and_an_engine_of_both_phases() -> None:
    table = Table(make_policy("slack"), one("a", decode_share=0.5), profile("b", prefill_share=0.5))
    table.arrive("r", "a")
    table.decide(0.0)
    table.arrive("s", "b", now=0.001)
    (smaller,) = table.decide(0.001)
    assert (smaller.model, smaller.share) == ("a", WHOLE // 2)
    (prefill,) = table.step("a", Phase.BOTH, 0.002, smaller.steps, tokens=0, seconds=0.0)
    assert (prefill.model, prefill.phase, prefill.share) == ("b", Phase.PREFILL, WHOLE // 2)


def test_free_withholds_nothing_and_renews_in_time() -> None:
    table = Table(make_policy("free"), one("a", decode_share=1.0), profile("b", decode_share=1.0), profile("c"))
    table.decoding("r", "b")
    for index, name in enumerate("abc"):
        table.arrive(f"s{index}", name, now=0.001)
    assert brief(table.decide(0.001)) == {("a", "both"), ("b", "prefill"), ("c", "prefill")}
    assert table.ledger.share_used == 4 * WHOLE
    left = table.ledger.by_name["b"].decode.lease
    assert left is not None
    (renewed,) = table.step("b", Phase.DECODE, 0.01, left.steps // 2)
    assert (renewed.model, renewed.renewable) == ("b", True)
    fixed = Table(make_policy("free"), one("a", decode_share=0.25, elastic=False))
    fixed.arrive("r", "a")
    assert fixed.decide(0.0)[0].share == WHOLE // 4, "an engine with a share for life keeps it"


# ---------------------------------------------------------------- lengths


def test_leases_are_as_long_as_their_quantum() -> None:
    quanta = Quanta()
    assert quanta.decode(0.0, contended=True).steps == 8
    assert quanta.decode(0.0001, contended=True).steps == 8
    assert quanta.decode(0.01, contended=True).steps == 2
    assert quanta.decode(0.5, contended=True).steps == 2
    assert quanta.decode(0.5, contended=False).steps == 4, "renewable before it ends"
    assert quanta.decode(0.0001, contended=False).steps == 64
    for step in (0.0, 0.001, 0.03, 2.0):
        for contended in (False, True):
            length = quanta.decode(step, contended)
            assert length.seconds >= 3 * length.steps * step
