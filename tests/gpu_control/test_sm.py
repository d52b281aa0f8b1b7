"""SM shares: what engines find in their environment, and which SMs they take as green contexts."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.gpu import green
from muxserve.gpu.driver import Driver, DriverError
from muxserve.gpu.green import ContextSet, GreenContext, GreenContextError, enter
from muxserve.gpu.sm import WHOLE, SmRange, parts_of, percentage, sm_range, step_of, step_range
from muxserve.spec import GpuSpec, PolicyName, SmSharing, UnitSpec
from muxserve.spec.unit import SHARE_STEPS
from tests.cluster.conftest import fake_unit_spec
from tests.gpu_control.fake_driver import FakeDriver


def unit_spec(sharing: SmSharing = "mps", shares: list[tuple[float, float]] | None = None) -> UnitSpec:
    base = fake_unit_spec(Path("/run/x"))
    models = [
        msgspec.structs.replace(model, prefill_share=prefill, decode_share=decode)
        for model, (prefill, decode) in zip(base.models, shares or [(0.6, 0.25), (0.5, 0.004)], strict=True)
    ]
    return msgspec.structs.replace(base, models=models, gpu=GpuSpec(["GPU-a"], sharing))


def test_nothing_changes_on_a_cpu() -> None:
    assert enter(fake_unit_spec(Path("/run/x")), "one", "decode") is None


@given(st.floats(1e-6, 1.0))
def test_percentages_are_what_mps_takes(share: float) -> None:
    assert 1 <= percentage(share) <= 100


class TestRanges:
    def test_prefill_from_the_front_decode_from_the_end(self) -> None:
        of = unit_spec("green_contexts", [(0.5, 0.25), (0.5, 0.25)])
        assert sm_range(of, "one", "prefill", 16) == sm_range(of, "two", "prefill", 16) == SmRange(0, 8)
        assert sm_range(of, "one", "decode", 16) == SmRange(12, 4)
        assert sm_range(of, "two", "decode", 16) == SmRange(8, 4)

    def test_what_finds_no_place_beside_the_prefill_begins_again_at_the_end(self) -> None:
        of = unit_spec("green_contexts", [(0.5, 0.4), (0.5, 0.25)])
        assert sm_range(of, "one", "decode", 16) == SmRange(10, 6)
        assert sm_range(of, "two", "decode", 16) == SmRange(12, 4)

    def test_all_of_the_gpu(self) -> None:
        of = unit_spec("green_contexts", [(1.0, 1.0), (1.0, 1.0)])
        assert {sm_range(of, m, p, 16) for m in ("one", "two") for p in ("prefill", "decode")} == {SmRange(0, 16)}

    @given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=2), st.integers(2, 20))
    def test_every_range_lies_on_the_gpu_and_decode_beside_prefill_where_it_fits(
        self, shares: list[tuple[float, float]], parts: int
    ) -> None:
        of = unit_spec("green_contexts", shares)
        most = max(parts_of(prefill, parts) for prefill, _ in shares)
        for model in of.models:
            for phase in ("prefill", "decode"):
                where = sm_range(of, model.name, phase, parts)
                assert where.first >= 0
                assert where.count >= 1
                assert where.first + where.count <= parts
            decode = sm_range(of, model.name, "decode", parts)
            if decode.count + most <= parts:
                assert decode.first >= most


def entered(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, phase: str = "decode", policy: PolicyName = "adbs"
) -> ContextSet:
    monkeypatch.setattr(Driver, "load", classmethod(lambda cls: cls(fake)))
    of = msgspec.structs.replace(unit_spec("green_contexts", [(0.5, 0.25), (0.5, 0.25)]), policy=policy)
    contexts = enter(of, "two", phase)
    assert contexts is not None
    return contexts


class TestSharesPerLease:
    def test_who_has_them(self) -> None:
        of = unit_spec("green_contexts")
        assert of.share_steps == 0
        assert msgspec.structs.replace(of, policy="slack").share_steps == SHARE_STEPS
        assert msgspec.structs.replace(unit_spec("mps"), policy="slack").share_steps == 0
        assert msgspec.structs.replace(fake_unit_spec(Path("/run/x")), policy="slack").share_steps == 0

    def test_an_engine_has_a_context_for_each_size_and_the_largest_is_the_whole_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeDriver()
        decode = entered(fake, monkeypatch, policy="slack")
        assert [context.sms for context in decode.contexts] == [32, 64, 96, 132]
        assert [fake.contexts[context.handle] for context in decode.contexts[:-1]] == [
            list(range(16 - count, 16)) for count in (4, 8, 12)
        ]
        assert fake.current == decode.contexts[-1].handle == 1, "the primary context"
        prefill = entered(FakeDriver(), monkeypatch, "prefill", "slack")
        assert len(prefill.contexts) == SHARE_STEPS

    @given(st.integers(2, 40), st.integers(2, 8), st.data())
    def test_prefill_and_decode_do_not_meet(self, parts: int, steps: int, data: st.DataObject) -> None:
        own = data.draw(st.integers(1, steps - 1))
        prefill, decode = (
            step_range(phase, n, steps, parts) for phase, n in (("prefill", own), ("decode", steps - own))
        )
        assert prefill.first == 0
        assert decode.first + decode.count == parts
        # Where the GPU's parts cannot be divided like that, both have part of one.
        assert prefill.count - decode.first <= 1
        if parts % steps == 0:
            assert prefill.count == decode.first

    @pytest.mark.parametrize(
        ("region", "step"), [(0, 0), (10_000, 0), (300_000, 0), (380_000, 1), (500_000, 1), (740_000, 2), (WHOLE, 3)]
    )
    def test_a_lease_s_region_is_the_nearest_size(self, region: int, step: int) -> None:
        assert step_of(region, 4) == step

    def test_a_switch_waits_for_what_was_launched_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        contexts = entered(fake, monkeypatch, policy="slack")
        fake.calls.clear()
        contexts.use(0)
        assert fake.calls == ["cuCtxGetCurrent", "cuCtxSynchronize", "cuCtxSetCurrent"]
        assert fake.current == contexts.contexts[0].handle
        fake.calls.clear()
        contexts.use(0)
        assert fake.calls == [], "the same share costs nothing"

    def test_each_context_has_a_stream_of_its_own_for_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        contexts = entered(fake, monkeypatch, policy="slack")
        streams = []
        for index in (0, 1, 0):
            contexts.use(index)
            streams.append(contexts.stream())
        assert streams[0] == streams[2] != streams[1]
        assert [fake.streams[stream] for stream in streams[:2]] == [each.handle for each in contexts.contexts[:2]]

    def test_no_switch_hides_that_a_library_chose_the_whole_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        contexts = entered(fake, monkeypatch, policy="slack")
        contexts.use(1)
        fake.current = 1
        with pytest.raises(GreenContextError, match="of 64 SMs is not current any more"):
            contexts.use(2)

    @pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuCtxSetCurrent", "cuStreamCreate"])
    def test_every_failure_names_the_call(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        contexts = entered(fake, monkeypatch, policy="slack")
        fake.fail = name
        act = contexts.stream if name == "cuStreamCreate" else lambda: contexts.use(0)
        with pytest.raises(GreenContextError, match=f"{name} failed"):
            act()


class TestGreenContexts:
    def enter(self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, phase: str = "decode") -> GreenContext:
        contexts = entered(fake, monkeypatch, phase)
        (context,) = contexts.contexts
        return context

    def test_the_context_has_the_parts_of_its_place_and_is_current(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        assert self.enter(fake, monkeypatch).sms == 32
        assert fake.chosen == [8, 9, 10, 11]  # of 16 parts of 8 SMs; 4 SMs of 132 are left over
        assert fake.current == 7
        assert fake.calls.index("cuDevicePrimaryCtxRetain") < fake.calls.index("cuGreenCtxCreate")

    def test_a_library_that_chooses_the_whole_gpu_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """NCCL's `cudaSetDevice` makes the primary context current, and says nothing."""
        fake = FakeDriver()
        context = self.enter(fake, monkeypatch)
        context.check()
        fake.current = 1
        with pytest.raises(GreenContextError, match=r"of 32 SMs is not current any more.*mps: off"):
            context.check()

    def test_the_current_context_tells_the_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeDriver()
        fake.current = 3
        self.enter(fake, monkeypatch, "prefill")
        assert "cuCtxGetDevice" in fake.calls
        assert "cuDevicePrimaryCtxRetain" not in fake.calls
        assert fake.chosen == list(range(8))

    @pytest.mark.parametrize(("major", "sms", "expected"), [(9, 132, 8), (8, 108, 4)])
    def test_drivers_that_do_not_tell_the_least_part(self, major: int, sms: int, expected: int) -> None:
        fake = FakeDriver(sms=sms, least=0, major=major)
        division = green.divide(Driver(fake), 0)
        assert (division.total, division.size, len(division.parts)) == (sms, expected, sms // expected)

    def test_a_gpu_too_small_to_divide(self) -> None:
        with pytest.raises(GreenContextError, match="the 8 SMs of this GPU cannot be divided"):
            green.divide(Driver(FakeDriver(sms=8)), 0)

    @pytest.mark.parametrize(
        "name", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc",
                 "cuGreenCtxCreate", "cuCtxFromGreenCtx", "cuCtxSetCurrent"],
    )  # fmt: skip
    def test_every_failure_names_the_call_and_the_way_out(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            GreenContextError,
            match=rf"{name} failed with CUDA_ERROR_NOT_SUPPORTED \(801\): operation not supported: use",
        ):
            self.enter(FakeDriver(fail=name), monkeypatch)
        with pytest.raises(
            GreenContextError, match=f'{name} cannot be called: Function "{name}" not found: use `mps: off`'
        ):
            self.enter(FakeDriver(lacks=name), monkeypatch)

    def test_no_bindings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.raises(
            GreenContextError, match=r"cuda\.bindings cannot be imported: .*; torch's builds for CUDA bring"
        ):
            green.load()

    def test_no_driver(self) -> None:
        with pytest.raises(DriverError, match=r'cuInit cannot be called: Function "cuInit" not found'):
            Driver(FakeDriver(lacks="cuInit")).call("cuInit", 0)
