"""Places in the plane of points with many dimensions, for figures."""

import numpy as np

FEWEST = 5
"""Points from which on such a figure says something."""


def tsne(points: np.ndarray) -> np.ndarray:
    """Places (N, 2) between -1 and 1 of points (N, d), N at least :data:`FEWEST`, by t-SNE; always the same."""
    from sklearn.manifold import TSNE

    near = min(30.0, (len(points) - 1) / 3)
    found = TSNE(perplexity=near, init="random", random_state=0).fit_transform(points.astype(np.float64))
    span = np.maximum(np.ptp(found, 0), 1e-12)
    return 2 * (found - found.min(0)) / span - 1
