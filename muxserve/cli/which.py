"""Which running fleet a command means, and where that is reached."""

from __future__ import annotations

from muxserve.cli.output import print_error
from muxserve.cli.ready import endpoint, trust
from muxserve.control.client import NoFleetError, find, running_fleets

DEFAULT_URL = "http://127.0.0.1:8000"


def endpoint_of(wanted: str | None) -> str | None:
    """The URL of the fleet `wanted`, which is a URL itself, also of another machine, or the port or the ID of a fleet
    that runs here. Without it that of the only fleet here, or `DEFAULT_URL`. None, after it was said, if there is no
    such fleet, or there are several."""
    # Whatever the URL is written like, the certificates of fleets of this machine are trusted.
    for fleet in running_fleets():
        if (spec := fleet.spec()) is not None:
            trust(spec.gateway)
    if wanted is not None and "://" in wanted:
        return wanted.rstrip("/")
    if wanted is None and not running_fleets():
        return DEFAULT_URL
    try:
        spec = find(wanted).spec()
    except NoFleetError as error:
        if wanted is not None and ":" in wanted:  # a host with its port, perhaps another machine
            return f"http://{wanted}"
        print_error(str(error) if wanted is None else f"{wanted!r} is not a URL such as {DEFAULT_URL}, and {error}")
        return None
    return DEFAULT_URL if spec is None else endpoint(spec.gateway)
