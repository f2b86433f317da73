"""Findings to a chest-CT volume: a schematic phantom in Hounsfield units, drawn with numpy in some ten milliseconds.

Axes are (z, y, x): z rises to the head, y to the back, x to the patient's left; mm count from the middle. Anatomy is
the patient's and depends on neither age nor sex; breath, position on the table and noise are the visit's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedtar_flare.synthetic import lesions
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, kind_of, side_of

AIR, FAT, MUSCLE, LIVER, SPLEEN, MARROW, CORTEX = -1000.0, -105.0, 45.0, 62.0, 52.0, 220.0, 620.0
LUNG = -818.0
SIDES = {"right": -1.0, "left": 1.0}
HEART_SCALE = (1.0, 1.22, 1.44, 1.7)
"""Width of the heart at size 0 (normal) to 3, relative to the patient's own normal heart."""


@dataclass(frozen=True)
class Scanner:
    """Geometry and image character of one scanner."""

    slices: int = 24
    matrix: int = 80  # rows and columns of a slice
    spacing_mm: tuple[float, float, float] = (10.5, 4.5, 4.5)  # z, y, x
    smoothing: float = 0.1  # side weight of a 1-2-1 kind of kernel in plane, 0 (sharp) to 0.3 (soft)
    noise_hu: float = 20.0  # standard deviation
    offset_hu: float = 0.0  # calibration error of every voxel
    contrast_hu: float = 140.0  # attenuation of blood
    kernel: str = "STANDARD"  # its name in DICOM


# (smoothing, noise): sharp and noisy to soft and smooth
KERNELS = {"SHARP": (0.0, 34.0), "MEDIUM": (0.06, 26.0), "STANDARD": (0.12, 20.0), "SOFT": (0.2, 13.0)}
_COVERAGE_MM = 252.0
# field of view in mm, slices, kernel, offset, contrast; one line per reporting style
_SITES: tuple[tuple[float, int, str, float, float], ...] = (
    (360.0, 24, "STANDARD", 0.0, 140.0),
    (380.0, 22, "SHARP", 8.0, 115.0),
    (345.0, 25, "SOFT", -10.0, 160.0),
    (370.0, 26, "MEDIUM", 4.0, 125.0),
    (352.0, 23, "SHARP", -6.0, 150.0),
    (388.0, 24, "SOFT", 12.0, 135.0),
)


def scanner_of(view_mm: float, slices: int, kernel: str, offset: float, contrast: float) -> Scanner:
    """The scanner with this field of view, whose kernel is one of :data:`KERNELS`; offset and contrast in HU."""
    pixel = round(view_mm / Scanner.matrix, 4)
    spacing = (round(_COVERAGE_MM / slices, 4), pixel, pixel)
    return Scanner(slices, Scanner.matrix, spacing, *KERNELS[kernel], offset, contrast, kernel)


def site_scanner(style: int) -> Scanner:
    """The scanner of the sites with a reporting style (1, 2, ...): six different ones, then again from the first."""
    return scanner_of(*_SITES[(style - 1) % len(_SITES)])


@dataclass(frozen=True)
class Anatomy:
    """A patient's anatomy, the same at every visit; lengths in mm."""

    chest: tuple[float, float]  # half width and half depth of the cavity
    wall: tuple[float, float]  # thickness of muscle and ribs, and of the fat under the skin
    heart: tuple[float, float, float]  # half width, half depth and half height
    diaphragm: tuple[float, float]  # height of the right and the left dome's top
    apex: float  # height of the lungs' tips
    vessels: int  # seed of the vessel tree
    positions: Mapping[str, tuple[float, float, float]]  # per known finding, in [0, 1): where in its region


def draw_anatomy(rng: np.random.Generator) -> Anatomy:
    """A patient's anatomy; the same numbers for the same generator state."""
    width = float(rng.uniform(116, 130))
    scale = width * float(rng.uniform(0.97, 1.03))
    right = float(rng.uniform(-60, -50))
    return Anatomy(
        chest=(width, float(rng.uniform(80, 91))),
        wall=(float(rng.uniform(13, 17)), float(rng.uniform(6, 15))),
        heart=(0.37 * scale, 0.32 * scale, 0.40 * scale),
        diaphragm=(right, right - float(rng.uniform(4, 14))),
        apex=float(rng.uniform(98, 110)),
        vessels=int(rng.integers(2**31)),
        positions={name: (float(rng.random()), float(rng.random()), float(rng.random())) for name in KNOWN_FINDINGS},
    )


def render(anatomy: Anatomy, findings: Mapping[str, int], scanner: Scanner, rng: np.random.Generator) -> np.ndarray:
    """Draw one visit: int16 HU (slices, matrix, matrix); ``findings`` by id are of size 1 (small) to 3 (large)."""
    shift = rng.uniform([-3, -6, -6], [3, 6, 6])
    breath = float(rng.uniform(-4, 4)) - 8.0 * findings.get("emphysema", 0)
    canvas = lesions.Canvas.of((scanner.slices, scanner.matrix, scanner.matrix), scanner.spacing_mm, shift)
    lungs = _draw_chest(canvas, anatomy, breath, scanner.contrast_hu, findings)
    for side, lung in lungs.items():
        _draw_vessels(canvas, anatomy, side, lung)
    for name in FINDINGS:  # in a fixed order: fluid first, what lies in it or above it after
        if name in findings and (draw := lesions.DRAW.get(kind_of(name))):
            shape = np.random.default_rng([anatomy.vessels, FINDINGS.index(name)])
            position = anatomy.positions.get(name) or tuple(shape.random(3).tolist())
            draw(canvas, lungs, side_of(name), findings[name], position, shape)
    hu = _smooth(canvas.hu, scanner.smoothing)
    hu += rng.standard_normal(hu.shape, dtype=np.float32) * scanner.noise_hu + scanner.offset_hu
    return np.clip(np.rint(hu), -1024, 3071).astype(np.int16)


def _draw_chest(
    canvas: lesions.Canvas, anatomy: Anatomy, breath: float, blood: float, findings: Mapping[str, int]
) -> dict[str, lesions.Lung]:
    """Body, bones, lungs and mediastinum with the findings of the heart; returns the lungs."""
    x, y, z = canvas.x, canvas.y, canvas.z
    width, depth = anatomy.chest
    muscle, fat = anatomy.wall
    up = np.clip(z / anatomy.apex, 0, 1)
    narrow = np.sqrt(np.clip(1 - up**3.2, 0.03, 1)).astype(np.float32)  # the cavity closes towards the apex
    shoulder = 1 + 0.1 * np.clip(z / 126, 0, 1) ** 2
    angle = np.arctan2(y, x * depth / width)

    # skin, fat, muscle
    canvas.blend(canvas.oval(0, 2, (width + muscle + fat) * shoulder, depth + muscle + fat, 2.4), FAT)
    canvas.blend(canvas.oval(0, 2, (width + muscle) * shoulder, depth + muscle, 2.3), MUSCLE)
    # ribs: slanting rings around the cavity
    ring = np.sqrt((x / (width + 5)) ** 2 + (y / (depth + 5)) ** 2) / (0.35 + 0.65 * narrow)
    rib = np.clip((6.0 - np.abs(ring - 1) * depth) / canvas.pixel, 0, 1)
    rib = rib * np.clip(np.cos(2 * np.pi * (z - 26 * np.sin(angle)) / 42) * 1.6 + 0.35, 0, 1) * (z < anatomy.apex)
    canvas.blend(rib, 380.0)
    # cavity: mediastinal fat above, abdominal organs below the domes
    cavity = canvas.oval(0, 0, width * narrow, depth * narrow, 2.2)
    canvas.blend(cavity, FAT)
    lungs: dict[str, lesions.Lung] = {}
    for side, sign in SIDES.items():
        dome = anatomy.diaphragm[0 if side == "right" else 1] + breath
        top = dome - 58 * np.clip(((x - sign * 55) / 78) ** 2 + ((y + 8) / 92) ** 2, 0, 1) ** 1.4
        half = np.clip(sign * x / canvas.pixel, 0, 1)
        organ = cavity * half * np.clip((top - z) / 8 + 0.5, 0, 1)
        canvas.blend(organ, LIVER if side == "right" else SPLEEN)
        medial = (26 + 6 * np.abs(y) / depth) * (0.55 + 0.45 * narrow)
        inside = cavity * np.clip((sign * x - medial) / canvas.pixel + 0.5, 0, 1) * np.clip((z - top) / 8 + 0.5, 0, 1)
        lungs[side] = lesions.Lung(
            mask=inside, sign=sign, base=dome - 30, apex=anatomy.apex, center_x=sign * (26 + width) / 2, depth=depth
        )
        canvas.blend(inside, LUNG + 45 * y / depth)
    _draw_mediastinum(canvas, anatomy, breath, blood, findings)
    airy = np.clip((-300 - canvas.hu) / 400, 0, 1)  # heart and vessels cover part of what was lung
    lungs = {side: replace(lung, mask=lung.mask * airy) for side, lung in lungs.items()}
    # spine over everything, then sternum
    disc = 0.5 + 0.5 * np.cos(2 * np.pi * z / 24)
    canvas.blend(canvas.oval(0, depth - 6, 21, 17, 2.2), CORTEX - 160 * disc)
    canvas.blend(canvas.oval(0, depth - 6, 15, 12, 2.2), MARROW - 90 * disc)
    canvas.blend(canvas.oval(0, depth + 14, 8, 8, 2), 20.0)
    canvas.blend(canvas.oval(0, depth + 26, 5, 11, 2), CORTEX * 0.7)
    canvas.blend(canvas.oval(0, -depth - 4, 18, 6, 2) * (z > -40), 420.0)
    return lungs


def _draw_mediastinum(
    canvas: lesions.Canvas, anatomy: Anatomy, breath: float, blood: float, findings: Mapping[str, int]
) -> None:
    depth = anatomy.chest[1]
    a, b, c = anatomy.heart
    scale = HEART_SCALE[findings.get("cardiomegaly", 0)]
    growth = scale - 1
    center = (8 + a * (0.3 + 0.5 * growth), -depth * 0.28, anatomy.diaphragm[0] + breath + 24 + 10 * growth)
    radii = (a * scale, b * (1 + 0.55 * growth), c * (1 + 0.45 * growth))
    if fluid := findings.get("pericardial_effusion", 0):
        depth_mm = lesions.PERICARDIAL_MM[fluid - 1]
        canvas.ball(center, tuple(radius + depth_mm for radius in radii), lesions.FLUID)
    canvas.ball(center, radii, MUSCLE + 10)
    canvas.ball(center, tuple(radius * 0.8 for radius in radii), blood)
    z = canvas.z
    arch = anatomy.apex - lesions.ARCH_BELOW_APEX
    canvas.blend(canvas.oval(15, depth - 31, 11, 11, 2) * (z < arch), blood)  # descending aorta
    canvas.blend(canvas.oval(-2, -depth * 0.3, 13, 13, 2) * ((z < arch) & (z > center[2])), blood)  # ascending aorta
    canvas.ball((6, depth * 0.22, arch + 4), (15, depth * 0.44, 13), blood)  # arch
    canvas.blend(canvas.oval(-19, -depth * 0.12, 8, 8, 2) * ((z > center[2]) & (z < arch + 30)), blood)  # vena cava
    canvas.ball((8, -2, arch - 32), (40, 11, 13), blood)  # pulmonary arteries
    canvas.blend(canvas.oval(6, depth - 36, 7, 6, 2), MUSCLE - 10)  # oesophagus
    fork = arch - 22
    canvas.blend(canvas.oval(0, 14, 9, 8, 2) * (z > fork), AIR + 20)  # trachea
    for sign in SIDES.values():  # main bronchi
        along = np.clip((fork - z) / 30, 0, 1)
        canvas.blend(canvas.oval(sign * (7 + 24 * along), 14, 7, 6, 2) * ((z <= fork) & (z > fork - 30)), AIR + 20)


def _draw_vessels(canvas: lesions.Canvas, anatomy: Anatomy, side: str, lung: lesions.Lung) -> None:
    """Branches from the hilum outwards, brighter near it."""
    rng = np.random.default_rng([anatomy.vessels, len(KNOWN_FINDINGS), side == "left"])
    branches, points = 34, 36
    t = np.linspace(0.05, 1, points)[:, None]
    height = rng.uniform(lung.base - 10, lung.apex - 12, branches)
    turn = rng.uniform(-1.35, 1.35, branches)
    reach = rng.uniform(0.75, 0.97, branches)
    end_x = lung.sign * (24 + (anatomy.chest[0] - 22) * reach * np.cos(turn))
    end_y = (lung.depth - 8) * reach * np.sin(turn)
    bend = rng.uniform(-14, 14, (2, 1, branches)) * np.sin(np.pi * t)
    path_x = lung.sign * 24 * (1 - t) + end_x * t + bend[0]
    path_y = 4 * (1 - t) + end_y * t + bend[1]
    path_z = 12 * (1 - t) + height * t**0.8
    bright = np.broadcast_to(430 * (1 - t) ** 1.2 + 90, path_x.shape)
    canvas.splat(path_x, path_y, path_z, bright, lung.mask)


def _smooth(hu: np.ndarray, weight: float) -> np.ndarray:
    """In-plane kernel (weight, 1 - 2 weight, weight) along y and x."""
    for axis in (1, 2):
        neighbours = np.roll(hu, 1, axis)
        neighbours += np.roll(hu, -1, axis)
        hu = (1 - 2 * weight) * hu + weight * neighbours
    return hu
