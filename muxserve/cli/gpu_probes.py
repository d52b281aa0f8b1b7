"""The probes of this machine's GPUs: all of them (`muxserve doctor --gpu`), and the quick ones that `deploy` makes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from muxserve.cli.output import console, escape, print_error, print_problems
from muxserve.cluster.machine import driver_too_old, findings, packages, this_machine, torch_cuda
from muxserve.cluster.ray.cluster import gpus_for
from muxserve.config import FleetError, load_fleet
from muxserve.gpu import mps, nvml
from muxserve.gpu.findings import Findings, ProbeFinding, place_of, remember, report
from muxserve.gpu.sm import percentage
from muxserve.gpu.unit import GpuUnit
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.probes import lab
from muxserve.probes.shape import AttentionShape
from placement import ModelDemand

_GREEN = "[green]a fleet can be served on these GPUs[/]"


def doctor_gpu(fleet: Path | None = None, as_json: bool = False) -> int:
    """Make the probes of this machine's GPUs, print and remember what they found; returns the exit code.

    Args:
        fleet: a fleet file, whose models' shapes are computed with the percentages that its engines would have.
    """
    machine = nvml.visible(nvml.machine(), os.environ)
    gpus = alike(machine)
    if not gpus:
        print_error(f"there is nothing to try: {machine.why_none or 'no GPU can be used; `muxserve doctor` says why'}")
        return ExitCode.NO
    probes = probes_of(machine)
    if fleet is not None:
        try:
            declared = load_fleet(fleet)
            plans = FleetPlanner(declared, this_machine(), gpus_for(declared)).at_start()
        except FleetError as error:
            print_problems(error, "nothing was tried")
            return ExitCode.WRONG
        shapes = shapes_by_percentage(plans)
        if shapes:
            probes.append(lab.shapes_probe(shapes))
        else:
            console.print("no engine of this fleet has a percentage of the SMs: its models' shapes are not computed")
    found = _found(gpus, probes, quiet=as_json)
    if as_json:
        kept = _remembered(found, quiet=True)
        rows = [dict(zip(("verdict", "probe", "found"), row, strict=True)) for row in report(found)]
        print(
            json.dumps(
                {"ok": not found.refused, "gpus": found.place.gpus, "date": found.date, "probes": rows}, indent=2
            )
        )
        return ExitCode.NO if found.refused else ExitCode.DONE if kept else ExitCode.NOT_DONE
    _print_findings(found)
    written = _remembered(found)
    if found.refused:
        console.print("\n[bold red]nothing can be served on these GPUs yet[/]")
        return ExitCode.NO
    console.print(f"\n{_GREEN}")
    return ExitCode.DONE if written else ExitCode.NOT_DONE


def probe_quickly() -> None:
    """Make the quick probes if nobody has made any on this machine with this driver and these packages."""
    machine = nvml.visible(nvml.machine(), os.environ)
    gpus = alike(machine)
    if not gpus or findings() is not None:
        return
    console.print(
        "MuxServe does not know these GPUs with this driver yet: it probes once what they can do, for at most "
        f"{lab.QUICK_SECONDS:.0f} s. `--no-probe` skips that: engines that share a GPU then alternate, one computes "
        "while the others wait. `muxserve doctor --gpu` makes all probes"
    )
    found = _found(gpus, [probes_of(machine)[0], *lab.QUICK], lab.QUICK_SECONDS)
    for each in found.findings:
        console.print(f"  {each.verdict}: {each.probe}: {escape(each.detail)}")
    _remembered(found)


def probe_shapes(plan: ResolvedUnit, unit: GpuUnit) -> ProbeFinding | None:
    """Compute the shapes of a unit's models with the percentages that its engines would have; None if none has any."""
    shapes = shapes_by_percentage([plan.with_gpu(unit)])
    if not shapes:
        return None
    console.print(
        "checking whether these models compute right with the percentages of the SMs that their engines will have, for "
        f"at most {lab.QUICK_SECONDS:.0f} s"
    )
    with tempfile.TemporaryDirectory(prefix="mux-") as directory:
        made = lab.Lab(unit.gpus, Path(directory), mps.binary())
        (found,) = lab.run(made, [lab.shapes_probe(shapes)], seconds=lab.QUICK_SECONDS)
    return found


def alike(machine: nvml.GpuMachine) -> list[nvml.Gpu]:
    """The usable GPUs of the kind that there is most of."""
    kinds: dict[str, list[nvml.Gpu]] = {}
    for gpu in machine.gpus:
        if not (gpu.fault or gpu.modes.mig):
            kinds.setdefault(gpu.name, []).append(gpu)
    return max(kinds.values(), key=len, default=[])


def probes_of(machine: nvml.GpuMachine) -> list[lab.Probe]:
    """The probes. The first compares versions: an old driver makes every other fail in its own way."""

    def driver(_: lab.Lab) -> str:
        if problem := driver_too_old(machine):
            raise lab.ProbeFailed(problem)
        return (
            f"{machine.driver_version} knows CUDA {machine.cuda_version}, torch is built for {torch_cuda() or 'none'}"
        )

    return [lab.Probe("driver", driver, "refuse"), *lab.PROBES]


def shapes_by_percentage(plans: Sequence[ResolvedUnit]) -> dict[int, list[AttentionShape]]:
    """The shapes of models whose engines get a percentage of the SMs, by that; latent attention has no such shape."""
    found: dict[int, list[AttentionShape]] = {}
    for plan in plans:
        if plan.gpu is None or plan.gpu.sharing == "off":
            continue
        for demand in plan.demands:
            share = plan.gpu.shares[demand.name]
            for part in {percentage(share.prefill), percentage(share.decode)}:
                shapes = found.setdefault(part, [])
                shape = _shape(demand, plan.gpu.ranks // plan.gpu.stages)
                if shape is not None and shape not in shapes:
                    shapes.append(shape)
    return {part: shapes for part, shapes in found.items() if shapes and part < 100}


def _shape(demand: ModelDemand, ranks: int) -> AttentionShape | None:
    model = demand.architecture
    if not (model.heads and model.kv_heads and model.causal) or model.latent:
        return None
    return AttentionShape(
        model.heads // ranks, max(1, model.kv_heads // ranks), model.head_dim, model.hidden,
        max(1, model.intermediate // ranks), model.vocab,
    )  # fmt: skip


def _found(
    gpus: Sequence[nvml.Gpu], probes: Sequence[lab.Probe], seconds: float = float("inf"), quiet: bool = False
) -> Findings:
    trying = (lambda _: None) if quiet else _trying
    with tempfile.TemporaryDirectory(prefix="mux-") as directory:
        tried = lab.run(lab.Lab(gpus, Path(directory), mps.binary()), probes, trying, seconds)
    return Findings(place_of(nvml.machine(), packages()), time.strftime("%Y-%m-%d %H:%M"), tuple(tried))


def _remembered(found: Findings, quiet: bool = False) -> bool:
    """Write it down, and say where unless `quiet`; whether that went well."""
    try:
        kept = remember(found)
        if not quiet:
            console.print(f"`muxserve deploy` follows these findings; they are kept in {kept}")
    except OSError as error:
        print_error(f"the findings cannot be stored: {error}; `muxserve deploy` cannot follow them")
        return False
    return True


def _trying(probe: str) -> None:
    console.print(f"trying: {probe}")


def _print_findings(found: Findings) -> None:
    """One table, to be pasted into a report."""
    place = found.place
    versions = ", ".join(f"{name} {version}" for name, version in place.packages.items() if version)
    console.print(f"\n{found.date}, driver {place.driver} (CUDA {place.cuda}), {escape(versions)}")
    for name, count in Counter(gpu.rpartition(" ")[0] for gpu in place.gpus).items():
        console.print(f"{count} x {escape(name)}")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", "probe", "found"):
        table.add_column(column, overflow="fold")
    signs = {"ok": "[green]ok[/]", "failed": "[bold red]failed[/]", "not tried": "[yellow]not tried[/]"}
    for verdict, probe, detail in report(found):
        table.add_row(signs[verdict], probe, escape(detail))
    console.print(table)
