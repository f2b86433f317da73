"""Small pictures that a page holds in itself."""

import base64
import io

import numpy as np


def png_address(pixels: np.ndarray, largest: int) -> str:
    """A PNG as a data address; ``pixels`` are uint8 (H, W) or (H, W, 3), shrunk to at most ``largest`` a side."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((largest, largest))
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
