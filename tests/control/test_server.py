"""Commands over the real socket, with a fleet that is not there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from muxserve.config import parse_fleet
from muxserve.control import messages
from muxserve.control import server as server_module
from muxserve.control.changes import NoRoomError
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, RunningFleet, find, running_fleets
from muxserve.control.server import ControlServer
from muxserve.control.tries import ApplyOutcome
from muxserve.net import sockets
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.residency_types import ResidencyRules
from muxserve.spec import AdapterSlots, ResidencySpec
from muxserve.spec.run_dir import RunDir
from tests.config.test_adapters import adapter
from tests.control.fakes import Controller, FakeControl, broken, declared_of, fleet_of, running
from tests.support.checkpoint_files import write_checkpoint
from tests.support.patience import PATIENCE, eventually

UNITS = {"u0": ["chat", "code"], "u1": ["chat"], "u2": []}


def do(base: Path, command: messages.Command) -> tuple[messages.Done | messages.CommandRefused, list[str]]:
    steps: list[str] = []
    with ControlClient(find(None, base)) as client:
        return client.do(command, steps.append), steps


def test_who(base: Path) -> None:
    with running(base, UNITS) as controller, ControlClient(find(None, base)) as client:
        here = client.who()
    assert (here.url, here.models) == (controller.url, ["chat", "code"])
    assert [(unit.name, unit.serves) for unit in here.units] == list(UNITS.items())


def test_scaling_tells_what_happens_and_where_it_ended(base: Path) -> None:
    with running(base, UNITS, {"code": ScalingRules(1, 3)}) as controller:
        answer, steps = do(base, messages.Scale({"chat": 3, "code": 1}))
        assert steps == ["chat: to 3"]
        assert answer == messages.Done(
            "chat has 3 replicas (u0, u1 and u2)\n"
            "code has 1 replica already (u0); from here it scales by itself between 1 and 3"
        )
        assert controller.control.calls == [("scale", "chat", 3)]


def test_what_was_lent_to_a_fleet_that_is_killed_is_served_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_SECONDS", 0.01)
    with running(base, UNITS) as controller:
        control, borrower = controller.control, RunDir(base)
        lend = messages.Lend(["chat"], [str(borrower.path / "http-0.sock")])
        control.fails[("take_back",)] = broken("the machine is full")
        assert do(base, lend)[0] == messages.Done("chat ended here")
        assert isinstance(do(base, messages.Lend(["code"], lend.sockets))[0], messages.Done)
        assert control.calls == [("lend", "chat"), ("lend", "code")]
        borrower.release()
        eventually(lambda: "the machine is full" in control.fleet.unfollowed, "a word in the status")
        control.fails.clear()
        eventually(lambda: control.fleet.other_fleet is None, "models that are taken back")
        eventually(lambda: not controller.server._watched, "the end of the watch")
        assert not control.fleet.unfollowed


def test_a_fleet_that_gives_back_is_watched_no_longer(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_SECONDS", 0.01)
    with running(base, UNITS) as controller:
        borrower = RunDir(base)
        do(base, messages.Lend(["chat"], [str(borrower.path / "http-0.sock")]))
        do(base, messages.TakeBack())
        eventually(lambda: not controller.server._watched, "the end of the watch")
        borrower.release()
        assert controller.control.calls == [("lend", "chat"), ("take_back",)]


def test_a_wrong_command_begins_nothing(base: Path) -> None:
    with running(base, UNITS) as controller:
        answer, steps = do(base, messages.Scale({"chat": 3, "coed": 2}))
        assert answer == messages.CommandRefused('the fleet has no model coed; did you mean "code"?')
        for command in (messages.DrainUnit("u9"), messages.Remove("x"), messages.Add("models: 3", "f", "/")):
            assert isinstance(do(base, command)[0], messages.CommandRefused)
        assert controller.control.calls == steps == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (messages.Scale({"code": 0}), "code needs at least 1 replica"),
        (messages.Scale({"chat": 99}), "chat can have at most 64 replicas"),
        (messages.DrainUnit("u0"), "u0 has the only replica of code"),
        (messages.SetAdapter("chat", "a", "/nowhere"), "were started without room for adapters"),
    ],
)
def test_what_this_fleet_cannot_do_is_no_wrong_command(base: Path, command: messages.Command, words: str) -> None:
    with running(base, UNITS) as controller:
        answer, _ = do(base, command)
        assert isinstance(answer, messages.CommandRefused)
        assert words in answer.text
        assert (answer.mistake, answer.after) == (False, messages.NOTHING_CHANGED)
        assert controller.control.calls == []


def test_several_models_are_scaled_or_none(base: Path) -> None:
    with running(base, UNITS) as controller:
        controller.control.fails["scale", "code", 3] = broken("no room for a unit more")
        answer, _ = do(base, messages.Scale({"chat": 1, "code": 3}))
        # What frees something comes after what may fail.
        assert controller.control.calls == [("scale", "code", 3)]
        assert answer == messages.CommandRefused("no room for a unit more", mistake=False)


def test_what_was_scaled_before_a_failure_is_undone(base: Path) -> None:
    with running(base, UNITS) as controller:
        controller.control.fails["scale", "chat", 3] = broken("it cannot start")
        answer, steps = do(base, messages.Scale({"code": 3, "chat": 3}))
        assert controller.control.calls == [("scale", "code", 3), ("scale", "chat", 3), ("scale", "code", 1)]
        assert steps[-2:] == ["code: back to 1 replica", "code: to 1"]
        assert answer == messages.CommandRefused("it cannot start", mistake=False)
        assert [len(controller.control.fleet.replicas(name)) for name in ("chat", "code")] == [2, 1]


def test_drain_add_and_remove(base: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new")
    with running(base, UNITS) as controller:
        assert do(base, messages.DrainUnit("u1")) == (messages.Done("u1 is empty and has ended"), ["draining u1"])
        text = "models: [{name: new, path: new}]"
        added = do(base, messages.Add(text, "new.yaml", str(tmp_path)))
        assert added == (messages.Done("new is served (u0)"), ["loading weights"])
        assert do(base, messages.Remove("code"))[0] == messages.Done("code is served no longer")
        joining = messages.Add("models: [{name: next, path: new}]", "next.yaml", str(tmp_path), "u0")
        assert do(base, joining)[0] == messages.Done("next is served (u0)")
        refused, _ = do(base, messages.Add("models: [{name: last, path: new}]", "x.yaml", str(tmp_path), "u9"))
        assert refused == messages.CommandRefused("there is no unit u9; known here: u0, u2")
        assert controller.control.calls == [
            ("drain", "u1"),
            ("add", "new", str(tmp_path / "new")),
            ("remove", "code"),
            ("add", "next", str(tmp_path / "new"), "u0"),
        ]


def apply(base: Path, text: str, **more: Any) -> tuple[messages.Done | messages.CommandRefused, list[str]]:
    return do(base, messages.Apply(text, "fleet.yaml", "/", **more))


CHAT, CODE = "{name: chat, hub: org/chat, replicas: 2}", "{name: code, hub: org/code}"


def test_a_fleet_becomes_what_a_file_says(base: Path) -> None:
    text = """
tenants: {team: {keys: [env:KEY], requests_per_minute: 5}}
models:
- {name: chat, hub: org/chat, replicas: 3, limits: {max_queue: 7}, max_len: 512}
- {name: new, hub: org/new}
"""
    lines = [
        "- model code",
        "+ model new",
        "~ chat: 2 -> 3 replicas",
        "~ models.chat.limits.max_queue: 1024 -> 7",
        "~ models.chat.max_len: auto -> 512; loaded beside the version that serves",
    ]
    with running(base, UNITS) as controller:
        control = controller.control
        planned, steps = apply(base, text, environ={"KEY": "s3cret"}, dry_run=True)
        (tenants,) = set(planned.text.splitlines()) - set(lines)
        assert tenants.startswith("~ tenants.team: set")
        assert "s3cret" not in planned.text
        assert steps == control.calls == []
        answer, steps = apply(base, text, environ={"KEY": "s3cret"})
        assert answer == messages.Done("6 changes made")
        assert [call[:2] for call in control.calls] == [
            ("adopt",),
            ("remove", "code"),
            ("replace", "chat"),
            ("add", "new"),
            ("scale", "chat"),
        ]
        assert control.adopted[0].tenants["team"].keys == ["s3cret"]
        # Once more: nothing is left.
        control.declared = control.declared.with_models([*control.declared.models, control.adopted[0].model("new")])
        assert apply(base, text, environ={"KEY": "s3cret"}) == (messages.Done("the fleet is as the file says"), [])


@pytest.mark.parametrize("memory", [False, True])
def test_a_model_gets_another_version_in_place_only_where_that_is_asked_for(base: Path, memory: bool) -> None:
    fleet = "memory: {limit: 4GiB}\n" if memory else ""
    before, after = "{name: code, hub: org/code}", "{name: code, hub: org/code, revision: v2}"
    models = f"[{{name: chat, hub: org/chat{'' if memory else ', replicas: 2'}}}, MODEL]"
    with running(base, UNITS) as controller:
        control = controller.control
        control.declared = parse_fleet(f"{fleet}models: {models}".replace("MODEL", before), "f.yaml", Path("/"), {})
        if memory:
            residency = {"u0": ResidencySpec(ResidencyRules(1 << 30), {})}
            control.fleet = msgspec.structs.replace(control.fleet, residency=residency)
        control.full["code", False] = NoRoomError("1 GiB is left")
        text = f"{fleet}models: {models}".replace("MODEL", after)
        left = [
            "! models.code.revision: set (v2); no room for both versions (1 GiB is left); `apply --in-place` ends the "
            "old one first"
        ]
        for dry_run in (True, False):
            answer, _ = apply(base, text, dry_run=dry_run)
            assert isinstance(answer, messages.Done)
            assert answer.left == left
        planned, _ = apply(base, text, dry_run=True, in_place=True)
        line = "~ models.code.revision: set (v2); loaded in place of the version that serves, which ends first"
        assert planned == messages.Done(line)
        assert control.calls == []
        assert apply(base, text, in_place=True) == (messages.Done("1 change made"), [line])
        assert control.calls == [("replace", "code", True)]
        # One that has no room even alone is left as it is.
        control.full["code", True] = NoRoomError("nothing is left")
        refused, _ = apply(base, text.replace("v2", "v3"), in_place=True)
        assert refused == messages.CommandRefused("nothing is left", mistake=False, after=messages.APPLIED_STAYS)
        assert control.calls == [("replace", "code", True)]


def test_commands_and_files_name_a_model_and_not_its_version(base: Path) -> None:
    with running(base, UNITS) as controller:
        control = controller.control
        units = [
            msgspec.structs.replace(each, serves=["code@3"] if each.name == "u0" else [])
            for each in control.fleet.units
        ]
        models = [control.fleet.models[0], msgspec.structs.replace(control.fleet.models[1], name="code@3")]
        control.fleet = msgspec.structs.replace(control.fleet, units=units, models=models, versions={"code": "code@3"})
        with ControlClient(find(None, base)) as client:
            assert client.who().models == ["chat", "code"]
        assert do(base, messages.Scale({"code": 1}))[0] == messages.Done("code has 1 replica already (u0)")
        refused, _ = do(base, messages.DrainUnit("u0"))
        assert "u0 has the only replica of code; start another one first: muxserve scale code=2" in refused.text
        assert do(base, messages.Scale({"code@3": 1}))[0] == messages.Done("code has 1 replica already (u0)")
        unknown, _ = do(base, messages.Remove("code@2"))
        assert unknown.text == 'the fleet has no model code@2; did you mean "code"?'
        planned, _ = apply(base, f"models: [{CHAT.replace(', replicas: 2', '')}, {CODE}]", dry_run=True)
        assert planned.text == "~ chat: 0 -> 1 replicas"


def test_names_and_adapters_are_followed_at_once(base: Path, tmp_path: Path) -> None:
    old, new, large = (adapter(tmp_path / name, r=rank) for name, rank in (("a", 8), ("b", 8), ("c", 64)))
    with running(base, UNITS) as controller:
        control = controller.control
        chat = f"{{name: chat, hub: org/chat, replicas: 2, aliases: [ALIAS], adapters: {{poet: POET, clerk: {old}}}}}"
        text = f"aliases: {{both: {{chat: 90, code: 10}}}}\nmodels: [{chat}, {CODE}]"
        control.declared = parse_fleet(text.replace("ALIAS", "one").replace("POET", str(old)), "f.yaml", Path("/"), {})
        room = msgspec.structs.replace(control.fleet.models[0], adapter_slots=AdapterSlots(2, 16))
        control.fleet = msgspec.structs.replace(control.fleet, models=[room, *control.fleet.models[1:]])
        wanted = text.replace("ALIAS", "two").replace("code: 10", "code: 20").replace(f", clerk: {old}", "")
        answer, steps = apply(base, wanted.replace("POET", str(new)))
        assert answer == messages.Done("4 changes made")
        assert steps == [
            "~ aliases.both.code: 10.0 -> 20.0",
            "~ models.chat.aliases: ['one'] -> ['two']",
            "~ adapter poet of chat",
            "- adapter clerk of chat",
        ]
        assert control.calls == [
            ("adopt",),
            ("set_adapter", "chat", "poet", str(new)),
            ("set_adapter", "chat", "clerk", ""),
        ]
        assert apply(base, wanted.replace("POET", str(new)))[0] == messages.Done("the fleet is as the file says")
        # Engines were started with room for smaller ones.
        planned, _ = apply(base, wanted.replace("POET", str(large)), dry_run=True)
        assert "loaded beside the version that serves" in planned.text


def test_a_file_that_says_what_there_is_changes_nothing(base: Path) -> None:
    with running(base, UNITS) as controller:
        assert apply(base, f"models: [{CHAT}, {CODE}]")[0] == messages.Done("the fleet is as the file says")
        wrong, _ = apply(base, f"models: [{CHAT}, {CODE}]\nquux: 1")
        assert isinstance(wrong, messages.CommandRefused)
        assert wrong.mistake
        assert "fleet.yaml:2: quux: unknown key" in wrong.text
        assert controller.control.calls == []


def test_models_are_exchanged_without_a_time_with_none(base: Path) -> None:
    with running(base, {"u0": ["chat"]}) as controller:
        assert isinstance(apply(base, f"models: [{CODE}]")[0], messages.Done)
        assert [call[:2] for call in controller.control.calls] == [("add", "code"), ("remove", "chat")]


def test_what_needs_a_start_is_named_and_nothing_interrupted(base: Path) -> None:
    text = f"kv_pool: {{size: 64MiB}}\ngateway: {{port: 9000}}\nmodels: [{CHAT}, {CODE}]"
    with running(base, UNITS) as controller:
        answer, _ = apply(base, text)
        lines = [
            "! kv_pool.size: auto -> 64 MiB; needs the fleet deployed again",
            "! gateway.port: 8000 -> 9000; needs the fleet deployed again",
        ]
        assert answer == messages.Done("2 changes marked ! not made", lines)
        assert controller.control.calls == []


def test_the_file_of_what_tenants_used_matters_where_there_are_some(base: Path) -> None:
    """None is open before there are tenants, and the first one stays open after them."""
    tenants, models = "tenants: {team: {keys: [env:KEY]}}\n", f"models: [{CHAT}, {CODE}]"

    def left(file: str, team: str = tenants) -> list[str]:
        answer, _ = apply(base, f"{team}gateway: {{usage_file: {file}}}\n{models}", environ={"KEY": "s3cret"})
        assert isinstance(answer, messages.Done), answer
        return list(answer.left)

    with running(base, UNITS) as controller:
        control = controller.control
        assert left("other", team="") == []
        assert left("first") == []
        control.fleet = msgspec.structs.replace(control.fleet, usage_file="/first")
        assert left("other", team="") == []
        assert left("first") == []
        assert left("other", team="") == []
        assert left("other") == ["! gateway.usage_file: /first -> /other; needs the fleet deployed again"]


def test_where_memory_decides_models_come_and_go_and_its_rules_are_followed(base: Path) -> None:
    with running(base, UNITS) as controller:
        control = controller.control
        text = f"memory: {{limit: 4GiB}}\nmodels: [{{name: chat, hub: org/chat}}, {CODE}]"
        control.declared = parse_fleet(text, "f.yaml", Path("/"), {})
        residency = ResidencySpec(ResidencyRules(1 << 30), {})
        control.fleet = msgspec.structs.replace(control.fleet, residency={"u0": residency})
        memory = "memory: {limit: 6GiB, turns: true, min_residence: 4s}"
        planned, _ = apply(
            base, f"{memory}\nmodels: [{{name: chat, hub: org/chat}}, {{name: new, hub: org/new}}]", dry_run=True
        )
        assert planned.text.splitlines() == [
            "- model code",
            "+ model new",
            "~ memory.limit: 4 GiB -> 6 GiB",
            "~ memory.min_residence: 2.0 -> 4.0",
            "~ memory.turns: auto -> True",
        ]
        made, _ = apply(base, f"{memory}\nmodels: [{{name: chat, hub: org/chat}}, {{name: new, hub: org/new}}]")
        assert isinstance(made, messages.Done)
        assert (made.text, len(made.left)) == ("5 changes made", 0)
        assert control.calls == [("adopt",), ("remove", "code"), ("add", "new", "org/new")]


def test_of_gpus_the_limit_of_memory_stays(base: Path) -> None:
    with running(base, UNITS) as controller:
        control = controller.control
        models = f"[{{name: chat, hub: org/chat}}, {CODE}]"
        text = f"memory: {{limit: LIMIT}}\ncluster: {{gpus: 1}}\nmodels: {models}"
        control.declared = parse_fleet(text.replace("LIMIT", "40GiB"), "f.yaml", Path("/"), {})
        control.fleet = msgspec.structs.replace(
            control.fleet, residency={"u0": ResidencySpec(ResidencyRules(1 << 30), {}, on_gpus=True)}
        )
        planned, _ = apply(base, text.replace("LIMIT", "60GiB"))
        assert isinstance(planned, messages.Done)
        assert planned.left == ["! memory.limit: 40 GiB -> 60 GiB; needs the fleet deployed again"]


def test_a_step_that_fails_ends_it(base: Path) -> None:
    with running(base, UNITS) as controller:
        controller.control.fails["scale", "chat", 3] = broken("no room")
        answer, _ = apply(
            base, f"models: [{CHAT.replace('2', '3')}, {{name: code, hub: org/code, slo: {{ttft_ms: 5}}}}]"
        )
        assert answer == messages.CommandRefused("no room", mistake=False, after=messages.APPLIED_STAYS)
        assert controller.control.calls == [("adopt",), ("scale", "chat", 3)]


def test_bounds_of_replicas_change_and_the_number_only_where_it_must(base: Path) -> None:
    with running(base, UNITS) as controller:
        text = (
            f"models: [{CHAT.replace('2', '{min: 1, max: 4}')}, {CODE.replace('}', ', replicas: {min: 2, max: 3}}')}]"
        )
        planned, _ = apply(base, text, dry_run=True)
        assert "~ code: 1 -> 2 replicas" in planned.text
        assert "chat: 2" not in planned.text
        assert "~ models.chat.replicas.max: 2 -> 4" in planned.text
        assert controller.control.calls == []


def test_changes_are_made_one_after_the_other(base: Path) -> None:
    with running(base, UNITS) as controller:
        control = controller.control
        control.hold = threading.Event()
        answers: list[object] = []
        first = threading.Thread(target=lambda: answers.append(do(base, messages.Scale({"chat": 3}))[0]))
        first.start()
        assert control.began.wait(PATIENCE)
        waiting = threading.Event()
        second = threading.Thread(target=lambda: answers.append(_drain(base, waiting)))
        second.start()
        assert waiting.wait(PATIENCE)
        assert control.calls == [("scale", "chat", 3)]
        control.hold.set()
        first.join(PATIENCE)
        second.join(PATIENCE)
        assert control.calls == [("scale", "chat", 3), ("drain", "u1")]
        assert [type(answer) for answer in answers] == [messages.Done] * 2


def _drain(base: Path, waiting: threading.Event) -> messages.Done | messages.CommandRefused:
    def told(text: str) -> None:
        if text == "waiting for another change to end":
            waiting.set()

    with ControlClient(find(None, base)) as client:
        return client.do(messages.DrainUnit("u1"), told)


def test_a_change_goes_on_when_its_command_is_gone(base: Path) -> None:
    with running(base, UNITS) as controller:
        control = controller.control
        control.hold = threading.Event()
        with ControlClient(find(None, base)) as client:
            client._socket.send(messages.encode(messages.DrainUnit("u1")))
            assert control.began.wait(PATIENCE)
        control.hold.set()
        answer, _ = do(base, messages.Scale({"chat": 1}))
        assert answer == messages.Done("chat has 1 replica already (u0)")
        assert control.calls == [("drain", "u1")]


def test_an_unforeseen_error_is_told_and_the_next_command_served(base: Path) -> None:
    with running(base, UNITS) as controller:
        controller.control.fails["drain", "u1"] = RuntimeError("boom")
        answer, _ = do(base, messages.DrainUnit("u1"))
        assert isinstance(answer, messages.CommandRefused)
        assert "RuntimeError: boom" in answer.text
        assert (answer.mistake, answer.after) == (False, messages.UNKNOWN)
        controller.control.fails.clear()
        assert isinstance(do(base, messages.DrainUnit("u1"))[0], messages.Done)


def test_a_command_of_another_version_is_refused(base: Path) -> None:
    with running(base, UNITS) as controller:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        sockets.connect(socket, controller.control.fleet.control_address)
        for frame in (b"\xff", b"\x81\xa1t\xa6Sing..."):
            socket.send(frame)
            assert socket.poll(10_000)
            answer = messages.decode_answer(socket.recv())
            assert isinstance(answer, messages.CommandRefused)
            assert "another version" in answer.text
        context.destroy(linger=0)


def test_which_fleet(base: Path) -> None:
    with pytest.raises(NoFleetError, match="no fleet runs here"):
        find(None, base)
    with running(base, UNITS) as one:
        assert find(None, base).name == one.name
        with running(base, {"u0": ["other"]}, port=one.port) as two:
            assert {fleet.name for fleet in running_fleets(base)} == {one.name, two.name}
            with pytest.raises(NoFleetError, match=rf"say which with --fleet: .*port {one.port}: (chat, code|other)"):
                find(None, base)
            assert find(two.name, base).path == two.run_dir.path
            # As while one takes over from the other.
            with pytest.raises(NoFleetError, match=r"several fleets run here"):
                find(str(one.port), base)
            with pytest.raises(NoFleetError, match="there is no fleet nowhere on this machine; running: "):
                find("nowhere", base)


def test_a_fleet_whose_controller_was_killed_is_none(base: Path) -> None:
    with running(base, UNITS) as controller:
        assert RunningFleet(controller.run_dir.path).alive
        controller.run_dir.release()
        assert not RunningFleet(controller.run_dir.path).alive
        assert running_fleets(base) == []


def test_the_end_of_the_fleet_ends_the_waiting(base: Path) -> None:
    controller = Controller(base, UNITS)
    controller.start()
    control = controller.control
    control.hold = threading.Event()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            do(base, messages.DrainUnit("u1"))
        except NoFleetError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert control.began.wait(PATIENCE)
    controller.stop()
    waiting.join(PATIENCE)
    assert [type(failure) for failure in failures] == [FleetEndedError]


def test_a_command_of_very_many_keys_is_refused_while_others_are_answered(base: Path) -> None:
    with running(base, UNITS) as controller:
        text = "".join(f"key{number}: 1\n" for number in range(100_000))
        answer, _ = do(base, messages.Apply(text, "fleet.yaml", "/"))
        assert isinstance(answer, messages.CommandRefused)
        assert answer.text == "fleet.yaml:10000: the file has more than 20,000 keys and values"
        assert not controller.control.calls


def test_a_command_that_is_far_too_large_ends_its_connection_alone(base: Path) -> None:
    with running(base, UNITS), zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        events = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sockets.connect(client, f"ipc://{find(None, base).path}/control.sock")
        client.send(messages.encode(messages.Apply("x" * (17 << 20), "fleet.yaml", "/")))
        assert events.poll(1000 * PATIENCE)
        client.disable_monitor()
        events.close()
        with ControlClient(find(None, base)) as other:
            assert other.who().models == ["chat", "code"]


async def test_the_status_says_what_of_its_file_a_fleet_is_not(tmp_path: Path) -> None:
    control = FakeControl(fleet_of(str(tmp_path), UNITS), declared_of(fleet_of(str(tmp_path), UNITS)))
    server, told = ControlServer(control, lambda: ""), list[str]()
    file = tmp_path / "fleet.yaml"

    async def reload(text: str) -> tuple[str, ApplyOutcome]:
        file.write_text(text)
        told.clear()
        followed = await server.reload(file, told.append)
        return control.fleet.unfollowed, followed

    good = f"models: [{CHAT}, {CODE}]\n"
    assert await reload(good) == ("", ApplyOutcome.DONE)
    assert told == [f"{file}: the fleet is as the file says"]
    unknown = f'{file}:2: polici: unknown key; did you mean "policy"?'
    assert await reload(good + "polici: fcfs\n") == (unknown, ApplyOutcome.WRONG)
    assert control.calls == []
    left = "! policy: slack -> fcfs; needs the fleet deployed again"
    assert await reload(good + "policy: fcfs\n") == (left, ApplyOutcome.DONE)
    control.fails["adopt",] = broken("a disk is full")
    assert await reload(good + "aliases: {front: chat}\n") == ("a disk is full", ApplyOutcome.FAILED)
    assert await reload(good) == ("", ApplyOutcome.DONE)
    control.fails["adopt",] = RuntimeError("odd")
    assert await reload(good + "aliases: {front: chat}\n") == ("failed: RuntimeError: odd", ApplyOutcome.FAILED)
    file.unlink()
    assert await server.reload(file, told.append) is ApplyOutcome.WRONG
    assert control.fleet.unfollowed == f"{file}: there is no such file"
    await server.close()


async def test_only_what_stands_beside_a_file_may_be_mended_without_it(tmp_path: Path) -> None:
    control = FakeControl(fleet_of(str(tmp_path), UNITS), declared_of(fleet_of(str(tmp_path), UNITS)))
    server, told = ControlServer(control, lambda: ""), list[str]()
    file = tmp_path / "fleet.yaml"
    absent = f"models: [{CHAT}, {CODE}, {{name: late, path: late}}]\n"
    file.write_text(absent)
    assert await server.reload(file, told.append) is ApplyOutcome.FAILED
    assert control.fleet.unfollowed == f"{file}:1: models[2].path: {tmp_path / 'late'} does not exist"
    # The file itself has a mistake, too.
    file.write_text(absent + "polici: fcfs\n")
    assert await server.reload(file, told.append) is ApplyOutcome.WRONG
    # It comes piece by piece.
    file.write_text(absent)
    whole, late = write_checkpoint(tmp_path / "whole"), tmp_path / "late"
    late.mkdir()
    for part in ("config.json", "model.safetensors", "tokenizer.json"):
        assert await server.reload(file, told.append) is ApplyOutcome.FAILED
        (late / part).write_bytes((whole / part).read_bytes())
    assert await server.reload(file, told.append) is ApplyOutcome.DONE
    assert control.fleet.served_names == ["chat", "code", "late"]
    await server.close()


async def test_versions_that_have_no_room_at_present_are_tried_again(tmp_path: Path) -> None:
    control = FakeControl(fleet_of(str(tmp_path), UNITS), declared_of(fleet_of(str(tmp_path), UNITS)))
    server, told = ControlServer(control, lambda: ""), list[str]()
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: [{CHAT[:-1]}, revision: v2}}, {CODE}]\n")
    control.full["chat", False] = NoRoomError("a GPU is full")
    assert await server.reload(file, told.append) is ApplyOutcome.FAILED
    assert "no room for both versions (a GPU is full)" in control.fleet.unfollowed
    control.full.clear()
    assert await server.reload(file, told.append) is ApplyOutcome.DONE
    assert control.fleet.unfollowed == ""
    await server.close()


def test_a_file_applied_by_command_clears_or_sets_what_the_status_says(base: Path) -> None:
    with running(base, UNITS) as controller:
        text = f"models: [{CHAT}, {CODE}]\n"
        apply(base, text + "policy: fcfs\n", dry_run=True)
        assert controller.control.fleet.unfollowed == ""
        apply(base, text + "policy: fcfs\n")
        assert "policy: slack -> fcfs" in controller.control.fleet.unfollowed
        apply(base, text)
        assert controller.control.fleet.unfollowed == ""
