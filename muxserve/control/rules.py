"""Which changes of a running fleet are refused before anything is begun. Pure.

`WrongCommandError` says that the command itself is wrong, any other `ChangeError` that this fleet cannot do it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from muxserve.config import AUTO, Fleet, FleetError, Model, parse_fleet
from muxserve.config.adapters import AdapterError, check_rank
from muxserve.config.include import DEFAULTS, INCLUDE, parse_whole
from muxserve.config.problems import did_you_mean
from muxserve.config.schema import MOST_SERVED
from muxserve.config.source import is_extension
from muxserve.config.values import ALIAS_PATTERN
from muxserve.control.changes import ChangeError, MissingFileError, WrongCommandError
from muxserve.spec import FleetSpec, public_name
from placement.format import enumerate_words


def check_scale(fleet: FleetSpec, replicas: Mapping[str, int]) -> None:
    """Whether models can have these numbers of replicas.

    Raises:
        ChangeError: a model is unknown, or its number not allowed.
    """
    if not replicas:
        raise WrongCommandError("no model is named; write MODEL=N")
    for model, count in replicas.items():
        _check_model(fleet, model)
        bounds = fleet.replica_bounds(fleet.serving(model))
        if bounds is None:
            raise ChangeError(f"memory decides in this fleet whether {model} is awake; a request wakes it")
        fewest, most = bounds
        if most is not None and not fewest <= count <= most:
            raise ChangeError(
                f"{model} has between {fewest} and {most} replicas, not {count}; `replicas` in the fleet file says so"
            )
        if count < fewest:
            raise ChangeError(
                f"{model} needs at least 1 replica; `muxserve remove {model}` takes it out of the fleet, and with "
                "`replicas: {min: 0, max: N}` in the fleet file it may have none while nobody asks for it"
            )
        if count > MOST_SERVED:
            raise ChangeError(f"{model} can have at most {MOST_SERVED} replicas, not {count}")


def check_drain(fleet: FleetSpec, unit: str) -> None:
    """Whether a unit can be drained.

    Raises:
        ChangeError: there is no such unit, or a model would be left without a replica.
    """
    if fleet.residency:
        raise ChangeError("memory decides in this fleet which models of its unit are awake; stop the fleet instead")
    names = [each.name for each in fleet.units]
    if unit not in names:
        raise WrongCommandError(f"there is no unit {unit}{did_you_mean(unit, names)}")
    serves = fleet.unit(unit).serves
    alone = [model for model in serves if len(fleet.replicas(model)) == 1 and not _may_sleep(fleet, model)]
    if alone:
        names = [public_name(model) for model in alone]
        more = " ".join(f"{name}=2" for name in names)
        raise ChangeError(
            f"{unit} has the only replica of {enumerate_words(names)}; start another one first: muxserve scale {more}"
        )


def check_remove(fleet: FleetSpec, model: str) -> None:
    """Whether a model can be taken out.

    Raises:
        ChangeError: it is unknown, or the only one.
    """
    _check_model(fleet, model)
    if len(fleet.served_names) == 1:
        raise ChangeError(f"{model} is the fleet's only model; stop the fleet instead (Ctrl-C where it was deployed)")


def check_lend(fleet: FleetSpec, models: Sequence[str]) -> None:
    """Whether another fleet can have these models.

    Raises:
        ChangeError: one is unknown, or they are all that there is.
    """
    for model in models:
        _check_model(fleet, model)
    if not set(fleet.served_names) - set(models):
        raise ChangeError("these are all models of the fleet; it ends instead when the other one takes over")


def check_adapter(fleet: FleetSpec, model: str, name: str, path: str) -> None:
    """Whether a LoRA adapter of `model` can be served under that name from `path`; "": no longer.

    Raises:
        ChangeError: the model or the adapter is unknown, its name is taken, or its engines have no room for it.
    """
    _check_model(fleet, model)
    spec = next(each for each in fleet.models if each.name == fleet.serving(model))
    if not path:
        if name not in spec.adapters:
            raise WrongCommandError(f"{model} has no adapter {name}{did_you_mean(name, spec.adapters)}")
        return
    if spec.adapter_slots is None:
        raise ChangeError(
            f"the engines of {model} were started without room for adapters; give it `adapters: {{}}` in the fleet file"
        )
    if not re.fullmatch(ALIAS_PATTERN, name):
        raise WrongCommandError(f"{name!r} is no name: letters, digits, '.', '_', ':', '/' and '-' only, at most 128")
    if name in _taken(fleet) and name not in spec.adapters:
        raise WrongCommandError(f"the fleet has a model or an adapter {name!r} already")
    try:
        check_rank(path, spec.adapter_slots)
    except AdapterError as error:
        raise WrongCommandError(str(error)) from None


def check_add(fleet: FleetSpec, text: str, file: str, base: str, unit: str = "", local: bool = True) -> Fleet:
    """The one model of a fleet file that is to be added; paths in it are relative to `base`. With `unit` it is to join
    that running unit. `local`: the file is of whoever runs the fleet (see `config.parse_fleet`).

    Raises:
        ChangeError: the file is wrong, has not exactly one model or something else, or the name is taken.
    """
    try:
        # Where memory decides who is awake, it does so of this model, too.
        declared = parse_fleet(text, file, Path(base), others={"memory": AUTO} if fleet.residency else {}, local=local)
        source = parse_whole(text, file, Path(base), os.environ, local)
    except FleetError as error:
        raise WrongCommandError(str(error)) from None
    others = [key for key in source.data if key not in ("models", INCLUDE, DEFAULTS) and not is_extension(key)]
    if others:
        message = "belongs to the fleet, which runs already; leave it out here"
        raise WrongCommandError("\n".join(str(source.problem((key,), message)) for key in others))
    if len(declared.models) != 1:
        problem = source.problem(("models",), f"has {len(declared.models)} models; add one at a time")
        raise WrongCommandError(str(problem))
    taken = _taken(fleet)
    for name, key in [(declared.models[0].name, "name"), *((alias, "aliases") for alias in declared.models[0].aliases)]:
        if name in taken:
            raise WrongCommandError(str(source.problem(("models", 0, key), f"the fleet has a model {name!r} already")))
    if unit:
        _check_join(fleet, declared.models[0], unit)
    return declared


def check_from_elsewhere(declared: Fleet, names: Collection[str], fleet: FleetSpec) -> None:
    """Whether models may come from whoever has an admin's key and is not on the machine: engine options of those that
    are new, `names`, can name code that engines run, and a key in a variable or a file of the machine would be sent to
    whatever endpoint is named with it.

    Raises:
        ChangeError: one has engine options, or a fallback with a key that `fleet` does not send there.
    """
    message = "can name code to run, and comes from the fleet's own machine only; use `muxserve add` or `apply` there"
    problems = [
        str(declared.model_problem(name, "engine_args", message)) for name in names if declared.model(name).engine_args
    ]
    sent = {(each.url, each.key) for each in fleet.fallbacks.values()}
    message = "has a key of the fleet's own machine, and comes from there only; use `muxserve add` or `apply` there"
    problems += [
        str(declared.model_problem(model.name, "fallback", message))
        for model in declared.models
        if (to := model.fallback) is not None and to.key is not None and (to.url, to.key) not in sent
    ]
    if problems:
        raise WrongCommandError("\n".join(problems))


def _check_join(fleet: FleetSpec, model: Model, name: str) -> None:
    names = [each.name for each in fleet.units]
    if name not in names:
        raise WrongCommandError(f"there is no unit {name}{did_you_mean(name, names)}")
    unit = fleet.unit(name)
    why = ""
    if any(each.stages > 1 or each.rolling for each in unit.unit_spec.models):
        why = f"{name} is for {enumerate_words([each.name for each in unit.unit_spec.models])} alone"
    elif model.has_own_unit:
        why = "a model over several stages, or over whose replicas prefill rolls, has a unit to itself"
    elif model.replicas.at_start > 1:
        why = f"it asks for {model.replicas.at_start} replicas; add one, and then scale"
    if why:
        raise ChangeError(f"{model.name} cannot join {name}: {why}. Without --unit it gets a unit of its own")


def check_apply(text: str, file: str, base: str, environ: Mapping[str, str], local: bool = True) -> Fleet:
    """The fleet that is wanted; paths are relative to `base`, keys are those of `environ`. `local` as in `check_add`.

    Raises:
        ChangeError: the file is wrong.
    """
    try:
        return parse_fleet(text, file, Path(base), environ, local=local)
    except FleetError as error:
        raise (MissingFileError if error.beside else WrongCommandError)(str(error)) from None


def _taken(fleet: FleetSpec) -> set[str]:
    return {name for model in fleet.models for name in (*fleet.names_of(model), *model.adapters)} | {*fleet.aliases}


def _check_model(fleet: FleetSpec, model: str) -> None:
    names = fleet.served_names
    if model not in names:
        raise WrongCommandError(f"the fleet has no model {model}{did_you_mean(model, names)}")


def _may_sleep(fleet: FleetSpec, model: str) -> bool:
    rules = fleet.scaling.get(model)
    return rules is not None and rules.minimum == 0
