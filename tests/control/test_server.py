"""Commands over the real socket, with a fleet that is not there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from muxserve.control import messages
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, RunningFleet, find, running_fleets
from muxserve.net import sockets
from muxserve.replicas.scaling import ScalingRules
from tests.control.fakes import Controller, broken, running
from tests.support.patience import PATIENCE

UNITS = {"u0": ["chat", "code"], "u1": ["chat"], "u2": []}


def do(base: Path, command: messages.Command) -> tuple[messages.Done | messages.CommandRefused, list[str]]:
    steps: list[str] = []
    with ControlClient(find(None, base)) as client:
        return client.do(command, steps.append), steps


def test_who(base: Path) -> None:
    with running(base, UNITS), ControlClient(find(None, base)) as client:
        here = client.who()
    assert (here.url, here.models) == ("http://127.0.0.1:8123", ["chat", "code"])
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


def test_a_wrong_command_begins_nothing(base: Path) -> None:
    with running(base, UNITS) as controller:
        answer, steps = do(base, messages.Scale({"chat": 3, "coed": 2}))
        assert answer == messages.CommandRefused('the fleet has no model coed; did you mean "code"?')
        for command in (messages.DrainUnit("u9"), messages.Remove("x"), messages.Add("models: 3", "f", "/")):
            assert isinstance(do(base, command)[0], messages.CommandRefused)
        assert controller.control.calls == steps == []


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
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.json").write_text("{}")
    (tmp_path / "new/model.safetensors").write_bytes(b"")
    with running(base, UNITS) as controller:
        assert do(base, messages.DrainUnit("u1")) == (messages.Done("u1 is empty and has ended"), ["draining u1"])
        text = "models: [{name: new, path: new}]"
        added = do(base, messages.Add(text, "new.yaml", str(tmp_path)))
        assert added == (messages.Done("new is served (u0)"), ["loading weights"])
        assert do(base, messages.Remove("code"))[0] == messages.Done("code is served no longer")
        assert controller.control.calls == [
            ("drain", "u1"),
            ("add", "new", str(tmp_path / "new")),
            ("remove", "code"),
        ]


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
        assert not answer.mistake
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
        with running(base, {"u0": ["other"]}) as two:
            assert {fleet.name for fleet in running_fleets(base)} == {one.name, two.name}
            with pytest.raises(NoFleetError, match=r"say which with --fleet: .*port 8123: (chat, code|other)"):
                find(None, base)
            assert find(two.name, base).path == two.run_dir.path
            with pytest.raises(NoFleetError, match="there is no fleet nowhere; running: "):
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
