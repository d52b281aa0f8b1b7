"""Messages between a user's command and the controller: one msgpack frame each, over ZeroMQ on a Unix socket."""

from __future__ import annotations

from typing import Literal, Union

import msgspec


class ControlMessage(msgspec.Struct, tag=True, tag_field="t", omit_defaults=True):
    """Base of every message; the struct's name is its tag."""


# ---------------------------------------------------------------- command -> controller


class Who(ControlMessage):
    """Which fleet is this? Answered by `Here`."""


class Scale(ControlMessage):
    """Have this number of replicas of each of these models."""

    replicas: dict[str, int]


class DrainUnit(ControlMessage):
    """Empty a unit and end it."""

    unit: str


class Add(ControlMessage):
    """Serve one model more: the text of a fleet file with that model. `file` is what it is called in errors, `base` the
    directory that paths in it are relative to; empty: that of the fleet's own file. `unit`: the running unit that it
    joins; empty: it gets its own."""

    text: str
    file: str
    base: str
    unit: str = ""


class Remove(ControlMessage):
    """Serve a model no longer."""

    model: str


class Apply(ControlMessage):
    """Become what the text of a fleet file says; with `dry_run` only say what that takes; with `in_place` end models
    that get another version first, where there is no room for both. `environ` has the variables
    whose keys the file names, as the command's user has them; None: those of the controller. `file` and `base` are as
    in `Add`."""

    text: str
    file: str
    base: str
    environ: dict[str, str] | None = {}
    dry_run: bool = False
    in_place: bool = False


class YieldEndpoint(ControlMessage):
    """Another fleet has taken over the endpoint's address: end with the requests that there are."""


class Lend(ControlMessage):
    """Another fleet is to serve these models: end their engines when their requests have ended, and pass requests for
    them on to the gateways at the Unix `sockets`, which pass requests for the other models back."""

    models: list[str]
    sockets: list[str]


class TakeBack(ControlMessage):
    """The other fleet has given up: serve again what was lent."""


class SetAdapter(ControlMessage):
    """Serve a LoRA adapter of a model under that name, from the directory `path`; "": no longer."""

    model: str
    name: str
    path: str


# ---------------------------------------------------------------- controller -> command


class UnitSummary(msgspec.Struct):
    """A unit and the models that it serves now."""

    name: str
    serves: list[str]


class Here(ControlMessage):
    """Answer to `Who`. `url`: the endpoint as reached on this machine."""

    url: str
    models: list[str]
    units: list[UnitSummary]


class ChangeProgress(ControlMessage):
    """What is being done, in words; any number of them before the end."""

    text: str


class Done(ControlMessage):
    """It has happened; `text` says what there is now. `left` has a line for each change of a fleet file that was not
    made, since it needs a start."""

    text: str
    left: list[str] = []


NOTHING_CHANGED = "nothing was changed"
APPLIED_STAYS = "what was done before stays; apply again goes on from there"
UNKNOWN = "`muxserve status` says how the fleet stands"


class CommandRefused(ControlMessage):
    """It has not happened; `text` says why and what to do. `mistake`: the command itself was wrong, otherwise the fleet
    cannot do it, or it failed. `after` says how that left the fleet."""

    text: str
    mistake: bool = True
    after: str = NOTHING_CHANGED


# `planned`: asked for with `dry_run`. `left`: done but for what needs a start. `refused`: the command is wrong.
# `failed`: the fleet cannot do it, or it went wrong.
Result = Literal["done", "planned", "left", "refused", "failed"]

Command = Union[Who, Scale, DrainUnit, Add, Remove, Apply, SetAdapter, Lend, TakeBack, YieldEndpoint]
Answer = Union[Here, ChangeProgress, Done, CommandRefused]


def result_of(command: Command, answer: Done | CommandRefused) -> Result:
    """What became of a command, in a word."""
    if isinstance(answer, CommandRefused):
        return "refused" if answer.mistake else "failed"
    if isinstance(command, Apply) and command.dry_run:
        return "planned"
    return "left" if answer.left else "done"


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: ControlMessage) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """What `encode` made of a command.

    Raises:
        msgspec.DecodeError: it is none, for instance one of another version.
    """
    return _commands.decode(frame)


def decode_answer(frame: bytes) -> Answer:
    """What `encode` made of an answer.

    Raises:
        msgspec.DecodeError: it is none, for instance one of another version.
    """
    return _answers.decode(frame)
