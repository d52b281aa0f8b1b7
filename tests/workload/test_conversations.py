"""Conversations: what turns hold, how often they come, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from muxserve.workload import TraceError, TraceRequest, WorkloadError, open_workload
from muxserve.workload.trace import cut_content, read_trace, write_trace

SPEC = "conversations:rate=5,duration=300,seed=3,system=100,systems=2,prompt=16..64,output=8..32,think=5"


def test_a_turn_holds_what_was_said_before_it() -> None:
    talks: dict[str, list[TraceRequest]] = {}
    for request in open_workload(SPEC, ["m"]):
        (system, shared), (talk, said) = request.content
        assert system in ("m/system 0", "m/system 1")
        assert shared == 100
        assert request.prompt_tokens == 100 + said
        talks.setdefault(talk, []).append(request)
    assert max(len(turns) for turns in talks.values()) > 4
    for turns in talks.values():
        for before, after in itertools.pairwise(turns):
            assert after.content[0] == before.content[0]
            assert after.prompt_tokens - before.prompt_tokens - before.output_tokens in range(16, 65)
            assert after.arrival >= before.arrival + 0.05 * before.output_tokens


@pytest.mark.parametrize("turns", [1, 4, 12])
def test_turns_come_at_the_rate(turns: int) -> None:
    requests = list(open_workload(f"{SPEC},turns={turns}", ["m"]))
    assert len(requests) / 300.0 == pytest.approx(5.0, rel=0.12)
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    # They are under way at the start.
    early = sum(arrival < 30.0 for arrival in arrivals)
    assert early / 30.0 == pytest.approx(5.0, rel=0.35)
    assert requests == list(open_workload(f"{SPEC},turns={turns}", ["m"]))


def test_another_conversation_begins_where_one_is_too_long() -> None:
    requests = list(open_workload(f"{SPEC},turns=30,max_prompt=300", ["m"]))
    assert max(request.prompt_tokens for request in requests) <= 300
    assert len(requests) / 300.0 == pytest.approx(5.0, rel=0.15)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("conversations:rate=1,turns=0.5", "turns must be at least 1"),
        ("conversations:rate=1,max_prompt=500", "no room behind a system prompt"),
        ("conversations:rate=1,systems=0", "systems at least 1"),
        ("conversations:rate=1,think=-1", "think must be"),
        ("conversations:rate=1,burst=2", "excludes diurnal and burst"),
        ("poisson:rate=1,turns=3", "turns belong to conversations"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        open_workload(spec, ["m"])


def test_what_prompts_consist_of_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    plain, talk = TraceRequest(0.0, "m", 5, 6), TraceRequest(1.0, "m", 9, 6, (("system", 4), ("talk", 5)))
    write_trace(path, ["m"], [plain, talk])
    assert path.read_text().splitlines()[1:] == ['[0.0,"m",5,6]', '[1.0,"m",9,6,[["system",4],["talk",5]]]']
    assert read_trace(path).requests == [plain, talk]
    (_, cut) = open_workload(f"{path}:max_prompt=6")
    assert cut.content == (("system", 4), ("talk", 2))
    with pytest.raises(TraceError, match="9 together"):
        write_trace(path, ["m"], [TraceRequest(0.0, "m", 9, 6, (("talk", 5),))])
    assert cut_content((("a", 3), ("b", 2)), 3) == (("a", 3),)


def test_mooncakes_hashes_say_what_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 9, "input_length": 1024, "output_length": 5, "hash_ids": [46, 47]}',
    ]
    path.write_text("\n".join(lines) + "\n")
    one, two = open_workload(str(path))
    assert one.content == (("46", 512), ("47", 512), ("48", 76))
    assert two.content == (("46", 512), ("47", 512))
    small = '{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}'
    path.write_text(small + "\n")
    sized = f"{path}:time_unit=s,block_tokens=16"
    assert [request.content for request in open_workload(sized)] == [(("1", 16), ("2", 16), ("3", 8))]
