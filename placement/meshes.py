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
    """The machines of a cluster by device type, and how meshes are cut out of them.

    A mesh lies within one machine. With a `network` between machines, of so many bytes per second, one may also take
    several equally large machines whole.
    """

    def __init__(self, cluster: Cluster, network: float | None = None) -> None:
        self.cluster, self.network = cluster, network
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

    def within_nodes(self) -> list[Mesh]:
        """Every kind of mesh within a machine, small ones first."""
        return [Mesh(device, size) for device in sorted(self.nodes) for size in range(1, self.nodes[device][0] + 1)]

    def across_nodes(self) -> list[Mesh]:
        """Every kind of mesh of two or more whole machines, small ones first."""
        kinds: set[Mesh] = set()
        if self.network is None:
            return []
        for device, sizes in self.nodes.items():
            for size, count in Counter(sizes).items():
                kinds |= {Mesh(device, size * n) for n in range(2, count + 1)}
        return sorted(kinds)

    def under(self, mesh: Mesh) -> int:
        """How many machines a mesh takes."""
        sizes = self.nodes.get(mesh.device, [])
        if not sizes or mesh.size <= sizes[0]:
            return 1
        return next((mesh.size // each for each in sorted(set(sizes), reverse=True) if mesh.size % each == 0), 1)

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
        """Sizes of the meshes on each machine (of `nodes`, in its order); several whole machines have one list with the
        mesh and others that are empty."""
        nodes = self.nodes[device]
        left = list(nodes)
        packed: list[list[int]] = [[] for _ in nodes]
        for size in sorted(counts, reverse=True):
            for _ in range(counts[size]):
                room = min((i for i in range(len(left)) if left[i] >= size), key=lambda i: (left[i], i), default=None)
                if room is not None:
                    left[room] -= size
                    packed[room].append(size)
                    continue
                whole = self._whole(nodes, left, size)
                if whole is None:
                    return None
                for i in whole:
                    left[i] = 0
                packed[whole[0]].append(size)
        return packed

    def _whole(self, nodes: list[int], left: list[int], size: int) -> list[int] | None:
        """Untouched, equally large machines that together are `size` devices."""
        for each in sorted(set(nodes), reverse=True) if self.network is not None else ():
            if size % each == 0 and size > each:
                idle = [i for i, count in enumerate(nodes) if count == each and left[i] == each]
                if len(idle) >= size // each:
                    return idle[: size // each]
        return None

    def assign(self, meshes: Iterable[Mesh]) -> list[tuple[int, ...]] | None:
        """Devices of each mesh, numbered as in the cluster; None if they do not fit."""
        wanted = list(meshes)
        answers: list[tuple[int, ...]] = [()] * len(wanted)
        firsts: list[int] = []
        number = 0
        for node in self.cluster.nodes:
            firsts.append(number)
            number += node.count
        for device, sizes in self.nodes.items():
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
            taken: set[int] = set()
            for place, meshes_here in enumerate(packed):
                offset = 0
                for size in meshes_here:
                    which = waiting[size].pop()
                    if size <= sizes[place]:
                        first = firsts[order[place]] + offset
                        answers[which] = tuple(range(first, first + size))
                        offset += size
                        continue
                    # Several machines: this one and untouched ones after it.
                    each = sizes[place]
                    devices: list[int] = []
                    for other in range(place, len(packed)):
                        if sizes[other] == each and other not in taken and (other == place or not packed[other]):
                            taken.add(other)
                            devices += range(firsts[order[other]], firsts[order[other]] + each)
                            if len(devices) == size:
                                break
                    answers[which] = tuple(devices)
        return answers if all(answers[i] for i, mesh in enumerate(wanted) if mesh.device in self.nodes) else None
