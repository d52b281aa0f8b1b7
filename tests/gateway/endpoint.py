"""An endpoint around an application that does as the test wants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from muxserve.gateway.http.app import Access, GatewayApp
from muxserve.gateway.http.errors import App
from muxserve.gateway.http.own_paths import OwnPaths
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.admission import ApiKeys
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.limits.priorities import Priorities
from muxserve.gateway.limits.tenants import Tenancy
from muxserve.gateway.status.measure import Measures
from muxserve.replicas.priorities import DEFAULT_LEVELS, NORMAL, Levels
from muxserve.spec import FleetSpec


def endpoint_of(
    fleet: FleetSpec, app: App, own: OwnPaths | None = None, registry: CollectorRegistry | None = None
) -> GatewayApp:
    """The endpoint of that fleet, whose models are all served by `app`; its metrics are in `registry`."""
    registry = registry or CollectorRegistry()
    measures = Measures(fleet.models, registry)
    tenancy = Tenancy(fleet, 0, registry)
    return GatewayApp(
        models={
            model.name: ServedApp(app, {model.name: {"id": model.name}}, model=model.name) for model in fleet.models
        },
        access=Access(
            ApiKeys(fleet.gateway.api_keys, {}, fleet.tenants, tenancy.keys.find if tenancy.keys else lambda _: None),
            Priorities(Levels(DEFAULT_LEVELS, NORMAL)),
            tenancy,
        ),
        own=own or OwnPaths(),
        limiter=ConcurrencyLimiter(fleet.models, 0, 1, measures),
        measures=measures,
        settings=fleet.gateway,
    )
