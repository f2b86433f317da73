"""A small encoder of lossless JPEG (process 14, first-order prediction), as no installed library writes it."""

from __future__ import annotations

import struct

import numpy as np


def encode(values: np.ndarray, bits: int = 16) -> bytes:
    """The stream of unsigned values (rows, columns)."""
    rows, columns = values.shape
    stored = values.astype(np.int64)
    predicted = np.empty_like(stored)
    predicted[:, 1:] = stored[:, :-1]
    predicted[1:, 0] = stored[:-1, 0]
    predicted[0, 0] = 1 << (bits - 1)
    text = []
    for difference in ((stored - predicted + 32767) % 65536 - 32767).ravel().tolist():
        category = abs(difference).bit_length()
        text.append(format(category, "05b"))  # every category has a code of five bits
        if 0 < category < 16:
            text.append(format(difference if difference > 0 else difference + (1 << category) - 1, f"0{category}b"))
    joined = "".join(text)
    joined += "1" * (-len(joined) % 8)
    content = int(joined, 2).to_bytes(len(joined) // 8, "big").replace(b"\xff", b"\xff\0")
    frame = b"\xff\xc3" + struct.pack(">HBHHB", 11, bits, rows, columns, 1) + b"\1\x11\0"
    codes = bytes([0, 0, 0, 0, 17] + [0] * 11) + bytes(range(17))
    table = b"\xff\xc4" + struct.pack(">HB", 3 + len(codes), 0) + codes
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\1\0\1\0\0"
    return b"\xff\xd8" + frame + table + scan + content + b"\xff\xd9"
