"""Models that keep latents or states, see images or take proposals, with one engine of both phases, beside a model
whose KV is by head: real engines; the test plays unit scheduler and gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.engine.cases import CASES, NOISE, SEEN, sampling
from tests.engine.checks import bodies, check, nothing_owned, reports
from tests.engine.harness import LATENT, MODELS, ROUNDED, SEEING, STATEFUL, TINY, Engines, deployed_model, engines
from tests.engine.test_images import features
from tests.engine.test_ngrams import SPECULATION
from tests.engine.test_page_classes import BY_HEAD, SHARED_PAGES, STATE_PAGES, STATEFUL_BLOCKS

IMAGES = "idefics3"
# Whether a step holds prompts beside decodes. The decodes of a prompt's step are at the mercy of what else is in it.
STEPS = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "by phase"])


@pytest.fixture(scope="module")
def latents() -> Iterator[Engines]:
    quota = SHARED_PAGES // 3
    models = [
        deployed_model(kind, TINY[kind](), quota_pages=quota, num_blocks=64, shape="one") for kind in sorted(LATENT)
    ]
    changes = {"block_tokens": 288, "num_blocks": 20, "max_len": 3 * 288}
    models.append(deployed_model(BY_HEAD, MODELS[BY_HEAD], quota_pages=quota, **changes))
    with engines(models, pages=SHARED_PAGES) as running:
        yield running


@pytest.fixture(scope="module")
def stateful() -> Iterator[Engines]:
    # Chunks of 128 tokens, which a state goes through while others decode.
    paths = {kind: TINY[kind]() for kind in sorted(STATEFUL)} | {BY_HEAD: MODELS[BY_HEAD]}
    models = [
        deployed_model(
            kind,
            path,
            block_tokens=STATEFUL_BLOCKS.get(kind, 64),
            quota_pages=STATE_PAGES // len(paths),
            max_num_batched_tokens=128,
            prefix_caching=True,
            shape="split" if kind == BY_HEAD else "one",
        )
        for kind, path in paths.items()
    ]
    # As many blocks as fill the pool.
    models = [
        msgspec.structs.replace(model, num_blocks=(STATE_PAGES - 1) // model.pages_per_block + 1, zeroed=True)
        for model in models
    ]
    with engines(models, pages=STATE_PAGES) as running:
        yield running


@pytest.fixture(scope="module")
def others() -> Iterator[Engines]:
    models = [
        deployed_model(IMAGES, SEEING[IMAGES](), max_num_batched_tokens=64, shape="one"),
        deployed_model(
            BY_HEAD,
            MODELS[BY_HEAD],
            max_num_batched_tokens=128,
            engine_args={"speculative_config": SPECULATION},
            shape="one",
        ),
    ]
    with engines(models) as running:
        yield running


def serve(family: Engines, stock: dict[str, Any], kind: str, mixed: bool) -> None:
    """At once, again with what is cached, and with so few pages that requests are preempted. What is computed in 16
    bits goes one by one: its tokens depend on what else is in a batch."""
    tag = f"{kind}-{mixed}"
    for again in ("first", "again"):
        for together in [[case] for case in NOISE] if kind in ROUNDED else [NOISE]:
            family.serve_both(kind, bodies(family, stock, f"{tag}-{again}", together), mixed)
        check(family, stock, f"{tag}-{again}", NOISE if kind not in ROUNDED else ["greedy", "seed", "grown"])
    if kind not in ROUNDED:
        deployed = family.unit_spec.model(kind)
        returned, greedy = len(family.returned()), stock["greedy"]
        long = [f"{tag}-long{i}" for i in range(4)]
        requests = bodies(family, stock, f"{tag}-tight", NOISE) | {
            name: family.body(name, greedy["prompt"], max_tokens=250, ignore_eos=True) for name in long
        }
        # Enough for the longest of them, but not for all.
        longest = max(len(stock[case]["prompt"]) + len(stock[case]["tokens"]) for case in NOISE)
        with family.quota(kind, -(-longest // deployed.block_tokens) + 2 * deployed.state_blocks + 2):
            family.serve_both(kind, requests, mixed)
        assert len(family.returned()) > returned
        check(family, stock, f"{tag}-tight", NOISE)
        assert {tuple(family.tokens[name][: len(greedy["tokens"])]) for name in long} == {tuple(greedy["tokens"])}
    nothing_owned(family)


@pytest.mark.thorough
@STEPS
@pytest.mark.parametrize("kind", sorted(LATENT))
def test_latents(latents: Engines, stock_tiny: dict[str, Any], kind: str, mixed: bool) -> None:
    serve(latents, stock_tiny[kind], kind, mixed)


@STEPS
@pytest.mark.parametrize("kind", sorted(STATEFUL))
def test_states(stateful: Engines, stock_tiny: dict[str, Any], kind: str, mixed: bool) -> None:
    serve(stateful, stock_tiny[kind], kind, mixed)


@pytest.mark.thorough
@STEPS
def test_images(others: Engines, stock_seeing: dict[str, Any], mixed: bool) -> None:
    """In chunks that end within an image."""
    stock = stock_seeing[IMAGES]
    for again in ("first", "again"):
        tag = f"seen-{mixed}-{again}"
        asked = {
            f"{tag}-{case}": others.body(
                f"{tag}-{case}",
                stock[case]["prompt"],
                stock[case]["eos"],
                features=features(stock[case]),
                **sampling(SEEN[case][2]),
            )
            for case in SEEN
        }
        others.serve_both(IMAGES, asked, mixed)
        check(others, stock, tag, SEEN)
    nothing_owned(others)


@pytest.mark.thorough
@STEPS
def test_proposals(others: Engines, answers: dict[str, Any], mixed: bool) -> None:
    for again in ("first", "again"):
        tag = f"proposed-{mixed}-{again}"
        others.serve_both(BY_HEAD, bodies(others, answers, tag), mixed)
        check(others, answers, tag)
    since = len(others.reports)
    name = f"long-{mixed}"
    long = others.body(name, answers["greedy"]["prompt"], max_tokens=300, ignore_eos=True)
    others.serve_both(BY_HEAD, {name: long}, mixed)
    assert len(others.tokens[name]) == 300
    assert sum(report.steps for report in reports(others, since)) < 200
    with others.quota(BY_HEAD, 12):
        returned = len(others.returned())
        tag = f"tight-{mixed}"
        requests = bodies(others, answers, tag) | {
            f"{tag}{i}": others.body(f"{tag}{i}", answers["greedy"]["prompt"], max_tokens=250, ignore_eos=True)
            for i in range(6)
        }
        others.serve_both(BY_HEAD, requests, mixed)
        assert len(others.returned()) > returned
    check(others, answers, tag, CASES)
    nothing_owned(others)
