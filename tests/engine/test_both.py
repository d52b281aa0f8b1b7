"""One engine of both phases, a real process; the test plays unit scheduler, gateway and migrator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from muxserve.memory import server
from muxserve.wire import Blocks, Detach, Detached, EngineLost, ShowBlocks, StepFailed, StepReport
from tests.engine.cases import CASES, sampling
from tests.engine.checks import bodies, check, owned, reports
from tests.engine.harness import MODELS, Engines, deployed_model, engines
from tests.support import poison
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases

MODEL = "arithmetic"
ENGINE = f"{MODEL}/both"
BLOCK = 64
# A machine that does other things may be too slow to meet an engine in the middle of something.
TRIES = 10
# The others end with their first token, or speak of the prompt only.
LONGER = [case for case in CASES if case not in ("one-token", "prompt-logprobs")]


# Also with the next step scheduled before the tokens of the last one are back.
ALSO_AHEAD = pytest.mark.parametrize("family", [False, True], indirect=True, ids=["in turn", "ahead"], scope="module")


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    own = {"logits_processors": [poison.NAME]}
    # Chunks of 128 tokens, so that the long prompts take several steps.
    changes: dict[str, Any] = {"max_num_batched_tokens": 128, "engine_args": own}
    with engines([deployed_model(MODEL, MODELS[MODEL], shape="one", rolling=True, **changes)]) as running:
        assert [hello.phase for hello in running.hellos] == ["both"]
        yield running


def prefill(family: Engines, requests: dict[str, bytes], **lease: Any) -> dict[str, int]:
    """Give each its first token and no more. Returns their incarnations."""
    admits = [family.admit(name, body) for name, body in requests.items()]
    family.lease(ENGINE, admits, phase="prefill", **lease)
    family.until(lambda: all(name in family.prefilled for name in requests))
    return {admit.request_id: admit.incarnation for admit in admits}


def decode(family: Engines, steps: int, admit: Any = ()) -> None:
    """That many steps, or less if all have ended."""
    lease = family.lease(ENGINE, admit, steps=steps, phase="decode")

    def over() -> bool:
        told = reports(family, lease=lease)
        return bool(told) and (told[-1].lease_left == 0 or not told[-1].running + told[-1].waiting)

    family.until(over)


def gone(family: Engines, names: list[str]) -> None:
    family.abort(ENGINE, names)
    family.until(lambda: owned(family)[MODEL] == 0)


@ALSO_AHEAD
@pytest.mark.parametrize("mixed", cases([False, True], [True]))
def test_tokens_are_those_of_stock_vllm(family: Engines, answers: dict[str, Any], mixed: bool) -> None:
    tag, since = f"mixed-{mixed}", len(family.reports)
    family.serve_both(MODEL, bodies(family, answers, tag), mixed)
    check(family, answers, tag)
    # Each said once that it has its first token, unless it ended with it.
    started = [p for report in reports(family, since) for p in report.prefilled]
    several = {f"{tag}-{case}" for case in CASES if len(answers[case]["tokens"]) > 1}
    assert sorted(p.request_id for p in started) == sorted(several)
    # What the steps consisted of is all that they computed.
    for report in reports(family, since):
        sums = [each for each in (report.prefills, report.decodes) if each is not None]
        if not report.tokens:  # a step in vain: what waited could not begin
            assert not sums
            continue
        assert sum(each.steps for each in sums) == report.steps
        assert sum(each.tokens for each in sums) == report.tokens
        assert min(each.seconds for each in sums) > 0
        if report.decodes is not None:
            # Every sequence that decodes has the token before in its context.
            assert report.decodes.tokens == report.decodes.sequences < report.decodes.context
            assert report.decodes.pairs == 0
        if report.prefills is not None:
            assert report.prefills.pairs >= report.prefill_tokens
    assert all(p.output_tokens == family.tokens[p.request_id][:1] for p in started)
    for report in reports(family, since):
        assert report.handed == []
        if not mixed and report.tokens:
            assert report.prefill_tokens in (0, report.tokens)
            assert (report.prefill_seconds > 0) == (report.prefill_tokens > 0)
    family.until(lambda: owned(family)[MODEL] == 0)


@ALSO_AHEAD
def test_nothing_decodes_under_a_lease_to_prefill(family: Engines, answers: dict[str, Any]) -> None:
    requests = bodies(family, answers, "first", LONGER)
    since = len(family.reports)
    prefill(family, requests)
    family.until(lambda: all(family.tokens[name] for name in requests))  # they come on another connection
    assert {name: family.tokens[name] for name in requests} == {
        f"first-{case}": answers[case]["tokens"][:1] for case in LONGER
    }
    last = reports(family, since)[-1]
    assert (last.running, last.waiting) == (len(requests), 0)
    assert last.lease_left > 0
    # A message that is answered at once shows that no step came in between.
    since = len(family.reports)
    family.abort(ENGINE, ["first-greedy"])
    family.until(lambda: len(family.reports) > since)
    assert (reports(family, since)[0].steps, reports(family, since)[0].finished) == (0, ["first-greedy"])
    assert owned(family)[MODEL] > 0
    gone(family, list(requests))


def test_a_lease_to_prefill_cuts_decoding_which_goes_on_later(family: Engines, answers: dict[str, Any]) -> None:
    # On a busy machine they may have ended before the lease to prefill comes, and there is nothing to cut.
    assert any(cuts(family, answers, str(number)) for number in range(TRIES))


def cuts(family: Engines, answers: dict[str, Any], tag: str) -> bool:
    """Whether something was left to decode when the lease to prefill came."""
    early, late = bodies(family, answers, f"early{tag}", LONGER), bodies(family, answers, f"late{tag}", LONGER)
    prefill(family, early)
    family.lease(ENGINE, steps=1000, phase="decode")
    family.until(lambda: len(family.tokens[f"early{tag}-greedy"]) > 4)
    since = len(family.reports)
    prefill(family, late)
    decoded = [r.tokens - r.prefill_tokens for r in reports(family, since)]
    # What was decoded before came with the first report after it; from the first chunk on there was nothing else.
    first = next(i for i, r in enumerate(reports(family, since)) if r.prefill_tokens)
    assert not any(decoded[first + 1 :])
    family.until(lambda: all(family.tokens[name] for name in late))
    still = {name: len(family.tokens[name]) for name in early}
    assert {len(family.tokens[name]) for name in late} == {1}
    family.lease(ENGINE, phase="decode")
    family.until(lambda: all(family.finished(name) for name in (*early, *late)))
    check(family, answers, f"early{tag}", LONGER)
    check(family, answers, f"late{tag}", LONGER)
    family.until(lambda: owned(family)[MODEL] == 0)
    return any(len(family.tokens[name]) > still[name] for name in early)


def fails(family: Engines) -> StepFailed:
    """What the engine says of a step that fails now."""
    since = len(family.reports)
    family.until(lambda: any(isinstance(m, StepFailed) for _, m in family.reports[since:]))
    return next(m for _, m in family.reports[since:] if isinstance(m, StepFailed))


def poisoned(family: Engines, answers: dict[str, Any], name: str, at: int) -> bytes:
    asked = {"poison": "raise", "poison_at": at}
    return family.body(name, answers["greedy"]["prompt"], max_tokens=40, ignore_eos=True, extra_args=asked)


@ALSO_AHEAD
def test_a_step_that_raises_costs_those_that_were_in_it_and_nobody_else(
    family: Engines, answers: dict[str, Any]
) -> None:
    pid = family.pids[MODEL, "both"]
    requests = bodies(family, answers, "beside", LONGER)
    prefill(family, requests)
    # Its prompt fails; those that decode sit still meanwhile.
    family.lease(ENGINE, [family.admit("bad", poisoned(family, answers, "bad", 0))], phase="prefill")
    failed = fails(family)
    assert (failed.request_ids, failed.lost) == (["bad"], [])
    assert poison.WORDS in failed.reason
    family.lease(ENGINE, phase="decode")
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, answers, "beside", LONGER)
    # In the middle of decoding it takes the batch along, whose requests can be served again.
    requests = bodies(family, answers, "again", ["greedy", "seed-top-p"])
    prefill(family, {**requests, "worse": poisoned(family, answers, "worse", 3)})
    family.lease(ENGINE, phase="decode")
    failed = fails(family)
    assert set(failed.request_ids) == {*requests, "worse"}
    family.until(lambda: owned(family)[MODEL] == 0)
    again = {name: list(family.tokens[name]) for name in requests}
    admits = [family.admit(name, body, output_tokens=again[name]) for name, body in requests.items()]
    family.lease(ENGINE, admits, phase="both")
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, answers, "again", ["greedy", "seed-top-p"])
    family.until(lambda: owned(family)[MODEL] == 0)
    assert psutil.Process(pid).is_running()


@ALSO_AHEAD
def test_one_alone_is_the_only_one_in_every_step(family: Engines, answers: dict[str, Any]) -> None:
    names = [f"alone-{case}" for case in LONGER[:3]]
    requests = bodies(family, answers, "alone", LONGER[:3])
    since = len(family.reports)
    admits = [family.admit(name, body) for name, body in requests.items()]
    lease = family.lease(ENGINE, admits, alone=names[1])
    family.until(lambda: family.finished(names[1]))
    family.until(lambda: len(told := reports(family, lease=lease)) > 1 and told[-1].lease_left == 0)
    # It says that it has the lease before it begins, and that the lease is over when the request is.
    first, *_, last = [m for _, m in family.reports[since:] if isinstance(m, StepReport) and m.lease_id == lease]
    assert (first.steps, first.lease_left > 0) == (0, True)
    assert (last.finished, last.running + last.waiting) == ([names[1]], 2)
    assert {name: len(family.tokens[name]) for name in (names[0], names[2])} == {names[0]: 0, names[2]: 0}
    family.lease(ENGINE)
    family.until(lambda: all(family.finished(name) for name in names))
    check(family, answers, "alone", LONGER[:3])
    # For one that has left nothing is done, and that is said.
    lease = family.lease(ENGINE, [family.admit("other", requests[names[0]])], alone="nobody")
    family.until(lambda: bool(reports(family, lease=lease)))
    told = reports(family, lease=lease)[-1]
    assert (told.lease_left, told.steps, told.waiting) == (0, 0, 1)
    gone(family, ["other"])


@ALSO_AHEAD
def test_prompts_wait_under_a_lease_to_decode(family: Engines, answers: dict[str, Any]) -> None:
    running, waiting = bodies(family, answers, "runs", ["greedy"]), bodies(family, answers, "waits", ["chunked"])
    prefill(family, running)
    decode(family, 5, [family.admit(name, body) for name, body in waiting.items()])
    last = reports(family)[-1]
    assert (last.running, last.waiting) == (1, 1)
    # One that is half through its prompt waits as well, and has its blocks.
    family.forget_prefixes(MODEL)
    held = owned(family)[MODEL]
    lease = family.lease(ENGINE, steps=2, phase="prefill")
    family.until(lambda: any(r.lease_left == 0 for r in reports(family, lease=lease)))
    assert [r.prefill_tokens for r in reports(family, lease=lease)] == [128, 128]
    decode(family, 5)
    family.until(lambda: len(family.tokens["runs-greedy"]) == 11)
    assert family.tokens["waits-chunked"] == []
    assert owned(family)[MODEL] > held
    family.lease(ENGINE, phase="prefill")
    family.until(lambda: "waits-chunked" in family.prefilled)
    family.lease(ENGINE, phase="decode")
    family.until(lambda: family.finished("runs-greedy") and family.finished("waits-chunked"))
    check(family, answers, "runs", ["greedy"])
    check(family, answers, "waits", ["chunked"])
    family.until(lambda: owned(family)[MODEL] == 0)


@ALSO_AHEAD
@pytest.mark.parametrize("mixed", cases([False, True], [True]))
def test_preempted_requests_come_back_and_end_with_the_same_tokens(
    family: Engines, answers: dict[str, Any], mixed: bool
) -> None:
    tag = f"tight-{mixed}"
    cases = ["greedy", "seed", "logprobs", "min-tokens", "json", "penalties", "chunked", "seed-top-p"]
    requests = bodies(family, answers, tag, cases)
    requests |= {
        f"{tag}{i}": family.body(f"{tag}{i}", answers["greedy"]["prompt"], max_tokens=250, ignore_eos=True)
        for i in range(6)
    }
    before = len(family.returned())
    with family.quota(MODEL, blocks=12):
        family.serve_both(MODEL, requests, mixed)
    assert len(family.returned()) > before, "the quota was not tight enough to preempt anything"
    check(family, answers, tag, cases)
    assert len({tuple(family.tokens[f"{tag}{i}"]) for i in range(6)}) == 1
    family.until(lambda: owned(family)[MODEL] == 0)


def test_a_prompt_takes_no_page_from_one_that_decodes(family: Engines, answers: dict[str, Any]) -> None:
    old = {"old": family.body("old", answers["greedy"]["prompt"], priority=9, max_tokens=400, ignore_eos=True)}
    with family.quota(MODEL, blocks=6):
        prefill(family, old)
        since = len(family.returned())
        new = family.body("new", answers["chunked"]["prompt"], max_tokens=9, ignore_eos=True)
        assert len(answers["chunked"]["prompt"]) > 6 * BLOCK
        family.lease(ENGINE, [family.admit("new", new)], phase="prefill")
        family.until(lambda: len(family.returned()) > since)
        assert [r.request_id for r in family.returned()[since:]] == ["new"]
        decode(family, 20)
        family.until(lambda: len(family.tokens["old"]) == 21)
    gone(family, ["old"])


def test_prompts_are_taken_in_the_order_in_which_they_come(family: Engines, answers: dict[str, Any]) -> None:
    """Whatever their level: that only says who gives pages back."""
    prompt = answers["greedy"]["prompt"]
    requests = {
        f"level{level}": family.body(f"level{level}", prompt, priority=level, max_tokens=9) for level in (2, 0, 1)
    }
    since = len(family.reports)
    prefill(family, requests, tokens=len(prompt))
    started = [p.request_id for report in reports(family, since) for p in report.prefilled]
    assert started == list(requests)
    gone(family, list(requests))


@pytest.mark.parametrize("moment", ["queued", "mid-prompt", "suspended", "decoding"])
def test_abort_gives_pages_back_at_any_moment(family: Engines, answers: dict[str, Any], moment: str) -> None:
    name = f"gone-{moment}"
    family.forget_prefixes(MODEL)
    body = family.body(name, answers["chunked"]["prompt"], max_tokens=300, ignore_eos=True)
    since = len(family.reports)
    steps = {"queued": 0, "mid-prompt": 2}.get(moment, 100)
    family.lease(ENGINE, [family.admit(name, body)], steps=steps, phase="prefill")
    if moment == "mid-prompt":
        family.until(lambda: len(family.reports) >= since + 2)
    elif moment != "queued":
        family.until(lambda: name in family.prefilled)
    if moment == "decoding":
        family.lease(ENGINE, phase="decode")
        family.until(lambda: len(family.tokens[name]) > 3)
    if moment != "decoding":  # then it may end by itself just now
        assert (owned(family)[MODEL] > 0) == (moment != "queued")
    family.abort(ENGINE, [name])
    family.until(lambda: any(name in report.finished for report in reports(family, since)))
    family.until(lambda: owned(family)[MODEL] == 0)


@ALSO_AHEAD
def test_cached_prefixes_of_prompts_and_outputs_are_found(family: Engines, answers: dict[str, Any]) -> None:
    prompt, tokens = answers["chunked"]["prompt"], answers["chunked"]["tokens"]

    def computed(name: str, prompt: list[int], **params: Any) -> int:
        since = len(family.reports)
        family.serve_both(MODEL, {name: family.body(name, prompt, **params)})
        return sum(report.prefill_tokens for report in reports(family, since))

    family.forget_prefixes(MODEL)
    long = {"max_tokens": 100, "ignore_eos": True}
    assert computed("cold", prompt, **long) == len(prompt)
    assert computed("warm", prompt, **long) == len(prompt) - (len(prompt) - 1) // BLOCK * BLOCK
    assert family.tokens["cold"] == family.tokens["warm"]
    assert family.tokens["cold"][: len(tokens)] == tokens
    again = prompt + family.tokens["cold"][:90]
    assert computed("turn-2", again, max_tokens=1) == len(again) - (len(again) - 1) // BLOCK * BLOCK
    assert family.tokens["turn-2"] == family.tokens["cold"][90:91]


@ALSO_AHEAD
def test_a_request_goes_on_from_tokens_sent_before(family: Engines, answers: dict[str, Any]) -> None:
    keep = 3
    cases = [case for case in CASES if len(answers[case]["tokens"]) > keep]
    requests = bodies(family, answers, "resumed", cases)
    admits = []
    for case in cases:
        name, sent = f"resumed-{case}", answers[case]["tokens"][:keep]
        family.tokens[name] = list(sent)
        admits.append(family.admit(name, requests[name], output_tokens=sent))
    family.lease(ENGINE, admits, phase="prefill")
    family.until(lambda: all(name in family.prefilled or family.finished(name) for name in requests))
    for case in cases:
        if f"resumed-{case}" in family.prefilled:
            assert family.prefilled[f"resumed-{case}"].output_tokens == answers[case]["tokens"][: keep + 1]
    family.lease(ENGINE, phase="decode")
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, answers, "resumed", cases)


@ALSO_AHEAD
def test_requests_move_out_and_back_in(family: Engines, answers: dict[str, Any]) -> None:
    requests = bodies(family, answers, "moved", LONGER)
    incarnations = prefill(family, requests)
    decode(family, 1)
    moves = 0
    while True:
        moves += 1
        admits = []
        for name, incarnation in incarnations.items():
            asked = Detach(name, incarnation, f"{name}/{moves}", 0)
            left = family.ask(ENGINE, asked, Detached)
            deadline = time.monotonic() + PATIENCE
            while not left.key and not family.finished(name):
                assert time.monotonic() < deadline, f"{name} neither decodes nor ends"
                # Its end is not told yet, or its lease ran out on a busy machine before it could decode.
                family.lease(ENGINE, steps=1, phase="decode")
                left = family.ask(ENGINE, asked, Detached)
            if not left.key:
                continue
            family.until(lambda name=name, left=left: len(family.tokens[name]) >= len(left.output_tokens))
            assert len(left.blocks) == -(-left.computed_tokens // BLOCK)
            admits.append(family.adopt(name, requests[name], left, foreign=bool(moves % 2)))
        if not admits:
            break
        if moves == 2:
            # Under a lease to prefill whoever was adopted waits, and keeps what it has.
            began = {admit.request_id: len(family.tokens[admit.request_id]) for admit in admits}
            new = family.body("beside", answers["greedy"]["prompt"], max_tokens=2, ignore_eos=True)
            family.lease(ENGINE, admits, phase="prefill")
            prefill(family, {"beside": new})
            assert {name: len(family.tokens[name]) for name in began} == began
            admits, kept = [], admits
        else:
            kept = admits
        decode(family, 7, admits)
        incarnations = {admit.request_id: admit.incarnation for admit in kept}
    assert moves > 4
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, answers, "moved", LONGER)
    # Adopted ones had their first token elsewhere.
    assert all(len(family.prefilled[name].output_tokens) == 1 for name in requests)
    family.until(lambda: owned(family)[MODEL] == 0)


def test_blocks_are_shown_of_those_that_decode(family: Engines, answers: dict[str, Any]) -> None:
    prompt = answers["chunked"]["prompt"]
    admit = family.admit("shown", family.body("shown", prompt, max_tokens=300, ignore_eos=True))
    family.forget_prefixes(MODEL)
    lease = family.lease(ENGINE, [admit], steps=2, phase="prefill")
    family.until(lambda: any(r.lease_left == 0 for r in reports(family, lease=lease)))
    half = family.ask(ENGINE, ShowBlocks("shown", admit.incarnation), Blocks)
    assert (half.blocks, half.computed_tokens) == ([], 0)
    family.lease(ENGINE, phase="prefill")
    family.until(lambda: "shown" in family.prefilled)
    whole = family.ask(ENGINE, ShowBlocks("shown", admit.incarnation), Blocks)
    assert whole.computed_tokens == len(prompt)
    assert len(whole.blocks) == -(-len(prompt) // BLOCK)
    gone(family, ["shown"])


def test_it_comes_back_when_it_has_died(family: Engines, answers: dict[str, Any]) -> None:
    prefill(family, bodies(family, answers, "dies", ["greedy"]))
    family.kill(MODEL, "both")
    family.reborn(MODEL, "both")
    family.until(lambda: owned(family)[MODEL] == 0)
    family.serve_both(MODEL, bodies(family, answers, "reborn", ["greedy", "seed"]))
    check(family, answers, "reborn", ["greedy", "seed"])


def test_it_binds_to_a_new_memory_manager(family: Engines, answers: dict[str, Any]) -> None:
    prefill(family, bodies(family, answers, "struck", ["greedy", "chunked"]))
    family.lease(ENGINE, phase="decode")
    family.until(lambda: len(family.tokens["struck-greedy"]) > 3)
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    family.until(lambda: bool(family.lost()))
    (lost,) = family.lost()
    assert isinstance(lost, EngineLost)
    family.serve_both(MODEL, bodies(family, answers, "anew"))
    check(family, answers, "anew")
    family.until(lambda: owned(family)[MODEL] == 0)


def test_what_is_sampled_is_sent_under_the_decode_engines_number(family: Engines, answers: dict[str, Any]) -> None:
    case = "logprobs"
    family.serve_both(MODEL, {"lp": family.body("lp", answers[case]["prompt"], **sampling(CASES[case][1]))})
    got = [row for output in family.outputs["lp"] for row in output.new_logprobs.logprobs[:, 0]]
    expected = answers[case]["logprobs"]
    tokens = answers[case]["tokens"]
    assert got == pytest.approx([expected[i][str(token)] for i, token in enumerate(tokens)], abs=1e-3)
    assert {header.engine for header in family.headers} == {1}
