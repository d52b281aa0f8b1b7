"""What the units that share a machine's cores have leased out, for each to know what the others' engines had.

A unit sees its own leases only. On a CPU, whose cores all units of a machine share, engines of other units are
neighbours as well, and slow its engines down.
"""

from __future__ import annotations

from pathlib import Path

from muxserve.net.process_rows import ProcessRows

# In a row: the pid, the share that is leased out, since when (the machine's monotonic clock), and the shares summed up
# over time until then.
_FIELDS = 4
# A unit scheduler tells anew at least so often while anything is leased out; what one says that has died ends then.
_TELL_SECONDS = 0.5
_COUNTED_SECONDS = 2.0
# Others are looked up so often at most; in between they are taken to stay as they are.
_LOOK_SECONDS = 0.005


class CoreLeases:
    """The own unit's part in the file at `path`, and the sum of the others'. Shares are in millionths of the cores.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, now: float) -> None:
        self._rows = ProcessRows(path, _FIELDS)
        mine = self._rows.mine
        share, since, before = self._rows.numbers[mine + 1 : mine + _FIELDS].tolist()
        # Sums go on in a row that a process had before: those who read it would see them fall.
        self._sum = _summed(share, since, before, now)
        self._share = 0
        self._since = now
        self._write()
        # Of the others when they were last looked up: when that was, their sums, and their shares.
        self._looked_at, self._sums, self._shares = now, 0.0, 0.0
        self._look(now)

    def leased(self, share: int, now: float) -> None:
        """From now on the own unit has leased out so much."""
        if share == self._share and (not share or now - self._since < _TELL_SECONDS):
            return
        # As the others counted it.
        self._sum = _summed(self._share, self._since, self._sum, now)
        self._share, self._since = share, now
        self._write()

    def elsewhere(self, now: float) -> float:
        """Shares that other units leased out, summed up over time (seconds) until now. Where it begins means nothing:
        only differences do."""
        if now - self._looked_at >= _LOOK_SECONDS:
            self._look(now)
        return self._sums + self._shares * (now - self._looked_at)

    def _look(self, now: float) -> None:
        numbers, fields, mine = self._rows.numbers, self._rows.fields, self._rows.mine
        sums = shares = 0.0
        for place in range(0, len(numbers), fields):
            pid, share, since, before = numbers[place : place + fields].tolist()
            if not pid:
                break
            if place == mine:
                continue
            sums += _summed(share, since, before, now)
            if now - since < _COUNTED_SECONDS:
                shares += share
        self._looked_at, self._sums, self._shares = now, sums, shares

    def _write(self) -> None:
        mine = self._rows.mine
        self._rows.numbers[mine + 1] = self._share
        self._rows.numbers[mine + 2] = self._since
        self._rows.numbers[mine + 3] = self._sum


def _summed(share: float, since: float, before: float, now: float) -> float:
    return before + share * max(0.0, min(now - since, _COUNTED_SECONDS))
