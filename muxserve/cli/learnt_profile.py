"""`muxserve profile --from-fleet`: the costs that a fleet has learnt while it serves, as a profile file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import structs

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.options import NoEffectError, check_effect
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.settings import ProfileSettings
from muxserve.cli.which import endpoint_of
from muxserve.costs.latency import CostError
from muxserve.costs.profile import Overheads, Profile, load_profile, save_profile
from muxserve.net.exit_codes import ExitCode

_MEASURING = ("FLEET", "--threads", "--tokens", "--sequences", "--batches", "--contexts")


def learnt_profile(settings: ProfileSettings) -> int:
    """Write the costs that a serving fleet has learnt; returns the exit code. Other engines, machines and leases
    of the file stay."""
    out = settings.out or Path("profile.json")
    try:
        check_effect(settings.given, _MEASURING, "with --from-fleet, which measures nothing")
    except NoEffectError as error:
        print_error(str(error))
        return ExitCode.WRONG
    url = endpoint_of(settings.running)
    if url is None:
        return ExitCode.WRONG
    try:
        status, body = get_json(url, "/fleet/profile", settings.key)
        if status != 200:
            message = body.get("error", {}).get("message") if isinstance(body, dict) else None
            raise HTTPFailure(f"{url}/fleet/profile answered {status}: {message or 'no reason was given'}")
        learnt = msgspec.convert(body, Profile)
        known = load_profile(out) if out.exists() else Profile(about=learnt.about)
    except msgspec.ValidationError:
        print_error(f"{url}/fleet/profile answered with something that is no profile; is this another version?")
        return ExitCode.WRONG
    except (HTTPFailure, CostError) as error:
        print_error(str(error))
        return ExitCode.WRONG
    if not learnt.engines:
        print_error(f"the fleet at {url} has not taken a step yet; send it requests first")
        return ExitCode.NOT_DONE
    new = {(engine.shape, engine.where) for engine in learnt.engines}
    known.engines = [engine for engine in known.engines if (engine.shape, engine.where) not in new]
    known.engines += learnt.engines
    for name in {engine.device for engine in learnt.engines}:
        before = known.overheads.get(name, Overheads())
        request = learnt.overheads.get(name, before).request
        # Steps are learnt with what is between them.
        known.overheads[name] = structs.replace(before, request=request, between=0.0)
    try:
        save_profile(known, out)
    except OSError as error:
        print_error(f"{out}: cannot be written: {error.strerror}")
        return ExitCode.WRONG
    for engine in learnt.engines:
        prefills, decodes = engine.prefill[0].samples, engine.decode[0].samples
        console.print(escape(f"{engine}: from {prefills:,} prefill and {decodes:,} decode steps"))
    for name, each in learnt.overheads.items():
        console.print(escape(f"{name}: a request takes {1e3 * each.request:.2f} ms from its arrival to its unit"))
    console.print(f"written to {escape(str(out))}")
    return ExitCode.DONE
