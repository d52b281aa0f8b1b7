"""What commands are asked for: each option stands here once, as a field with its help."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli import completion

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
# Of every command for a fleet that runs.
Which = Annotated[
    str | None,
    typer.Option(
        "--url",
        "--fleet",
        envvar="MUXSERVE_URL",
        metavar="FLEET",
        help="Which running fleet: its URL; on this machine also its port or ID (`muxserve list`). Else the only one.",
        show_default=False,
        autocompletion=completion.fleets,
    ),
]
EndpointKey = Annotated[
    str | None, typer.Option("--api-key", envvar="MUXSERVE_API_KEY", help="API key, if the fleet wants one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs instead of the file's.", show_default=False)]
_GpuType = Annotated[
    str | None,
    typer.Option(
        help="Their type, e.g. A100-80GB, H100, L40S.", show_default=False, autocompletion=completion.gpu_types
    ),
]
_Nodes = Annotated[
    str | None,
    typer.Option(help="Machines instead, e.g. 4x8:A100-80GB,2x4:L20 (count, GPUs, type).", show_default=False),
]
_Costs = Annotated[
    str,
    typer.Option(
        metavar="auto|roofline|measured|FILE",
        help="What predicts steps: a profile (FILE), measured kernels, the roofline; auto: the first of these that "
        "knows a model.",
        autocompletion=lambda: ["auto", "roofline", "measured"],
    ),
]
_Page = Annotated[Path | None, typer.Option(help="Write one page with plots.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_Report = Annotated[
    Path | None, typer.Option("-o", "--out", "--output", help="JSON report to write.", show_default=False)
]
_Objective = Annotated[
    float | None, typer.Option(help="Objective for all models instead of the fleet's.", show_default=False)
]


Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the endpoint (else the file's, or 8000); 0: any free one.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on (else the file's, or 127.0.0.1).")]


class LogFormat(Enum):
    """How logs are written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(Enum):
    """From which level on lines are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    """Options of `muxserve deploy`."""

    fleet: FleetFile
    port: Port = None
    host: Host = None
    demo: Annotated[bool, typer.Option("--demo", help="Ask each model its demo question when ready.")] = False
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Listen at the port of the fleet that runs there as soon as all models are up, and let that one end "
            "with its last request.",
        ),
    ] = False
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Apply the fleet file whenever it, or a file that it includes, has changed."),
    ] = False
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="With --take-over where there is no room for both fleets: one unit after the other, and requests for "
            "its models wait meanwhile.",
        ),
    ] = False
    plan: Annotated[
        Path | None, typer.Option(help="Serve as this plan has it (`muxserve plan -o`).", show_default=False)
    ] = None
    probe: Annotated[
        bool, typer.Option(help="Probe GPUs that have not been probed yet (a minute, once per machine and driver).")
    ] = True
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Keep logs here, in a directory for each run (the last ten).", show_default=False),
    ] = None
    log_format: Annotated[LogFormat, typer.Option(help="How all processes log, and what this one prints.")] = (
        LogFormat.TEXT
    )
    log_level: Annotated[LogLevel, typer.Option(help="From which level on the fleet's processes log.")] = LogLevel.INFO
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Engines compute nothing, and take the time that they would.")
    ] = False
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Predict steps by this profile, not the roofline; with --simulated they take as long.",
            show_default=False,
        ),
    ] = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Options of `muxserve run`."""

    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names of the Hugging Face hub, such as Qwen/Qwen3-0.6B, or directories with checkpoints.",
            show_default=False,
        ),
    ]
    port: Port = None
    host: Host = None
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="GPUs of this machine; 0: the CPU. Else one if this vLLM can use it.",
            show_default=False,
        ),
    ] = None
    write: Annotated[
        Path | None, typer.Option(help="Write the fleet file that this uses; a new file.", show_default=False)
    ] = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Options of `muxserve profile`. `given` are those on the command line."""

    fleet: Annotated[
        Path | None, typer.Argument(metavar="[FLEET]", help="The fleet file (YAML).", show_default=False)
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            "--output",
            help="The profile file; what it has already is not measured again. Without: FLEET.profile.json, which "
            "`plan` and `simulate` read; with --from-fleet profile.json.",
            show_default=False,
        ),
    ] = None
    threads: Annotated[
        str | None, typer.Option(help="Threads per engine, e.g. 1,2; by default those of the fleet and all cores.")
    ] = None
    tokens: Annotated[str | None, typer.Option(help="Prompt tokens per sequence of prefill steps, e.g. 64,512.")] = None
    sequences: Annotated[str | None, typer.Option(help="Sequences of prefill steps, e.g. 1,4.")] = None
    batches: Annotated[str | None, typer.Option(help="Sequences of decode steps, e.g. 1,8,32.")] = None
    contexts: Annotated[str | None, typer.Option(help="Tokens of context of decode steps, e.g. 64,512.")] = None
    from_fleet: Annotated[
        bool, typer.Option("--from-fleet", help="Start nothing: write what a fleet that serves has learnt.")
    ] = False
    running: Which = None
    key: EndpointKey = None
    given: frozenset[str] = frozenset()


def _list(what: str | None) -> None:
    """Print a list that `plan` can be asked for, and end."""
    if what is not None:
        from muxserve.cli.plan_lists import show_list

        raise typer.Exit(show_list(what))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Options of `muxserve plan`. `given` are those on the command line."""

    fleet: FleetFile
    gpus: _Gpus = None
    gpu_type: _GpuType = None
    nodes: _Nodes = None
    objective: Annotated[
        str,
        typer.Option(
            help="throughput; slo: requests within their objectives; gpus: as few as meet rates and objectives; "
            "auto: slo if the file has objectives, else throughput.",
            autocompletion=lambda: ["auto", "throughput", "slo", "gpus"],
        ),
    ] = "auto"
    mode: Annotated[
        str,
        typer.Option(
            help="muxserve, or a baseline: spatial or temporal.",
            autocompletion=lambda: ["muxserve", "spatial", "temporal"],
        ),
    ] = "muxserve"
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Part of a model's requests that must meet its objectives.")
    ] = 0.95
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Plan for growing clusters: gpus=8..64, with a step gpus=8..64:8; or for growing rates: scale=0.5..4, "
            "scale=1..3:0.5."
        ),
    ] = None
    scale: Annotated[float, typer.Option(min=0.001, max=1e6, help="Factor on the rates of the file.")] = 1.0
    costs: _Costs = "auto"
    seconds: Annotated[float, typer.Option(min=0, help="How long the local search may take.")] = 10.0
    simulate: Annotated[
        float | None,
        typer.Option(
            min=0, max=1e6, help="Seconds of the plan to simulate; 0: none. Default: up to 300.", show_default=False
        ),
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
    list_of: Annotated[
        str | None,
        typer.Option(
            "--list",
            metavar="models|gpus",
            callback=_list,
            is_eager=True,
            help="Print the models, or the types of GPUs, that are known by name, and end.",
            show_default=False,
            autocompletion=lambda: ["models", "gpus"],
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON (docs/plan.md).")] = False
    html: _Page = None
    output: Annotated[
        Path | None, typer.Option("-o", "--out", "--output", help="Write the plan as YAML.", show_default=False)
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(help="Write the fleet file of the answer, with its GPUs and rates.", show_default=False),
    ] = None
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """Options of `muxserve simulate`. `given` are those on the command line."""

    fleet: FleetFile
    workload: Annotated[str, typer.Option(help=SOURCE_HELP, show_default=False)]
    mode: Annotated[
        str,
        typer.Option(
            help="One or several of muxserve (the plan), spatial, temporal; policies: slack, adbs, free, fcfs.",
            autocompletion=lambda: ["muxserve", "spatial", "temporal", "slack", "adbs", "free", "fcfs"],
        ),
    ] = "muxserve"
    plan: Annotated[
        Path | None, typer.Option(help="Plan file (`muxserve plan -o`) instead of planning now.", show_default=False)
    ] = None
    gpus: _Gpus = None
    gpu_type: _GpuType = None
    nodes: _Nodes = None
    costs: _Costs = "auto"
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
    url: Annotated[
        str,
        typer.Option(
            "--url",
            envvar="MUXSERVE_URL",
            metavar="URL",
            help="Any OpenAI-compatible endpoint, or the port or ID of a fleet here. Else the only fleet here.",
            show_default=False,
            autocompletion=completion.fleets,
        ),
    ] = ""
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
