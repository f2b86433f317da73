"""Points with many dimensions in the plane, for figures."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedtar_flare.reporting.plots import Chart, Series

FEWEST = 5
"""Points from which on such a figure says something."""


def tsne(points: np.ndarray) -> np.ndarray:
    """Places (N, 2) between -1 and 1 of points (N, d), N at least :data:`FEWEST`, by t-SNE; always the same."""
    from sklearn.manifold import TSNE

    near = min(30.0, (len(points) - 1) / 3)
    found = TSNE(perplexity=near, init="random", random_state=0).fit_transform(points.astype(np.float64))
    span = np.maximum(np.ptp(found, 0), 1e-12)
    return 2 * (found - found.min(0)) / span - 1


def places(title: str, groups: Mapping[str, tuple[int, Sequence[tuple[float, float, str]]]]) -> Chart:
    """A chart of places with their tooltips, by group, each with the number of its colour."""
    series = [
        Series(name, [one for x, y, tip in found for one in ((x, y, tip), (x, None, ""))], index=colour)
        for name, (colour, found) in groups.items()
    ]
    return Chart(title, series, x_label="t-SNE, first axis", y_label="second axis", whole=False)
