"""`muxserve profile --from-fleet`: the costs that a fleet has learnt while it serves, as a profile file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import structs

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.status import endpoint_of
from muxserve.costs.latency import CostError
from muxserve.costs.profile import Overheads, Profile, load_profile, save_profile
from muxserve.net.exit_codes import ExitCode

# What a fleet learns of its overheads: the front end's work where its cores are the engines', and delays.
_WORK = ("request_work", "step_work", "token_work", "lease_work")
_LEARNT = (*_WORK, "turn", "between", "request", "request_spread", "rested", "resumed")


def learnt_profile(url: str | None, key: str | None, out: Path) -> int:
    """Write what the fleet at `url`, or the one that runs here, has learnt to `out`; returns the exit code. What the
    file has of other engines, and of machines, stays, and what it measured of pairs and of time outside of steps."""
    url = endpoint_of(url)
    if url is None:
        return ExitCode.WRONG
    try:
        status, body = get_json(url, "/fleet/profile", key)
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
    measured = {pair.device for pair in known.pairs}
    known.engines = [engine for engine in known.engines if (engine.shape, engine.where) not in new]
    known.engines += [
        # Measured pairs say what neighbours cost.
        structs.replace(engine, prefill_friction=0.0, decode_friction=0.0) if engine.device in measured else engine
        for engine in learnt.engines
    ]
    # Without pairs these were learnt by an earlier version, of all engines of a device together.
    for name in {engine.device for engine in learnt.engines} - measured:
        known.interference.pop(name, None)
    for name, each in learnt.overheads.items():
        before = known.overheads.get(name, Overheads())
        # What it has not learnt is as it was.
        known.overheads[name] = structs.replace(
            before, **{key: seconds for key in _LEARNT if (seconds := getattr(each, key))}
        )
    known.pace |= learnt.pace
    try:
        save_profile(known, out)
    except OSError as error:
        print_error(f"{out}: cannot be written: {error.strerror}")
        return ExitCode.WRONG
    for engine in learnt.engines:
        prefills, decodes = engine.prefill[0].samples, engine.decode[0].samples
        console.print(escape(f"{engine}: from {prefills:,} prefill and {decodes:,} decode steps"))
    for name, each in learnt.overheads.items():
        if any(getattr(each, key) for key in _WORK):
            request, step, token, lease = (1e3 * getattr(each, key) for key in _WORK)
            console.print(
                escape(
                    f"{name}: gateways, unit schedulers and local clients take {request:.2f} ms of all its cores per "
                    f"request, {step:.3f} per step, {token:.3f} per token and {lease:.3f} per lease"
                )
            )
        if each.turn:
            console.print(
                escape(
                    f"{name}: a lease and the report of its first steps take {1e3 * each.turn:.2f} ms, beside the steps"
                )
            )
        if each.between:
            console.print(escape(f"{name}: engines take {1e3 * each.between:.3f} ms from one step to the next"))
        if each.request:
            beside = f"{1e3 * each.request:.2f} ± {1e3 * each.request_spread:.2f} ms beside the queue and its prefill"
            console.print(escape(f"{name}: a first token takes {beside}"))
        if each.rested:
            console.print(
                escape(f"{name}: a prefill takes {1e3 * each.rested:.2f} ms longer on cores that have rested")
            )
        if each.resumed:
            console.print(
                escape(f"{name}: the first decode step after a long pause takes {1e3 * each.resumed:.2f} ms longer")
            )
    for name, pace in learnt.pace.items():
        console.print(escape(f"{name}: from one second to another steps take {100 * pace.spread:.0f} % more or less"))
    console.print(f"written to {escape(str(out))}")
    return ExitCode.DONE
