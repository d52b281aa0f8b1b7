"""A decode engine that proposes tokens by n-grams, a real process on CPU: several tokens of a sequence in one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from muxserve.engine.cpu.ngrams import expand_batch_to_tokens
from muxserve.wire import Detach, Detached
from tests.engine.cases import CASES
from tests.engine.checks import adopted, bodies, check, nothing_owned, reports, same_as_stock
from tests.engine.harness import MODELS, Engines, deployed_model, engines

MODEL = "arithmetic"
PREFILL, DECODE = f"{MODEL}/prefill", f"{MODEL}/decode"
PROPOSED = 4
SPECULATION = {"method": "ngram", "num_speculative_tokens": PROPOSED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    own = {"speculative_config": SPECULATION}
    with engines([deployed_model(MODEL, MODELS[MODEL], max_num_batched_tokens=128, engine_args=own)]) as running:
        yield running


def test_values_of_requests_are_given_to_their_tokens() -> None:
    """vLLM's kernel for CPUs leaves what it returns as it was unless that has 64-bit integers."""
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    temperatures = torch.tensor([0.5, 0.25, 0.0])
    assert expand_batch_to_tokens(temperatures, ends, 3, 0, 1).tolist() == [0.5, 0.5, 1.0]
    assert expand_batch_to_tokens(torch.tensor([7, 8, 9], dtype=torch.int32), ends, 3).tolist() == [7, 7, 9]
    assert temperatures.tolist() == [0.5, 0.25, 0.0]


def decoded(family: Engines, since: int) -> tuple[int, int]:
    """Steps and tokens of the decode engine."""
    told = [r for engine, r in family.reports[since:] if engine == DECODE and hasattr(r, "steps")]
    return sum(r.steps for r in told), sum(r.tokens for r in told)


@pytest.mark.thorough
def test_tokens_are_those_of_stock_vllm(family: Engines, answers: dict[str, Any]) -> None:
    """With room, with cached prefixes, and with so few pages that requests are preempted."""
    same_as_stock(family, MODEL, answers, CASES)


@pytest.mark.thorough
def test_an_answer_that_repeats_itself_takes_fewer_steps_than_tokens(family: Engines, answers: dict[str, Any]) -> None:
    since = len(family.reports)
    prompt = answers["greedy"]["prompt"]
    family.serve(MODEL, {"long": family.body("long", prompt, max_tokens=300, ignore_eos=True)})
    assert len(family.tokens["long"]) == 300
    steps, _ = decoded(family, since)
    assert steps < 200
    nothing_owned(family)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "own", [{"temperature": 0.01}, {"seed": 3, "temperature": 0.01}, {"min_tokens": 40}, {"logit_bias": {5: 1.0}}]
)
def test_some_parameters_go_without_proposals(family: Engines, answers: dict[str, Any], own: dict[str, Any]) -> None:
    since = len(family.reports)
    prompt, name = answers["greedy"]["prompt"], f"plain-{'-'.join(own)}"
    family.serve(MODEL, {name: family.body(name, prompt, max_tokens=60, ignore_eos=True, **own)})
    assert decoded(family, since) == (59, 59)


@pytest.mark.thorough
def test_logprobs_agree(family: Engines, answers: dict[str, Any]) -> None:
    family.serve(MODEL, bodies(family, answers, "lp", ["logprobs"]))
    got = [row for output in family.outputs["lp-logprobs"] for row in output.new_logprobs.logprobs[:, 0]]
    expected, tokens = answers["logprobs"]["logprobs"], answers["logprobs"]["tokens"]
    assert got == pytest.approx([expected[i][str(token)] for i, token in enumerate(tokens)], abs=1e-3)


@pytest.mark.thorough
def test_a_request_that_leaves_takes_the_blocks_of_its_tokens(family: Engines, answers: dict[str, Any]) -> None:
    """Not those of proposals that were rejected; it goes on with the same tokens."""
    prompt = answers["greedy"]["prompt"]
    # With penalties most proposals are rejected.
    own: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "repetition_penalty": 2.0, "frequency_penalty": 2.0}
    family.serve(MODEL, {"whole": family.body("whole", prompt, **own)})
    body = family.body("moves", prompt, **own)
    (admit,) = adopted(family, MODEL, {"moves": body})
    moves = 0
    while not family.finished("moves"):
        # The second step is the first one with proposals.
        lease = family.lease(DECODE, [admit], steps=2)
        family.until(
            lambda lease=lease: family.finished("moves") or any(r.lease_left == 0 for r in reports(family, lease=lease))
        )
        left = family.ask(DECODE, Detach("moves", admit.incarnation, f"moved-{moves}", 0), Detached)
        if not left.key:
            break
        moves += 1
        block = family.unit_spec.model(MODEL).block_tokens
        assert left.computed_tokens == len(prompt) + len(left.output_tokens) - 1
        assert len(left.blocks) == -(-left.computed_tokens // block)
        admit = family.adopt("moves", body, left, foreign=True)
    assert moves > 40
    assert family.tokens["moves"] == family.tokens["whole"]
    nothing_owned(family)


def test_a_killed_engine_comes_back_and_answers_the_same(family: Engines, answers: dict[str, Any]) -> None:
    body = family.body("dies", answers["greedy"]["prompt"], max_tokens=900, ignore_eos=True)
    family.lease(DECODE, adopted(family, MODEL, {"dies": body}), steps=100_000)
    family.until(lambda: len(family.tokens["dies"]) > 3)
    family.kill(MODEL, "decode")
    nothing_owned(family)
    family.reborn(MODEL, "decode")
    names = ["greedy", "penalties", "json", "seed-top-p"]
    family.serve(MODEL, bodies(family, answers, "after", names))
    check(family, answers, "after", names)
    nothing_owned(family)
