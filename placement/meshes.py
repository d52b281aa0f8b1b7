"""Which meshes the hardware allows, and whether a set of them fits onto the machines."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from placement.cluster import Cluster
from placement.demand import Mesh

Counts = Mapping[Mesh, int]


class Machines:
    """The machines of a cluster by device type, and how meshes are cut out of them. A mesh lies within one machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes: dict[str, list[int]] = {}
        for node in cluster.nodes:
            self.nodes.setdefault(node.device, []).append(node.count)
        for sizes in self.nodes.values():
            sizes.sort(reverse=True)
        self._fits: dict[tuple[str, tuple[tuple[int, int], ...]], bool] = {}

    @cached_property
    def devices(self) -> dict[str, int]:
        """Devices of each type."""
        return {device: sum(sizes) for device, sizes in self.nodes.items()}

    def kinds(self) -> list[Mesh]:
        """Every kind of mesh, small ones first."""
        return [Mesh(device, size) for device in sorted(self.nodes) for size in range(1, self.nodes[device][0] + 1)]

    def fits(self, counts: Counts) -> bool:
        """Whether so many meshes of each kind can be cut out of the machines.

        Packs the largest first into the fullest machine that still has room. That is exact where sizes divide each
        other, as powers of two do; otherwise it may refuse what a cleverer packing allows, never the reverse.
        """
        for device in self.nodes:
            sizes = tuple(sorted(((mesh.size, n) for mesh, n in counts.items() if mesh.device == device and n)))
            if sum(size * n for size, n in sizes) > self.devices[device]:
                return False
            key = (device, sizes)
            found = self._fits.get(key)
            if found is None:
                found = self._fits[key] = self._chain(device, sizes) or self._pack(device, dict(sizes)) is not None
            if not found:
                return False
        return all(mesh.device in self.nodes for mesh, n in counts.items() if n)

    def _chain(self, device: str, sizes: tuple[tuple[int, int], ...]) -> bool:
        """Whether the sum already tells: sizes divide each other and every machine."""
        chain = [size for size, _ in sizes]
        if not chain:
            return True
        divides = all(large % small == 0 for small, large in itertools.pairwise(chain))
        return divides and all(node % chain[-1] == 0 for node in self.nodes[device])

    def _pack(self, device: str, counts: Mapping[int, int]) -> list[list[int]] | None:
        """Sizes of the meshes on each machine (of `nodes`, in its order); None if there is no room."""
        left = list(self.nodes[device])
        packed: list[list[int]] = [[] for _ in left]
        for size in sorted(counts, reverse=True):
            for _ in range(counts[size]):
                room = min((i for i in range(len(left)) if left[i] >= size), key=lambda i: (left[i], i), default=None)
                if room is None:
                    return None
                left[room] -= size
                packed[room].append(size)
        return packed

    def assign(self, meshes: Iterable[Mesh]) -> list[tuple[int, ...]] | None:
        """Devices of each mesh, numbered as in the cluster; None if they do not fit."""
        wanted = list(meshes)
        answers: list[tuple[int, ...]] = [()] * len(wanted)
        firsts: list[int] = []
        number = 0
        for node in self.cluster.nodes:
            firsts.append(number)
            number += node.count
        for device in self.nodes:
            order = sorted(
                (i for i, node in enumerate(self.cluster.nodes) if node.device == device),
                key=lambda i: -self.cluster.nodes[i].count,
            )
            mine = [i for i, mesh in enumerate(wanted) if mesh.device == device]
            packed = self._pack(device, Counter(wanted[i].size for i in mine))
            if packed is None:
                return None
            waiting: dict[int, list[int]] = {}
            for i in sorted(mine, reverse=True):
                waiting.setdefault(wanted[i].size, []).append(i)
            for place, meshes_here in enumerate(packed):
                offset = 0
                for size in meshes_here:
                    first = firsts[order[place]] + offset
                    answers[waiting[size].pop()] = tuple(range(first, first + size))
                    offset += size
        return answers if all(answers[i] for i, mesh in enumerate(wanted) if mesh.device in self.nodes) else None
