"""How many requests of batches may begin, and which lines of a file can be asked."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.gateway.batches.lines import MOST_LINES, PlannedLine, answered, body_of, not_asked, planned_lines
from muxserve.gateway.batches.pace import QUIET_SECONDS, ModelTraffic, room

ALONE = ModelTraffic(seats=64)
BUSY = ModelTraffic(seats=64, others=3, quiet_seconds=0.0)


def test_alone_it_takes_half() -> None:
    assert room(ALONE) == 32
    assert room(replace(ALONE, batch=30)) == 2
    assert room(replace(ALONE, batch=40)) == 0
    assert room(ModelTraffic(seats=1)) == 1


def test_beside_others_few_are_in_service_in_the_whole_unit() -> None:
    assert room(BUSY) == 4
    assert room(replace(BUSY, batch=4)) == 0
    # It does not matter whose requests they are.
    assert room(ALONE, [BUSY]) == 4
    assert room(ALONE, [replace(BUSY, batch=3)]) == 1
    assert room(ModelTraffic(seats=4), [BUSY]) == 1


def test_others_are_there_for_a_moment_after_their_last_request() -> None:
    assert room(replace(ALONE, quiet_seconds=QUIET_SECONDS / 2)) == 4
    assert room(replace(ALONE, quiet_seconds=QUIET_SECONDS)) == 32


def test_nothing_begins_behind_a_queue_or_while_objectives_are_missed() -> None:
    assert room(replace(ALONE, queued=1)) == 0
    assert room(ALONE, [replace(ALONE, queued=1)]) == 0
    assert room(replace(BUSY, met=0.9)) == 0
    assert room(ALONE, [replace(BUSY, met=0.9)]) == 0
    assert room(replace(BUSY, met=0.96)) == 4
    # What was missed is over.
    assert room(replace(ALONE, met=0.5)) == 32


def test_a_model_is_not_woken_beside_others() -> None:
    asleep = replace(ALONE, asleep=True)
    assert room(asleep, [BUSY]) == 0
    assert room(asleep, [ALONE]) == 32


LOADS = st.builds(
    ModelTraffic,
    seats=st.integers(1, 256),
    queued=st.integers(0, 2),
    others=st.integers(0, 50),
    batch=st.integers(0, 50),
    quiet_seconds=st.floats(0, 10),
    met=st.floats(0, 1),
    asleep=st.booleans(),
)


@given(LOADS, st.lists(LOADS, max_size=3))
def test_what_begins_never_makes_more_than_its_part(load: ModelTraffic, beside: list[ModelTraffic]) -> None:
    begins = room(load, beside)
    assert begins >= 0
    if begins:
        assert load.batch + begins <= max(1, load.seats // 2)
        if any(each.busy for each in (load, *beside)):
            assert sum(each.batch for each in (load, *beside)) + begins <= max(1, load.seats // 16)


# ------------------------------------------------------------ lines

CHAT = "/v1/chat/completions"


def line(name: str, **changes: object) -> bytes:
    asked = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "a", "messages": []}, **changes}
    return json.dumps(asked).encode() + b"\n"


def model_of(asked: str | None) -> str:
    if asked not in (None, "a", "alias"):
        raise ValueError(f"the model {asked!r} does not exist")
    return "a"


def test_lines_know_where_they_are() -> None:
    texts = [line("one"), b"\n", line("zwei ü"), line("three", body={"model": "alias"}).rstrip()]
    found, errors = planned_lines(texts, CHAT, model_of)
    assert not errors
    whole = b"".join(texts)
    for planned, text in zip(found, [texts[0], texts[2], texts[3]], strict=True):
        assert whole[planned.offset : planned.offset + planned.length] == text
    assert [(each.number, each.custom_id, each.model) for each in found] == [
        (0, "one", "a"),
        (1, "zwei ü", "a"),
        (2, "three", "a"),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"nonsense\n", "invalid_json_line"),
        (b'{"custom_id": "x"}\n', "invalid_request"),
        (b'{"custom_id": ' + b"[" * 100_000, "invalid_request"),
        (line("one"), "duplicate_custom_id"),
        (line("x", method="GET"), "invalid_method"),
        (line("x", url="/v1/embeddings"), "mismatched_endpoint"),
        (line("x", body={"model": "a", "stream": True}), "invalid_request"),
        (line("x", body={"model": "b"}), "model_not_found"),
        (line("x", body={"model": 3}), "invalid_request"),
        (line("x", body=[]), "invalid_request"),
        (line("x", body={"model": "a", "user": "?"}).replace(b"?", b"\xff"), "invalid_json_line"),
    ],
)
def test_every_mistake_is_named_with_its_line(text: bytes, code: str) -> None:
    _, errors = planned_lines([line("one"), text, b"nonsense"], CHAT, model_of)
    assert [(error.line, error.code) for error in errors] == [(2, code), (3, "invalid_json_line")]


def test_what_lines_ask_for_is_not_unpacked() -> None:
    """Each list would take twenty times its text, and all of a file are looked at in one go."""
    text = line("one", body={"model": "a", "messages": [[]] * 100_000})
    tracemalloc.start()
    try:
        found, errors = planned_lines([text], CHAT, model_of)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(found), errors) == (1, [])
    assert peak < 2 * len(text)
    assert json.loads(body_of(text)) == json.loads(text)["body"]


def test_a_file_has_requests_and_not_too_many() -> None:
    assert [error.code for error in planned_lines([b"\n"], CHAT, model_of)[1]] == ["empty_file"]
    many = (line(str(number)) for number in range(MOST_LINES + 1))
    assert [error.code for error in planned_lines(many, CHAT, model_of)[1]] == ["too_many_requests"]


def test_results_are_as_openai_has_them() -> None:
    planned = PlannedLine(0, "one", 0, 1, "a")
    done = json.loads(answered("batch_req_1", planned.custom_id, 200, "r", b'{"choices": []}'))
    assert done == {
        "id": "batch_req_1",
        "custom_id": "one",
        "response": {"status_code": 200, "request_id": "r", "body": {"choices": []}},
        "error": None,
    }
    left = json.loads(not_asked("batch_req_1", "one", "batch_expired", "too late"))
    assert (left["response"], left["error"]) == (None, {"code": "batch_expired", "message": "too late"})
