"""Which latency model a command predicts with (`--costs`), and which of its parts knows a model on a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.devices import device
from muxserve.costs.kernels import EXTRA, KernelModel, package_version
from muxserve.costs.latency import CostError, EngineShape, LatencyModel
from muxserve.costs.measured import ProfileModel, read_profile
from muxserve.costs.roofline import Roofline

AUTO, MEASURED, ROOFLINE, PROFILE = "auto", "measured", "roofline", "profile"


def profile_of(fleet: Path) -> Path:
    """Where the profile of a fleet is looked for, and written if nobody says where: beside its file."""
    return fleet.with_suffix(".profile.json")


def chosen_costs(choice: str, fleet: Path) -> LatencyModel:
    """The latency model that `--costs` names: `roofline`; `measured`, kernel tables and the roofline for what they do
    not have; a profile's file, and for what it does not have the same; `auto`, the profile of this fleet where there
    is one, and the same.

    Raises:
        CostError: there are no kernel tables although they are asked for, or the file cannot be read.
    """
    if choice == ROOFLINE:
        return Roofline()
    if choice == MEASURED and not package_version():
        raise CostError(f"--costs: kernel tables are not installed; pip install '{EXTRA}', or give --costs roofline")
    kernels = KernelModel(beyond=Roofline())
    if choice == MEASURED:
        return kernels
    file = profile_of(fleet) if choice == AUTO else Path(choice)
    if choice == AUTO and not file.exists():
        return kernels
    try:
        return ProfileModel(read_profile(file), beyond=kernels, file=str(file))
    except CostError as error:
        raise CostError(f"--costs: {error}; it takes auto, roofline, measured, or the file of a profile") from None


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """How far costs of a kind were from what others measured: relative errors, `median` and `p90` of their size."""

    median: float
    p90: float
    of: str


# docs/costs.md; benchmarks/results/costs_runs.json. Profiles of this machine have none that is known beforehand.
_HOPPER, _B200 = "1,093 whole runs on H100 and H200", "256 whole runs of vLLM on B200"
ERRORS = {
    MEASURED: MeasuredError(0.081, 0.289, _HOPPER),
    ROOFLINE: MeasuredError(0.203, 0.522, _HOPPER),
}
ERRORS_ON_BLACKWELL = {
    MEASURED: MeasuredError(0.223, 0.692, _B200),
    ROOFLINE: MeasuredError(0.252, 0.877, _B200),
}
BLACKWELL = ("B200", "B300", "GB200", "GB300", "RTX-PRO-6000")


class Doubt(NamedTuple):
    """Costs of a kind, and how far they were off."""

    kind: str
    error: MeasuredError


@dataclass(frozen=True, slots=True)
class CostSource:
    """What predicts a model's steps on a device: the `kind` (profile, measured, roofline), its `version` (the file of a
    profile; the versions of kernel tables), and where that is the roofline on a GPU, `why` nothing measured does."""

    kind: str
    version: str = ""
    why: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON; what is empty is left out."""
        return {key: value for key, value in asdict(self).items() if value}

    def error_on(self, on: str) -> MeasuredError | None:
        """How far costs of this kind were off on others' devices; None for profiles, and on a CPU."""
        where = device(on)
        errors = ERRORS_ON_BLACKWELL if where.name.startswith(BLACKWELL) else ERRORS
        return errors.get(self.kind) if where.kind == "gpu" else None

    @property
    def name(self) -> str:
        """Its kind in words."""
        return {MEASURED: "measured kernels"}.get(self.kind, self.kind)

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.version})' if self.version else ''}"


def source_of(latency: LatencyModel, architecture: ModelArchitecture, shape: EngineShape) -> CostSource:
    """Which part of `latency` answers for that engine."""
    if isinstance(latency, ProfileModel):
        if latency.knows(architecture, shape):
            return CostSource(PROFILE, latency.file)
        if latency.beyond is not None:
            return source_of(latency.beyond, architecture, shape)
    if isinstance(latency, KernelModel):
        why = latency.why_not(architecture, shape)
        if not why:
            return CostSource(MEASURED, latency.version(shape.device))
        return CostSource(ROOFLINE, why=why if device(shape.device).kind == "gpu" else "")
    return CostSource(ROOFLINE)


@dataclass(frozen=True, slots=True)
class CostsUsed:
    """What predicts the models of a plan: a `CostSource` for each model and type of device, in order."""

    engines: tuple[tuple[str, str, CostSource], ...]

    def __str__(self) -> str:
        """Each source once: `roofline`, or with several `roofline for a, b; profile (FILE) for c`."""
        groups: dict[CostSource, list[str]] = {}
        for model, _, source in self.engines:
            names = groups.setdefault(source, [])
            if model not in names:
                names.append(model)
        if not groups:
            return "nothing has a place"
        if len(groups) == 1:
            return _with_why(next(iter(groups)))
        return "; ".join(f"{_with_why(source)} for {', '.join(names)}" for source, names in groups.items())

    @property
    def doubtful(self) -> Doubt | None:
        """The costs with the largest error, of those of models on GPUs; None if all of them have a profile."""
        known = [Doubt(source.kind, error) for _, on, source in self.engines if (error := source.error_on(on))]
        return max(known, key=lambda doubt: doubt.error.median, default=None)

    def of(self, model: str, on: str) -> str:
        """What predicts a model on a device, in a few words, with the median of its error."""
        source = next(each for name, device, each in self.engines if (name, device) == (model, on))
        error = source.error_on(on)
        return source.name if error is None else f"{source.name}, ±{error.median:.0%}"

    def as_list(self) -> list[dict[str, str | float]]:
        """For JSON."""
        found: list[dict[str, str | float]] = []
        for model, on, source in self.engines:
            told: dict[str, str | float] = {"model": model, "device": on, **source.as_dict()}
            if (error := source.error_on(on)) is not None:
                told |= {"error_median": error.median, "error_p90": error.p90}
            found.append(told)
        return found


def _with_why(source: CostSource) -> str:
    return f"{source}, since {source.why}" if source.why else str(source)
