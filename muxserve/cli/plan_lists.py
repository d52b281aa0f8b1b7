"""`muxserve plan --list`: the models and the GPUs that are known by name."""

from __future__ import annotations

from pathlib import Path

from muxserve.cli.output import console, escape, print_error
from muxserve.costs.architecture import UnsupportedModelError
from muxserve.costs.devices import DEVICES
from muxserve.costs.kernels import EXTRA, SYSTEMS, package_version
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.demand.known_models import known_names, planned_architecture
from placement.format import format_size


def show_list(what: str) -> int:
    """Print the list of that name; returns the exit code."""
    tables = {"models": models_table, "gpus": gpus_table}
    if what not in tables:
        print_error(f"--list: must be {' or '.join(tables)}, not {what!r}")
        return ExitCode.WRONG
    console.print(tables[what]())
    if what == "models":
        more = "" if package_version() else f"; pip install '{EXTRA}' brings more of them"
        console.print(escape(f"A repository of the Hugging Face hub is a name, too{more}."))
    return ExitCode.DONE


def models_table() -> FigureTable:
    """One row per model."""
    table = FigureTable(["model", "from", "parameters", "longest sequence"], words=2)
    for name, source in known_names():
        try:
            found = planned_architecture(name, Path())
        except (ValueError, UnsupportedModelError):
            continue  # vLLM does not serve it
        table.add_row(escape(name), escape(source), f"{found.parameters / 1e9:.1f} B", f"{found.max_len:,}")
    return table


def gpus_table() -> FigureTable:
    """One row per type of GPU."""
    table = FigureTable(["GPU", "kernel tables", "memory", "BF16", "bandwidth", "link"], words=2)
    for name, device in DEVICES.items():
        if device.kind == "gpu":
            measured = "measured" if name in SYSTEMS else "-"
            table.add_row(
                name,
                measured,
                format_size(device.memory_bytes),
                f"{device.peak('bfloat16') / 1e12:.0f} TFLOPS",
                f"{device.bandwidth / 1e9:,.0f} GB/s",
                f"{device.link} {device.link_bandwidth / 1e9:.0f} GB/s",
            )
    return table
