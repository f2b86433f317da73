"""Small pictures that are embedded in a page."""

import base64
import io

import numpy as np


def png_address(pixels: np.ndarray, largest: int) -> str:
    """Encode a picture, uint8 (H, W) or (H, W, 3), as the address of an image element."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((largest, largest))
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
