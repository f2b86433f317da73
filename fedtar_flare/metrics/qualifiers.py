"""Which finding of a sentence a word of side, degree or change belongs to."""

from bisect import bisect_left
from collections.abc import Sequence

from fedtar_flare.metrics.labeler import Mention
from fedtar_flare.metrics.sentences import Match, Tag

_DIVIDERS = frozenset(
    [",", "and", "but", "while", "whereas", "however", "although", "though", "with", "plus", "(", ")"]
)


def qualifiers(
    words: Sequence[str], mentions: Sequence[Mention], matches: Sequence[Match[Tag]], *, shared: bool = False
) -> list[list[Match[Tag]]]:
    """Of each of a sentence's ``mentions`` those ``matches`` that qualify it; all are in order.

    Commas, brackets and conjunctions divide a sentence into pieces, "and" only between two findings. A finding has the
    matches of its own piece, of several findings there each the nearest one. Else it has those of the next piece if
    that names no finding ("effusion, unchanged"); else of a piece before, whose match stands before a colon ("right
    lung: consolidation, nodule") or, if ``shared``, before its findings ("increased effusion and atelectasis"), or that
    names none; else of a piece behind, whose match comes last ("effusion and consolidation on the right").
    """
    numbers = _pieces(words, {mention.start for mention in mentions})
    by_piece: dict[int, list[Match[Tag]]] = {}
    for match in matches:
        by_piece.setdefault(numbers[match.start], []).append(match)
    spans: dict[int, list[tuple[int, int]]] = {}  # words of the findings of a piece; two classes may share them
    for mention in mentions:
        of_piece = spans.setdefault(numbers[mention.start], [])
        if not of_piece or mention.start >= of_piece[-1][1]:
            of_piece.append((mention.start, mention.end))
    order, found = sorted(by_piece), []
    colon = words.index(":") if ":" in words else -1
    for mention in mentions:
        own = numbers[mention.start]
        place = bisect_left(order, own)
        before, after = (order[i] if 0 <= i < len(order) else -1 for i in (place - 1, place))
        chosen: list[Match[Tag]] = []
        if own in by_piece:
            chosen = by_piece[own]
            chosen = chosen if len(spans[own]) == 1 else [nearest(chosen, mention)]
        elif after == own + 1 and after not in spans:
            chosen = by_piece[after]
        elif before >= 0 and before not in spans:
            chosen = by_piece[before]
        elif before >= 0 and by_piece[before][-1].end <= (spans[before][0][0] if shared else colon):
            chosen = by_piece[before][-1:]
        elif after >= 0 and (after not in spans or by_piece[after][0].start >= spans[after][-1][1]):
            chosen = by_piece[after]
        found.append(chosen)
    return found


def nearest(matches: Sequence[Match[Tag]], mention: Mention) -> Match[Tag]:
    """The one nearest to the mention; of two as near, the one before."""
    i = bisect_left(matches, mention.start, key=lambda match: match.start)
    near = matches[max(0, i - 1) : i + 1]
    return min(near, key=lambda match: max(match.start - mention.end, mention.start - match.end))


def _pieces(words: Sequence[str], findings: set[int]) -> list[int]:
    """Of each word the number of its piece; ``findings`` begin at these words."""
    starts = [0] + [i for i, word in enumerate(words) if i and word in _DIVIDERS and words[i - 1] not in _DIVIDERS]
    numbers: list[int] = []
    named = True
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(words)], strict=True)):
        names = not findings.isdisjoint(range(start, end))
        goes_on = words[start] == "and" and numbers and not (named and names)
        numbers += [numbers[-1] if goes_on else number] * (end - start)
        named = names or (bool(goes_on) and named)
    return numbers
