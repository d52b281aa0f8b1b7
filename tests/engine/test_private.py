"""Engines with vLLM's own cache, beside one on the shared pool: real processes; the test plays unit scheduler and
gateway."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from muxserve.memory import server
from muxserve.wire import Blocks, Detach, Detached, ShowBlocks, StepFailed
from tests.engine.cases import CASES, GROWN, NOISE, sampling
from tests.engine.checks import bodies, check, reports
from tests.engine.conftest import TRIED
from tests.engine.harness import MODELS, PRIVATE_KINDS, Engines, deployed_model, engines, private_model
from tests.support import poison
from tests.support.thoroughness import THOROUGH
from tests.support.tiny_private import TEXT, WHOLE, tiny_private

POOLED = "arithmetic"
# The same checkpoint with a cache of its own.
OWN = "own"
ENGINE = f"{OWN}/both"
# The same with a draft model, and with the next step scheduled before the last one's tokens are back.
DRAFTED = "drafted"
# Room for some sequences of it only.
FEW = 14 << 20
# Stock vLLM on CPU has other tokens for LFM2, too, when several prompts are in a step. Zamba 2 was tried so only.
ALONE = {"lfm2", "zamba2"}


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    # Chunks of 128 tokens, so that the long prompts take several steps.
    changes: dict[str, Any] = {"max_num_batched_tokens": 128, "engine_args": {"logits_processors": [poison.NAME]}}
    models = [
        deployed_model(POOLED, MODELS[POOLED], max_num_batched_tokens=128),
        private_model(OWN, MODELS[POOLED], kv_bytes=FEW, **changes),
        *(private_model(kind, tiny_private(kind), max_num_batched_tokens=128) for kind in PRIVATE_KINDS),
    ]
    if THOROUGH:
        proposing = {"method": "draft_model", "model": str(MODELS[POOLED]), "num_speculative_tokens": 2}
        models += [
            private_model(WHOLE, tiny_private(WHOLE), max_num_batched_tokens=128),
            private_model(DRAFTED, MODELS[POOLED], engine_args={"speculative_config": proposing}),
        ]
    with engines(models) as running:
        yield running


def ended(family: Engines, requests: dict[str, bytes]) -> None:
    family.until(lambda: all(family.finished(name) for name in requests))


SERVED = [
    pytest.param("mamba2", marks=pytest.mark.serves("Mamba2 (private)", "served")),
    pytest.param("falcon_h1", marks=pytest.mark.serves("FalconH1 (private)", "served")),
    pytest.param("zamba2", marks=pytest.mark.serves("Zamba2 (private)", "served")),
    pytest.param("lfm2", marks=pytest.mark.serves("Lfm2 (private)", "served")),
    pytest.param("llama4", marks=pytest.mark.serves("Llama4 (private)", "served", "prefix cache")),
    pytest.param("gemma3n", marks=pytest.mark.serves("Gemma3n (private)", "served")),
    pytest.param("gemma4", marks=pytest.mark.serves("Gemma4 (private)", "served", "prefix cache")),
    pytest.param("minicpm3", marks=pytest.mark.serves("MiniCPM3 (private)", "served")),
]


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.values[0] in PRIVATE_KINDS])
def test_tokens_are_those_of_stock_vllm(family: Engines, stock_private: dict[str, Any], kind: str) -> None:
    for tag in (f"{kind}-first", f"{kind}-again"):
        for cases in [[case] for case in NOISE] if kind in ALONE else [NOISE]:
            family.serve_both(kind, bodies(family, stock_private[kind], tag, cases), mixed=True)
        check(family, stock_private[kind], tag, NOISE)


@pytest.mark.thorough
@pytest.mark.serves("Llama4 (text of multi-modal, private)", "served")
def test_text_of_a_multi_modal_checkpoint(family: Engines, stock_private: dict[str, Any]) -> None:
    family.serve_both(WHOLE, bodies(family, stock_private[TEXT], WHOLE, NOISE), mixed=True)
    check(family, stock_private[TEXT], WHOLE, NOISE)


@pytest.mark.thorough
def test_tokens_with_a_draft_model(family: Engines, answers: dict[str, Any]) -> None:
    asked = ["greedy", "chunked", "stop-token", "logprobs"]
    family.serve_both(DRAFTED, bodies(family, answers, DRAFTED, asked), mixed=True)
    check(family, answers, DRAFTED, asked)


def test_it_preempts_by_itself_beside_a_model_on_the_pool(family: Engines, answers: dict[str, Any]) -> None:
    since, text = len(family.reports), CASES | GROWN
    requests = bodies(family, answers, "few")
    for number, case in itertools.product(range(4), ["greedy", "seed"]):
        name = f"long-{case}-{number}"
        keywords = {**sampling(text[case][1]), "max_tokens": 250}
        requests[name] = family.body(name, answers[case]["prompt"], answers[case]["eos"], **keywords)
    pooled = bodies(family, answers, "pooled")
    family.serve_both(OWN, requests, mixed=True)
    family.serve(POOLED, pooled)
    check(family, answers, "few")
    check(family, answers, "pooled")
    for name in requests.keys() - {f"few-{case}" for case in CASES}:
        stock = answers[name.split("-")[1]]["tokens"]
        assert family.tokens[name][: len(stock)] == stock
    assert not [returned for report in reports(family, since) for returned in report.returned]


def test_after_a_death_requests_are_computed_again(family: Engines, answers: dict[str, Any]) -> None:
    asked = ["greedy", "seed", "seed-top-p", "penalties"]
    requests = bodies(family, answers, "killed", asked)
    family.lease(ENGINE, [family.admit(name, body) for name, body in requests.items()], steps=9)
    family.until(lambda: all(len(family.tokens[name]) > 3 for name in requests))
    pid = family.pids[OWN, "both"]
    family.kill(OWN, "both")
    family.expect_exit(pid)
    family.reborn(OWN, "both")
    known = {name: list(family.tokens[name]) for name in requests}
    family.lease(ENGINE, [family.admit(n, body, output_tokens=known[n]) for n, body in requests.items()])
    ended(family, requests)
    check(family, answers, "killed", asked)


def test_a_step_that_raises_costs_those_that_were_in_it(family: Engines, answers: dict[str, Any]) -> None:
    """Nobody finds what the step was to write."""
    asked = {**sampling(CASES["chunked"][1]), "extra_args": {"poison": "raise", "poison_at": 3}}
    bad = family.body("bad", answers["chunked"]["prompt"], answers["chunked"]["eos"], **asked)
    requests = bodies(family, answers, "beside", ["greedy", "chunked"])
    family.lease(ENGINE, [family.admit(name, body) for name, body in {"bad": bad, **requests}.items()])
    family.until(lambda: any(isinstance(m, StepFailed) for _, m in family.reports))
    (failed,) = [m for _, m in family.reports if isinstance(m, StepFailed)]
    assert "bad" in failed.request_ids
    assert poison.WORDS in failed.reason
    known = {name: list(family.tokens[name]) for name in requests}
    again = [family.admit(n, body, output_tokens=known[n]) for n, body in requests.items() if n in failed.request_ids]
    family.lease(ENGINE, again)
    ended(family, requests)
    check(family, answers, "beside", ["greedy", "chunked"])
    assert psutil.Process(family.pids[OWN, "both"]).is_running()


def test_one_alone_is_the_only_one_in_a_step(family: Engines, answers: dict[str, Any]) -> None:
    requests = bodies(family, answers, "alone", ["greedy", "seed"])
    first, second = requests
    family.lease(ENGINE, [family.admit(name, body) for name, body in requests.items()], alone=first)
    family.until(lambda: family.finished(first))
    assert not family.tokens[second]
    family.lease(ENGINE)
    ended(family, requests)
    check(family, answers, "alone", ["greedy", "seed"])


def test_nothing_of_it_moves(family: Engines, answers: dict[str, Any]) -> None:
    requests = bodies(family, answers, "stays", ["greedy"])
    (name,) = requests
    admit = family.admit(name, requests[name])
    family.lease(ENGINE, [admit], steps=5)
    family.until(lambda: len(family.tokens[name]) > 1)
    since = len(family.reports)
    family.send(ENGINE, ShowBlocks(name, admit.incarnation, 0))
    family.send(ENGINE, Detach(name, admit.incarnation, "key", 0))
    family.until(lambda: any(isinstance(m, Detached) for _, m in family.reports[since:]))
    shown = next(m for _, m in family.reports[since:] if isinstance(m, Blocks))
    detached = next(m for _, m in family.reports[since:] if isinstance(m, Detached))
    assert (shown.blocks, detached.key) == ([], "")
    family.lease(ENGINE)
    ended(family, requests)
    check(family, answers, "stays", ["greedy"])


@pytest.mark.thorough
def test_on_two_ranks(stock_by_ranks: dict[int, dict[str, Any]]) -> None:
    with engines([private_model(OWN, MODELS[POOLED], max_num_batched_tokens=128)], ranks=2) as two:
        two.serve_both(OWN, bodies(two, stock_by_ranks[2], "two", TRIED), mixed=True)
        check(two, stock_by_ranks[2], "two", TRIED)


def test_it_serves_on_when_the_memory_manager_dies(family: Engines, answers: dict[str, Any]) -> None:
    """To be the last: the pool's engines are bound to another manager then."""
    requests = bodies(family, answers, "unmoved", ["greedy", "seed"])
    lost = len(family.lost())
    family.lease(ENGINE, [family.admit(name, body) for name, body in requests.items()], steps=5)
    family.until(lambda: all(family.tokens[name] for name in requests))
    family.manager.kill()
    family.manager.wait()
    family.lease(ENGINE)
    ended(family, requests)
    check(family, answers, "unmoved", ["greedy", "seed"])
    family.manager = server.start(family.unit_spec)
    assert len(family.lost()) == lost
