"""The commands that need no running fleet of ours: options of plan, simulate, profile and replay. What they do is
imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli import workload_args as args
from muxserve.cli.given import given_options, refuse_given

app = typer.Typer(rich_markup_mode=None)

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET", help="The fleet file (YAML).", show_default=False)]


def _library(value: str) -> str:
    if value not in ("beside", "inline", "cdn") and not value.endswith(".js"):
        raise typer.BadParameter("must be beside, inline, cdn, or the URL or path of a plotly.min.js")
    return value


PlotlyLibrary = Annotated[
    str,
    typer.Option(
        help="Where the page has plotly's library (4.8 MB) from: `beside` writes it there once, `inline` into the "
        "page, `cdn` loads it from the net when the page is opened; or the URL or path of a plotly.min.js.",
        callback=_library,
    ),
]


@app.command()
@args.reads_a_workload(
    "format", "map", "start", "duration", "limit", "rate", "max_prompt", "max_output", "time_unit", "block_tokens"
)
def plan(
    context: typer.Context,
    fleet: FleetFile,
    reading: args.Reading,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Plan for so many GPUs instead of the file's.", show_default=False)
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="Their type, e.g. A100-80GB, H100, L40S.", show_default=False)
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Machines instead, e.g. 4x8:A100-80GB,2x4:L20 (count, GPUs, type).", show_default=False),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="throughput; slo: requests within their objectives; gpus: as few as meet rates and objectives; "
            "auto: slo if the file has objectives, else throughput."
        ),
    ] = "auto",
    mode: Annotated[str, typer.Option(help="muxserve, or a baseline: spatial, temporal, memory.")] = "muxserve",
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Part of a model's requests that must meet its objectives.")
    ] = 0.95,
    sweep: Annotated[
        str | None, typer.Option(help="Plan for growing clusters: gpus=8..64, with a step gpus=8..64:8.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured costs (`muxserve profile`); the roofline without.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long the local search may take.")] = 10.0,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also solve exactly and tell the gap (small fleets only).")
    ] = False,
    simulate: Annotated[
        float | None,
        typer.Option(
            min=0, help="Simulate the plan for so long; 0: not at all. Default: up to 300.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the local search and the simulation.")] = 0,
    robust: Annotated[
        bool,
        typer.Option(help="Of equal plans take the one that holds up best under other rates, lengths and a burst."),
    ] = True,
    network: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Gbit/s between machines instead of the file's cluster.network.", show_default=False
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            help="Also say what models that sleep would bring, by this workload: a trace file, or a generator such as "
            "bursty-groups:rate=8,duration=120,lengths=sharegpt.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON (docs/plan.md).")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page with plots.", show_default=False)] = None,
    plotly: PlotlyLibrary = "beside",
    output: Annotated[
        Path | None, typer.Option("-o", "--out", "--output", help="Write the plan as YAML.", show_default=False)
    ] = None,
) -> None:
    """Plan which models share which GPUs, and predict what they will deliver."""
    if html is None:
        refuse_given(context, ["plotly"], "without --html")
    from muxserve.cli.plan import PlanArguments
    from muxserve.cli.plan import plan as run

    raise typer.Exit(
        run(
            PlanArguments(
                fleet=fleet,
                gpus=gpus,
                gpu_type=gpu_type,
                nodes=nodes,
                objective=objective,
                mode=mode,
                attainment=attainment,
                sweep=sweep,
                profile=profile,
                seconds=seconds,
                exact=exact,
                simulate=simulate,
                seed=seed,
                as_json=json,
                html=html,
                plotly=plotly,
                output=output,
                network=network,
                robust=robust,
                workload=workload,
                reading={**reading, "seed": seed},
                given=given_options(context),
            )
        )
    )


@app.command()
@args.reads_a_workload()
def simulate(
    context: typer.Context,
    fleet: FleetFile,
    workload: Annotated[str, typer.Option("--workload", help=args.SOURCE_HELP, show_default=False)],
    mode: Annotated[
        str,
        typer.Option(
            help="One or several of muxserve (the plan), spatial, temporal; policies: slack, adbs, round-robin, fcfs."
        ),
    ] = "muxserve",
    plan: Annotated[
        Path | None, typer.Option(help="Plan file (`muxserve plan -o`) instead of planning now.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="So many GPUs instead of the file's.", show_default=False)
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="Their type, e.g. A100-80GB, H100, L40S.", show_default=False)
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Machines instead, e.g. 4x8:A100-80GB,2x4:L20.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Measured costs (`muxserve profile`); the roofline without.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long the search for each placement may take.")] = 10.0,
    request_overhead: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds from the client to the unit's queue; or the profile's.", show_default=False),
    ] = None,
    control_delays: Annotated[
        bool, typer.Option(help="Reports and leases take the time that they take live; without, none.")
    ] = True,
    priorities: Annotated[
        str, typer.Option(help="Parts of the requests by priority level, e.g. high=0.1.", show_default=False)
    ] = "",
    timeline: Annotated[
        Path | None, typer.Option(help="Write every job as a trace for ui.perfetto.dev.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON (docs/simulator.md).")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", "--output", help="JSON report to write.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with plots.", show_default=False)] = None,
    plotly: PlotlyLibrary = "beside",
    *,
    reading: args.Reading,
) -> None:
    """Simulate a fleet on a workload, under the scheduler that serves, in one or several modes side by side."""
    if html is None:
        refuse_given(context, ["plotly"], "without --html")
    from muxserve.cli.simulate import SimulateSettings
    from muxserve.cli.simulate import run as run_simulation

    raise typer.Exit(
        run_simulation(
            SimulateSettings(
                fleet=fleet,
                workload=workload,
                options=reading,
                modes=mode,
                profile=profile,
                plan=plan,
                gpus=gpus,
                gpu_type=gpu_type,
                nodes=nodes,
                seconds=seconds,
                request_overhead=request_overhead,
                control_delays=control_delays,
                priorities=priorities,
                timeline=timeline,
                out=out,
                html=html,
                plotly=plotly,
                as_json=json,
                seed=reading["seed"],
                given=given_options(context),
            )
        )
    )


@app.command()
def profile(
    context: typer.Context,
    fleet: Annotated[
        Path | None, typer.Argument(metavar="[FLEET]", help="The fleet file (YAML).", show_default=False)
    ] = None,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", "--output", help="The profile file; what it has already is not measured again."),
    ] = Path("profile.json"),
    threads: Annotated[
        str | None, typer.Option(help="Threads per engine, e.g. 1,2; by default those of the fleet and all cores.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Prompt tokens per sequence of prefill steps, e.g. 64,512.")
    ] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences of prefill steps, e.g. 1,4.")] = None,
    batches: Annotated[str | None, typer.Option(help="Sequences of decode steps, e.g. 1,8,32.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens of context of decode steps, e.g. 64,512.")] = None,
    pairs: Annotated[bool, typer.Option(help="Measure pairs of engines beside each other, too.")] = True,
    from_fleet: Annotated[
        bool, typer.Option("--from-fleet", help="Start nothing: write what a fleet that serves has learnt.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="MUXSERVE_URL",
            help="With --from-fleet: its endpoint; else that of the fleet which runs on this machine.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--api-key", envvar="MUXSERVE_API_KEY", help="With --from-fleet: API key.")
    ] = None,
) -> None:
    """Measure what prefill and decode steps of a fleet cost on this machine.

    Starts the fleet's engines without an endpoint. Every measured cell is written at once; after Ctrl-C the same
    command goes on where it was. With --from-fleet it asks a fleet that serves instead, which corrects its predicted
    costs by the steps that it takes.
    """
    if from_fleet:
        measuring = ("fleet", "threads", "tokens", "sequences", "batches", "contexts", "pairs")
        refuse_given(context, measuring, "with --from-fleet, which measures nothing")
        from muxserve.cli.learnt_profile import learnt_profile

        raise typer.Exit(learnt_profile(url, key, out))
    refuse_given(context, ("url", "key"), "without --from-fleet")
    if fleet is None:
        raise typer.BadParameter("which fleet? Name its file, or give --from-fleet", param_hint="FLEET")
    from muxserve.cli.profile import profile as run

    raise typer.Exit(run(fleet, out, threads, tokens, sequences, batches, contexts, pairs))


@app.command()
@args.reads_a_workload()
def replay(
    context: typer.Context,
    workload: Annotated[str, typer.Option("-w", "--workload", help=args.SOURCE_HELP, show_default=False)],
    url: Annotated[
        str, typer.Option("--url", envvar="MUXSERVE_URL", help="Any OpenAI-compatible endpoint.")
    ] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option("--api-key", envvar="MUXSERVE_API_KEY", help="API key, if it wants one.")
    ] = None,
    fleet: args.Fleet = None,
    models: args.Models = None,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at most; others wait.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request has failed.")] = 600.0,
    alone: Annotated[
        bool, typer.Option("--alone", help="First measure each model alone, for SLO attainment by scale.")
    ] = False,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Objective for all models instead of the fleet's.", show_default=False)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Objective for all models instead of the fleet's.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", "--output", help="JSON report to write.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="HTML report to write.", show_default=False)] = None,
    plotly: PlotlyLibrary = "beside",
    records: Annotated[
        Path | None, typer.Option(help="JSON Lines to write, a line for each request.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    prompt_seed: Annotated[
        int | None, typer.Option(help="The same prompts in every run; new ones without.", show_default=False)
    ] = None,
    *,
    reading: args.Reading,
) -> None:
    """Send a workload to an endpoint at its own pace and report what clients see.

    Open loop: every request leaves at its time, whatever became of the others. The first Ctrl-C sends nothing more and
    waits for what is under way, the second gives that up; both report what was done.
    """
    if html is None:
        refuse_given(context, ["plotly"], "without --html")
    args.refuse_seed(context, workload)
    from muxserve.cli.replay import ReplaySettings
    from muxserve.cli.replay import replay as run

    settings = ReplaySettings(
        url, workload, reading, fleet, models, key, max_in_flight, timeout, alone, slo_ttft_ms, slo_tpot_ms,
        out, html, plotly, records, json, prompt_seed,
    )  # fmt: skip
    raise typer.Exit(run(settings))
