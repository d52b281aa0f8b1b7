"""The fleet that another one takes over from, as the new one sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from muxserve.control.changes import ChangeError, Tell
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, RunningFleet
from muxserve.control.messages import Command, CommandRefused, Lend, TakeBack, YieldEndpoint
from muxserve.spec import FleetSpec

_LOOK_SECONDS = 0.2


class PreviousFleet:
    """A running fleet that has the endpoint's address. All methods wait for it, in the calling thread.

    Args:
        running: where it is found.
        spec: what its file says as the take-over begins.
    """

    def __init__(self, running: RunningFleet, spec: FleetSpec) -> None:
        self.running = running
        self.spec = spec

    def lend(self, models: Sequence[str], sockets: Sequence[str], tell: Tell) -> None:
        """Have it end the engines of these models when their requests have ended, and pass requests on to the gateways
        at `sockets`. A fleet that has ended lends everything.

        Raises:
            ChangeError: it does not.
        """
        self._do(Lend([*models], [*sockets]), tell)

    def take_back(self, tell: Tell) -> None:
        """Have it serve the models again that it has lent.

        Raises:
            ChangeError: it does not.
        """
        self._do(TakeBack(), tell)

    def hand_over(self, tell: Tell) -> None:
        """Have it take no more connections, and end with its last request.

        Raises:
            ChangeError: it does not.
        """
        self._do(YieldEndpoint(), tell)

    def end(self, tell: Tell) -> None:
        """The same; returns when it has ended.

        Raises:
            ChangeError: it does not.
        """
        self.hand_over(tell)
        while self.running.alive:
            time.sleep(_LOOK_SECONDS)

    def _do(self, command: Command, tell: Tell) -> None:
        try:
            with ControlClient(self.running) as client:
                answer = client.do(command, tell)
        except FleetEndedError:
            return
        except NoFleetError as error:
            if self.running.alive:
                raise ChangeError(str(error)) from None
            return
        if isinstance(answer, CommandRefused):
            raise ChangeError(f"{self.running.name}: {answer.text}")
        tell(f"{self.running.name}: {answer.text}")
