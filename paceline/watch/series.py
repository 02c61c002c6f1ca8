"""
One curve in bounded memory, however long the run: of every stretch of steps its lowest and its highest point stay.

Stretches are powers of two wide and begin at zero, so a longer one is made of whole shorter ones: what is the extreme of a stretch
today stood in the memory of every day before. Nothing of files here.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.watch.snapshot import Series

MAX_POINTS = 2000  # kept of a curve


class Curve:
    """Points in the order of x: a step, or a second where nothing counts steps."""

    def __init__(self, *, max_points: int = MAX_POINTS):
        self.max_points = max_points
        self.x = self.values = self.times = np.empty(0)
        self._series: Series | None = None

    def extend(self, x: ArrayLike, values: ArrayLike, times: ArrayLike) -> None:
        """x grows; where it falls back behind what is there, that is replaced. What is no number is left out."""
        new = [np.asarray(each, dtype=float) for each in (x, values, times)]
        sound = np.isfinite(new[1])
        if not sound.all():
            new = [each[sound] for each in new]
        if not len(new[0]):
            return
        kept = int(np.searchsorted(self.x, new[0][0]))
        self.x, self.values, self.times = (
            np.concatenate([old[:kept], fresh])
            for old, fresh in zip((self.x, self.values, self.times), new, strict=True)
        )
        self._series = None
        if len(self.x) > self.max_points:
            chosen = extremes(self.x, self.values, max_points=self.max_points)
            self.x, self.values, self.times = self.x[chosen], self.values[chosen], self.times[chosen]

    def series(self) -> Series:
        """With x as steps."""
        if self._series is None:
            self._series = Series(self.x.astype(int).tolist(), self.values.tolist(), self.times.tolist())
        return self._series

    def series_by_time(self, steps: NDArray[np.float64], times: NDArray[np.float64]) -> Series:
        """With the step that was done last at each time; steps and times: of the run's logged steps."""
        if self._series is None:
            at = np.searchsorted(times, self.times, side="right")
            found = np.concatenate([[0.0], steps])[at].astype(int)
            self._series = Series(found.tolist(), self.values.tolist(), self.times.tolist())
        return self._series


def extremes(x: NDArray[np.float64], values: NDArray[np.float64], *, max_points: int) -> NDArray[np.intp]:
    """Indices of the lowest and the highest point of each stretch, of the first point and the last."""
    width = 1.0
    while (x[-1] - x[0]) / width >= max_points // 2 - 2:
        width *= 2
    stretch = x // width
    starts = np.flatnonzero(np.concatenate([[True], stretch[1:] != stretch[:-1]]))
    sizes = np.diff(np.append(starts, len(x)))
    chosen = np.zeros(len(x), dtype=bool)
    chosen[[0, -1]] = True
    for found in (np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)):
        hits = np.flatnonzero(values == np.repeat(found, sizes))
        chosen[hits[np.concatenate([[True], stretch[hits[1:]] != stretch[hits[:-1]]])]] = True  # the first of equals
    return np.flatnonzero(chosen)
