"""Engines of both phases: their ledger, and the policies that lease them for one phase at a time or for both."""

from __future__ import annotations

import pytest

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.state import Event
from muxserve.scheduling.types import (
    WHOLE,
    Grant,
    ModelProfile,
    Phase,
    PoolProfile,
    QueuedRequest,
    RequestPlace,
    StepsDone,
)
from tests.scheduling.machine import profile


def both(**changes: object) -> ModelProfile:
    return profile("a", both=True, decode_share=1.0, **changes)


def ledger(pages: int = 400, **changes: object) -> UnitLedger:
    made = UnitLedger([both(quota_pages=pages, **changes)], [PoolProfile("pool", pages)])
    made.engine_up("a", Phase.BOTH, 0.0)
    return made


def arrive(book: UnitLedger, request_id: str, prompt: int = 20, at: float = 0.0, **more: object) -> None:
    book.arrived(QueuedRequest(request_id, "a", prompt, 10, at, **more), at)  # type: ignore[arg-type]


def grant(book: UnitLedger, phase: Phase, *ids: str, lease: int, steps: int = 4, now: float = 0.0) -> None:
    book.granted(Grant("a", phase, steps, 1.0, WHOLE, ids), lease, now)


def step(book: UnitLedger, lease: int, now: float, left: int = 3, steps: int = 1, **more: float) -> None:
    values = {"tokens": 1, "seconds": 0.01, "prefill_tokens": 0, "prefill_seconds": 0.0} | more
    remaining = len(book.by_name["a"].decode.inside)
    book.stepped(
        "a",
        Phase.BOTH,
        StepsDone(
            lease,
            left,
            seconds=values["seconds"],
            tokens=int(values["tokens"]),
            remaining=remaining,
            steps=steps,
            prefill_tokens=int(values["prefill_tokens"]),
            prefill_seconds=values["prefill_seconds"],
        ),
        now,
    )


def prefilled(book: UnitLedger, request_id: str, lease: int, now: float = 0.1) -> None:
    assert book.prefilled(request_id, lease, 1, now)
    step(book, lease, now, tokens=20, seconds=0.02, prefill_tokens=20, prefill_seconds=0.02)


# ---------------------------------------------------------------- the ledger


def test_a_request_decodes_in_the_engine_that_prefilled_it() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=1)
    live = book.requests["r"]
    assert live.place is RequestPlace.PREFILLING
    assert model.promised == (2 + 1) * 4
    assert book.share_used == WHOLE
    prefilled(book, "r", 1)
    assert live.place is RequestPlace.DECODING
    assert (live.tokens, model.promised, model.outstanding) == (21, 0, 0)
    assert dict(model.decode.inside) == {"r": live}
    assert book.share_used == 0, "nothing is left to prefill: that lease is over"
    grant(book, Phase.DECODE, lease=2, now=0.2)
    step(book, 2, 0.3)
    assert model.tokens_of(live) == 22
    assert not book.finished("r", Phase.BOTH, 0, 0.4)
    assert book.finished("r", Phase.BOTH, 2, 0.4)
    step(book, 2, 0.4)
    assert not book.requests
    assert book.share_used == 0


def test_work_is_counted_by_what_steps_did() -> None:
    book = ledger()
    engine = book.by_name["a"].decode
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=1)
    prefilled(book, "r", 1)
    grant(book, Phase.DECODE, lease=2, now=0.2)
    step(book, 2, 0.3, steps=4, tokens=4, seconds=0.04)
    assert engine.prefills is not None
    assert (engine.prefills.jobs, engine.prefills.tokens, engine.prefills.step_seconds) == (1, 20, 0.02)
    assert (engine.jobs, engine.tokens, engine.step_seconds) == (4, 4, 0.01)
    arrive(book, "s")
    grant(book, Phase.PREFILL, "s", lease=3, now=0.4)
    assert book.prefilled("s", 3, 1, 0.5)
    # Two decode steps that were not told before, and the prefill.
    step(book, 3, 0.5, steps=3, tokens=22, seconds=0.04, prefill_tokens=20, prefill_seconds=0.02)
    assert (engine.prefills.jobs, engine.prefills.tokens) == (2, 40)
    assert (engine.jobs, engine.tokens, engine.step_seconds) == (6, 6, pytest.approx(0.01))


def test_a_lease_for_both_counts_tokens_apart_and_rounds_by_tokens() -> None:
    book = ledger()
    model = book.by_name["a"]
    for name in "rst":
        arrive(book, name)
    grant(book, Phase.BOTH, "r", "s", "t", lease=1, steps=64)
    for name in "rst":
        assert book.prefilled(name, 1, 1, 0.1)
    step(book, 1, 0.1, left=63, tokens=60, seconds=0.02, prefill_tokens=60)
    assert not model.fresh, "the next step decodes"
    # Three micro-batches with a sequence each: a token for everyone.
    step(book, 1, 0.2, left=60, steps=3, tokens=3, seconds=0.03)
    assert [model.tokens_of(book.requests[name]) for name in "rst"] == [22, 22, 22]
    assert model.decode.prefills is not None
    assert (model.decode.jobs, model.decode.tokens, model.decode.prefills.tokens) == (4, 3, 60)


def test_the_wait_for_the_phase_switch_is_counted_from_the_first_token_to_the_decode_lease() -> None:
    book = ledger()
    tally = book.by_name["a"].tally
    for name in "rst":
        arrive(book, name)
    grant(book, Phase.PREFILL, "r", "s", "t", lease=1)
    assert book.prefilled("r", 1, 1, 1.0)
    assert book.prefilled("s", 1, 1, 1.5)
    book.cancelled("r", 1.6)
    assert book.prefilled("t", 1, 1, 2.0)
    assert book.requests["s"].decoding_since is None
    grant(book, Phase.DECODE, lease=2, now=2.25)
    assert (tally.phase_switches, tally.phase_switch_seconds) == (2, 0.75 + 0.25)
    assert book.requests["s"].decoding_since == 2.25
    grant(book, Phase.DECODE, lease=3, now=3.0)
    assert tally.phase_switches == 2


def test_prompts_without_pages_let_decoding_go_on_and_are_tried_again() -> None:
    book = ledger()
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=1)
    prefilled(book, "r", 1)
    arrive(book, "s")
    grant(book, Phase.PREFILL, "s", lease=2, now=0.2)
    policy = make_policy("rolling")
    step(book, 2, 0.3, tokens=0, seconds=0.001, prefill_seconds=0.001)
    (decode,) = policy.decide(book, 0.3)
    assert (decode.phase, decode.admit) == (Phase.DECODE, ())
    book.granted(decode, 3, 0.3)
    due = policy.wakeup(book, 0.3)
    assert 0.3 < due <= 0.32
    assert policy.decide(book, (0.3 + due) / 2) == []
    (again,) = policy.decide(book, due)
    assert again.phase is Phase.PREFILL
    book.granted(again, 4, due)
    step(book, 4, 0.4, tokens=0, seconds=0.001, prefill_seconds=0.001)
    book.pages("a", 100, 0, 400)
    book.granted(policy.decide(book, 0.4)[0], 5, 0.4)
    book.pages("a", 50, 0, 400)
    assert policy.decide(book, 0.4)[0].phase is Phase.PREFILL, "a page came free"


def test_words_of_an_earlier_life_are_not_believed() -> None:
    book = ledger()
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=5)
    assert not book.prefilled("r", 4, 1, 0.1)
    assert not book.handed_over("nobody", 5, 1, 0.1)
    assert book.prefilled("r", 5, 1, 0.1)
    assert not book.prefilled("r", 5, 1, 0.1), "twice"
    assert book.returned("r", 5, 3, 0.2)
    assert book.requests["r"].place is RequestPlace.QUEUED
    assert not book.prefilled("r", 5, 1, 0.3)


def test_a_pair_of_engines_prefills_nothing_in_place() -> None:
    book = UnitLedger([profile("a")], [PoolProfile("pool", 400)])
    book.engine_up("a", Phase.PREFILL, 0.0)
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=1)
    assert not book.prefilled("r", 1, 1, 0.1)


def test_a_death_loses_all_that_is_inside_and_what_was_to_come_in() -> None:
    book = ledger(max_num_seqs=8)
    for name in ("prompt", "decoding", "queued"):
        arrive(book, name)
    grant(book, Phase.PREFILL, "prompt", "decoding", lease=1)
    assert book.prefilled("decoding", 1, 1, 0.1)
    book.taken_over(QueuedRequest("moved", "a", 20, 10, 0.0, output_tokens=3), 0.1)
    assert sorted(book.engine_down("a", Phase.BOTH, 0.2)) == ["decoding", "moved", "prompt"]
    assert list(book.requests) == ["queued"]
    assert book.share_used == 0
    assert not book.by_name["a"].fresh
    assert book.by_name["a"].promised == 0


def test_a_move_out_and_back_in_again() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "r")
    grant(book, Phase.PREFILL, "r", lease=1)
    assert not book.detached("r", 1, 1, 0.05), "it has no token yet"
    prefilled(book, "r", 1)
    assert book.detached("r", 1, 1, 0.2)
    assert (list(model.moving), list(model.fresh)) == (["r"], [])
    assert book.stays("r", 0.3)
    (back,) = make_policy("rolling").decide(book, 0.3)
    assert (back.phase, back.admit) == (Phase.DECODE, ("r",))
    book.granted(back, 2, 0.3)
    assert book.requests["r"].place is RequestPlace.DECODING
    assert book.requests["r"].decoding_since == 0.3


def test_the_journal_has_what_happened_in_order() -> None:
    book = ledger()
    model = book.by_name["a"]
    arrive(book, "before")
    model.journal = []
    arrive(book, "r", output_tokens=2)
    grant(book, Phase.PREFILL, "before", "r", lease=1)
    prefilled(book, "r", 1)
    assert book.returned("r", 1, 5, 0.2)
    book.taken_over(QueuedRequest("moved", "a", 20, 10, 0.0, output_tokens=3), 0.3)
    book.cancelled("before", 0.4)
    assert [(note.event, note.request_id) for note in model.journal] == [
        (Event.CAME, "r"),
        (Event.PREFILLED, "r"),
        (Event.LEFT, "r"),
        (Event.CAME, "r"),
        (Event.CAME, "moved"),
        (Event.LEFT, "before"),
    ]
    assert [(n.tokens, n.max_tokens, n.with_kv) for n in model.journal if n.event is Event.CAME] == [
        (22, 8, False),
        (25, 5, False),
        (23, 7, True),
    ]


# ---------------------------------------------------------------- the policies


def test_rolling_prefills_all_that_waits_before_it_decodes_and_cuts_decoding_for_it() -> None:
    book, policy = ledger(max_num_batched_tokens=24), make_policy("rolling")
    assert policy.decide(book, 0.0) == []
    for name in "rst":
        arrive(book, name)
    (first,) = policy.decide(book, 0.0)
    assert (first.phase, first.admit, first.share) == (Phase.PREFILL, ("r",), WHOLE)
    book.granted(first, 1, 0.0)
    (ahead,) = policy.decide(book, 0.0)
    assert (ahead.phase, ahead.admit) == (Phase.PREFILL, ("s",)), "one more step's tokens"
    book.granted(ahead, 2, 0.0)
    prefilled(book, "r", 1)
    (third,) = policy.decide(book, 0.1)
    assert (third.phase, third.admit) == (Phase.PREFILL, ("t",))
    book.granted(third, 3, 0.1)
    prefilled(book, "s", 2, 0.2)
    assert policy.decide(book, 0.2) == [], "t is not done"
    prefilled(book, "t", 3, 0.3)
    (decode,) = policy.decide(book, 0.3)
    assert (decode.phase, decode.admit) == (Phase.DECODE, ())
    book.granted(decode, 4, 0.3)
    assert policy.decide(book, 0.301) == []
    arrive(book, "u", at=0.302)
    (cut,) = policy.decide(book, 0.302)
    assert (cut.phase, cut.admit) == (Phase.PREFILL, ("u",))


def test_rolling_goes_back_to_decoding_when_the_last_prompt_was_cancelled() -> None:
    book, policy = ledger(), make_policy("rolling")
    arrive(book, "r")
    book.granted(policy.decide(book, 0.0)[0], 1, 0.0)
    prefilled(book, "r", 1)
    arrive(book, "s", at=0.2)
    book.granted(policy.decide(book, 0.2)[0], 2, 0.2)
    book.cancelled("s", 0.3)
    (decode,) = policy.decide(book, 0.3)
    assert decode.phase is Phase.DECODE


def test_a_prompt_that_does_not_fit_does_not_hold_decoding_up() -> None:
    book, policy = ledger(max_num_seqs=1), make_policy("rolling")
    arrive(book, "r")
    book.granted(policy.decide(book, 0.0)[0], 1, 0.0)
    prefilled(book, "r", 1)
    arrive(book, "s", at=0.2)
    (decode,) = policy.decide(book, 0.2)
    assert decode.phase is Phase.DECODE


def test_free_admits_what_the_budget_is_to_see_and_renews_before_a_pipeline_runs_empty() -> None:
    book = ledger(pages=4000, max_num_seqs=64, depth=4, waiting_tokens=100)
    policy = make_policy("free")
    for index in range(6):
        arrive(book, f"r{index}")
    (first,) = policy.decide(book, 0.0)
    assert (first.phase, len(first.admit)) == (Phase.BOTH, 5), "100 of 120 tokens"
    book.granted(first, 1, 0.0)
    assert policy.decide(book, 0.0) == []
    model = book.by_name["a"]
    model.decode.step_seconds = 1.0
    assert book.prefilled("r0", 1, 1, 0.1)
    step(book, 1, 0.1, left=63, tokens=20, seconds=1.0, prefill_tokens=20)
    (more,) = policy.decide(book, 0.1)
    assert more.admit == ("r5",)
    assert more.steps >= 4 * 4, "however long a step takes, as many are left as are under way when half is used"
    assert more.seconds >= more.steps
    book.granted(more, 2, 0.1)
    step(book, 2, 1.0, left=more.steps // 2 + 1)
    assert policy.decide(book, 1.0) == []
    step(book, 2, 1.1, left=more.steps // 2)
    (renewed,) = policy.decide(book, 1.1)
    assert (renewed.phase, renewed.admit) == (Phase.BOTH, ())
