"""The options by which commands name a workload; the same for `workload`, `replay` and `simulate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muxserve.cli.given import refuse_given

if TYPE_CHECKING:
    from muxserve.workload import Workload

SOURCE_HELP = "A trace file, or a generator such as poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt."
Fleet = Annotated[Path | None, typer.Option("--fleet", help="Fleet file: its models and rates.", show_default=False)]
Models = Annotated[
    str | None,
    typer.Option("--models", help="Models, most popular first: a,b or with rates a=4,b=1.", show_default=False),
]
Reading = dict[str, Any]  # the options below, by the names of `WorkloadOptions`


def _reading(
    format: Annotated[
        str | None, typer.Option("--format", help="Format of the file, if it is not recognised.", show_default=False)
    ] = None,
    map: Annotated[
        str, typer.Option("--map", help="auto, rates, round-robin, power:ALPHA, or OLD=NEW,*=NEW.")
    ] = "auto",
    start: Annotated[float, typer.Option(help="Seconds of the trace to leave out at its start.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of the trace to take.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(help="Requests to take at most.", show_default=False)] = None,
    speed: Annotated[float, typer.Option(help="Divide all times by this.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(help="Rescale to this many requests per second on average.", show_default=False)
    ] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Cap prompts, tokens.", show_default=False)] = None,
    max_output: Annotated[int | None, typer.Option(help="Cap outputs, tokens.", show_default=False)] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json that counts the tokens of texts; they are estimated without.", show_default=False
        ),
    ] = None,
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="Every turn of a conversation, not the first alone.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out and count them.")] = False,
    time_unit: Annotated[
        str | None,
        typer.Option(help="What times of the file count, if that is not certain: s, ms, us, ns.", show_default=False),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that a hash of the file stands for, if not certain.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn beside a file: models, times.")] = 0,
) -> None:
    """The options that say how a workload is read; only its signature is used."""


def reads_a_workload(*only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `_reading`, or those that are named; it gets them together, as `reading`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = inspect.signature(_reading, eval_str=True).parameters
        names = only or tuple(added)

        def run(**arguments: Any) -> None:
            reading = {"mapping" if name == "map" else name: arguments.pop(name) for name in names}
            command(**arguments, reading=reading)

        parameters = [p for p in own.parameters.values() if p.name != "reading"] + [added[name] for name in names]
        # By keyword, so that it does not matter which of them have defaults.
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in keywords}
        run.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
        return run

    return decorate


def refuse_seed(context: typer.Context, source: str) -> None:
    """A command that draws nothing itself takes no seed for a workload that has its own.

    Raises:
        typer.BadParameter: one was given.
    """
    from muxserve.workload.spec import is_spec

    if is_spec(source) and not Path(source).is_file():
        refuse_given(context, ["seed"], "on a generator; write seed=... into it")


def models_of(fleet: Path | None, models: str | None) -> Mapping[str, float] | Sequence[str] | None:
    """The models that a command names.

    Raises:
        FleetError: the fleet file is wrong.
        WorkloadError: both are given, or `models` makes no sense.
    """
    from muxserve.workload import WorkloadError

    if fleet is not None and models is not None:
        raise WorkloadError("--fleet and --models exclude each other")
    if fleet is not None:
        from muxserve.config import load_fleet

        return {model.name: model.rate for model in load_fleet(fleet).models}
    if models is None:
        return None
    parts = [part.strip() for part in models.split(",") if part.strip()]
    names = [part.partition("=")[0].strip() for part in parts]
    if not names or len(set(names)) != len(names) or not all(names):
        raise WorkloadError(f"--models {models!r} must name at least one model, and none twice")
    if not any("=" in part for part in parts):
        return names
    try:
        rates = {name: float(part.partition("=")[2]) for name, part in zip(names, parts, strict=True)}
    except ValueError:
        rates = {}
    if not rates or not all(0 < rate < float("inf") for rate in rates.values()):
        raise WorkloadError(f"--models {models!r}: every model needs a positive rate, or none has one") from None
    return rates


def print_left_out(workload: Workload) -> None:
    """Say on stderr what reading it left out."""
    from muxserve.cli.output import errors, escape

    left = workload.left_out
    if left.bad:
        errors.print(f"[yellow]left out {left.bad} malformed:[/] {escape(left.first_bad)}" + (" ..." * (left.bad > 1)))
    for reason, count in left.dropped.items():
        errors.print(f"[yellow]left out {count}:[/] {escape(reason)}")
