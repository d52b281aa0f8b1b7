"""What the offline commands are asked for: each option stands here once, as a field with its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

SOURCE_HELP = (
    "A trace file, with keys such as trace.csv:map=rates,duration=600; or a generator such as "
    "poisson:rate=8,duration=60."
)
FleetFile = Annotated[Path, typer.Argument(metavar="FLEET", help="The fleet file (YAML).", show_default=False)]
FleetModels = Annotated[
    Path | None, typer.Option("--fleet", help="Fleet file: its models and rates.", show_default=False)
]
Models = Annotated[
    str | None,
    typer.Option("--models", help="Models, most popular first: a,b or with rates a=4,b=1.", show_default=False),
]
_Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs instead of the file's.", show_default=False)]
_GpuType = Annotated[str | None, typer.Option(help="Their type, e.g. A100-80GB, H100, L40S.", show_default=False)]
_Nodes = Annotated[
    str | None,
    typer.Option(help="Machines instead, e.g. 4x8:A100-80GB,2x4:L20 (count, GPUs, type).", show_default=False),
]
_Profile = Annotated[
    Path | None, typer.Option(help="Measured costs (`muxserve profile`); the roofline without.", show_default=False)
]
_Page = Annotated[Path | None, typer.Option(help="Write one page with plots.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_Report = Annotated[
    Path | None, typer.Option("-o", "--out", "--output", help="JSON report to write.", show_default=False)
]
_Objective = Annotated[
    float | None, typer.Option(help="Objective for all models instead of the fleet's.", show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Options of `muxserve plan`. `given` are the names of those on the command line."""

    fleet: FleetFile
    gpus: _Gpus = None
    gpu_type: _GpuType = None
    nodes: _Nodes = None
    objective: Annotated[
        str,
        typer.Option(
            help="throughput; slo: requests within their objectives; gpus: as few as meet rates and objectives; "
            "auto: slo if the file has objectives, else throughput."
        ),
    ] = "auto"
    mode: Annotated[str, typer.Option(help="muxserve, or a baseline: spatial, temporal, memory.")] = "muxserve"
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Part of a model's requests that must meet its objectives.")
    ] = 0.95
    sweep: Annotated[
        str | None, typer.Option(help="Plan for growing clusters: gpus=8..64, with a step gpus=8..64:8.")
    ] = None
    profile: _Profile = None
    seconds: Annotated[float, typer.Option(min=0, help="How long the local search may take.")] = 10.0
    exact: Annotated[bool, typer.Option("--exact", help="Also solve exactly and tell the gap (small fleets only).")] = (
        False
    )
    simulate: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of the plan to simulate; 0: none. Default: up to 300.", show_default=False),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the local search and the simulation.")] = 0
    robust: Annotated[
        bool,
        typer.Option(help="Try plans under other rates, lengths and bursts, too; and take the best in the mean."),
    ] = True
    workload: Annotated[
        str | None,
        typer.Option(
            help="Also compare with models that sleep, on this workload: a trace file, or a generator such as "
            "bursty-groups:rate=8,duration=120,lengths=sharegpt.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON (docs/plan.md).")] = False
    html: _Page = None
    output: Annotated[
        Path | None, typer.Option("-o", "--out", "--output", help="Write the plan as YAML.", show_default=False)
    ] = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """Options of `muxserve simulate`. `given` are the names of those on the command line."""

    fleet: FleetFile
    workload: Annotated[str, typer.Option(help=SOURCE_HELP, show_default=False)]
    mode: Annotated[
        str,
        typer.Option(
            help="One or several of muxserve (the plan), spatial, temporal; policies: slack, adbs, round-robin, fcfs."
        ),
    ] = "muxserve"
    plan: Annotated[
        Path | None, typer.Option(help="Plan file (`muxserve plan -o`) instead of planning now.", show_default=False)
    ] = None
    gpus: _Gpus = None
    gpu_type: _GpuType = None
    nodes: _Nodes = None
    profile: _Profile = None
    seconds: Annotated[float, typer.Option(min=0, help="How long the search for each placement may take.")] = 10.0
    seed: Annotated[int, typer.Option(help="Of the searches for placements, and of --priorities.")] = 0
    priorities: Annotated[
        str, typer.Option(help="Parts of the requests by priority level, e.g. high=0.1.", show_default=False)
    ] = ""
    timeline: Annotated[
        Path | None, typer.Option(help="Write every job as a trace for ui.perfetto.dev.", show_default=False)
    ] = None
    as_json: _Json = False
    out: _Report = None
    html: _Page = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Options of `muxserve replay`; times in seconds, objectives in milliseconds."""

    workload: Annotated[str, typer.Option("-w", "--workload", help=SOURCE_HELP, show_default=False)]
    url: Annotated[str, typer.Option("--url", envvar="MUXSERVE_URL", help="Any OpenAI-compatible endpoint.")] = (
        "http://127.0.0.1:8000"
    )
    key: Annotated[
        str | None, typer.Option("--api-key", envvar="MUXSERVE_API_KEY", help="API key, if it wants one.")
    ] = None
    fleet: FleetModels = None
    models: Models = None
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at most; others wait.", show_default=False)
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request has failed.")] = 600.0
    alone: Annotated[
        bool, typer.Option("--alone", help="First measure each model alone, for SLO attainment by scale.")
    ] = False
    slo_ttft_ms: _Objective = None
    slo_tpot_ms: _Objective = None
    out: _Report = None
    html: _Page = None
    records: Annotated[
        Path | None, typer.Option(help="JSON Lines to write, a line for each request.", show_default=False)
    ] = None
    as_json: _Json = False
    prompt_seed: Annotated[
        int | None, typer.Option(help="The same prompts in every run; new ones without.", show_default=False)
    ] = None
    given: frozenset[str] = frozenset()
