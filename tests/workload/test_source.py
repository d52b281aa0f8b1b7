"""open_workload: specifications, mapping to a fleet's models, cutting and rescaling."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.workload import TraceRequest, WorkloadError, describe, open_workload, write_trace
from muxserve.workload.spec import GeneratorSpec, TraceSpec, is_generator, parse_spec
from tests.workload import files


def trace(tmp_path: Path, count: int = 100, gap: float = 0.5) -> Path:
    path = tmp_path / "t.jsonl"
    requests = (TraceRequest(i * gap, "old" if i % 4 else "rare", 100 + i, 10) for i in range(count))
    write_trace(path, ["old", "rare"], requests, duration=count * gap)
    return path


def test_a_specification_drives_the_generator() -> None:
    workload = open_workload("poisson:rate=20,alpha=1,duration=50,prompt=16,output=8..9,seed=3", ["a", "b"])
    requests = list(workload)
    assert requests == list(workload)
    assert (workload.models, workload.duration, workload.seed) == (("a", "b"), 50.0, 3)
    assert len(requests) == pytest.approx(1000, abs=130)
    counts = Counter(request.model for request in requests)
    assert counts["a"] / counts["b"] == pytest.approx(2, rel=0.25)
    assert {r.prompt_tokens for r in requests} == {16}
    assert {r.output_tokens for r in requests} == {8, 9}


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        ("poisson:duration=400", (9.0, 3.0)),  # the fleet's own rates
        ("poisson:duration=400,rate=8", (6.0, 2.0)),  # scaled
        ("poisson:duration=400,rate=8,alpha=0", (4.0, 4.0)),  # another skew
    ],
)
def test_rates_of_the_fleet(spec: str, shares: tuple[float, float]) -> None:
    made = describe(open_workload(spec, {"a": 9.0, "b": 3.0}), 400.0)
    assert [made.models[name].rate for name in "ab"] == pytest.approx(shares, rel=0.12)


@pytest.mark.slow
def test_every_key_reaches_the_generator() -> None:
    calm = describe(open_workload("even:rate=10,duration=100,models=a"))
    clumpy = describe(open_workload("gamma:rate=10,duration=400,cv=3,models=a"))
    day = describe(open_workload("poisson:rate=50,duration=400,models=a,diurnal=1,max_prompt=50,max_output=20"))
    bursty = describe(open_workload("poisson:rate=50,duration=400,models=a,burst=10,burst_every=100,burst_length=10"))
    assert calm.overall
    assert clumpy.overall
    assert day.overall
    assert bursty.overall
    assert calm.overall.cv == pytest.approx(0, abs=1e-6)
    assert clumpy.overall.cv == pytest.approx(3, rel=0.25)
    assert day.overall.peak == pytest.approx(2, rel=0.2)
    assert (day.overall.prompt.max, day.overall.output.max) == (50, 20)
    assert bursty.overall.peak is not None
    assert bursty.overall.peak > 3
    assert bursty.overall.rate == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("poisson:rat=8", "'rat' is no key; did you mean rate"),
        ("poisson:rate", "rate needs a value"),
        ("poisson:rate=x", "rate must be a number, not 'x'"),
        ("poisson:rate=1,seed=1.5", "seed must be a whole number"),
        ("poisson:rate=1,rate=2", "rate is given twice"),
        ("poisson:alpha=1", "a rate is needed"),
        ("poisson:rate=0", "rate must be positive"),
        ("poisson:rate=1,alpha=-1", "alpha must be zero or positive"),
        ("poisson:rate=1,duration=0", "duration must be positive"),
        ("poisson:rate=1,max_prompt=0", "max_prompt must be at least 1"),
        ("poisson:rate=1,cv=2", "cv is for gamma"),
        ("gamma:rate=1", "gamma arrivals need cv"),
        ("gamma:rate=1,cv=-1", "must be zero or positive"),
        ("poisson:rate=1,lengths=x", "are not known"),
        ("poisson:rate=1,diurnal=2", "amplitude"),
        ("poisson:rate=1,period=2", "belong to diurnal"),
        ("poisson:rate=1,burst_every=2", "belong to burst"),
        ("poisson:rate=1,burst=2,diurnal=1", "exclude each other"),
        ("poisson:rate=1,models=a+c", "c is not among a, b"),
        ("poisson:rate=1,models=a+a", "same model twice"),
    ],
)
def test_mistakes_in_specifications(spec: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        open_workload(spec, ["a", "b"])


def test_a_specification_needs_models() -> None:
    with pytest.raises(WorkloadError, match="name the models"):
        open_workload("poisson:rate=1")


def test_generators_and_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_generator("poisson")
    assert is_generator("gamma:cv=2")
    assert not is_generator("poisson.jsonl")
    assert not is_generator("a/poisson:x")
    monkeypatch.chdir(tmp_path)
    trace(tmp_path).rename("poisson")
    assert len(list(open_workload("poisson"))) == 100
    assert len(list(open_workload("./poisson:limit=7"))) == 7
    for missing in ("nowhere.csv", "nowhere.csv:limit=3"):
        with pytest.raises(FileNotFoundError):
            open_workload(missing)
    with pytest.raises(WorkloadError, match="no file 'poison' and no such generator; did you mean poisson"):
        open_workload("poison:alpha=1")


@pytest.mark.parametrize("name", ["t.jsonl", "a:b.jsonl", "rate=3:x,y.jsonl", "a:limit=3"])
def test_a_path_may_have_colons_and_commas(tmp_path: Path, name: str) -> None:
    trace(tmp_path).rename(tmp_path / name)
    assert len(list(open_workload(tmp_path / name))) == 100
    spec = parse_spec(f"{tmp_path / name}:limit=7,map=old=a+*=b,skip_bad=yes")
    assert spec == TraceSpec(str(tmp_path / name), limit=7, map="old=a+*=b", skip_bad=True)
    assert len(list(open_workload(f"{tmp_path / name}:limit=7"))) == 7


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("limt=3", "'limt' is no key; did you mean limit"),
        ("alpha=3", "'alpha' is no key. Keys: format, map, seed"),
        ("limit", "limit needs a value, as in"),
        ("limit=3,limit=4", "limit is given twice"),
        ("limit=1.5", "limit must be a whole number, not '1.5'"),
        ("skip_bad=on", "skip_bad must be true or false, not 'on'"),
    ],
)
def test_mistakes_in_keys_of_files(tmp_path: Path, keys: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(says)):
        open_workload(f"{trace(tmp_path)}:{keys}")


@settings(deadline=None)
@given(
    st.builds(
        GeneratorSpec,
        st.sampled_from(["poisson", "gamma", "even"]),
        rate=st.none() | st.integers(1, 99).map(float),
        alpha=st.none() | st.sampled_from([0.5, 2.0]),
        seed=st.integers(0, 99),
        models=st.lists(st.sampled_from(["a", "b/c"]), unique=True).map(tuple),
        prompt=st.none() | st.sampled_from(["64", "3..4", "lognormal/60/0.8/8/512"]),
        max_output=st.none() | st.integers(1, 9),
    )
)
def test_a_specification_is_what_its_text_says(spec: GeneratorSpec) -> None:
    assert parse_spec(spec.text()) == spec


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        ("auto", (0.75, 0.25)),
        ("rates", (0.75, 0.25)),
        ("round-robin", (0.5, 0.5)),
        ("power/1", (2 / 3, 1 / 3)),
        ("old=b+*=a", (0.25, 0.75)),
        ("old=b+rare=a", (0.25, 0.75)),
    ],
)
def test_mapping_to_a_fleet(tmp_path: Path, how: str, shares: tuple[float, float]) -> None:
    path = trace(tmp_path, 2000)
    workload = open_workload(f"{path}:map={how},seed=5", {"a": 3.0, "b": 1.0})
    models = [request.model for request in workload]
    assert models == [request.model for request in workload]
    assert [models.count(name) / 2000 for name in "ab"] == pytest.approx(shares, abs=0.04)
    assert workload.models == ("a", "b")


def test_known_names_stay(tmp_path: Path) -> None:
    models = Counter(r.model for r in open_workload(trace(tmp_path), {"old": 1.0, "b": 9.0}))
    # Only the requests of the unknown one are drawn.
    assert models["old"] >= 75
    assert models["b"] > 15


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("old=c", "no pair OLD=NEW with NEW among a, b"),
        ("old=a", "no pair maps the model 'rare'"),
        ("power/x", "needs an exponent"),
        ("whatever", "no way to map models; there are rates, round-robin"),
    ],
)
def test_mistakes_in_mappings(tmp_path: Path, how: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        list(open_workload(f"{trace(tmp_path)}:map={how}", ["a", "b"]))


def test_other_mistakes(tmp_path: Path) -> None:
    azure = files.write(tmp_path / "a.csv", files.AZURE_2023)
    with pytest.raises(WorkloadError, match=r"add \*=NAME"):
        list(open_workload(f"{azure}:map=x=a", ["a"]))
    with pytest.raises(WorkloadError, match="name the models"):
        open_workload(f"{azure}:map=rates")
    for value in ("speed=0", "rate=-1", "start=-1", "limit=0", "max_prompt=0"):
        with pytest.raises(WorkloadError, match=f"a.csv: {value.partition('=')[0]} must be"):
            open_workload(f"{azure}:{value}")
    with pytest.raises(WorkloadError, match="exclude each other"):
        open_workload(f"{azure}:speed=2,rate=1")


def test_cutting(tmp_path: Path) -> None:
    path = trace(tmp_path)
    workload = open_workload(f"{path}:start=10,duration=5")
    requests = list(workload)
    assert [r.arrival for r in requests] == [i * 0.5 for i in range(10)]
    assert requests[0].prompt_tokens == 120
    assert workload.duration == 5.0
    limited = open_workload(f"{path}:limit=7")
    assert len(list(limited)) == 7
    assert limited.duration == 3.0
    assert open_workload(f"{path}:start=45,duration=20").duration == 5.0


def test_rescaling(tmp_path: Path) -> None:
    path = trace(tmp_path)
    fast = open_workload(f"{path}:speed=4")
    assert [r.arrival for r in fast][:3] == [0.0, 0.125, 0.25]
    assert fast.duration == 12.5
    for keys in ("rate=8", "rate=8,start=10,duration=20"):
        workload = open_workload(f"{path}:{keys}")
        requests = list(workload)
        assert len(requests) / workload.duration == pytest.approx(8.0)
        assert requests[1].arrival == pytest.approx(0.125)
    limited = open_workload(f"{path}:rate=8,limit=11")
    assert [r.arrival for r in limited][-1] == pytest.approx(10 / 8)
    # A file that does not say how long it is.
    foreign = open_workload(f"{files.write(tmp_path / 'm.jsonl', files.MOONCAKE)}:rate=2")
    assert [r.arrival for r in foreign] == [0.0, 0.5]
    one = open_workload(f"{path}:rate=8,limit=1")
    with pytest.raises(WorkloadError, match="cannot be given a rate"):
        list(one)


def test_capping(tmp_path: Path) -> None:
    requests = list(open_workload(f"{trace(tmp_path)}:max_prompt=150,max_output=3"))
    assert max(r.prompt_tokens for r in requests) == 150
    assert {r.output_tokens for r in requests} == {3}


def test_a_span_without_length_has_no_rate() -> None:
    described = describe([TraceRequest(0.0, "a", 8, 4)])
    assert described.overall is not None
    assert (described.overall.rate, described.overall.cv, described.overall.peak) == (None, None, None)
