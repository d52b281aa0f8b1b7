"""What engines under leases have in common, and what they ask of the unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from muxserve.costs import EngineCosts
from muxserve.scheduling.engines import EngineState
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.types import Phase, share_units
from muxserve.simulator.leaps import BOUNDARY, IDLE, STEPPING, Engine, Host
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest

if TYPE_CHECKING:
    from muxserve.simulator.decode import DecodeEngine
    from muxserve.simulator.prefill import PrefillEngine


class LeasedHost(Host, Protocol):
    """A unit with a scheduler."""

    policy: Policy

    def usage(self, engine: Engine) -> EngineState:
        """What the ledger knows of the decode engine."""
        ...

    def disturbed(self, now: float) -> None:
        """Something happens that the scheduler is not told of at once, and that may matter to its next turn."""
        ...

    def releasing(self, pages: ModelPages, now: float) -> None:
        """Decoding sequences are about to give pages back."""
        ...

    def report(
        self,
        engine: DecodeEngine | PrefillEngine,
        left: int,
        seconds: float,
        tokens: int,
        steps: int,
        remaining: int,
        now: float,
        finished: list[SimRequest],
        handed: list[SimRequest],
        returned: list[SimRequest],
    ) -> None:
        """An engine's `StepReport`."""
        ...


class Lease:
    """What an engine is told: `steps` steps within `seconds` of taking it, on `share` millionths of the unit."""

    __slots__ = ("admit", "lease_id", "seconds", "share", "steps")

    def __init__(self, lease_id: int, steps: int, share: int, seconds: float, admit: list[SimRequest]) -> None:
        self.lease_id = lease_id
        self.steps = steps
        self.share = share
        self.seconds = seconds
        self.admit = admit


class Leased(Engine):
    """The part of an engine that holds a lease."""

    unit: LeasedHost
    phase: Phase
    _costs: EngineCosts | None

    def _without_lease(self, unit: LeasedHost) -> None:
        self.unit = unit
        self.lease_id = 0
        self._pending: Lease | None = None
        self._entering: list[SimRequest] = []
        self._granted_share = 0
        self._deadline = 0.0
        self._costs = None

    def receive(self, lease: Lease, now: float) -> None:
        """A lease arrives."""
        self._pending = lease
        self._entering += lease.admit
        if self.state == IDLE:
            self.state = BOUNDARY
            self.unit.at_boundary(self)
        elif self.state == STEPPING:
            self.interrupt(now)

    def _accept(self, lease: Lease, phase: Phase, now: float) -> bool:
        """The lease replaces the one before; whether the engine's costs are others than before."""
        self._pending = None
        self.lease_id = lease.lease_id
        self._deadline = now + lease.seconds
        if self._granted_share == lease.share and self._costs is not None:
            return False
        self._granted_share = lease.share
        profile = self.model.profile
        own = profile.prefill_share if phase is Phase.PREFILL else profile.decode_share
        self._costs = self.unit.costs(self.model, lease.share, share_units(own), phase)
        return True
