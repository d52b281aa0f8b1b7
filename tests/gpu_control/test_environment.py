"""What processes on GPUs find in their environment, and who may still fork."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from muxserve.gpu import environment
from muxserve.gpu.environment import (
    ImportsThatTouchCuda,
    client_environment,
    driver_is_initialised,
    keeper_environment,
    parent_environment,
    prepare,
    refuse_cuda,
)
from muxserve.gpu.green import enter
from muxserve.gpu.sm import has_share, share_of
from muxserve.spec import GpuSpec, SmSharing, UnitSpec
from tests.cluster.conftest import fake_unit_spec
from tests.gpu_control.test_sm import unit_spec

PERCENTAGE, PIPE, VISIBLE, PRIORITY = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_CLIENT_PRIORITY",
)


class TestShares:
    @pytest.mark.parametrize(
        ("model", "phase", "expected"), [("one", "prefill", "60"), ("one", "decode", "25"), ("two", "decode", "1")]
    )
    def test_a_percentage_per_engine(self, model: str, phase: str, expected: str) -> None:
        environ: dict[str, str] = {}
        prepare(unit_spec(), model, phase, environ)
        assert environ[PERCENTAGE] == expected
        assert environ[PIPE] == f"{unit_spec().run_dir}/mps/pipe"

    @pytest.mark.parametrize(
        ("spec", "phase", "expected"),
        [
            (unit_spec(), "weights", keeper_environment(unit_spec())),
            (unit_spec("green_contexts"), "decode", client_environment(unit_spec())),
            (unit_spec("off"), "decode", {}),
            (fake_unit_spec(Path("/run/x")), "decode", {PERCENTAGE: "3"}),
        ],
        ids=["a weight holder has no limit", "clients with green contexts", "no MPS", "a CPU"],
    )
    def test_without_a_percentage(self, spec: UnitSpec, phase: str, expected: dict[str, str]) -> None:
        """One from outside is removed, but for on a CPU, where nothing changes."""
        environ = {PERCENTAGE: "3", "HOME": "/"}
        prepare(spec, "one", phase, environ)
        assert environ == {"HOME": "/", **expected}

    @pytest.mark.parametrize("sharing", ["mps", "green_contexts"])
    def test_one_engine_of_both_phases_has_the_share_of_one_that_decodes(self, sharing: SmSharing) -> None:
        spec, environ = unit_spec(sharing), {PERCENTAGE: "3"}
        prepare(spec, "one", "both", environ)
        assert share_of(spec, "one", "both") == share_of(spec, "one", "decode") == 0.25
        assert environ.get(PERCENTAGE) == ("25" if sharing == "mps" else None)
        assert has_share(spec, "one", "both")
        # One that has all of them has no limit, beside whoever else computes.
        models = [msgspec.structs.replace(model, decode_share=1.0) for model in spec.models]
        whole = msgspec.structs.replace(spec, models=models)
        prepare(whole, "one", "both", environ)
        assert environ == client_environment(whole)
        assert enter(whole, "one", "both") is None

    @pytest.mark.parametrize("phase", ["prefill", "decode", "both", "weights", ""])
    def test_a_priority_from_outside_is_removed(self, phase: str) -> None:
        environ = {PRIORITY: "7"}
        prepare(unit_spec("mps"), "one", phase, environ)
        assert PRIORITY not in environ

    def test_no_such_model(self) -> None:
        with pytest.raises(KeyError):
            prepare(unit_spec(), "three", "decode", {})


def several_gpus(sharing: SmSharing = "mps", models: int = 2, ranks: int = 2, **more: bool) -> UnitSpec:
    base = unit_spec(sharing)
    gpu = GpuSpec(["GPU-a", "GPU-b"][:ranks], sharing, **more)
    return msgspec.structs.replace(base, models=base.models[:models], ranks=ranks, gpu=gpu)


class TestMps:
    def test_every_client_names_the_unit_s_gpus_itself(self) -> None:
        """An MPS server numbers its GPUs anew: the user's `2,3` would be none of them."""
        environ = {VISIBLE: "2,3"}
        environ.update(client_environment(several_gpus()))
        assert environ[VISIBLE] == "GPU-a,GPU-b"

    def test_what_keeps_memory_for_others_stays_outside(self) -> None:
        """One failed kernel ends every client of a server."""
        of = several_gpus()
        assert keeper_environment(of)[PIPE] != client_environment(of)[PIPE]
        assert not Path(keeper_environment(of)[PIPE]).exists()
        assert keeper_environment(of)[VISIBLE] == "GPU-a,GPU-b"

    def test_a_gpu_that_lets_mps_in_only_has_them_inside(self) -> None:
        of = several_gpus(keepers_in_mps=True)
        assert keeper_environment(of) == client_environment(of)

    def test_without_mps_there_is_nothing_to_say(self) -> None:
        assert keeper_environment(several_gpus("off")) == client_environment(several_gpus("off")) == {}


class TestParent:
    def test_memory_can_be_shared_whatever_torch_does_by_itself(self) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            found = parent_environment(several_gpus(), {name: "max_split_size_mb:64,expandable_segments:True"})
            assert found["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:False"
            assert found["PYTORCH_CUDA_ALLOC_CONF"] == found["PYTORCH_ALLOC_CONF"]
        assert parent_environment(several_gpus(), {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"

    @pytest.mark.parametrize(
        ("models", "ranks", "nvls", "off"),
        [(2, 2, True, True), (1, 2, True, False), (2, 1, True, False), (1, 2, False, True)],
    )
    def test_several_communicators_leave_the_switch_s_slots_alone(
        self, models: int, ranks: int, nvls: bool, off: bool
    ) -> None:
        found = parent_environment(several_gpus(models=models, ranks=ranks, nvls=nvls), {})
        names = ("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER")
        assert [found.get(name) for name in names] == (["0"] * 3 if off else [None] * 3)

    def test_what_the_user_says_of_nccl_counts(self) -> None:
        found = parent_environment(several_gpus(), {"NCCL_NVLS_ENABLE": "1"})
        assert "NCCL_NVLS_ENABLE" not in found
        assert found["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"

    def test_stages_of_a_pipeline_reduce_nothing(self) -> None:
        several = several_gpus()
        models = [msgspec.structs.replace(model, stages=2) for model in several.models]
        of = msgspec.structs.replace(several, models=models)
        assert "NCCL_NVLS_ENABLE" not in parent_environment(of, {})

    def test_kernels_are_compiled_where_a_toolkit_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM's default sampler and its FP8 products are compiled in the warm-up: engines would end there without."""
        monkeypatch.setattr(environment, "_TOOLKIT", str(tmp_path / "usual"))
        names = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM")

        def chosen(**environ: str) -> list[str | None]:
            found = parent_environment(several_gpus(), {"PATH": str(tmp_path), **environ})
            return [found.get(name) for name in names]

        assert chosen() == ["0", "0"]
        assert chosen(VLLM_USE_FLASHINFER_SAMPLER="1") == [None, "0"]
        for home in ("named", "usual"):
            compiler = tmp_path / home / "bin" / "nvcc"
            compiler.parent.mkdir(parents=True)
            compiler.touch(mode=0o755)
            assert chosen(CUDA_HOME=str(tmp_path / home)) == ["0", None]
        assert chosen() == ["0", None]
        (tmp_path / "ninja").touch(mode=0o755)
        assert chosen() == [None, None]
        compiler.unlink()
        assert chosen(PATH=f"{tmp_path}:{tmp_path / 'named' / 'bin'}") == [None, None]
        # They look nowhere else then.
        assert chosen(PATH=f"{tmp_path}:{tmp_path / 'named' / 'bin'}", CUDA_PATH="/nowhere") == ["0", "0"]

    @pytest.mark.parametrize(("sharing", "sampler"), [("mps", None), ("green_contexts", "0")])
    def test_green_contexts_sample_with_torch(
        self, sharing: SmSharing, sampler: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Thread blocks of FlashInfer's sampler wait for as many as the whole GPU has SMs."""
        monkeypatch.setattr(environment, "without_compiler", lambda environ: {})
        assert parent_environment(unit_spec(sharing), {}).get("VLLM_USE_FLASHINFER_SAMPLER") == sampler

    def test_nothing_on_a_cpu(self) -> None:
        assert parent_environment(fake_unit_spec(Path("/run/x")), {}) == {}


class TestForks:
    def test_a_bare_cuinit_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch does not know of it: a library asked the driver for the GPU's capability. That open devices say nothing
        was seen on a GPU: NVML of driver 580 opens those that cuInit opens."""
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=bool)))
        library = tmp_path / "libcuda.so.1"
        source = "static int ready; int cuInit(int f) { ready = 1; return 0; }"
        source += " int cuDeviceGetCount(int* n) { *n = 1; return ready ? 0 : 3; }"
        compiler = [shutil.which("cc") or "cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
        subprocess.run(compiler, input=source, text=True, check=True)

        assert not driver_is_initialised(str(library)), "it has not even been loaded"
        driver = ctypes.CDLL(str(library))
        assert not driver_is_initialised(str(library)), "loaded, and not initialised"
        driver.cuInit(0)
        assert driver_is_initialised(str(library))

        monkeypatch.setattr(environment, "driver_is_initialised", lambda: True)
        with pytest.raises(RuntimeError, match="has touched CUDA and cannot fork: something has called cuInit"):
            refuse_cuda()

    def test_who_touches_cuda_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        touched = False
        monkeypatch.setattr(environment, "driver_is_initialised", lambda: touched)
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("harmless", "greedy", "late"):
            (tmp_path / f"{name}_library.py").write_text("")
        with ImportsThatTouchCuda() as imports:
            import_module("harmless_library")
            assert not imports.after
            import_module("greedy_library")
            touched = True
            import_module("late_library")
        assert imports.after == "after the import of greedy_library"
        assert imports not in sys.meta_path
        with pytest.raises(RuntimeError, match="capability after the import of greedy_library; it was"):
            refuse_cuda(imports.after)

    def test_this_process_may_fork(self) -> None:
        refuse_cuda()
