"""Recursive least squares with forgetting, whose coefficients cannot be negative.

The estimate minimises the squared errors of what was observed, which counts the less the longer ago it was, and of a
prior, which always counts. In information form, with a forgetting factor `1 - f` and an observation `y = b x`:

    R <- (1 - f) R + w x x'        r <- (1 - f) r + w x y
    b = argmin b' (R + s^2 R0) b - 2 b' (r + s^2 R0 b0),  b >= 0

R0 is the inverse of the prior's covariance, and s the scatter of observations as it is now: the more they scatter, the
more the prior counts. What is forgotten goes back to the prior, so that a coefficient of which nothing is heard keeps
its value, and its variance stays bounded (no windup).
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]

_TOLERANCE = 1e-9


class RecursiveLeastSquares:
    """Coefficients of a linear model, from observations in any order of size.

    An observation that is far off counts as if it were near (Huber's weights), by a scale that follows the errors: a
    single one moves little, while a new level is followed.

    Args:
        prior: coefficients before anything was observed.
        covariance: of their errors; what is positive between two makes one follow the other.
        noise: standard deviation of an observation of weight 1, at least.
        memory: the weight of observations after which one counts 1/e.
    """

    # Errors beyond so many times the usual one count as that many.
    FAR = 2.5
    # The usual error is never taken for less, and follows the last so many observations.
    LEAST_SCALE = 0.02
    SCALE_MEMORY = 50.0
    # Solved anew after so many observations; at the beginning after each.
    SOLVE_EVERY, FIRST = 8, 16

    def __init__(self, prior: Sequence[float], covariance: Matrix, noise: float, memory: float) -> None:
        self._size = len(prior)
        self._prior = inverse(covariance)
        self._pulled = [sum(a * b for a, b in zip(row, prior, strict=True)) for row in self._prior]
        self._information = [[0.0] * self._size for _ in prior]
        self._vector = [0.0] * self._size
        self._noise = noise
        self._memory = memory
        self._coefficients = [float(value) for value in prior]
        self._unsolved = 0
        self.observations = 0
        # By how much a new observation misses: the prior's own doubt at first.
        self.scale = max(self.LEAST_SCALE, max(row[i] for i, row in enumerate(covariance)) ** 0.5)

    @property
    def coefficients(self) -> list[float]:
        """As of the last observation."""
        self._solve()
        return self._coefficients

    def observe(self, x: Sequence[float], y: float, weight: float = 1.0) -> float:
        """`y` was seen where `x` was; returns its error before it was learnt from."""
        error = y - sum(a * b for a, b in zip(x, self._coefficients, strict=True))
        most = self.FAR * self.scale
        trust = weight * (1.0 if abs(error) <= most else most / abs(error))
        keep = 1.0 - min(0.5, weight / self._memory)
        for i in range(self._size):
            row = self._information[i]
            at = trust * x[i]
            for j in range(self._size):
                row[j] = keep * row[j] + at * x[j]
            self._vector[i] = keep * self._vector[i] + at * y
        self.observations += 1
        counts = min(self.SCALE_MEMORY, self.observations + 3.0)
        self.scale = max(self.LEAST_SCALE, self.scale + (min(abs(error), most) - self.scale) / counts)
        self._unsolved += 1
        if self._unsolved >= self.SOLVE_EVERY or self.observations <= self.FIRST:
            self._solve()
        return error

    def _solve(self) -> None:
        if self._unsolved:
            doubt = max(self._noise, self.scale) ** 2
            information = [
                [seen + doubt * prior for seen, prior in zip(*rows, strict=True)]
                for rows in zip(self._information, self._prior, strict=True)
            ]
            vector = [seen + doubt * prior for seen, prior in zip(self._vector, self._pulled, strict=True)]
            self._coefficients = non_negative(information, vector)
            self._unsolved = 0


def non_negative(information: Matrix, vector: Sequence[float]) -> list[float]:
    """The `b >= 0` at which `b' R b - 2 b' r` is smallest, R positive definite (Lawson and Hanson's active sets)."""
    size = len(vector)
    found, free = [0.0] * size, [True] * size
    # It begins with all free, which is the end where nothing wants to be negative. Each round but the first lowers the
    # error, so that no set comes twice; rounding is why they are counted all the same.
    for _ in range(4 * size + 8):
        where = [i for i in range(size) if free[i]]
        wanted = _solve([[information[i][j] for j in where] for i in where], [vector[i] for i in where])
        if all(value > 0.0 for value in wanted):
            found = [0.0] * size
            for i, value in zip(where, wanted, strict=True):
                found[i] = value
            gradient = [
                vector[i] - sum(information[i][j] * found[j] for j in where) if not free[i] else 0.0
                for i in range(size)
            ]
            most = max(range(size), key=lambda i: gradient[i])
            if gradient[most] <= _TOLERANCE * (abs(vector[most]) + 1.0):
                return found
            free[most] = True
            continue
        # As far towards it as nothing becomes negative.
        step = 1.0
        for i, value in zip(where, wanted, strict=True):
            if value <= 0.0:
                step = min(step, found[i] / (found[i] - value) if found[i] > value else 0.0)
        for i, value in zip(where, wanted, strict=True):
            found[i] += step * (value - found[i])
            if value <= 0.0 and found[i] <= _TOLERANCE:
                found[i], free[i] = 0.0, False
    return found


def inverse(matrix: Matrix) -> Matrix:
    """The inverse of a positive definite matrix."""
    size = len(matrix)
    columns = [_solve(matrix, [1.0 if i == j else 0.0 for i in range(size)]) for j in range(size)]
    return [[columns[j][i] for j in range(size)] for i in range(size)]


def _solve(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    """`matrix * x = vector`, `matrix` positive definite, by Cholesky's decomposition."""
    size = len(vector)
    lower: Matrix = [[0.0] * size for _ in range(size)]
    x = [0.0] * size
    for i in range(size):
        for j in range(i + 1):
            left = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = left**0.5 if i == j else left / lower[j][j]
        x[i] = (vector[i] - sum(lower[i][k] * x[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(size)):
        x[i] = (x[i] - sum(lower[k][i] * x[k] for k in range(i + 1, size))) / lower[i][i]
    return x
