"""A labeler and two scores of another package: see 'A score of one's own' in docs/reference/metrics.md."""

from fedtar_flare.metrics.labels import Labeler
from fedtar_flare.metrics.score import Score


def labels(text):
    words = text.lower().replace(".", " ").split()
    return {name: "positive" for name in ("pacemaker", "port", "tube") if name in words}


LABELER = Labeler("devices", ("pacemaker", "port", "tube"), labels)


def overlap(reference, draft):
    """Share of the reference's words that the draft has."""
    words = set(reference.lower().split())
    return len(words & set(draft.lower().split())) / len(words) if words else None


OVERLAP = Score("word_overlap", "words in common", pair=overlap, unit="% of words")


DEVICES = Score("devices_f1", "devices F1", needs="devices")
