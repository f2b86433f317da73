"""Mutated copies of images: each mutation is drawn from a generator, so that its number alone makes it again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Files = dict[str, bytes]
LONG = (b"OB", b"OW", b"OF", b"OD", b"OL", b"OV", b"SQ", b"UC", b"UN", b"UR", b"UT", b"SV", b"UV")
VRS = b"AE AS CS DA DS FD FL IS LO OB OW PN SH SL SQ SS ST TM UI UL UN US UT".split()
META = 0x0002FFFF


class Element(NamedTuple):
    """Where an element of little-endian DICOM lies in its file."""

    tag: int
    start: int
    vr: int | None  # place of the VR; None where it is implicit
    size: int  # place of the length
    value: int
    length: int


class Mutation(NamedTuple):
    """What was done: its kind, the field it touched (0 for none), and whether all files were changed alike."""

    kind: str
    tag: int
    all: bool
    text: str


def elements(content: bytes) -> list[Element]:
    """The elements up to the pixel data; none of a file that is deflated or big-endian."""
    known: list[Element] = []
    place, syntax = 132, b""
    while place + 8 <= len(content):
        group, number = struct.unpack_from("<HH", content, place)
        tag = group << 16 | number
        if tag > META and syntax not in SYNTAXES:
            break
        vr = None if tag > META and syntax == IMPLICIT else place + 4
        long = content[place + 4 : place + 6] in LONG
        size, value = (place + 8, place + 12) if vr and long else (place + (6 if vr else 4), place + 8)
        length = int.from_bytes(content[size:value], "little")
        known.append(Element(tag, place, vr, size, value, length))
        if tag == 0x00020010:
            syntax = content[value : value + length].rstrip(b"\0")
        if tag == PIXELS or length == UNDEFINED:
            break
        place = value + length
    return known


def pixel_place(content: bytes) -> int:
    """Where the pixel values begin, or what of a deflated file holds them."""
    known = elements(content)
    if known and known[-1].tag == PIXELS:
        return known[-1].value
    place = max(content.rfind(b"\xe0\x7f\x10\x00"), content.rfind(b"\x7f\xe0\x00\x10"))
    return min(place + 12, len(content) - 1) if place >= 0 else known[-1].value + known[-1].length


PIXELS = 0x7FE00010
UNDEFINED = 0xFFFFFFFF
IMPLICIT = b"1.2.840.10008.1.2"
SYNTAXES = {IMPLICIT, *(b"1.2.840.10008.1.2." + end for end in (b"1", b"5", b"4.50", b"4.70", b"4.80", b"4.90"))}


def _one(files: Files, rng: np.random.Generator) -> str:
    return sorted(files)[int(rng.integers(len(files)))]


def _flip(content: bytes, place: int, rng: np.random.Generator) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << int(rng.integers(8))]) + content[place + 1 :]


def _damaged(content: bytes, place: int, run: int, rng: np.random.Generator) -> tuple[bytes, ...]:
    """A bit flipped, bytes zeroed, lost or put in, or the file cut."""
    return (
        _flip(content, place, rng),
        content[:place] + bytes(min(run, len(content) - place)) + content[place + run :],
        content[:place] + content[place + run :],
        content[:place] + rng.bytes(run) + content[place:],
        content[:place],
    )


def _in_header(change: Callable[[bytes, Element, np.random.Generator], bytes], kind: str):
    """A mutation of one element before the pixel values, in one file or alike in all."""

    def mutate(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
        name, everywhere = _one(files, rng), bool(rng.integers(4) == 0)
        known = elements(files[name])
        if not known:
            return _bytes(files, rng)
        tag = known[int(rng.integers(len(known)))].tag
        seed = int(rng.integers(1 << 30))
        for each in files if everywhere else [name]:
            element = next((one for one in elements(files[each]) if one.tag == tag), None)
            if element is not None:
                files[each] = change(files[each], element, np.random.default_rng(seed))
        return files, Mutation(kind, tag, everywhere, f"{tag:08x} of {'all' if everywhere else name}")

    return mutate


def _bit(content: bytes, element: Element, rng: np.random.Generator) -> bytes:
    end = element.value + (0 if element.tag == PIXELS or element.length == UNDEFINED else element.length)
    return _flip(content, int(rng.integers(element.start, end)), rng)


def _vr(content: bytes, element: Element, rng: np.random.Generator) -> bytes:
    if element.vr is None:
        return _bit(content, element, rng)
    return content[: element.vr] + VRS[int(rng.integers(len(VRS)))] + content[element.vr + 2 :]


def _length(content: bytes, element: Element, rng: np.random.Generator) -> bytes:
    most = 1 << 8 * (element.value - element.size)
    lengths = (0, element.length // 4, element.length // 2, element.length - 2, element.length + 2, most - 1, most // 2)
    length = max(0, lengths[int(rng.integers(len(lengths)))]) % most
    return content[: element.size] + length.to_bytes(element.value - element.size, "little") + content[element.value :]


def _removed(content: bytes, element: Element, rng: np.random.Generator) -> bytes:
    end = len(content) if element.tag == PIXELS else element.value + element.length
    return content[: element.start] + content[end:]


def _number(content: bytes, element: Element, rng: np.random.Generator) -> bytes:
    """Another number of the same length, as a wrong writer would put there."""
    old = content[element.value : element.value + element.length]
    if element.tag == PIXELS:
        return _bit(content, element, rng)
    if element.length == 2:
        new = int(rng.choice([0, 1, 2, 8, 12, 15, 16, 31, 33, 64, 255, 65535])).to_bytes(2, "little")
    else:
        new = bytes(int(rng.integers(48, 58)) if 48 <= byte < 58 else byte for byte in old)
    return content[: element.value] + new + content[element.value + element.length :]


def _pixels(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """Bits flipped, bytes zeroed, lost or put in among the pixel values."""
    name = _one(files, rng)
    content = files[name]
    place, how = int(rng.integers(pixel_place(content), len(content))), int(rng.integers(4))
    run = int(rng.integers(1, 64))
    files[name] = _damaged(content, place, run, rng)[how]
    return files, Mutation("pixel stream", PIXELS, False, f"{name} at {place}, way {how}, {run} bytes")


def _bytes(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """A bit anywhere."""
    name = _one(files, rng)
    place = int(rng.integers(len(files[name])))
    tag = PIXELS if place >= pixel_place(files[name]) else 0
    files[name] = _flip(files[name], place, rng)
    return files, Mutation("any bit", tag, False, f"{name} at {place}")


def _cut(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """A file cut, emptied, gone, or with a block of zeros."""
    name, way = _one(files, rng), int(rng.integers(5))
    content = files[name]
    place = int(rng.integers(len(content)))
    end = pixel_place(content)
    within = int(rng.integers(end))
    ways = (content[:place], b"", bytes(place) + content[place:], None)
    ways += (content[:within] + bytes(min(64, end - within)) + content[within + 64 :],)
    files[name] = ways[way]
    if way == 3:
        del files[name]
    return files, Mutation("gone" if way == 3 else "cut", 0, False, f"{name} at {place}, way {way}")


def _doubled(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """A file twice: as it is, with another pixel, with another UID, or under another's name."""
    name, other, way = _one(files, rng), _one(files, rng), int(rng.integers(4))
    content = files[name]
    if way == 1:
        content = content[:-2] + bytes([content[-2] ^ 16]) + content[-1:]
    elif way == 2:
        uid = next((one for one in elements(content) if one.tag == 0x00080018), None)
        if uid is not None:
            content = content[: uid.value] + b"9" + content[uid.value + 1 :]
    files[other if way == 3 else f"copy-{name}"] = content
    return files, Mutation("double", PIXELS if way == 1 else 0, False, f"{name} over {other}, way {way}")


def _swapped(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """The positions of two files, or of all of them, in each other's place."""
    names = sorted(files)
    tags = [{one.tag: one for one in elements(files[name])} for name in names]
    if len(names) < 2 or any(0x00200032 not in known for known in tags):
        return _bytes(files, rng)
    order = np.arange(len(names))
    if rng.integers(2):
        i, j = rng.choice(len(names), 2, replace=False)
        order[[i, j]] = order[[j, i]]
    else:
        rng.shuffle(order)
    places = [(name, known[0x00200032]) for name, known in zip(names, tags, strict=True)]
    values = [files[name][at.size : at.value + at.length] for name, at in places]
    for i, (name, at) in enumerate(places):
        files[name] = files[name][: at.size] + values[order[i]] + files[name][at.value + at.length :]
    return files, Mutation("swap", 0x00200032, False, f"order {order.tolist()}")


KINDS = (
    _in_header(_bit, "header bit"),
    _in_header(_vr, "VR"),
    _in_header(_length, "length"),
    _in_header(_removed, "removed tag"),
    _in_header(_number, "number"),
    *(_pixels, _bytes, _cut, _doubled, _swapped),
)


def mutated(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """A copy of some DICOM files with one thing changed."""
    return KINDS[int(rng.integers(len(KINDS)))](dict(files), rng)


def raw(files: Files, rng: np.random.Generator) -> tuple[Files, Mutation]:
    """One file of any format (an archive, a picture, NIfTI) with bits flipped, bytes zeroed, lost, put in or cut."""
    (name,) = files
    content = files[name]
    near = (64, 400, len(content))[int(rng.integers(3))]  # headers are short
    place, run, way = int(rng.integers(min(near, len(content)))), int(rng.integers(1, 64)), int(rng.integers(5))
    done = Mutation("bytes", 0, False, f"at {place}, way {way}, {run} bytes")
    return {name: _damaged(content, place, run, rng)[way]}, done
