"""What the host does for the steps of a GPU engine beside the device's work: it launches kernels, and between two steps
it schedules, prepares inputs, samples and sends outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muxserve.costs.calibration import Calibration
from muxserve.costs.latency import Decode, EngineShape


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host for a step: `prefill_launches` and `decode_launches` for its kernels, which run while the
    device computes; `step`, and `sequence` for each of its sequences, between two steps.

    The device waits for the latter, unless steps are scheduled `ahead`: then one thread of the host does all of it
    while the device computes the step before, and a step takes as long as the slower of both.
    """

    prefill_launches: float
    decode_launches: float
    step: float
    sequence: float
    ahead: bool = False

    @staticmethod
    def of(shape: EngineShape, layers: int, by: Calibration) -> Host:
        """The host's work for an engine of that shape whose model has `layers` layers."""
        prefill, decode = by.launch_seconds(shape.graphs, layers, shape.tp > 1)
        return Host(prefill, decode, by.host_step, by.host_sequence, shape.ahead)

    def prefill(self, device: float, sequences: int) -> float:
        """Seconds of a prefill step of which the device computes `device` seconds."""
        least, after = self._beside(self.prefill_launches, sequences)
        return max(device, least) + after

    def decode(self, device: Iterable[Decode], batch: int) -> tuple[Decode, ...]:
        """A decode step of which the device computes those rising pieces."""
        least, after = self._beside(self.decode_launches, batch)
        pieces, start = [], 0.0
        for piece in device:
            above = start
            if piece.seconds(start) < least:
                above = (least - piece.fixed) / piece.per_token if piece.per_token else float("inf")
                pieces.append(Decode(least + after, 0.0, min(above, piece.until)))
            if above < piece.until:
                pieces.append(Decode(piece.fixed + after, piece.per_token, piece.until))
            start = piece.until
        return tuple(pieces)

    def _beside(self, launches: float, sequences: int) -> tuple[float, float]:
        """The least seconds of a step, and those for which the device waits then."""
        own = self.step + sequences * self.sequence
        return (launches + own, 0.0) if self.ahead else (launches, own)
