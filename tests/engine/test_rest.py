"""Engines that rest while their model sleeps, and answer as before when it is woken: in one process each, and with two
ranks. vLLM computes; the unit scheduler and the controller are the test's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muxserve.memory import server
from muxserve.wire import HeldRequests, ShowRequests, StepReport
from tests.engine.checks import nothing_owned, workers
from tests.engine.conftest import SPLIT
from tests.engine.harness import Engines, deployed_model, engines, parent_of
from tests.support.patience import until_ended

ROOT = Path(__file__).resolve().parents[2]
MODEL = SPLIT
PHASES = ("prefill", "decode")
# The last one of several chunks.
PROMPTS = [[5, 17, 42, 8], [99], list(range(3, 203))]
TOKENS = 12


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.thorough)],
    ids=["one process", "two ranks"],
)
def family(request: pytest.FixtureRequest) -> Iterator[Engines]:
    model = deployed_model(MODEL, ROOT / "configs/models" / MODEL, ranks=request.param, max_num_batched_tokens=128)
    with engines([model], ranks=request.param, parent_of=parent_of("tests.engine.resting_family")) as running:
        yield running


def answers(family: Engines, name: str) -> list[list[int]]:
    """Tokens of some requests at a time."""
    requests = {
        f"{name}-{number}": family.body(f"{name}-{number}", prompt, max_tokens=TOKENS, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS)
    }
    family.serve(MODEL, requests)
    return [family.tokens[each] for each in requests]


def wake(family: Engines) -> None:
    """Have both engines back."""
    hellos, before = len(family.hellos), dict(family.pids)
    for phase in PHASES:
        family.fork(MODEL, phase)
    family.expect_up({(MODEL, phase) for phase in PHASES})
    family.until(lambda: len(family.hellos) >= hellos + len(PHASES))
    assert family.pids == before, "they have stayed"


def test_engines_answer_as_before_they_rested(family: Engines) -> None:
    expected = answers(family, "before")
    assert [len(each) for each in expected] == [TOKENS] * len(PROMPTS)
    for rest in range(3):
        family.rest(MODEL, *PHASES)
        wake(family)
        assert answers(family, f"after-{rest}") == expected


def begin(family: Engines, name: str, body: bytes, **again: Any) -> None:
    """Prefill a request, and have it decode."""
    family.lease(f"{MODEL}/prefill", [family.admit(name, body, **again)])
    family.until(lambda: name in family.held)
    held = family.held.pop(name)
    adopted = family.adopt(name, body, held)
    family.lease(f"{MODEL}/decode", [adopted])


def test_what_an_engine_has_when_it_is_told_to_rest_is_lost_to_it(family: Engines) -> None:
    expected = answers(family, "whole")
    body = family.body("struck", PROMPTS[0], max_tokens=900, ignore_eos=True)
    begin(family, "struck", body)
    family.until(lambda: len(family.tokens["struck"]) > 3)
    family.rest(MODEL, *PHASES)
    nothing_owned(family)
    wake(family)
    family.send(f"{MODEL}/decode", ShowRequests())
    family.until(lambda: any(isinstance(each, HeldRequests) for _, each in family.reports))
    (said,) = (each for _, each in family.reports if isinstance(each, HeldRequests))
    assert said.request_ids == []
    assert answers(family, "again") == expected


def test_what_was_stopped_goes_on_with_the_kv_that_it_had(family: Engines) -> None:
    """The full blocks of its prompt and of its answer are found as cached prefixes after the rest."""
    family.forget_prefixes(MODEL)
    tokens, block = 400, family.unit_spec.model(MODEL).block_tokens
    body = family.body("stopped", PROMPTS[2], max_tokens=tokens, ignore_eos=True)
    begin(family, "stopped", body)
    family.until(lambda: len(family.tokens["stopped"]) > 2 * block)
    family.rest(MODEL, *PHASES)
    wake(family)
    made = list(family.tokens["stopped"])
    assert 2 * block < len(made) < tokens
    seen = len(family.reports)
    begin(family, "stopped", body, output_tokens=made)
    steps = [each for who, each in family.reports[seen:] if who == f"{MODEL}/prefill" and isinstance(each, StepReport)]
    assert 0 < sum(each.tokens for each in steps) <= 2 * block, "of some hundred"
    family.until(lambda: family.finished("stopped"))
    family.forget_prefixes(MODEL)
    family.serve(MODEL, {"undisturbed": family.body("undisturbed", PROMPTS[2], max_tokens=tokens, ignore_eos=True)})
    assert family.tokens["stopped"] == family.tokens["undisturbed"]


def test_a_memory_manager_that_died_meanwhile_is_noticed(family: Engines) -> None:
    expected = answers(family, "old")
    family.rest(MODEL, *PHASES)
    os.kill(family.manager.pid, signal.SIGKILL)
    family.manager.wait()
    family.manager = server.start(family.unit_spec)
    lost = len(family.lost())
    wake(family)
    family.until(lambda: len(family.lost()) >= lost + len(PHASES))
    assert answers(family, "new") == expected


def test_an_engine_that_dies_at_rest_is_forked_anew(family: Engines) -> None:
    expected = answers(family, "first")
    family.rest(MODEL, *PHASES)
    before = family.pids[MODEL, "decode"]
    theirs = workers(before)
    family.kill(MODEL, "decode")
    family.expect_exit(before)
    hellos = len(family.hellos)
    for phase in PHASES:
        family.fork(MODEL, phase)
    family.expect_up({(MODEL, phase) for phase in PHASES})
    family.until(lambda: len(family.hellos) >= hellos + len(PHASES))
    assert family.pids[MODEL, "decode"] != before
    for worker in theirs:
        until_ended(worker, "a worker of the engine that died")
    assert answers(family, "last") == expected
