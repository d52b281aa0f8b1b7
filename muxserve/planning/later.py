"""Units that a running fleet gets later, as the controller's changes want them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from muxserve.cluster.fleet_plan import planned_unit
from muxserve.cluster.plan import fetch
from muxserve.cluster.rules import scaling_of
from muxserve.cluster.steps import Addition
from muxserve.cluster.units import PlannedUnit
from muxserve.config import Fleet, FleetError
from muxserve.control.changes import ChangeError, Tell
from muxserve.planning.serving import FleetPlanner, NoRoomError
from muxserve.spec import FleetSpec, UnitEntry


class LaterUnits:
    """A `muxserve.cluster.changes.Planner` for the fleet that `planner` has planned."""

    def __init__(self, planner: FleetPlanner) -> None:
        self._planner = planner

    def unit(self, model: str, name: str, fleet: FleetSpec) -> PlannedUnit:
        """See `Planner.unit`."""
        gateway = fleet.gateway
        try:
            plan = self._planner.unit(name, [model], fleet)
        except NoRoomError as error:
            raise ChangeError(str(error)) from None
        return planned_unit(plan, fleet.run_dir, gateway.host, gateway.port, fleet.keys)

    def addition(self, declared: Fleet, names: Callable[[], str], fleet: FleetSpec, tell: Tell) -> Addition:
        """See `Planner.addition`."""
        told = len(self._planner.reasons)
        try:
            declared = self._planner.arranged(fetch(declared, tell))
        except FleetError as error:
            raise ChangeError("; ".join(problem.message for problem in error.problems)) from None
        for reason in self._planner.reasons[told:]:
            tell(reason)
        (model,) = declared.models
        self._planner.declare(declared)
        units: list[PlannedUnit] = []
        try:
            # One at least: without it nobody knows the model's layout, which the front end is built from.
            for _ in range(max(1, model.replicas.at_start)):
                units.append(self.unit(model.name, names(), _with(fleet, units)))
        except BaseException:
            self._planner.forget(model.name)
            raise
        return Addition(units[0].unit_spec.models[0], tuple(units), scaling_of(declared).get(model.name))

    def forget(self, model: str) -> None:
        """See `Planner.forget`."""
        self._planner.forget(model)


def _with(fleet: FleetSpec, units: list[PlannedUnit]) -> FleetSpec:
    """The fleet with units that are about to be started."""
    entries = [
        UnitEntry(unit.unit_spec, unit.unit_spec.unit_address, unit.unit_spec.migrator_address, list(unit.serves))
        for unit in units
    ]
    return msgspec.structs.replace(fleet, units=[*fleet.units, *entries])
