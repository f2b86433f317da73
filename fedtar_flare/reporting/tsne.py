"""t-SNE of points with many dimensions: FedTAR's Figure 3(b) and FedKEI's Figure 8."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedtar_flare.reporting.plots import Chart, Series

FEWEST = 5
"""Fewest points worth a figure."""


def tsne(points: np.ndarray) -> np.ndarray:
    """Embed points in the plane by t-SNE (van der Maaten and Hinton, JMLR 2008), with a fixed seed.

    Parameters
    ----------
    points : ndarray of shape (N, d)
        At least :data:`FEWEST` points.

    Returns
    -------
    ndarray of shape (N, 2)
        Coordinates between -1 and 1.
    """
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(points.astype(np.float64))
    return 2 * (plane - plane.min(0)) / np.maximum(np.ptp(plane, 0), 1e-12) - 1


def scatter(title: str, groups: Mapping[str, tuple[int, Sequence[tuple[float, float, str]]]]) -> Chart:
    """Draw embedded points by group."""
    series = []
    for name, (colour, points) in groups.items():
        apart = [one for x, y, tip in points for one in ((x, y, tip), (x, None, ""))]  # no line joins two points
        series.append(Series(name, apart, index=colour))
    return Chart(title, series, x_label="t-SNE, first axis", y_label="second axis", whole=False)
