"""Data and scores: a CT to model input beside MONAI's transforms; scoring reports beside pycocoevalcap."""

import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.imaging.pipeline import Size
from fedtar_flare.imaging.transforms import preparation
from fedtar_flare.metrics.language import clean, language_scores
from fedtar_flare.synthetic.dicom_writer import write_ct_series
from tests.benchmarks.harness import Absent, comparison
from tools.corpus import text_corpus

Cases = tuple[Callable[[], Any], Callable[[], Any]]
REPORTS = 5000


def write_study(folder: Path, quick: bool) -> Path:
    """A round body with two lungs and noise, uncompressed."""
    slices, size = (12, 64) if quick else (300, 512)
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    plane = np.where((x / 0.9) ** 2 + (y / 0.7) ** 2 < 1, 40, -1000)
    lungs = np.where(((abs(x) - 0.4) / 0.3) ** 2 + (y / 0.45) ** 2 < 1, -850, plane)
    noise = np.random.default_rng(0).integers(-20, 20, (slices, size, size))
    hu = np.stack([lungs if 0.13 * slices < z < 0.87 * slices else plane for z in range(slices)]) + noise
    write_ct_series(folder, hu.clip(-1024), (1.0, 0.7, 0.7), patient_id="p", study_datetime=datetime(2020, 1, 1))
    return folder


@comparison("model-input", "MONAI's chain with Spacingd", ("at least", 20.0))
def model_input(quick: bool, folder: Path) -> Cases:
    """DICOM folder of 512 x 512 x 300 to model input; MONAI's slices are then still to be chosen."""
    from monai.transforms import Compose, LoadImaged, Orientationd, ScaleIntensityRanged, Spacingd

    study = {"image": str(write_study(folder / "study", quick))}
    chain = Compose(
        [
            LoadImaged("image", ensure_channel_first=True, reader="PydicomReader"),
            Orientationd("image", "RAS", labels=None),
            Spacingd("image", (0.75, 0.75, 1.5)),
            ScaleIntensityRanged("image", -1000, 1000, -1, 1, clip=True),
        ]
    )
    ours = preparation("ct", Size(224, 24))
    return lambda: ours(dict(study)), lambda: chain(dict(study))


def _reports(count: int) -> tuple[list[str], list[str]]:
    """References of the warm start's words, and as generated ones the same with a tenth of the words changed."""
    draw = random.Random(0)
    references = text_corpus(count, 0)
    words = sorted({word for text in references for word in text.split()})
    return references, [
        " ".join(draw.choice(words) if draw.random() < 0.1 else word for word in text.split()) for text in references
    ]


@comparison("scores", "pycocoevalcap", ("at least", 3.0), note="ours cleans the texts too", warm=0)
def scores(quick: bool, folder: Path) -> Cases:
    """BLEU-1 to 4, ROUGE-L and CIDEr of 5,000 reports."""
    try:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
    except ImportError:
        raise Absent("pycocoevalcap is not installed") from None
    texts = _reports(20 if quick else REPORTS)
    truth, said = ({i: [clean(text)] for i, text in enumerate(side)} for side in texts)

    def theirs() -> list[float]:
        bleu = Bleu(4).compute_score(truth, said, verbose=0)[0]
        return [*bleu, Rouge().compute_score(truth, said)[0], Cider().compute_score(truth, said)[0]]

    def ours() -> list[float]:
        return list(language_scores(*texts).values())

    np.testing.assert_allclose(ours(), theirs(), rtol=1e-9)
    return ours, theirs
