"""Whether the Hugging Face hub can be reached, asked once for all models: its library tries long, for each file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

# For so long an answer is waited for, the first part of it without a word.
SECONDS, SILENT_SECONDS = 5.0, 1.0
# An answer holds for so many seconds: a network may come back, and go.
KEPT_SECONDS = 60.0


def ask(seconds: float = SECONDS) -> bool:
    """Whether the hub answers anything within so many seconds."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    found: list[bool] = []
    done = threading.Event()

    def head() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
            found.append(True)
        except Exception as error:  # of whichever library it uses
            log.debug("no answer from the hub: %s", error)
        finally:
            done.set()

    # Looking a name up has no time limit of its own, and nobody should wait for that when the command ends.
    threading.Thread(target=head, name="hub", daemon=True).start()
    host = urlsplit(constants.ENDPOINT).netloc
    if not done.wait(min(seconds, SILENT_SECONDS)):
        log.warning("waiting for %s, up to %g s", host, seconds)
        done.wait(max(0.0, seconds - SILENT_SECONDS))
    if not found:
        log.warning("%s does not answer; checkpoints are taken from the local cache", host)
    return bool(found)


class HubReach:
    """Remembers the answer for a while.

    Args:
        asks: how it is found out.
        clock: monotonic, seconds.
    """

    def __init__(self, asks: Callable[[], bool] = ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._asks = asks
        self._clock = clock
        self._lock = threading.Lock()
        self._known: tuple[float, bool] | None = None

    def __call__(self) -> bool:
        """Whether the hub can be reached; asks if that is not known."""
        with self._lock:
            if self._known is None or self._clock() - self._known[0] > KEPT_SECONDS:
                reachable = self._asks()
                self._known = self._clock(), reachable
            return self._known[1]


# What this process knows.
reachable = HubReach()
