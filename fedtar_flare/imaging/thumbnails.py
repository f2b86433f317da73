"""Small pictures of a page."""

import base64
import io

import numpy as np


def png(pixels: np.ndarray, largest: int) -> bytes:
    """Encode a picture, uint8 (H, W) or (H, W, 3), shrunk to at most ``largest`` pixels of a side."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((largest, largest))
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def png_address(pixels: np.ndarray, largest: int) -> str:
    """Encode a picture as :func:`png` does, as the address of an image element."""
    return "data:image/png;base64," + base64.b64encode(png(pixels, largest)).decode("ascii")
