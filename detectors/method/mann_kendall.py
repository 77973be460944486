"""Whether a series rises steadily: the z of Mann (1945), Econometrica 13, 245-259, with Kendall's variance.

Without ties that is n(n-1)(2n+5)/18; z counts one less than the sum of the signs, for continuity. Hourly means have
hardly a tie, and with ties the true variance is smaller: z errs to the side of silence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def z_of(score: Floats, n: NDArray[np.int64]) -> Floats:
    """z of sums of signs over all pairs of `n` values each; 0 where there are no pairs."""
    variance = n * (n - 1.0) * (2.0 * n + 5.0) / 18.0
    return np.asarray((score - np.sign(score)) / np.sqrt(np.maximum(variance, 1.0)))


def z_of_rows(series: Floats) -> Floats:
    """(N,) z of each row of (N, T); NaN are instants without a value."""
    score = np.zeros(len(series))
    for lag in range(1, series.shape[1]):
        later, earlier = series[:, lag:], series[:, :-lag]  # a comparison with NaN is neither more nor less
        score += (later > earlier).sum(axis=1) - (later < earlier).sum(axis=1)
    return z_of(score, np.isfinite(series).sum(axis=1))
