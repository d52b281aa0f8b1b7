"""A decode engine shows blocks and lets go of requests in the middle; the test plays unit scheduler and migrator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from muxserve.wire import (
    Abort,
    Blocks,
    Detach,
    Detached,
    HandOff,
    HeldRequests,
    ShowBlocks,
    ShowRequests,
    StepReport,
)
from tests.engine.cases import CASES, LONG, sampling
from tests.engine.harness import Engines, deployed_model, engines

MODEL = "arithmetic"
PATH = Path(__file__).resolve().parents[2] / "configs/models" / MODEL
PREFILL, DECODE = f"{MODEL}/prefill", f"{MODEL}/decode"
BLOCK = 64
# The others end with their first token, or speak of the prompt only.
MOVED = [case for case in CASES if case not in ("one-token", "prompt-logprobs")]


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    with engines([deployed_model(MODEL, PATH, max_num_batched_tokens=256)]) as running:
        assert running.unit_spec.model(MODEL).block_tokens == BLOCK
        yield running


def prompt_of(text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(PATH / "tokenizer.json")).encode(text).ids)


def eos() -> int:
    found = json.loads((PATH / "config.json").read_text())["eos_token_id"]
    return int(found)


def body(family: Engines, name: str, case: str) -> bytes:
    return family.body(name, prompt_of(CASES[case][0]), eos(), **sampling(CASES[case][1]))


def held(family: Engines) -> int:
    with family.memory() as client:
        (model,) = client.stats()["models"]
    return int(model["owned_pages"] + model["handed_pages"])


def decoding(family: Engines, bodies: dict[str, bytes], steps: int) -> dict[str, int]:
    """Bring requests into the decode engine and run that many steps. Returns their incarnations."""
    family.lease(PREFILL, [family.admit(name, each) for name, each in bodies.items()])
    family.until(lambda: all(name in family.held for name in bodies))
    handed = [family.held.pop(name) for name in bodies]
    return resume(
        family,
        bodies,
        {h.request_id: (h.key, h.computed_tokens, h.output_tokens) for h in handed},
        steps,
    )


def resume(
    family: Engines,
    bodies: dict[str, bytes],
    states: dict[str, tuple[str, int, list[int]]],
    steps: int,
    foreign: bool = False,
) -> dict[str, int]:
    admits = [
        family.admit(name, bodies[name], output_tokens=tokens, hand_off=HandOff(key, computed, foreign))
        for name, (key, computed, tokens) in states.items()
    ]
    lease = family.lease(DECODE, admits, steps=steps)
    family.until(lambda: over(family, lease))
    return {admit.request_id: admit.incarnation for admit in admits}


def over(family: Engines, lease: int) -> bool:
    reports = [m for e, m in family.reports if e == DECODE and isinstance(m, StepReport) and m.lease_id == lease]
    return bool(reports) and (reports[-1].lease_left == 0 or not reports[-1].running + reports[-1].waiting)


def test_requests_detached_again_and_again_end_with_the_same_tokens(family: Engines) -> None:
    detach_again_and_again(family)


@pytest.mark.thorough
def test_engines_of_several_ranks_let_go_of_requests_in_the_same_way() -> None:
    with engines([deployed_model(MODEL, PATH, ranks=2, max_num_batched_tokens=256)], ranks=2) as running:
        detach_again_and_again(running)


def detach_again_and_again(family: Engines) -> None:
    plain = {f"plain-{case}": body(family, f"plain-{case}", case) for case in MOVED}
    family.serve(MODEL, plain)
    bodies = {f"moved-{case}": body(family, f"moved-{case}", case) for case in MOVED}
    incarnations = decoding(family, bodies, steps=2)
    moves = 0
    while incarnations:
        moves += 1
        states = {}
        for name, incarnation in incarnations.items():
            gone = detach(family, name, incarnation, f"{name}/{moves}")
            if not gone.key:
                continue
            assert gone.output_tokens[: len(family.tokens[name])] == family.tokens[name]
            assert len(gone.blocks) == gone.computed_tokens // BLOCK + (gone.computed_tokens % BLOCK > 0)
            states[name] = (gone.key, gone.computed_tokens, gone.output_tokens)
        if not states:
            break
        incarnations = resume(family, bodies, states, steps=7, foreign=bool(moves % 2))
    assert moves > 4
    family.until(lambda: all(family.finished(name) for name in bodies))
    assert {case: family.tokens[f"moved-{case}"] for case in MOVED} == {
        case: family.tokens[f"plain-{case}"] for case in MOVED
    }
    family.until(lambda: held(family) == 0)


def detach(family: Engines, name: str, incarnation: int, key: str) -> Detached:
    """What the decode engine lets go of; without a key if the request has ended."""
    while True:
        gone = family.ask(DECODE, Detach(name, incarnation, key, 0), Detached)
        if gone.key or family.finished(name):
            return gone
        # It does not run before its grammar is compiled.
        lease = family.lease(DECODE, [], steps=1)
        family.until(lambda lease=lease: over(family, lease))


def test_an_engine_says_which_requests_it_has_and_drops_the_lives_that_are_meant(family: Engines) -> None:
    prompt = prompt_of("2+2=")
    bodies = {name: family.body(name, prompt, max_tokens=200, ignore_eos=True) for name in ("one", "two")}
    lives = decoding(family, bodies, steps=2)

    def there() -> dict[str, int]:
        said = family.ask(DECODE, ShowRequests(), HeldRequests)
        assert said.lease_id == max(m.lease_id for _, m in family.reports if isinstance(m, StepReport))
        return dict(zip(said.request_ids, said.incarnations, strict=True))

    assert there() == lives
    family.send(DECODE, Abort(["one", "two"], [lives["one"], lives["two"] + 1]))
    assert there() == {"two": lives["two"]}
    last = [m for _, m in family.reports if isinstance(m, StepReport)][-1]
    assert (last.finished, last.steps, last.running) == (["one"], 0, 1)
    family.abort(DECODE, ["two"])
    assert there() == {}
    family.until(lambda: held(family) == 0)


def test_blocks_are_shown_while_the_request_goes_on(family: Engines) -> None:
    name = "shown"
    prompt = prompt_of(LONG)
    bodies = {name: family.body(name, prompt, max_tokens=200, ignore_eos=True)}
    incarnation = decoding(family, bodies, steps=3)[name]
    first = family.ask(DECODE, ShowBlocks(name, incarnation), Blocks)
    assert first.computed_tokens == len(prompt) + 3
    assert len(first.blocks) == -(-first.computed_tokens // BLOCK)
    lease = family.lease(DECODE, steps=BLOCK)
    family.until(lambda: over(family, lease))
    whole = first.computed_tokens // BLOCK
    later = family.ask(DECODE, ShowBlocks(name, incarnation, whole), Blocks)
    assert (later.since, later.computed_tokens) == (whole, first.computed_tokens + BLOCK)
    assert later.blocks[: len(first.blocks) - whole] == first.blocks[whole:]
    assert len(later.blocks) == len(first.blocks) - whole + 1
    gone = family.ask(DECODE, Detach(name, incarnation, "shown-key", whole), Detached)
    assert gone.blocks == later.blocks
    family.until(lambda: len(family.tokens[name]) == len(gone.output_tokens))  # they come on another connection
    assert gone.output_tokens == family.tokens[name]
    assert held(family) > 0
    # It is in nobody's batch: an engine that is told to run has nothing to do, and says so when it is asked.
    family.lease(DECODE, steps=5)
    again = family.ask(DECODE, Detach(name, incarnation, "another", 0), Detached)
    assert (again.key, again.blocks, again.output_tokens) == ("", [], [])
    with family.memory() as client:
        client.drop(MODEL, "shown-key")
    assert held(family) == 0


@pytest.mark.parametrize("stale", ["unknown", "older"])
def test_what_does_not_run_here_has_no_blocks(family: Engines, stale: str) -> None:
    name = f"stale-{stale}"
    incarnation = 1
    if stale == "older":
        bodies = {name: family.body(name, prompt_of("hello"), max_tokens=300, ignore_eos=True)}
        incarnation = decoding(family, bodies, steps=2)[name] - 1
    empty = family.ask(DECODE, ShowBlocks(name, incarnation), Blocks)
    assert (empty.blocks, empty.computed_tokens) == ([], 0)
    gone = family.ask(DECODE, Detach(name, incarnation, "k"), Detached)
    assert gone.key == ""
    family.abort(DECODE, [name])
    family.until(lambda: held(family) == 0)


@pytest.mark.parametrize("foreign", [True, False])
def test_foreign_blocks_are_published_by_the_engine_that_adopts_them(family: Engines, foreign: bool) -> None:
    name = f"foreign-{foreign}"
    prompt = prompt_of(LONG + name)
    bodies = {name: family.body(name, prompt, max_tokens=300, ignore_eos=True)}
    incarnation = decoding(family, bodies, steps=2)[name]
    gone = family.ask(DECODE, Detach(name, incarnation, name), Detached)
    with family.memory() as client:
        client.reset_cache(client.map(MODEL))
    resume(family, bodies, {name: (gone.key, gone.computed_tokens, gone.output_tokens)}, steps=2, foreign=foreign)
    since = len(family.reports)
    again = f"again-{name}"
    family.serve(MODEL, {again: family.body(again, prompt, max_tokens=1)})
    computed = sum(r.tokens for e, r in family.reports[since:] if e == PREFILL and isinstance(r, StepReport))
    cached = (len(prompt) - 1) // BLOCK * BLOCK if foreign else 0
    assert computed == len(prompt) - cached
    assert family.tokens[again] == family.tokens[name][:1]
    family.abort(DECODE, [name])
    family.until(lambda: held(family) == 0)


def test_prompts_behind_one_that_is_cached_are_looked_up_in_the_same_step(family: Engines) -> None:
    prompts = {f"queued-{i}": prompt_of(f"{i} {i} {i}: {LONG}{LONG}") for i in range(3)}
    # Each alone would fill the step, if nothing of it were cached.
    assert min(len(prompt) for prompt in prompts.values()) >= 256
    family.serve(MODEL, {name: family.body(name, prompt, max_tokens=1) for name, prompt in prompts.items()})
    since = len(family.reports)
    again = {f"again-{name}": family.body(f"again-{name}", each, max_tokens=1) for name, each in prompts.items()}
    family.serve(MODEL, again)
    steps = [r for e, r in family.reports[since:] if e == PREFILL and isinstance(r, StepReport)]
    assert sum(r.tokens for r in steps) == sum((len(each) - 1) % BLOCK + 1 for each in prompts.values())
    assert [family.tokens[name] for name in again] == [family.tokens[name] for name in prompts]
    family.until(lambda: held(family) == 0)


@pytest.mark.thorough
def test_low_execution_priority_is_preempted_first(family: Engines) -> None:
    """Both requests need a fourth block at the same moment and there is one: it goes to the older, or the higher."""
    prompt = prompt_of("What is 12 + 7? ")
    for tag, priorities, loser in (("equal", (0, 0), 1), ("ranked", (0, -1), 0)):
        names = [f"{tag}-{i}" for i in range(2)]
        bodies = {
            name: family.body(name, prompt, priority=priority, max_tokens=400, ignore_eos=True)
            for name, priority in zip(names, priorities, strict=True)
        }
        with family.memory() as client:
            client.reset_cache(client.map(MODEL))
            (model,) = client.stats()["models"]
            client.set_quotas({MODEL: 7 * family.unit_spec.model(MODEL).pages_per_block})
            try:
                before = len(family.returned())
                decoding(family, bodies, steps=1)
                family.lease(DECODE, steps=1000)
                family.until(lambda since=before: len(family.returned()) > since)  # type: ignore[misc]
                assert family.returned()[before].request_id == names[loser]
            finally:
                client.set_quotas({MODEL: model["quota_pages"]})
        family.abort(DECODE, names)
        family.until(lambda: held(family) == 0)


@pytest.mark.parametrize("loser", [0, 1])
def test_of_those_that_wait_with_all_blocks_one_goes_on(family: Engines, loser: int) -> None:
    """Both are adopted with full blocks, and the next token of each needs one more, of which there is none."""
    names = [f"waits-{loser}-{i}" for i in range(2)]
    text = prompt_of(CASES["chunked"][0])
    bodies = {
        name: family.body(name, text[i : i + size], priority=int(i == loser), max_tokens=20, ignore_eos=True)
        for i, (name, size) in enumerate(zip(names, (3 * BLOCK, BLOCK), strict=True))
    }
    before = len(family.returned())
    with family.quota(MODEL, blocks=4):
        decoding(family, bodies, steps=1)
        assert [returned.request_id for returned in family.returned()[before:]] == [names[loser]]
        family.lease(DECODE)
        family.until(lambda: family.finished(names[1 - loser]))
    family.abort(DECODE, names)
    family.until(lambda: held(family) == 0)


def test_prompts_go_on_though_what_is_cached_of_them_is_all_that_there_may_be(family: Engines) -> None:
    """Each needs another block. Together they would hold all of them, in each step again."""
    text, ends = prompt_of(CASES["chunked"][0]), {"max_tokens": 1, "ignore_eos": True}
    begun = [text[i : i + 2 * BLOCK] for i in range(2)]
    with family.quota(MODEL, blocks=4):
        for number, prompt in enumerate(begun):
            family.serve(MODEL, {f"begun-{number}": family.body(f"begun-{number}", prompt, **ends)})
        longer = {f"longer-{number}": [*prompt, *text[:8]] for number, prompt in enumerate(begun)}
        family.serve(MODEL, {name: family.body(name, prompt, **ends) for name, prompt in longer.items()})
    assert held(family) == 0
