"""What a gateway says that the fleet has learnt, as a profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

import muxserve.gateway.front_end.engine_client as module
from muxserve.costs.correction import Correction
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel
from muxserve.gateway.front_end.engine_client import UnitEngineClient
from muxserve.gateway.http.http_request import HttpRequest, current_http
from muxserve.gateway.status.reports import FEWEST_DELAYS, Reports
from tests.support.unit_specs import model_spec

ENGINE = EngineProfile(
    "m",
    ProfiledModel(2, 2, 2, 64, 128, 256, 1000),
    "CPU",
    "float32",
    share=0.5,
    prefill=[PrefillCell(1, tokens, 0, 1e-4 * tokens) for tokens in (32, 64, 128)],
    decode=[DecodeCell(batch, 64, 0.002) for batch in (1, 2, 4)],
)


def profile(delays: list[float], steps: int = 20) -> Profile:
    """The profile of a fleet whose last requests took these delays to reach their units."""
    learnt = {"m": {"decode": Correction((2.0,) * 3, 2.0, 0.0, steps)}} if steps else {}
    entry = SimpleNamespace(unit_spec=SimpleNamespace(costs={"m": [ENGINE]}))
    units = {"u0": SimpleNamespace(entry=entry, learnt=lambda: learnt)}
    status: Any = SimpleNamespace(units=units, broker=SimpleNamespace(request_delays=delays))
    limiter: Any = None
    grammars: Any = None
    return Reports(status, 0, limiter, grammars).profile()


def test_it_has_corrected_steps_and_the_way_of_requests() -> None:
    found = profile([0.002, 0.004] * FEWEST_DELAYS)
    assert [cell.seconds for cell in found.engines[0].decode] == pytest.approx([0.004] * 3)
    assert set(found.overheads) == {"CPU"}
    assert found.overheads["CPU"].request == pytest.approx(0.003)


def test_few_requests_say_nothing_of_their_way() -> None:
    assert profile([0.002] * (FEWEST_DELAYS - 1)).overheads == {}


def test_nothing_is_said_of_what_has_taken_no_step() -> None:
    found = profile([0.002] * FEWEST_DELAYS, steps=0)
    assert (found.engines, found.overheads) == ([], {})


@pytest.mark.parametrize(
    ("params", "waited", "learnt"),
    [
        (SamplingParams(), False, [1.5]),
        (SamplingParams(), True, []),
        (SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)), False, []),
    ],
    ids=["plain", "waited for the model's limit", "with a grammar"],
)
async def test_the_way_of_plain_requests_is_learnt(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, waited: bool, learnt: list[float]
) -> None:
    delays: list[float] = []
    sent: list[Any] = []
    table = SimpleNamespace(new_id=lambda: "wire")
    broker: Any = SimpleNamespace(
        attach=lambda name, client: None, table=table, submit=sent.append, request_delays=delays
    )

    async def admit(*_: object) -> None:
        pass

    grammars, images = SimpleNamespace(admit=admit), SimpleNamespace()
    client = UnitEngineClient(model_spec("m", prefix_caching=False), broker, grammars, images)  # type: ignore[arg-type]
    client.vocabulary = 1000
    client.bind(SimpleNamespace(request_states={"front": SimpleNamespace(request_index=0)}))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 101.5))
    request = EngineCoreRequest(
        request_id="front",
        prompt_token_ids=[1] * 20,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    came = current_http.set(HttpRequest(100.0, waited=waited))
    try:
        await client.add_request_async(request)
    finally:
        current_http.reset(came)
    assert [each.arrival for each in sent] == [100.0]
    assert delays == learnt
