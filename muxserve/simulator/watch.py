"""What an engine of both phases is seen doing: the blocks that it holds, and its jobs."""

from __future__ import annotations

from muxserve.simulator.timeline import Timeline


class Watch:
    """Watches one engine of `model`.

    `samples` has the blocks in use every `every` seconds (0: never), those of a moment before what begins then; `peak`
    is the most that there were, `tokens` counts those that went through the engine. Jobs go into `timeline`, if given.
    """

    def __init__(self, model: str, every: float = 0.0, timeline: Timeline | None = None) -> None:
        self.samples: list[tuple[float, int]] = []
        self.peak = 0
        self.tokens = 0
        self.timeline = timeline
        self._model = model
        self._every = every
        self._held = 0

    def holds(self, now: float, blocks: int) -> None:
        """So many from now on."""
        if self._every > 0.0:
            while len(self.samples) * self._every <= now:
                self.samples.append((len(self.samples) * self._every, self._held))
        self._held = blocks
        self.peak = max(self.peak, blocks)

    def did(self, phase: str, began: float, ended: float, sequences: int, tokens: int) -> None:
        """A job has ended; `phase` as in `timeline.Job`."""
        self.tokens += tokens
        if self.timeline is not None:
            self.timeline.job(self._model, phase, began, ended, sequences, tokens)
