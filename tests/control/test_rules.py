"""What is refused before anything is begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.cluster.changes import with_adapter
from muxserve.control.changes import ChangeError
from muxserve.control.rules import check_adapter, check_add, check_drain, check_remove, check_scale
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.spec import AdapterSlots, ResidencySpec
from tests.config.test_adapters import adapter
from tests.control.fakes import fleet_of
from tests.support.checkpoint_files import write_checkpoint

FLEET = fleet_of(
    "/run",
    {"u0": ["chat", "code", "nap"], "u1": ["chat"]},
    {"code": ScalingRules(1, 3), "nap": ScalingRules(0, 2)},
)


@pytest.mark.parametrize("replicas", [{"chat": 1}, {"chat": 64}, {"code": 3, "nap": 0}])
def test_numbers_that_are_allowed(replicas: dict[str, int]) -> None:
    check_scale(FLEET, replicas)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({}, "no model is named"),
        ({"chta": 2}, 'the fleet has no model chta; did you mean "chat"?'),
        ({"other": 2}, "the fleet has no model other; known here: chat, code, nap"),
        ({"chat": 0}, "chat needs at least 1 replica; `muxserve remove chat` takes it out"),
        ({"chat": 65}, "at most 64"),
        ({"code": 4}, "code has between 1 and 3 replicas, not 4; `replicas` in the fleet file says so"),
        ({"code": 0}, "between 1 and 3"),
        ({"chat": 2, "nap": 3}, "nap has between 0 and 2"),
    ],
)
def test_numbers_that_are_not(replicas: dict[str, int], said: str) -> None:
    with pytest.raises(ChangeError) as caught:
        check_scale(FLEET, replicas)
    assert said in str(caught.value)


def test_the_page_offers_what_is_allowed() -> None:
    assert [FLEET.replica_bounds(name) for name in ("chat", "code", "nap")] == [(1, None), (1, 3), (0, 2)]
    decides = ResidencySpec(ResidencyRules(1 << 30), {"chat": WakeCosts(1 << 20)})
    resident = msgspec.structs.replace(FLEET, residency={"u0": decides})
    assert resident.replica_bounds("chat") is None
    with pytest.raises(ChangeError, match="memory decides in this fleet whether chat is awake"):
        check_scale(resident, {"chat": 1})


def test_a_unit_with_the_only_replica_of_a_model_is_not_drained() -> None:
    check_drain(FLEET, "u1")
    with pytest.raises(ChangeError, match=r"u0 has the only replica of code; .*muxserve scale code=2"):
        check_drain(FLEET, "u0")
    check_drain(fleet_of("/run", {"u0": ["chat"], "u1": ["nap"]}, {"nap": ScalingRules(0, 1)}), "u1")
    with pytest.raises(ChangeError, match="no unit u7"):
        check_drain(FLEET, "u7")


def test_the_only_model_is_not_removed() -> None:
    check_remove(FLEET, "chat")
    with pytest.raises(ChangeError, match="only model; stop the fleet instead"):
        check_remove(fleet_of("/run", {"u0": ["chat"]}), "chat")
    with pytest.raises(ChangeError, match='did you mean "code"'):
        check_remove(FLEET, "coed")


def test_one_model_is_added(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new")
    text = "models: [{name: new, path: new, replicas: 2}]"
    declared = check_add(FLEET, text, "new.yaml", str(tmp_path))
    assert [(m.name, m.path, m.replicas.at_start) for m in declared.models] == [("new", str(tmp_path / "new"), 2)]


def test_an_added_model_may_have_defaults_and_stand_in_another_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "more.yaml").write_text("models: [{name: new, path: m}]\n")
    text = "include: more.yaml\nmodel_defaults: {rate: 3}\n"
    fleet = fleet_of("/run/x", {"u0": ["chat"]})
    (model,) = check_add(fleet, text, "f.yaml", str(tmp_path)).models
    assert (model.name, model.rate, model.path) == ("new", 3, str(tmp_path / "m"))
    (tmp_path / "more.yaml").write_text("policy: fcfs\nmodels: [{name: new, path: m}]\n")
    with pytest.raises(ChangeError, match=r"more.yaml:1: policy: belongs to the fleet, which runs already"):
        check_add(fleet, text, "f.yaml", str(tmp_path))
    with pytest.raises(ChangeError, match="a file from elsewhere cannot include files"):
        check_add(fleet, text, "f.yaml", str(tmp_path), local=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [{name: new, path: gone}]", "new.yaml:1: models[0].path: "),
        ("models: [{name: a, hub: x/y}, {name: b, hub: x/y}]", "models: has 2 models; add one at a time"),
        ("models: [{name: chat, hub: x/y}]", "new.yaml:1: models[0].name: the fleet has a model 'chat' already"),
        (
            "models: [{name: a, hub: x/y}]\ngateway: {port: 1}\npolicy: fcfs",
            "new.yaml:2: gateway: belongs to the fleet, which runs already; leave it out here\nnew.yaml:3: policy: ",
        ),
        ("models: {", "not valid YAML"),
    ],
)
def test_what_cannot_be_added(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ChangeError) as caught:
        check_add(FLEET, text, "new.yaml", str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("model", "unit", "changes", "said"),
    [
        ("replicas: 2", "u0", {}, "it asks for 2 replicas; add one, and then scale"),
        (
            "engines: one, dispatch: rolling, slo: {ttft_ms: 9, tpot_ms: 9}",
            "u0",
            {},
            "a model over several stages, or over whose replicas prefill rolls, has a unit to itself",
        ),
        ("", "u0", {"rolling": True}, "u0 is for chat alone"),
    ],
)
def test_what_cannot_join_a_unit(model: str, unit: str, changes: dict[str, Any], said: str) -> None:
    fleet = fleet_of("/run", {"u0": ["chat"]})
    entry = fleet.units[0]
    spec = entry.unit_spec
    if "rolling" in changes:
        rolling = [msgspec.structs.replace(each, shape="one", rolling=True) for each in spec.models]
        spec = msgspec.structs.replace(spec, models=rolling)
    entry = msgspec.structs.replace(entry, unit_spec=spec)
    fleet = msgspec.structs.replace(fleet, units=[entry])
    text = f"models: [{{name: new, hub: x/y{', ' if model else ''}{model}}}]"
    with pytest.raises(ChangeError) as caught:
        check_add(fleet, text, "new.yaml", "/", unit)
    assert str(caught.value).startswith("new cannot join u0: ")
    assert said in str(caught.value)
    assert str(caught.value).endswith(". Without --unit it gets a unit of its own")


def test_adapters_that_can_come_and_go(tmp_path: Path) -> None:
    path = adapter(tmp_path / "x", r=16)
    fleet = fleet_of("/run", {"u0": ["chat", "bare"]})
    room = {"adapters": {"poet": "/p"}, "adapter_slots": AdapterSlots(2, 16)}
    chat = msgspec.structs.replace(fleet.models[0], **room)
    fleet = msgspec.structs.replace(fleet, models=[chat, fleet.models[1]])
    check_adapter(fleet, "chat", "clerk", str(path))
    check_adapter(fleet, "chat", "poet", "")
    check_adapter(fleet, "chat", "poet", str(path))
    assert with_adapter(chat, "clerk", "/c").adapters == {"poet": "/p", "clerk": "/c"}
    assert with_adapter(chat, "poet", "").adapters == {}
    for model, name, where, said in (
        ("nobody", "clerk", str(path), "no model nobody"),
        ("bare", "clerk", str(path), "started without room for adapters"),
        ("chat", "bare", str(path), "a model or an adapter 'bare' already"),
        ("chat", "a b", str(path), "is no name"),
        ("chat", "clerk", str(tmp_path), "has no adapter_config.json"),
        ("chat", "clerk", str(adapter(tmp_path / "y", r=64)), "has rank 64"),
        ("chat", "clerk", "", "chat has no adapter clerk"),
    ):
        with pytest.raises(ChangeError, match=said):
            check_adapter(fleet, model, name, where)
