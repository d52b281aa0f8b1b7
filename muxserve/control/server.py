"""The controller's side: takes commands on a Unix socket, checks them, has them done one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from muxserve.config import Fleet, FleetError
from muxserve.config.source import read_text
from muxserve.control import messages, rules
from muxserve.control.apply import ChangePlan, plan_changes
from muxserve.control.changes import (
    ChangeError,
    FleetControl,
    MissingFileError,
    NoRoomError,
    Tell,
    WrongCommandError,
)
from muxserve.control.client import RunningFleet
from muxserve.control.tries import ApplyOutcome
from muxserve.net.sockets import bind_local
from muxserve.spec import FleetSpec, UnitEntry, public_name
from placement.format import enumerate_words

log = logging.getLogger(__name__)

# Largest command: a fleet file, and the environment of its sender.
_MOST_BYTES = 16 << 20
# How often it is looked whether a fleet that has borrowed models is there.
_LOOK_SECONDS = 1.0

SAME = "the fleet is as the file says"


class ControlServer:
    """Serves commands until `close`.

    A change that has been begun goes on when the command that asked for it is gone.

    Args:
        control: what does the changes.
        url: where the endpoint is reached on this machine.
        base: what paths in texts from elsewhere are relative to.
    """

    def __init__(self, control: FleetControl, url: Callable[[], str], base: Path = Path("/")) -> None:
        self._base = str(base)
        self._control = control
        self._url = url
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        # ZeroMQ closes the connection of who sends more, before anything of it is read.
        self._socket.maxmsgsize = _MOST_BYTES
        self._changing = asyncio.Lock()
        self._answers: asyncio.Queue[tuple[bytes, messages.ControlMessage]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: set[RunningFleet] = set()
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Listen at the fleet's `control_address`; the fleet's directory, which only its owner may enter, is there."""
        bind_local(self._socket, self._control.fleet.control_address)
        self._loops = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]

    async def close(self) -> None:
        """Stop; changes under way are given up where they are."""
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            peer, frame = frames[0], frames[-1]
            try:
                command = messages.decode_command(frame)
            except msgspec.DecodeError as error:
                text = f"the fleet does not know this command ({error}); is it of another version of muxserve?"
                self._answers.put_nowait((peer, messages.CommandRefused(text)))
                continue
            task = asyncio.create_task(self._serve(peer, command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        while True:
            peer, answer = await self._answers.get()
            # A command that does not read is not waited for, and one that is gone not missed.
            with contextlib.suppress(zmq.Again):
                await self._socket.send_multipart([peer, messages.encode(answer)], zmq.NOBLOCK)

    async def _serve(self, peer: bytes, command: messages.Command) -> None:
        loop = asyncio.get_running_loop()

        def answered(message: messages.ControlMessage) -> None:
            # Some steps are told by other threads, and all that is told keeps its order.
            loop.call_soon_threadsafe(self._answers.put_nowait, (peer, message))

        def tell(text: str) -> None:
            answered(messages.ChangeProgress(text))

        answer: messages.ControlMessage
        try:
            answer = await self._do(command, tell)
        except ChangeError as error:
            mistake = isinstance(error, WrongCommandError)
            stays = isinstance(command, messages.Apply) and not mistake
            after = messages.APPLIED_STAYS if stays else messages.NOTHING_CHANGED
            answer = messages.CommandRefused(str(error), mistake, after)
        except Exception as error:
            log.exception("a change of the fleet failed")
            text = f"failed: {type(error).__name__}: {error}"
            answer = messages.CommandRefused(text, mistake=False, after=messages.UNKNOWN)
        answered(answer)

    async def _do(self, command: messages.Command, tell: Tell) -> messages.ControlMessage:
        if isinstance(command, messages.Who):
            return self._here()
        if self._changing.locked():
            tell("waiting for another change to end")
        async with self._changing:
            match command:
                case messages.Scale(replicas):
                    asked = {self._named(model): count for model, count in replicas.items()}
                    return messages.Done(await self._scale(asked, tell))
                case messages.DrainUnit(unit):
                    rules.check_drain(self._control.fleet, unit)
                    await self._control.drain(unit, tell)
                    return messages.Done(f"{unit} is empty and has ended")
                case messages.Add(text, file, base, unit):
                    fleet, place = self._control.fleet, base or self._base
                    declared = await asyncio.to_thread(rules.check_add, fleet, text, file, place, unit, bool(base))
                    name = declared.models[0].name
                    if not base:
                        rules.check_from_elsewhere(declared, [name], fleet)
                    await self._control.add(declared, tell, unit)
                    return messages.Done(f"{name} is served{_where(self._control.fleet, name)}")
                case messages.Apply():
                    done, _ = await self._apply(command, tell)
                    if not command.dry_run:
                        self._control.unfollowed("\n".join(done.left))
                    return done
                case messages.SetAdapter(model, name, path):
                    model = self._named(model)
                    rules.check_adapter(self._control.fleet, model, name, path)
                    await self._control.set_adapter(model, name, path)
                    return messages.Done(f"{name} is served {'with ' + model if path else 'no longer'}")
                case messages.Lend(models, sockets):
                    rules.check_lend(self._control.fleet, models)
                    try:
                        await self._control.lend(models, sockets, tell)
                    finally:
                        self._watch_borrower()
                    return messages.Done(f"{enumerate_words(models)} ended here")
                case messages.TakeBack():
                    await self._control.take_back(tell)
                    return messages.Done("serves as before")
                case messages.YieldEndpoint():
                    await self._control.hand_over(tell)
                    return messages.Done("the fleet takes no more connections, and ends with its last request")
                case messages.Remove(model):
                    model = self._named(model)
                    rules.check_remove(self._control.fleet, model)
                    await self._control.remove(model, tell)
                    return messages.Done(f"{model} is served no longer")

    async def _apply(self, command: messages.Apply, tell: Tell) -> tuple[messages.Done, ApplyOutcome]:
        """Settings first, which cannot fail for want of room; then what frees something, then what takes it. What has
        been done stays: another try goes on from there. Versions without room are left, and have failed."""
        control, base = self._control, command.base or self._base
        environ = os.environ if command.environ is None else command.environ
        wanted = await asyncio.to_thread(
            rules.check_apply, command.text, command.file, base, environ, bool(command.base)
        )
        plan = await asyncio.to_thread(plan_changes, control.fleet, control.declared, wanted)
        if not command.base:
            rules.check_from_elsewhere(wanted, [*plan.add, *plan.replace], control.fleet)
        for name in plan.replace:
            await self._look_for_room(plan, wanted.with_models([wanted.model(name)]), command.in_place, tell)
        lines, left = plan.lines(), plan.left()
        if command.dry_run:
            return messages.Done("\n".join([*lines, *left]) or SAME, left), ApplyOutcome.DONE
        if not lines and not left:
            return messages.Done(SAME), ApplyOutcome.DONE
        for line in [*lines, *left]:
            tell(line)
        if plan.settings:
            await control.adopt(wanted, tell)
        for (model, name), path in plan.adapters.items():
            await control.set_adapter(model, name, path)
        # Never without a model at all.
        last = plan.remove.pop() if len(plan.remove) == len(control.fleet.served_names) else None
        for name in plan.remove:
            await control.remove(name, tell)
        down = [name for name, (before, after) in plan.scale.items() if after < before]
        for name in down:
            await control.scale(name, plan.scale[name][1], tell)
        for name in plan.replace:
            if name not in plan.refused:
                await self._replace(plan, wanted.with_models([wanted.model(name)]), command.in_place, tell)
        for name in plan.add:
            await control.add(wanted.with_models([wanted.model(name)]), tell)
        for name in plan.scale:
            if name not in down:
                await control.scale(name, plan.scale[name][1], tell)
        if last is not None:
            await control.remove(last, tell)
        parts = [f"{_changes(len(lines))} made"] if lines else []
        parts += [f"{_changes(len(left))} marked ! not made"] if left else []
        return messages.Done("; ".join(parts), left), ApplyOutcome.FAILED if plan.refused else ApplyOutcome.DONE

    async def _look_for_room(self, plan: ChangePlan, model: Fleet, in_place: bool, tell: Tell) -> None:
        """Whether there is room for another version of a model beside the one that serves; only where there is none is
        it loaded in its place, and only if that is asked for (`in_place`)."""
        name = model.models[0].name
        try:
            await self._control.room_for(model, tell)
        except NoRoomError as error:
            if not in_place:
                plan.refused[name] = f"no room for both versions ({error}); `apply --in-place` ends the old one first"
                return
            plan.in_place.add(name)
            await self._control.room_for(model, tell, in_place=True)

    async def _replace(self, plan: ChangePlan, model: Fleet, in_place: bool, tell: Tell) -> None:
        """Give a model another version. A unit on GPUs may have less room than was planned."""
        if model.models[0].name in plan.in_place:
            await self._control.replace(model, tell, in_place=True)
            return
        try:
            await self._control.replace(model, tell)
        except NoRoomError as error:
            if not in_place:
                raise NoRoomError(f"{error}; `apply --in-place` ends the old version first") from None
            tell(f"no room for both versions: {error}")
            await self._control.replace(model, tell, in_place=True)

    async def reload(self, file: Path, told: Tell) -> ApplyOutcome:
        """Have the fleet become what `file` says, with the variables of this process, and tell how that went; what it
        does not become stands in its status."""
        try:
            text = await asyncio.to_thread(read_text, file, "fleet file")
            command = messages.Apply(text, str(file), str(file.parent.absolute()), dict(os.environ))
            async with self._changing:
                done, followed = await self._apply(command, told)
            told(f"{file}: {done.text}")
            self._control.unfollowed("\n".join(done.left))
            return followed
        except (FleetError, ChangeError) as error:
            told(f"{file} is not followed: {error}")
            self._control.unfollowed(str(error))
            wrong = isinstance(error, (FleetError, WrongCommandError)) and not isinstance(error, MissingFileError)
            return ApplyOutcome.WRONG if wrong else ApplyOutcome.FAILED
        except Exception as error:
            log.exception("the fleet file could not be followed")
            told(f"{file} could not be followed: {type(error).__name__}: {error}")
            self._control.unfollowed(f"failed: {type(error).__name__}: {error}")
            return ApplyOutcome.FAILED

    def _watch_borrower(self) -> None:
        borrower = self._borrower()
        if borrower is not None and borrower not in self._watched:
            self._watched.add(borrower)
            task = asyncio.create_task(self._until_given_back(borrower))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._watched.discard(borrower))

    def _borrower(self) -> RunningFleet | None:
        """The fleet that models are lent to, if any are."""
        fleet, other = self._control.fleet, self._control.fleet.other_fleet
        if other is None or not other.sockets or fleet.handed_over:
            return None
        return RunningFleet(Path(other.sockets[0]).parent)

    async def _until_given_back(self, borrower: RunningFleet) -> None:
        """Take back what was lent when the fleet that has it ends without a word, as one that was killed."""
        while self._borrower() == borrower:
            if not borrower.alive:
                async with self._changing:
                    if self._borrower() == borrower:
                        await self._take_back(borrower)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _take_back(self, borrower: RunningFleet) -> None:
        log.warning("%s has ended before it served; this fleet serves all its models again", borrower.name)
        words = f"models that were lent to {borrower.name}, which has ended, are not served yet"
        try:
            await self._control.take_back(partial(log.info, "%s"))
        except Exception as error:  # what that fleet had may not be free yet: it is tried again
            log.exception("models that were lent are not served yet")
            self._control.unfollowed(f"{words}: {error or type(error).__name__}")
        else:
            if self._control.fleet.unfollowed.startswith(words):
                self._control.unfollowed("")

    def _named(self, asked: str) -> str:
        """The model that a command means, which may name the version that answers, as `status` shows it."""
        name = public_name(asked)
        return name if self._control.fleet.serving(name) == asked else asked

    def _here(self) -> messages.Here:
        fleet = self._control.fleet
        units = [messages.UnitSummary(unit.name, list(unit.serves)) for unit in fleet.units]
        return messages.Here(self._url(), fleet.served_names, units)

    async def _scale(self, replicas: dict[str, int], tell: Tell) -> str:
        """All of them or none: what may fail comes first, and what was done is undone if something does."""
        control = self._control
        rules.check_scale(control.fleet, replicas)
        before = {model: len(_replicas_of(control.fleet, model)) for model in replicas}
        changed: list[str] = []
        for model in sorted(replicas, key=lambda model: before[model] - replicas[model]):
            if replicas[model] == len(_replicas_of(control.fleet, model)):
                continue
            try:
                await control.scale(model, replicas[model], tell)
            except Exception:
                for done in reversed(changed):
                    tell(f"{done}: back to {_replicas(before[done])}")
                    try:
                        await control.scale(done, before[done], tell)
                    except ChangeError as error:
                        log.warning("%s does not have %d replicas again: %s", done, before[done], error)
                raise
            changed.append(model)
        fleet = control.fleet
        words = []
        for model, count in replicas.items():
            already = "" if model in changed else " already"
            own = fleet.scaling.get(fleet.serving(model))
            goes_on = f"; from here it scales by itself between {own.minimum} and {own.maximum}" if own else ""
            words.append(f"{model} has {_replicas(count)}{already}{_where(fleet, model)}{goes_on}")
        return "\n".join(words)


def _replicas_of(fleet: FleetSpec, model: str) -> list[UnitEntry]:
    return fleet.replicas(fleet.serving(model))


def _where(fleet: FleetSpec, model: str) -> str:
    units = [unit.name for unit in _replicas_of(fleet, model)]
    return f" ({enumerate_words(units)})" if units else ""


def _changes(count: int) -> str:
    return f"{count} change{'' if count == 1 else 's'}"


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"
