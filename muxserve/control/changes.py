"""What can be changed in a running fleet, as the controller offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from muxserve.config import Fleet
from muxserve.spec import FleetSpec

Tell = Callable[[str], None]


class ChangeError(Exception):
    """A change that has not happened; nothing is different from before. The message is for the user, a sentence that
    says why and what to do."""


class NoRoomError(ChangeError):
    """What is wanted more does not fit beside what is there."""


class WrongCommandError(ChangeError):
    """The command itself is wrong: it names what the fleet does not have, or has a file with mistakes."""


class MissingFileError(WrongCommandError):
    """The file of the command names others, such as checkpoints, that are not there or not whole."""


class FleetControl(Protocol):
    """A running fleet that can be changed.

    Each method returns when the change is complete, calls `tell` (from any thread) with a few words at every step that
    takes time, and leaves everything as it was if it raises `ChangeError`. The server has checked before what
    `muxserve.control.rules` checks, and calls one method at a time; changes of the fleet's own (auto-scaling, restarts)
    may come in between, so what is found to be different by then is refused, too.
    """

    @property
    def fleet(self) -> FleetSpec:
        """The fleet as it is now."""

    @property
    def declared(self) -> Fleet:
        """What it is to be: the fleet file, with the changes that were made since."""

    async def adopt(self, wanted: Fleet, tell: Tell) -> None:
        """Follow `wanted` in all that does not need anything started again: keys, tenants, shared names, and of the
        models that the fleet has limits, objectives, aliases and bounds of replicas.

        Raises:
            ChangeError: nothing can be changed in this fleet.
        """

    def unfollowed(self, words: str) -> None:
        """Have the fleet's status say what of its file is not so, and why; empty: it is as its file says."""

    async def scale(self, model: str, replicas: int, tell: Tell) -> None:
        """Have `replicas` replicas of `model` that serve, 0 included: start engines in units that declare it and serve
        it not, else new units; or drain those with the least load and stop them.

        Raises:
            ChangeError: a replica could not be started (those that this call had started are stopped again).
        """

    async def drain(self, unit: str, tell: Tell) -> None:
        """Take no more requests there, move or finish what it has, end it.

        Raises:
            ChangeError: it cannot be drained, or stays in service for another reason.
        """

    async def add(self, declared: Fleet, tell: Tell, to: str = "") -> None:
        """Serve one model more, on as many replicas as it asks for at the start, each a unit of its own; or in the
        running unit `to` and its pools, whose quotas and shares are planned anew. `declared` has that model alone, its
        rates, limits and rules; its weights may still have to be fetched.

        Raises:
            ChangeError: there is no room, or it could not be started.
        """

    async def hand_over(self, tell: Tell) -> None:
        """Another fleet listens at the endpoint's address: take no more connections, and end the fleet when the
        requests that it has are finished."""

    async def lend(self, models: Sequence[str], sockets: Sequence[str], tell: Tell) -> None:
        """Another fleet, whose gateways listen at the Unix `sockets`, is to serve these models: new requests go there,
        those that run are finished, the models' replicas end.

        Raises:
            ChangeError: one could not be taken out.
        """

    async def take_back(self, tell: Tell) -> None:
        """Serve again what was lent.

        Raises:
            ChangeError: a model could not be started.
        """

    async def room_for(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """Whether the only model of `declared` would fit beside the version of it that serves; `in_place`: instead of
        that. On GPUs the unit may find less room than was planned.

        Raises:
            NoRoomError: it would not.
            ChangeError: it cannot be served.
        """

    async def replace(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """Serve the only model of `declared` in place of the one of that name: it is started beside it and checked with
        a request; then new requests go to it, and the old version ends with its last request. `in_place`: the old
        version ends before, and requests are answered with 503 until the new one has been checked.

        Raises:
            NoRoomError: there is no room for both.
            ChangeError: it cannot be started, or has not answered; the old version serves as before.
        """

    async def set_adapter(self, model: str, name: str, path: str) -> None:
        """Serve the LoRA adapter in the directory `path` under that name, with the model's engines as they run; "": no
        longer. Requests that have one keep it.

        Raises:
            ChangeError: the model is gone.
        """

    async def remove(self, model: str, tell: Tell) -> None:
        """Serve a model no longer: the gateways refuse new requests, those that run are finished, its replicas end.

        Raises:
            ChangeError: it could not be taken out.
        """
