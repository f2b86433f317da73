"""A site's own page of its patients' phi: t-SNE, by age and by sex (FedTAR, Fig. 3). It stays at the site."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.data.cohort import Sample
from fedtar_flare.reporting.groups import AGES, age_of, sex_of
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.tsne import scatter, tsne

PHI_PAGE = "phi.html"
MOST = 500
"""Most patients that are drawn: t-SNE of more takes longer than a second or two."""


def write_phi_page(folder: Path, site: str, round_: int, samples: Sequence[Sample], phi: np.ndarray) -> Path:
    """Write ``phi.html``, readable by its owner alone: a point for each of N patients by ``phi`` (N, d)."""
    ages, sexes = [age_of(sample) for sample in samples], [sex_of(sample) for sample in samples]
    at, figures = tsne(phi).tolist(), []
    for title, kinds, of in (("By age, years", [name for *_, name in AGES], ages), ("By sex", ["women", "men"], sexes)):
        colours = {**dict(zip(kinds, range(6), strict=False)), "unknown": 6}
        points = [(x, y, kind) for (x, y), kind in zip(at, of, strict=True)]
        groups = {kind: (i, [one for one in points if one[2] == kind]) for kind, i in colours.items()}
        figures.append(scatter(title, groups).figure())
    text = render("phi_page.html", site=site, round=round_, n=len(phi), figures=figures, kind="")
    return write_text(folder / PHI_PAGE, text, PRIVATE)
