"""A decode engine that schedules asynchronously, as on GPUs: the next step before the last one's tokens. It is a real
process with kernels of the CPU, and what stands in for streams of CUDA (`ahead_family`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from muxserve.memory import server
from muxserve.wire import Detach, Detached, StepFailed
from tests.engine.cases import CASES
from tests.engine.checks import adopted, bodies, check, nothing_owned, reports, same_as_stock
from tests.engine.harness import MODELS, Engines, deployed_model, engines, parent_of, private_model
from tests.support import poison

MODEL = "arithmetic"
PREFILL, DECODE = f"{MODEL}/prefill", f"{MODEL}/decode"


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    own = {"async_scheduling": True, "logits_processors": [poison.NAME]}
    model = deployed_model(MODEL, MODELS[MODEL], max_num_batched_tokens=128, engine_args=own)
    with engines([model], parent_of=parent_of("tests.engine.ahead_family")) as running:
        yield running


@pytest.mark.thorough
def test_tokens_of_a_model_with_a_cache_of_its_own(answers: dict[str, Any]) -> None:
    asked = ["greedy", "chunked", "stop-token", "logprobs"]
    model = private_model("own", MODELS[MODEL], engine_args={"async_scheduling": True})
    with engines([model], parent_of=parent_of("tests.engine.ahead_family")) as family:
        family.serve_both("own", bodies(family, answers, "own", asked), mixed=True)
        check(family, answers, "own", asked)


def equal(family: Engines, tag: str, answers: dict[str, Any], count: int, tokens: int) -> dict[str, bytes]:
    prompt = answers["greedy"]["prompt"]
    return {f"{tag}-{i}": family.body(f"{tag}-{i}", prompt, max_tokens=tokens, ignore_eos=True) for i in range(count)}


def test_tokens_are_those_of_stock_vllm(family: Engines, answers: dict[str, Any]) -> None:
    """With room, with cached prefixes, and with so few pages that requests are preempted."""
    same_as_stock(family, MODEL, answers, CASES)


def test_logprobs_agree(family: Engines, answers: dict[str, Any]) -> None:
    family.serve(MODEL, bodies(family, answers, "lp", ["logprobs"]))
    got = [row for output in family.outputs["lp-logprobs"] for row in output.new_logprobs.logprobs[:, 0]]
    expected, tokens = answers["logprobs"]["logprobs"], answers["logprobs"]["tokens"]
    assert got == pytest.approx([expected[i][str(token)] for i, token in enumerate(tokens)], abs=1e-3)


@pytest.mark.parametrize(("case", "in_vain"), [("greedy", 0), ("stop-token", 1)])
def test_a_request_that_ends_by_a_token_costs_a_step_more(
    family: Engines, answers: dict[str, Any], case: str, in_vain: int
) -> None:
    """One that ends by its length does not: that is known before the token is."""
    name = f"ends-{case}"
    lease = family.lease(DECODE, adopted(family, MODEL, bodies(family, answers, "ends", [case])))
    family.until(lambda: family.finished(name))
    nothing_owned(family)
    # The step in vain is told with the next report: that of a request that is not there.
    family.abort(DECODE, [name])
    check(family, answers, "ends", [case])
    family.until(lambda: any(name in r.finished for r in reports(family, lease=lease)))
    assert sum(r.tokens for r in reports(family, lease=lease)) == len(answers[case]["tokens"]) - 1 + in_vain


def test_a_lease_ends_with_nothing_in_flight(family: Engines, answers: dict[str, Any]) -> None:
    requests = equal(family, "leased", answers, 3, 60)
    lease = family.lease(DECODE, adopted(family, MODEL, requests), steps=5)
    family.until(lambda: any(r.lease_left == 0 for r in reports(family, lease=lease)))
    # A message that is answered at once shows that no further step came.
    family.abort(DECODE, ["leased-0"])
    family.until(lambda: any("leased-0" in r.finished for r in reports(family, lease=lease)))
    family.until(lambda: all(len(family.tokens[name]) == 6 for name in requests))
    told = [r for r in reports(family, lease=lease) if r.steps]
    assert (sum(r.steps for r in told), sum(r.tokens for r in told)) == (5, 15)
    family.lease(DECODE)
    family.until(lambda: all(family.finished(f"leased-{i}") for i in (1, 2)))
    assert family.tokens["leased-1"][:40] == answers["greedy"]["tokens"]
    nothing_owned(family)


@pytest.mark.thorough
def test_a_request_detached_in_flight_goes_on_with_the_same_tokens(family: Engines, answers: dict[str, Any]) -> None:
    requests = equal(family, "moves", answers, 3, 500)
    admits = adopted(family, MODEL, requests)
    family.lease(DECODE, admits, steps=100_000)
    family.until(lambda: len(family.tokens["moves-0"]) > 5)
    left = family.ask(DECODE, Detach("moves-0", admits[0].incarnation, "moved", 0), Detached)
    # On a busy machine it may have ended before.
    if left.key:
        assert left.computed_tokens == len(answers["greedy"]["prompt"]) + len(left.output_tokens) - 1
        family.until(lambda: family.tokens["moves-0"] == left.output_tokens)
        back = family.adopt("moves-0", requests["moves-0"], left, foreign=True)
        family.lease(DECODE, [back], steps=100_000)
    family.until(lambda: all(family.finished(name) for name in requests))
    assert len({tuple(family.tokens[name]) for name in requests}) == 1
    nothing_owned(family)


@pytest.mark.parametrize("moment", [0, 1, 8])
def test_abort_in_flight(family: Engines, answers: dict[str, Any], moment: int) -> None:
    requests = equal(family, f"gone{moment}", answers, 5, 400)
    family.lease(DECODE, adopted(family, MODEL, requests))
    family.until(lambda: len(family.tokens[f"gone{moment}-0"]) >= moment)
    family.abort(DECODE, list(requests))
    nothing_owned(family)
    tag = f"after{moment}"
    family.serve(MODEL, bodies(family, answers, tag, ["greedy", "penalties", "json"]))
    check(family, answers, tag, ["greedy", "penalties", "json"])


def test_blocks_of_answers_are_cached(family: Engines, answers: dict[str, Any]) -> None:
    """A block is published when the step that filled it is through, although its last token was not known when that
    was scheduled."""
    prompt = answers["greedy"]["prompt"]
    family.forget_prefixes(MODEL)
    family.serve(MODEL, {"turn-1": family.body("turn-1", prompt, max_tokens=140, ignore_eos=True)})
    again = prompt + family.tokens["turn-1"][:130]
    since = len(family.reports)
    family.serve(MODEL, {"turn-2": family.body("turn-2", again, max_tokens=5, ignore_eos=True)})
    block = family.unit_spec.model(MODEL).block_tokens
    computed = sum(r.tokens for e, r in family.reports[since:] if e == PREFILL and hasattr(r, "tokens"))
    assert computed == len(again) - (len(again) - 1) // block * block
    assert family.tokens["turn-2"] == family.tokens["turn-1"][130:135]


def test_a_step_that_raises_costs_those_in_flight_and_nobody_else(family: Engines, answers: dict[str, Any]) -> None:
    requests = bodies(family, answers, "beside", ["greedy", "seed-top-p"])
    asked = {"poison": "raise", "poison_at": 3}
    bad = family.body("bad", answers["greedy"]["prompt"], max_tokens=40, ignore_eos=True, extra_args=asked)
    admits = adopted(family, MODEL, {**requests, "bad": bad})
    family.lease(DECODE, admits)
    family.until(lambda: any(isinstance(m, StepFailed) for _, m in family.reports))
    failed = next(m for _, m in family.reports if isinstance(m, StepFailed))
    assert (set(failed.request_ids), failed.lost) == ({*requests, "bad"}, [])
    nothing_owned(family)
    # They go on from the tokens that were heard.
    again = {name: list(family.tokens[name]) for name in requests}
    family.lease(PREFILL, [family.admit(name, body, output_tokens=again[name]) for name, body in requests.items()])
    family.held.clear()
    family.until(lambda: all(name in family.held for name in requests))
    on = [family.adopt(h.request_id, requests[h.request_id], h) for h in family.held.values()]
    family.lease(DECODE, on)
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, answers, "beside", ["greedy", "seed-top-p"])
    nothing_owned(family)


@pytest.mark.thorough
def test_it_comes_back_when_it_has_died_and_binds_to_a_new_memory_manager(
    family: Engines, answers: dict[str, Any]
) -> None:
    family.lease(DECODE, adopted(family, MODEL, equal(family, "dies", answers, 2, 900)), steps=100_000)
    family.until(lambda: len(family.tokens["dies-0"]) > 3)
    family.kill(MODEL, "decode")
    nothing_owned(family)
    family.reborn(MODEL, "decode")
    family.serve(MODEL, bodies(family, answers, "reborn", ["greedy", "seed"]))
    check(family, answers, "reborn", ["greedy", "seed"])

    family.lease(DECODE, adopted(family, MODEL, equal(family, "struck", answers, 2, 900)), steps=100_000)
    family.until(lambda: len(family.tokens["struck-0"]) > 3)
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    family.until(lambda: len(family.lost()) >= 2)
    family.serve(MODEL, bodies(family, answers, "anew"))
    check(family, answers, "anew")
    nothing_owned(family)
