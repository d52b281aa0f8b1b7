"""The fleet as it stands: which units there are, what they serve, and by which rules.

The controller writes it to `run_dir/fleet.json` before anything starts and whenever something changes, always as a
whole; then it sends the gateways and the global scheduler SIGHUP, and they read it again. So whoever is started anew
knows what the others know.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.prefixes import DispatchName
from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.scheduling.turns import TurnRules
from muxserve.spec.network import Keys
from muxserve.spec.unit import GatewaySpec, ModelSpec, UnitSpec, WatchdogRules, levels_of_model, write
from muxserve.spec.versions import public_name

FILE = "fleet.json"


class UnitEntry(msgspec.Struct, frozen=True):
    """One unit of the fleet.

    `unit_address` is the ZeroMQ ROUTER of its scheduler, `migrator_address` that of its migrator, as the other
    processes of the fleet reach them. `serves` are the models of the unit that are up or being started there; the
    others have no engines at present. A `remote` unit is reached over TCP.
    """

    unit_spec: UnitSpec
    unit_address: str
    migrator_address: str
    serves: list[str]
    remote: bool = False

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit_spec.unit


class Suspect(msgspec.Struct, frozen=True):
    """A process that gives no sign of life, in words. While another replica can serve `models` of `unit`, that is
    preferred; there are none where requests are served all the same."""

    part: str
    unit: str = ""
    models: tuple[str, ...] = ()


class TenantLimits(msgspec.Struct, frozen=True):
    """What a tenant may ask for, of all gateways together; 0: as much as it wants."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrency)


BudgetPeriod = Literal["day", "month"]


class BudgetSpec(msgspec.Struct, frozen=True):
    """Most `tokens` of prompts and answers in a calendar day or month (UTC), of one model or, without, of all."""

    period: BudgetPeriod
    tokens: int
    model: str = ""


class FallbackSpec(msgspec.Struct, frozen=True):
    """What answers in place of a model that is degraded or at a limit: another `model` of the fleet or, with a `url`,
    of that OpenAI endpoint, which gets `key`."""

    model: str
    url: str = ""
    key: str = ""

    @property
    def words(self) -> str:
        """What answers' headers call it."""
        return f"{self.url} {self.model}" if self.url else self.model


class TenantSpec(msgspec.Struct, frozen=True):
    """Who comes with one of some keys, which are known by their SHA-256 (hex) only. `models` are those that it may use,
    None: all. `weight` is its share of a model beside other tenants that wait for it. Whoever `shares_prefixes` finds
    the KV of prompts that others who do so have sent; all else is found by its own tenant only."""

    name: str
    key_hashes: tuple[str, ...]
    models: tuple[str, ...] | None = None
    priority: str | None = None
    limits: TenantLimits = TenantLimits()
    budgets: tuple[BudgetSpec, ...] = ()
    weight: float = 1.0
    admin: bool = False
    shares_prefixes: bool = False

    def may_use(self, model: str) -> bool:
        """Whether `model` is one of its."""
        return self.models is None or model in self.models


class ResidencySpec(msgspec.Struct, frozen=True):
    """Memory decides which models are awake: by these rules, and with what each model is expected to take. Models that
    are not in it are served as without. With `turns` a model that has to go may stop before it has finished.
    `on_gpus`: the memory is that of each GPU, and not this machine's; the engines of about `resting` models stay while
    these sleep."""

    rules: ResidencyRules
    models: dict[str, WakeCosts]
    turns: TurnRules | None = None
    on_gpus: bool = False
    resting: int = 0


class OtherFleet(msgspec.Struct, frozen=True):
    """Requests that gateways pass on to another fleet's gateways, which listen at the Unix `sockets`: those for the
    models that clients call `names`; None: those for models that this fleet has no longer. What comes from the other
    fleet is never passed on."""

    sockets: tuple[str, ...]
    names: tuple[str, ...] | None = None


class FleetSpec(msgspec.Struct, frozen=True):
    """Everything that gateways and the global scheduler need to know.

    `models` are all that the endpoint offers, also those that no unit serves at present; where replicas differ, as the
    smallest has it. `scaling` has the models whose number of replicas may change by itself. `migration` is None where
    requests stay where they are; `dispatch` says which replica gets a new one. `key_levels` gives API keys a priority
    level; `usage_file` keeps what `tenants` used. `tokens_host` is the address under which engines of other machines
    reach the gateways. `generation` grows with every change.

    A model that was replaced has several versions among `models`, each under a name of its own
    (`muxserve.spec.versions`): one answers requests, `candidates` are being checked, and the others finish the requests
    that they have.
    """

    run_dir: str
    gateway: GatewaySpec
    models: list[ModelSpec]
    units: list[UnitEntry]
    scaling: dict[str, ScalingRules] = {}
    migration: MigrationRules | None = None
    dispatch: DispatchName = "prefix"
    levels: tuple[Level, ...] = tuple(DEFAULT_LEVELS)
    key_levels: dict[str, str] = {}
    tenants: tuple[TenantSpec, ...] = ()
    usage_file: str = ""
    keys: Keys | None = None
    tokens_host: str = ""
    generation: int = 0
    # The models whose prefill rolls over their replicas.
    rolling: dict[str, RollingRules] = {}
    # None: nobody looks whether a process hangs.
    watchdog: WatchdogRules | None = WatchdogRules()
    # Who gives no sign of life at present, and how often a process of each kind was killed because it hung.
    suspects: tuple[Suspect, ...] = ()
    hangs: dict[str, int] = {}
    # By unit, where memory decides; else models sleep when nobody has asked for them for some time, if they may at all.
    residency: dict[str, ResidencySpec] = {}
    # It takes the endpoint's address over from another fleet: gateways listen when all models have been up.
    takes_over: bool = False
    # Another fleet has it: gateways take no more connections, and end with those that they have.
    handed_over: bool = False
    # While units go from one fleet to another, one after the other: what the other one answers.
    other_fleet: OtherFleet | None = None
    # Which version answers, by the model's name for clients, where it is not the one of that very name; empty: none.
    versions: dict[str, str] = {}
    # Versions that no client's request goes to yet.
    candidates: tuple[str, ...] = ()
    # What of the fleet file is not so, and why; empty: it is as its file says.
    unfollowed: str = ""
    # Other names that clients ask for, each with the models that share its requests, by weight.
    aliases: dict[str, dict[str, float]] = {}
    # What answers in place of a model, by its name for clients.
    fallbacks: dict[str, FallbackSpec] = {}

    def serving(self, name: str) -> str:
        """The version that answers requests for the model that clients call `name`; empty: none at present."""
        return self.versions.get(name, name)

    def answers(self, model: str) -> bool:
        """Whether clients' requests go to that version of a model."""
        return self.serving(public_name(model)) == model

    def is_retired(self, model: str) -> bool:
        """Whether that version only finishes the requests that it has."""
        return not self.answers(model) and model not in self.candidates

    def names_of(self, model: ModelSpec) -> tuple[str, ...]:
        """The names that clients may ask for `model` by, its own first; without its adapters."""
        name = public_name(model.name)
        shared = (alias for alias, weights in self.aliases.items() if name in weights)
        return tuple(dict.fromkeys((name, *model.aliases, *shared)))

    @property
    def served_names(self) -> list[str]:
        """The models that clients can ask for, by the names that they have for them."""
        return [public_name(model.name) for model in self.models if self.answers(model.name)]

    @property
    def version_names(self) -> set[str]:
        """The names of all versions that the fleet has, and of those of which a unit keeps the page table."""
        kept = (model.name for unit in self.units for model in unit.unit_spec.models)
        return {*kept, *(model.name for model in self.models)}

    def is_resident(self, model: str) -> bool:
        """Whether memory decides if `model` is awake."""
        return any(model in each.models for each in self.residency.values())

    def replica_bounds(self, model: str) -> tuple[int, int | None] | None:
        """Fewest and most replicas of that version of a model that can be asked for, None: as many as there is room
        for. None in place of both where memory decides."""
        if self.residency:
            return None
        rules = self.scaling.get(model)
        return (1, None) if rules is None else (rules.minimum, rules.maximum)

    @property
    def needs_key(self) -> bool:
        """Whether the endpoint wants a key."""
        return bool(self.gateway.api_keys or self.tenants)

    def unit(self, name: str) -> UnitEntry:
        """The unit of that name.

        Raises:
            KeyError: there is none.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(name)

    def replicas(self, model: str) -> list[UnitEntry]:
        """The units that serve `model`."""
        return [unit for unit in self.units if model in unit.serves]

    def is_suspect(self, unit: str, model: str) -> bool:
        """Whether a process that `model` needs in `unit` gives no sign of life."""
        return any(each.unit == unit and model in each.models for each in self.suspects)

    def placed_by_scheduler(self, model: str) -> bool:
        """Whether the global scheduler says where requests of `model` go. With one replica for good there is nothing to
        choose, and gateways do not ask."""
        return model in self.scaling or model in self.rolling or len(self.replicas(model)) != 1

    @property
    def needs_scheduler(self) -> bool:
        """Whether there is anything for a global scheduler to decide."""
        return any(self.placed_by_scheduler(each.name) for each in self.models if not self.is_retired(each.name))

    def priority_levels(self, model: str | None = None) -> Levels:
        """The levels as the policies of that model want them."""
        return levels_of_model(self.levels, self.models, model)

    @property
    def scheduler_address(self) -> str:
        """ZeroMQ ROUTER of the global scheduler."""
        return f"ipc://{self.socket('scheduler')}"

    @property
    def control_address(self) -> str:
        """ZeroMQ ROUTER of the controller, for the commands of its user."""
        return f"ipc://{self.socket('control')}"

    def tokens_address(self, gateway: int) -> str:
        """ZeroMQ PULL of gateway number `gateway`, where engines of this machine push tokens."""
        return f"ipc://{self.socket(f'gateway-{gateway}')}"

    @property
    def gateway_sockets(self) -> tuple[str, ...]:
        """Paths of the Unix sockets at which the gateways answer other gateways of this machine."""
        return tuple(self.socket(f"http-{index}") for index in range(self.gateway.count))

    def socket(self, name: str) -> str:
        """Path of a Unix socket of the fleet."""
        return os.path.join(self.run_dir, f"{name}.sock")

    @property
    def file(self) -> Path:
        """Where this is written."""
        return Path(self.run_dir) / FILE

    @property
    def log_dir(self) -> Path:
        """Logs of the processes that belong to no unit."""
        return Path(self.run_dir) / "logs"


def save_fleet(fleet: FleetSpec) -> None:
    """Write it to its place, as a whole, readable by the owner only."""
    temporary = fleet.file.with_suffix(".new")
    write(msgspec.json.format(msgspec.json.encode(fleet), indent=2), temporary)
    os.replace(temporary, fleet.file)


def load_fleet(path: str | os.PathLike[str]) -> FleetSpec:
    """Read what `save_fleet` wrote.

    Raises:
        OSError: it cannot be read.
        msgspec.ValidationError: the file is not a fleet.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=FleetSpec)


def offered(units: Iterable[Iterable[ModelSpec]], order: Sequence[str]) -> list[ModelSpec]:
    """The models as the endpoint offers them, in that order: where replicas differ, the one with the shortest length.
    Models that no unit has are left out."""
    smallest: dict[str, ModelSpec] = {}
    for models in units:
        for model in models:
            known = smallest.get(model.name)
            if known is None or model.max_len < known.max_len:
                smallest[model.name] = model
    return [smallest[name] for name in order if name in smallest]
