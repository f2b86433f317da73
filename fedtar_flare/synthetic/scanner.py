"""Scanners of the synthetic cohort: what makes one site's images look different from another's."""

from dataclasses import dataclass


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
    smoothing, noise = KERNELS[kernel]
    matrix = Scanner.matrix
    pixel = round(view_mm / matrix, 4)
    spacing = (round(_COVERAGE_MM / slices, 4), pixel, pixel)
    return Scanner(slices, matrix, spacing, smoothing, noise, offset, contrast, kernel)


def site_scanner(style: int) -> Scanner:
    """The scanner of the sites with a reporting style (1, 2, ...): six different ones, then again from the first."""
    return scanner_of(*_SITES[(style - 1) % len(_SITES)])
