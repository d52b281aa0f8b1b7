"""A model that sees images: real engines; the test plays unit scheduler and gateway, and has what stock vLLM's front
end makes of the images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muxserve.wire import Detach, Detached, StepFailed
from tests.engine.cases import SEEN, sampling
from tests.engine.checks import check, decoded, features, handed, nothing_owned
from tests.engine.harness import SEEING, Engines, deployed_model, engines
from tests.support import poison
from tests.support.thoroughness import cases

KIND = "idefics3"
UNCACHED = "uncached"


@pytest.fixture(scope="module")
def family() -> Iterator[Engines]:
    # Chunks of 64 tokens, less than an image has. Prefixes of one are cached.
    changes: dict[str, Any] = {"max_num_batched_tokens": 64, "engine_args": {"logits_processors": [poison.NAME]}}
    path = SEEING[KIND]()
    # The smaller blocks are, the more of an image's can be found.
    models = [deployed_model(name, path, prefix_caching=name == KIND, **changes) for name in (KIND, UNCACHED)]
    with engines(models) as running:
        yield running


@pytest.fixture(scope="module")
def stock(stock_seeing: dict[str, Any]) -> dict[str, Any]:
    """Stock vLLM's answers."""
    found: dict[str, Any] = stock_seeing[KIND]
    return found


def asked(family: Engines, stock: dict[str, Any], tag: str, cases: list[str] | None = None) -> dict[str, bytes]:
    return {
        f"{tag}-{case}": body(family, stock, f"{tag}-{case}", case, **sampling(SEEN[case][2])) for case in cases or SEEN
    }


def body(family: Engines, stock: dict[str, Any], name: str, case: str, **params: Any) -> bytes:
    answer = stock[case]
    return family.body(name, answer["prompt"], answer["eos"], features=features(answer), **params)


def hits(family: Engines, model: str) -> int:
    with family.memory() as client:
        return int(next(m["hits"] for m in client.stats()["models"] if m["name"] == model))


def test_what_is_seen_changes_the_answer(stock: dict[str, Any]) -> None:
    """Else the other tests would show nothing."""
    assert stock["image"]["prompt"][:6] == stock["another"]["prompt"][:6]
    assert stock["image"]["tokens"] != stock["another"]["tokens"]
    assert len(stock["crossing"]["prompt"]) > 3 * 64


@pytest.mark.serves("Idefics3 (with images)", "served", "prefix cache")
@pytest.mark.parametrize("model", cases([KIND, UNCACHED], [KIND]))
def test_tokens_are_those_of_stock_vllm(family: Engines, stock: dict[str, Any], model: str) -> None:
    """Greedy and seeded, all at once, in chunks that end within an image, and once more with what is cached then."""
    for tag in ("first", "again"):
        before = hits(family, model)
        family.serve(model, asked(family, stock, f"{model}-{tag}"))
        check(family, stock, f"{model}-{tag}", SEEN)
    assert (hits(family, model) > before) == (model == KIND)
    nothing_owned(family)


def test_an_image_is_not_found_under_the_text_of_another(family: Engines, stock: dict[str, Any]) -> None:
    """The same tokens, but the two images have changed places."""
    answer = stock["two"]
    family.serve(KIND, asked(family, stock, "seen", ["two"]))
    before = hits(family, KIND)
    first, second = features(stock["two"])
    assert first.mm_position.length == second.mm_position.length
    first.mm_position, second.mm_position = second.mm_position, first.mm_position
    params = {"max_tokens": len(answer["tokens"]), "ignore_eos": True}
    request = family.body("swapped", answer["prompt"], answer["eos"], features=[second, first], **params)
    family.serve(KIND, {"swapped": request})
    assert hits(family, KIND) == before
    assert family.tokens["swapped"] != answer["tokens"]


@pytest.mark.parametrize("model", cases([KIND, UNCACHED], [KIND]))
def test_preempted_requests_see_their_images_again(family: Engines, stock: dict[str, Any], model: str) -> None:
    since = len(family.returned())
    tag = f"{model}-tight"
    with family.quota(model, 12):
        family.serve(model, asked(family, stock, tag, ["two", "crossing", "image", "another", "long-none"]))
    assert len(family.returned()) > since
    check(family, stock, tag, ["two", "crossing", "image", "another", "long-none"])
    nothing_owned(family)


def test_no_token_is_lost_when_the_decode_engine_is_killed(family: Engines, stock: dict[str, Any]) -> None:
    """Whatever was decoded is prefilled with its images, as the gateway asks for it again."""
    tag, cases = "dead", ["image", "two", "seed"]
    requests = asked(family, stock, tag, cases)
    decoded(family, KIND, handed(family, KIND, requests), steps=9)
    family.kill(KIND, "decode")
    family.reborn(KIND, "decode")
    sent = {name: list(family.tokens[name]) for name in requests}
    family.lease(f"{KIND}/decode", handed(family, KIND, requests, sent))
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, stock, tag, cases)
    nothing_owned(family)


def test_requests_leave_an_engine_and_go_on_in_one_without_their_images(family: Engines, stock: dict[str, Any]) -> None:
    """As when they move to another unit."""
    tag, cases = "moved", ["image", "two", "seed"]
    requests = asked(family, stock, tag, cases)
    admits = handed(family, KIND, requests)
    decoded(family, KIND, admits, steps=9)
    since = len(family.reports)
    for admit in admits:
        family.send(f"{KIND}/decode", Detach(admit.request_id, admit.incarnation, f"{admit.request_id}/out"))

    def left() -> list[Detached]:
        return [told for _, told in family.reports[since:] if isinstance(told, Detached)]

    family.until(lambda: len(left()) == len(admits))
    again = [family.adopt(told.request_id, requests[told.request_id], told, foreign=True) for told in left()]
    family.lease(f"{KIND}/decode", again)
    family.until(lambda: all(family.finished(name) for name in requests))
    check(family, stock, tag, cases)
    nothing_owned(family)


def test_after_a_step_that_failed_images_are_computed_anew(family: Engines, stock: dict[str, Any]) -> None:
    """vLLM's scheduler believes that the runner has what the failed step was to compute."""
    family.forget_prefixes(KIND)
    bad = body(family, stock, "bad", "image", max_tokens=9, extra_args={"poison": "raise", "poison_at": 0})
    family.lease(f"{KIND}/prefill", [family.admit("bad", bad)])
    family.until(lambda: any(isinstance(told, StepFailed) for _, told in family.reports))
    family.serve(KIND, asked(family, stock, "after", ["image", "two"]))
    check(family, stock, "after", ["image", "two"])


def test_without_its_file_a_request_ends_with_an_error(family: Engines, stock: dict[str, Any], tmp_path: Path) -> None:
    gone = features(stock["image"])
    gone[0].mm_hash = str(tmp_path / "gone")
    answer = stock["image"]
    request = family.body("gone", answer["prompt"], answer["eos"], features=gone, max_tokens=4)
    family.lease(f"{KIND}/prefill", [family.admit("gone", request)])
    family.until(lambda: family.finished("gone"))
    assert family.outputs["gone"][-1].finish_reason.name == "ERROR"
    family.serve(KIND, asked(family, stock, "still", ["image"]))
    check(family, stock, "still", ["image"])
