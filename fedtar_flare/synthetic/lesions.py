"""The canvas that a phantom is drawn on, and the findings drawn on it, in three sizes that differ visibly.

A drawing function takes ``at``, three numbers in [0, 1) that put the finding within its region, and a generator of the
patient's own, so that a finding keeps its shape from visit to visit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

FLUID, TISSUE, CONSOLIDATED, HOLE = 10.0, 48.0, 32.0, -995.0

EFFUSION_MM = ((25.0, 95.0), (46.0, 130.0), (74.0, 180.0))  # depth of the fluid at the base and its height, per size
CONSOLIDATION_MM = (22.0, 36.0, 52.0)  # radius, per size
NODULE_MM = (16.0, 24.0, 35.0)  # diameter, per size; the reports' styles that give millimetres give these
EMPHYSEMA = ((45, 11.5), (75, 14.0), (110, 17.5))  # number of holes per lung and their radius in mm, per size
ARCH_BELOW_APEX = 52.0  # the aortic arch lies this far below the apex of the lungs, mm
NODES = ((4, 12.5), (6, 16.0), (7, 20.0))  # number of enlarged lymph nodes and their radius in mm, per size
PNEUMOTHORAX = (0.78, 0.62, 0.46)  # width and depth of the collapsed lung relative to its own, per size
CAVITY_MM = (36.0, 50.0, 66.0)  # outer diameter, per size; the wall takes a fifth of it on either side
FIBROSIS_MM = (40.0, 70.0, 105.0)  # height of the network above the base of the lungs, per size
PERICARDIAL_MM = (12.0, 20.0, 30.0)  # depth of the fluid around the heart, per size; drawn with the heart


@dataclass
class Canvas:
    """A volume in the making: float32 HU (z, y, x), with coordinates in mm that broadcast to it."""

    hu: np.ndarray
    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    spacing: tuple[float, float, float]

    @classmethod
    def of(cls, counts: tuple[int, int, int], spacing: tuple[float, float, float], shift: np.ndarray) -> "Canvas":
        """An empty canvas (air) of so many voxels, spaced in mm (z, y, x), the patient moved by ``shift`` mm."""
        axes = []
        for number, step, offset in zip(counts, spacing, shift, strict=True):
            axes.append(((np.arange(number) - (number - 1) / 2) * step - offset).astype(np.float32))
        z, y, x = axes
        hu = np.full(counts, -1000, np.float32)
        return cls(hu, x[None, None, :], y[None, :, None], z[:, None, None], spacing)

    @property
    def pixel(self) -> float:
        """Size of a pixel in plane, mm: the width of a soft edge."""
        return self.spacing[1]

    def blend(self, mask: np.ndarray, value: float | np.ndarray) -> None:
        """Mix ``value`` in with weight ``mask`` in [0, 1]."""
        self.hu += mask * (value - self.hu)

    def oval(
        self, x: float | np.ndarray, y: float, a: float | np.ndarray, b: float | np.ndarray, power: float
    ) -> np.ndarray:
        """Soft mask of a (super)ellipse in plane with half axes a (x) and b (y); both may depend on z."""
        r = (np.abs((self.x - x) / a) ** power + np.abs((self.y - y) / b) ** power) ** (1 / power)
        return np.clip((1 - r) * np.minimum(a, b) / self.pixel + 0.5, 0, 1)

    def ball(
        self,
        center: tuple[float, float, float],
        radii: tuple[float, ...],
        value: float,
        within: np.ndarray | None = None,
        bumps: np.ndarray | None = None,
    ) -> None:
        """Blend an ellipsoid (half axes, mm) ``within`` a mask; ``bumps`` (n, 4), direction and height, roughen it."""
        box = []
        for axis, middle, radius in zip((self.z, self.y, self.x), center[::-1], radii[::-1], strict=True):
            line = axis.ravel()
            margin = radius * 1.4 + abs(line[1] - line[0])
            box.append(slice(*np.searchsorted(line, [middle - margin, middle + margin])))
        at = tuple(box)
        dx = (self.x[:, :, box[2]] - center[0]) / radii[0]
        dy = (self.y[:, box[1]] - center[1]) / radii[1]
        dz = (self.z[box[0]] - center[2]) / radii[2]
        r = np.sqrt(dx**2 + dy**2 + dz**2)
        for bx, by, bz, height in bumps if bumps is not None else ():
            r = r * (1 - height * np.clip(bx * dx + by * dy + bz * dz, -1, 1))
        mask = np.clip((1 - r) * min(radii) / self.pixel + 0.5, 0, 1)
        if within is not None:
            mask = mask * within[at]
        part = self.hu[at]
        part += mask * (value - part)

    def splat(
        self, x: np.ndarray, y: np.ndarray, z: np.ndarray, height: np.ndarray, within: np.ndarray, sign: float = 1
    ) -> None:
        """Raise (sign 1) or lower (sign -1) the voxels nearest to points by ``height`` HU where ``within`` is one."""
        index = []
        keep = np.ones(x.shape, bool)
        for axis, points in ((self.z, z), (self.y, y), (self.x, x)):
            line = axis.ravel()
            i = np.rint((points - line[0]) / (line[1] - line[0])).astype(int)
            keep &= (i >= 0) & (i < line.size)
            index.append(i)
        bump = np.zeros_like(self.hu)
        np.maximum.at(bump, tuple(i[keep] for i in index), height[keep].astype(np.float32))
        self.hu += sign * bump * within


@dataclass(frozen=True)
class Lung:
    """One lung: soft mask of the volume, sign of x, heights of base and apex, middle in x, half depth, in mm."""

    mask: np.ndarray
    sign: float
    base: float
    apex: float
    center_x: float
    depth: float


Position = tuple[float, float, float]
Lungs = Mapping[str, Lung]


def effusion(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """Fluid that layers at the back of a lying patient, deepest at the base, with a curved upper surface."""
    lung = lungs[side]
    depth, height = EFFUSION_MM[size - 1]
    taper = np.clip(1 - (canvas.z - lung.base) / (height * (0.94 + 0.12 * at[0])), 0, 1) ** 0.7
    bowl = 0.22 * np.abs(canvas.x - lung.center_x)  # rises at chest wall and mediastinum
    surface = lung.depth * 0.93 - depth * (0.94 + 0.12 * at[1]) * taper - bowl
    fluid = lung.mask * np.clip((canvas.y - surface) / canvas.pixel + 0.5, 0, 1) * (taper > 0)
    canvas.blend(fluid, FLUID)


def consolidation(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """Airless lung with an irregular border and dark air-filled bronchi in it, in the lower lobe."""
    lung = lungs[side]
    radius = CONSOLIDATION_MM[size - 1] * (0.96 + 0.08 * at[2])
    center = (lung.center_x + lung.sign * (at[0] * 20 + 4), 4 + 18 * at[1], lung.base + 52 + 10 * at[2])
    bumps = np.concatenate([rng.standard_normal((5, 3)), rng.uniform(0.06, 0.16, (5, 1))], axis=1)
    for direction in rng.standard_normal((12, 3)):  # patches around it
        x, y, z = radius * 1.08 * direction / np.linalg.norm(direction)
        patch = radius * float(rng.uniform(0.16, 0.3)) + 2
        canvas.ball((center[0] + x, center[1] + y, center[2] + z), (patch,) * 3, CONSOLIDATED - 150, lung.mask)
    canvas.ball(center, (radius, radius * 0.9, radius * 1.05), CONSOLIDATED, lung.mask, bumps)
    t = np.linspace(-0.8, 0.8, 30)
    for bronchus in rng.standard_normal((2 + size, 3)):
        x, y, z = radius * bronchus / np.linalg.norm(bronchus)
        dark = np.full(t.shape, 360.0)
        canvas.splat(center[0] + x * t, center[1] + y * t, center[2] + z * t, dark, lung.mask, sign=-1)


def nodule(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """A round solid nodule in the upper lobe; stretched along the body so that thick slices cannot miss it."""
    lung = lungs[side]
    radius = NODULE_MM[size - 1] / 2
    center = (lung.center_x + lung.sign * (20 * at[0] - 10), -32 + 22 * at[1], lung.apex - 52 - 10 * at[2])
    canvas.ball(center, (radius + 1, radius + 1, max(radius, 17.0)), TISSUE + 40, lung.mask)


def emphysema(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """Holes of air in both lungs, more of them towards the apex; the lungs are larger too (see the phantom)."""
    number, radius = EMPHYSEMA[size - 1]
    for lung in lungs.values():
        canvas.hu -= 28.0 * size * lung.mask
        reach = (lung.depth - 14) * np.sqrt(rng.random(EMPHYSEMA[-1][0]))
        turn = rng.uniform(-np.pi, np.pi, EMPHYSEMA[-1][0])
        height = lung.apex - 12 - (lung.apex - lung.base - 20) * rng.beta(1.1, 1.7, EMPHYSEMA[-1][0])
        for r, angle, z in list(zip(reach, turn, height, strict=True))[:number]:
            x = lung.center_x + 0.55 * r * np.cos(angle)
            canvas.ball((x, r * np.sin(angle), z), (radius, radius, radius * 1.1), HOLE, lung.mask)


def lymphadenopathy(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """Enlarged nodes in the fat around trachea and great vessels; large ones bulge into the lungs."""
    number, radius = NODES[size - 1]
    arch = lungs["right"].apex - ARCH_BELOW_APEX
    # beside and before the trachea, under the arch, under the fork, at both hila, behind the sternum
    stations = ((-19, 6, 10), (2, -32, 4), (17, -8, -14), (0, 22, -46), (-36, 6, -24), (38, 4, -30), (-4, -44, -18))
    jitter = rng.uniform(-2.5, 2.5, (len(stations), 3))
    for (x, y, z), move in list(zip(stations, jitter, strict=True))[:number]:
        canvas.ball((x + move[0], y + move[1], arch + z + move[2]), (radius, radius, radius * 1.25), TISSUE)


def pneumothorax(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """Air in front of and beside a lung that falls back to its hilum and turns denser; what is solid stays in sight."""
    lung, left = lungs[side], PNEUMOTHORAX[size - 1]
    half = abs(lung.center_x) - 26
    x, y = lung.center_x - lung.sign * half * (1 - left), lung.depth * (1 - left) * (0.7 + 0.2 * at[0])
    inside = canvas.oval(x, y, half * left * 1.06, lung.depth * left, 2.2)
    airy = lung.mask * np.clip((-450 - canvas.hu) / 150, 0, 1)
    canvas.hu += airy * inside * 150 * (1 / left - 1)
    canvas.blend(airy * (1 - inside), HOLE)


def cavity(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """A thick wall around air, at the back of one upper lobe; stretched along the body like a nodule."""
    lung = lungs["right" if at[0] < 0.5 else "left"]
    radius = CAVITY_MM[size - 1] / 2
    center = (lung.center_x + lung.sign * (6 * at[1] - 6), 26 + 10 * at[1], lung.apex - 56 - 8 * at[2])
    for share, hu in ((1.0, TISSUE), (0.6, HOLE)):
        canvas.ball(center, (radius * share, radius * share, max(radius, 24.0) * share), hu, lung.mask)


def fibrosis(canvas: Canvas, lungs: Lungs, side: str, size: int, at: Position, rng: np.random.Generator) -> None:
    """A honeycomb of thick septa around small holes of air, from the base of both lungs upwards."""
    turn = np.pi * (0.2 + 0.3 * at[0])
    u, v = canvas.x * np.cos(turn) + canvas.y * np.sin(turn), canvas.y * np.cos(turn) - canvas.x * np.sin(turn)
    u, v = u + 4 * np.sin(canvas.z / 17 + 6 * at[1]), v + 4 * np.cos(canvas.z / 13 + 6 * at[2])
    septa = np.clip(1.7 - 2.4 * np.abs(np.sin(np.pi * u / 21) * np.sin(np.pi * v / 21)), 0, 1)
    for lung in lungs.values():
        reach = np.clip((lung.base + 26 + FIBROSIS_MM[size - 1] - canvas.z) / 24, 0, 1)
        airy = lung.mask * np.clip((-300 - canvas.hu) / 200, 0, 1) * reach
        canvas.blend(airy * (0.25 + 0.6 * septa), np.where(septa > 0.35, -60.0, HOLE).astype(np.float32))


DRAW: dict[str, Callable[[Canvas, Lungs, str, int, Position, np.random.Generator], None]] = {
    draw.__name__: draw
    for draw in (effusion, consolidation, nodule, emphysema, lymphadenopathy, pneumothorax, cavity, fibrosis)
}
