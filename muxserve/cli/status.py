"""`muxserve status`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.which import endpoint_of
from muxserve.metrics.figure_table import FigureTable
from muxserve.net.exit_codes import ExitCode
from placement.format import format_size


def status(wanted: str | None, key: str | None, as_json: bool) -> int:
    """Print the state of the fleet `wanted`, or of the one that runs here; returns the exit code."""
    url = endpoint_of(wanted)
    if url is None:
        return ExitCode.WRONG
    try:
        code, health = get_json(url, "/health")
        fleet_code, fleet = get_json(url, "/fleet", key)
    except HTTPFailure as error:
        print_error(f"{error}; is `muxserve deploy` running there?")
        return ExitCode.WRONG
    if not isinstance(health, dict) or "models" not in health:
        print_error(f"{url} answers, but is no MuxServe endpoint")
        return ExitCode.WRONG
    known = fleet if fleet_code == 200 and isinstance(fleet, dict) else None
    if as_json:
        print(json.dumps({"health": health, "fleet": known}, indent=2))
    else:
        _print(url, health, known or {})
    serves = ExitCode.DONE if code == 200 else ExitCode.NO
    if known is not None:
        return serves
    if fleet_code not in (401, 403):
        print_error(f"queues and pages are not known: {url}/fleet answered {fleet_code}")
        return ExitCode.NO
    if key is None:
        print_error("queues and pages need an API key: give --api-key or set MUXSERVE_API_KEY")
        return serves
    print_error(f"{url} refused the API key, so queues and pages are not known; give an admin's with --api-key")
    return ExitCode.WRONG


# What the units say of a model: the column, and the key in a unit's state.
_COUNTS = {
    "queued": "queued",
    "prefilling": "prefilling",
    "decoding": "decoding",
    "pages used": "used_pages",
    "quota": "quota_pages",
    "cached": "cached_pages",
}
_PAGES = ("used_pages", "quota_pages", "cached_pages")
_MOVES = {"moved in": "moved_in", "moved out": "moved_out"}


def _print(url: str, health: dict[str, Any], fleet: dict[str, Any]) -> None:
    units: list[dict[str, Any]] = fleet.get("units") or []
    several = len(health.get("units") or units) > 1
    console.print(_headline(url, health, units))
    counts = {**_COUNTS, **(_MOVES if several else {})}
    shapes = _shapes(fleet)
    words_of = ("model", *(["engines"] if shapes else []), "state")
    table = FigureTable([*words_of, "running", "waiting", *counts], words=len(words_of))
    for name, model in health["models"].items():
        replicas = {u.get("name", "?"): u for u in units if name in u.get("serves", ())}
        said = {unit: _of(each, name) for unit, each in replicas.items()}
        down = [phase for phase, engine in (model.get("engines") or {}).items() if engine != "up"]
        words = str(model.get("status", "?"))
        if down and words != "asleep":
            # A single engine of both phases needs no name.
            words += " (engine down)" if down == ["both"] else f" ({', '.join(down)} down)"
        sums = [_sum(said.values(), key) for key in counts.values()]
        how = [shapes.get(name, "-")] if shapes else []
        _row(table, [name, *how, words, model.get("running", "-"), model.get("waiting", "-"), *sums])
        if several:
            states = model.get("replicas") or {}
            for unit, each in said.items():
                word = "draining" if each.get("terminating") else states.get(unit, "?")
                blank = [""] if shapes else []
                _row(table, [f"  {unit}", *blank, word, "", "", *(_sum([each], key) for key in counts.values())])
    console.print(table)
    own = _private(fleet)
    for name, size in own.items():
        console.print(f"{escape(name)}: {format_size(size)} of KV cache of its own in each engine (kv: private)")
    served = {name: model for unit in units for name, model in _models(unit).items() if name in health["models"]}
    pageless = sorted({name for name, model in served.items() if _without_pages(model)} - own.keys())
    if pageless:
        console.print(
            f"no pages: {escape(', '.join(pageless))} ({'they keep' if len(pageless) > 1 else 'it keeps'} no KV)"
        )
    for unit in units:
        whose = f"{unit.get('name')} " if several else ""
        for name, pool in (_state(unit).get("pools") or {}).items():
            free, total = pool.get("free_pages", "-"), pool.get("total_pages", "-")
            if total == 1:
                continue  # of private caches alone: it has the null page
            console.print(f"{escape(whose + str(name))}: {free} of {total} pages free")
        for line in [*_in_time(unit, health["models"]), *_costs(unit, health["models"])]:
            console.print(escape(whose + line))
        if several and not unit.get("serves"):
            console.print(f"{escape(whose)}serves nothing at present")
    for line in [*_unfollowed(fleet), *_waits(fleet), *_memory(fleet.get("memory") or {})]:
        console.print(escape(line))
    _print_gpus(fleet.get("gpus") or [])


def _unfollowed(fleet: dict[str, Any]) -> list[str]:
    """What of the fleet file is not so."""
    lines = str(fleet.get("unfollowed") or "").splitlines()
    return ["the fleet is not in all as its file says:", *(f"  {line}" for line in lines)] if lines else []


def _waits(fleet: dict[str, Any]) -> list[str]:
    """What requests wait for, and why a model is not served as it should be."""
    lines = []
    resident: dict[str, dict[str, Any]] = (fleet.get("memory") or {}).get("models") or {}
    for model in fleet.get("models") or []:
        name = str(model.get("name"))
        for wait in (model.get("gateway") or {}).get("waits") or []:
            count, longest = wait["requests"], f", the longest for {wait['seconds']:.0f} s" if wait["seconds"] else ""
            lines.append(f"{name}: {count} {'wait' if count > 1 else 'waits'} for {wait['reason']}{longest}")
        if trouble := resident.get(name, {}).get("trouble"):
            lines.append(f"{name}: {trouble}")
    return lines


def _memory(memory: dict[str, Any]) -> list[str]:
    """How the fleet's memory stands, and what became of the models that it decides on."""
    if not memory:
        return []
    models: dict[str, dict[str, Any]] = memory.get("models") or {}
    used, limit = (format_size(int(memory.get(key) or 0)) for key in ("used_bytes", "limit_bytes"))
    where = Counter(str(model.get("residence")) for model in models.values())
    over = int(memory.get("excess_bytes") or 0)
    beyond = f", the limit is exceeded by {format_size(over)}" if over else ""
    words = ", ".join(f"{n} {word}" for word, n in sorted(where.items()))
    lines = [f"memory: {used} of {limit} used{beyond}; {words}"]
    if copies := sum(int(model.get("copy_bytes") or 0) for model in models.values()):
        resting = sum(bool(model.get("engines_rest")) for model in models.values())
        lines.append(
            f"copies of weights take {format_size(copies)} of the host's memory; "
            f"engines of {resting} models stay while these sleep"
        )
    if memory.get("turns"):
        lines.append(_turns(memory["turns"]))
    for name, model in models.items():
        if not model.get("wakes") and not model.get("evictions") and not model.get("failed_wakes"):
            continue
        parts = [f"{format_size(int(model.get('held_bytes') or 0))}", f"woken {model.get('wakes')} times"]
        if model.get("last_wake_seconds") is not None:
            parts.append(f"last in {model['last_wake_seconds']:.2f} s, {model['last_wake_ago_seconds']:.0f} s ago")
        if model.get("evictions"):
            ahead = f" ({model['evictions_ahead']} ahead)" if model.get("evictions_ahead") else ""
            parts.append(f"put to sleep {model['evictions']} times{ahead}, last: {model['last_eviction']}")
        if model.get("refused"):
            parts.append(f"{model['refused']} requests waited in vain")
        if model.get("turns"):
            parts.append(f"{model['turns']} turns ended before its requests")
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def _turns(turns: dict[str, Any]) -> str:
    """Whose turn it is, for how long yet, and who is next."""
    there = []
    for name, turn in turns["now"].items():
        ends = ", and ends then" if turn["leaving"] else ""
        there.append(f"{name} {turn['seconds']:.1f} s of {turn['length_seconds']:.1f} s{ends}")
    after = ", ".join(turns["next"]) or "nobody"
    return f"turns: {'; '.join(there) or 'nobody'}; next: {after}; {turns['ended']} ended before their requests"


def _served(unit: dict[str, Any], served: Container[str]) -> list[tuple[str, dict[str, Any]]]:
    """What the unit says of the models that are `served`; it remembers those that were removed from the fleet."""
    return [(name, model) for name, model in _models(unit).items() if name in served]


def _in_time(unit: dict[str, Any], served: Container[str]) -> list[str]:
    """What one engine of both phases costs each model of the unit: waits for a phase, and stages with nothing to do."""
    lines = []
    up = float(_state(unit).get("uptime_seconds") or 0.0)
    for name, model in _served(unit, served):
        switches, bubbles = model.get("phase_switches"), model.get("bubbles")
        if switches:
            wait = 1000 * float(model.get("phase_switch_seconds", 0.0)) / switches
            lines.append(
                f"{name}: {switches} requests waited {wait:.1f} ms on average from their first token to decode"
            )
        if bubbles and up:
            idle = ", ".join(f"{seconds / up:.1%}" for seconds in bubbles)
            lines.append(f"{name}: stages in bubbles {idle} of the time")
    return lines


def _costs(unit: dict[str, Any], served: Container[str]) -> list[str]:
    """How long steps take, over their predictions of the deployment."""
    lines = []
    for name, model in _served(unit, served):
        learnt: dict[str, dict[str, Any]] = model.get("costs") or {}
        found = [f"{phase} {each['ratio']:.2f} ({each['steps']:,} steps)" for phase, each in learnt.items()]
        if found:
            lines.append(f"{name}: steps over predicted: {', '.join(found)}")
    return lines


def _private(fleet: dict[str, Any]) -> dict[str, int]:
    """Bytes of the private caches, by model."""
    models = fleet.get("models") or []
    return {str(each.get("name")): int(each.get("kv_bytes") or 0) for each in models if each.get("kv") == "private"}


def _shapes(fleet: dict[str, Any]) -> dict[str, str]:
    """The models' engines, by model; nothing if all have the same, without stages or rolling prefill."""
    shapes = {str(model.get("name")): _shape(model) for model in fleet.get("models") or []}
    return {} if set(shapes.values()) <= {"split"} or set(shapes.values()) <= {"one"} else shapes


def _shape(model: Mapping[str, Any]) -> str:
    stages = int(model.get("stages") or 1)
    more = f", {stages} stages" if stages > 1 else ", rolling" if model.get("rolling") else ""
    return f"{model.get('shape') or 'split'}{more}"


def _headline(url: str, health: dict[str, Any], units: list[dict[str, Any]]) -> str:
    word = str(health.get("status", "unknown"))
    colour = {"ok": "green", "degraded": "yellow", "starting": "yellow"}.get(word, "red")
    states: dict[str, str] = health.get("units") or {unit.get("name", "?"): unit.get("status", "?") for unit in units}
    down = [name for name, state in states.items() if state != "up"]
    if len(states) == 1:
        parts = [f"unit {name} {state}" for name, state in states.items()]
    else:
        parts = [f"{len(states)} units" + (f" ({', '.join(down)} down)" if down else "")]
    if health.get("scheduler") in ("up", "down"):
        parts.append(f"global scheduler {health['scheduler']}")
    # Each once: units of rolling models have a policy of their own.
    parts += dict.fromkeys(_policy(_state(unit)) for unit in units if "policy" in _state(unit))
    return f"{escape(url)}: [{colour}]{escape(word)}[/], {escape(', '.join(parts))}"


def _policy(state: dict[str, Any]) -> str:
    """A unit's policy; of one that can change shares of compute, whether its engines can."""
    policy, shares = state["policy"], state.get("shares")
    return f"{policy} (shares {shares})" if policy == "slack" and shares else str(policy)


def _state(unit: dict[str, Any]) -> dict[str, Any]:
    """What the unit's scheduler said last; nothing if it has not."""
    return unit.get("state") or {}


def _of(unit: dict[str, Any], model: str) -> dict[str, Any]:
    return _models(unit).get(model) or {}


def _models(unit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return _state(unit).get("models") or {}


def _sum(replicas: Iterable[dict[str, Any]], key: str) -> object:
    known = [each[key] for each in replicas if key in each and not (key in _PAGES and _without_pages(each))]
    return sum(known) if known else "-"


def _without_pages(model: dict[str, Any]) -> bool:
    """The model keeps no KV, as a unit says of it."""
    return model.get("pages_per_block") == 0


def _row(table: FigureTable, cells: list[object]) -> None:
    table.add_row(*(escape(str(cell)) for cell in cells))


def _print_gpus(gpus: list[dict[str, Any]]) -> None:
    for gpu in gpus:
        of = f" of {gpu['host']}" if gpu.get("host") else ""
        name = f"GPU {gpu.get('index', '?')}{of} ({gpu.get('name') or gpu.get('uuid')})"
        if gpu.get("fault"):
            console.print(f"{escape(name)}: [red]{escape(str(gpu['fault']))}[/]")
            continue
        busy = gpu.get("utilization")
        words = "" if busy is None else f", busy {busy:.0%} of the time"
        used, total, pool = (format_size(gpu.get(key) or 0) for key in ("used_bytes", "memory_bytes", "pool_bytes"))
        console.print(f"{escape(name)}: {used} of {total} in use, {pool} of it KV pool{words}")
