"""`muxserve`: the command line. Thin: each command lives in a module of its own that is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from muxserve.cli import completion
from muxserve.cli.exit_codes import add_exit_codes
from muxserve.cli.fleet_app import app as fleet_app
from muxserve.cli.offline_app import app as offline_app
from muxserve.cli.options import takes
from muxserve.cli.settings import DeploySettings, EndpointKey, FleetFile, Json, RunSettings, Which
from muxserve.cli.teams_app import app as teams_app
from muxserve.net.process import close_inherited

# Plain help and no rich tracebacks: both would import much for little.
app = typer.Typer(
    name="muxserve",
    help="Serves many LLMs from shared compute and one KV cache, behind one OpenAI endpoint.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(fleet_app)
app.add_typer(offline_app)
app.add_typer(teams_app)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        from muxserve.cluster.machine import compiled

        typer.echo(f"muxserve {version('muxserve')}{' (compiled)' if compiled() else ''}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@takes(DeploySettings)
def deploy(settings: DeploySettings) -> int:
    """Serve a fleet until Ctrl-C.

    Everything is checked before anything starts. The first Ctrl-C (or SIGTERM) lets running requests finish, the second
    ends at once."""
    from muxserve.net.logs import choose

    choose(settings.log_format.value, settings.log_level.value)
    from muxserve.cli.deploy import deploy as run

    return run(settings)


@app.command("run")
@takes(RunSettings)
def run_models(settings: RunSettings) -> int:
    """Serve models by name until Ctrl-C: what is not here is downloaded from the Hugging Face hub.

    No fleet file is needed; `--write` writes the one that was used, to go on from there."""
    from muxserve.cli.run import run

    return run(settings)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def upgrade(
    context: typer.Context,
    file: FleetFile,
    fleet: Which = None,
) -> None:
    """Deploy a fleet file anew in place of the running fleet, and lose no request: with this version of MuxServe.

    The new fleet starts in the background. When all its models are up, it listens at the same port, and the one before
    ends with its last request. Options of `deploy` are passed on."""
    from muxserve.cli.upgrade import upgrade as run

    raise typer.Exit(run(file, fleet, context.args))


@app.command()
def validate(
    fleet: FleetFile,
    file_only: Annotated[
        bool, typer.Option("--file-only", help="Check the file alone, not whether it fits this machine.")
    ] = False,
    json: Json = False,
) -> None:
    """Check a fleet file and show what would be deployed."""
    from muxserve.cli.validate import validate as run

    raise typer.Exit(run(fleet, file_only=file_only, as_json=json))


@app.command()
def status(fleet: Which = None, key: EndpointKey = None, json: Json = False) -> None:
    """Show a running fleet: models, queues, pages."""
    from muxserve.cli.status import status as run

    raise typer.Exit(run(fleet, key=key, as_json=json))


@app.command()
def top(
    fleet: Which = None,
    key: EndpointKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON per second (muxserve/metrics/live.py).")
    ] = False,
) -> None:
    """Watch a running fleet, once per second: models, latencies, pages, jobs. Ctrl-C ends it."""
    from muxserve.cli.top import top as run

    raise typer.Exit(run(fleet, key=key, once=once, as_json=json))


@app.command()
def logs(
    part: Annotated[
        str,
        typer.Argument(
            metavar="[PART]",
            help="Such as gateway-0, u0/unit, u0 or engine; all by default.",
            show_default=False,
            autocompletion=completion.logs,
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="So many lines of each log.")] = 20,
    fleet: Which = None,
) -> None:
    """Print the logs of the fleet that runs on this machine."""
    from muxserve.cli.logs import logs as run

    raise typer.Exit(run(part, lines, follow, fleet))


@app.command()
def doctor(
    fleet: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FLEET]",
            help="With --gpu: also compute the shapes of this fleet's models with the SMs of their engines.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Check every node of that Ray cluster instead; auto: this machine's."),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Try what the GPUs can do (one to two minutes); `deploy` acts on what is found."),
    ] = False,
    json: Json = False,
) -> None:
    """Check what this machine can do."""
    if ray is not None and gpu:
        raise typer.BadParameter("goes without --ray: it tries the GPUs of this machine", param_hint="--gpu")
    if fleet is not None and not gpu:
        raise typer.BadParameter("needs --gpu: only GPUs are tried with a fleet's models", param_hint="FLEET")
    if ray is not None:
        from muxserve.cli.doctor import doctor_nodes

        raise typer.Exit(doctor_nodes(ray, json))
    if gpu:
        from muxserve.cli.gpu_probes import doctor_gpu

        raise typer.Exit(doctor_gpu(fleet, json))
    from muxserve.cli.doctor import doctor as run

    raise typer.Exit(run(json))


@app.command()
def schema() -> None:
    """Print the JSON schema of fleet files, for editors."""
    from muxserve.config.loader import fleet_schema_text

    sys.stdout.write(fleet_schema_text())


add_exit_codes(app)


def main() -> None:
    """The entry point."""
    if sys.argv[1:2] in (["deploy"], ["run"]):
        close_inherited(sys.argv)
    app()


if __name__ == "__main__":
    main()
