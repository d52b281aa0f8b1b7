"""Algorithm 2 of MuxServe (arXiv:2404.02015): how a model would run on each kind of mesh if it were alone there."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from placement.curves import DecodeCurve
from placement.demand import Demand, Member, Mesh
from placement.engines import Engines
from placement.settle import Runner, settle

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MEETS = 0.99  # of its rate, from which on a model counts as served


class Candidate(NamedTuple):
    """The fewest SMs with which a member meets its rate (and its TPOT objective, while it is alone) on a mesh; where no
    share does, the one that serves most. `throughput` is requests per second, `batch` sequences."""

    mesh: Mesh
    share: float
    throughput: float
    batch: float
    meets: bool


class Candidates:
    """Parallel candidates, cached.

    Args:
        engines: the fleet's models.
        shares: the grid of shares, ascending, the last one 1.
    """

    def __init__(self, engines: Engines, shares: Sequence[float] = SHARES) -> None:
        if not shares or sorted(shares) != list(shares) or shares[-1] != 1.0 or shares[0] <= 0:
            raise ValueError("shares must ascend to 1")
        self.engines = engines
        self.shares = tuple(shares)
        self._found: dict[tuple[Member, Mesh, float], Candidate | None] = {}

    def of(self, member: Member, mesh: Mesh, reserve: float = 1.0) -> Candidate | None:
        """The candidate of a member on a kind of mesh, for `reserve` times its rate; None if it cannot run there."""
        key = (member, mesh, reserve)
        if key not in self._found:
            fits = self.engines.fits(member.model, mesh)
            self._found[key] = self._search(member, mesh, reserve) if fits else None
        return self._found[key]

    def all(self, member: Member, meshes: Iterable[Mesh]) -> list[Candidate]:
        """One candidate per kind of mesh on which the member can run: the output of Algorithm 2."""
        return [found for mesh in meshes if (found := self.of(member, mesh)) is not None]

    def whole(self, member: Member, mesh: Mesh) -> Candidate | None:
        """What a member does with all SMs of a kind of mesh; None if it cannot run there."""
        return self._alone(member, mesh, 1.0) if self.engines.fits(member.model, mesh) else None

    def _search(self, member: Member, mesh: Mesh, reserve: float) -> Candidate | None:
        tried: dict[float, Candidate | None] = {}

        def meets(share: float) -> bool:
            tried[share] = self._alone(member, mesh, share, reserve)
            found = tried[share]
            return found is not None and found.meets

        # More SMs never make it slower, so the grid need not be walked; what costs are not known for does not meet.
        i = bisect.bisect_left(self.shares, True, key=meets)
        if i < len(self.shares):
            return tried.get(self.shares[i]) or self._alone(member, mesh, self.shares[i], reserve)
        best = self._alone(member, mesh, 1.0, reserve)
        if best is None:
            return None
        # Decode hardly gains from the last SMs; take what serves as much.
        for share in self.shares[:-1]:
            found = self._alone(member, mesh, share, reserve)
            if found is not None and found.throughput >= best.throughput * (1 - 1e-6):
                return found
        return best

    def _alone(self, member: Member, mesh: Mesh, share: float, reserve: float = 1.0) -> Candidate | None:
        engines = self.engines
        demand = engines.demands[member.model]
        decode = engines.decode(member.model, mesh, share)
        prefill = engines.prefill(member.model, mesh, 1.0)
        if decode is None or prefill is None:
            return None
        footprint = engines.footprint(member.model, mesh)
        rate = reserve * demand.rate / member.replicas
        most = most_sequences(demand, decode)
        runner = Runner(rate, footprint.sequence, most, share, decode, prefill)
        state = settle([runner], 1.0, engines.memory[mesh.device] - footprint.own)
        meets = state.rates[0] >= MEETS * rate and not self._needlessly_slow(member, mesh, decode)
        return Candidate(mesh, share, state.rates[0], state.batches[0], meets)

    def _needlessly_slow(self, member: Member, mesh: Mesh, decode: DecodeCurve) -> bool:
        """Whether even a batch of one misses the TPOT objective, though with all SMs it would not."""
        slo = self.engines.demands[member.model].slo_tpot
        whole = self.engines.decode(member.model, mesh, 1.0)
        return slo is not None and whole is not None and decode.seconds[0] > slo >= whole.seconds[0]


def most_sequences(demand: Demand, decode: DecodeCurve) -> float:
    """The largest batch that the model may have: its own limit, and what its TPOT objective allows if any does."""
    if demand.slo_tpot is None:
        return float(demand.max_num_seqs)
    within = decode.batch_within(demand.slo_tpot)
    return within if within >= 1.0 else float(demand.max_num_seqs)
