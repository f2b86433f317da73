"""What is denied and what is doubted in a sentence: cues and their reach, after NegEx (Chapman et al., 2001)."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from fedtar_flare.metrics.sentences import Match, Phrasebook, listed


class Cue(Enum):
    """What a phrase does to the words around it."""

    DENIES_AFTER = 1
    DENIES_BEFORE = 2
    DOUBTS_AFTER = 3
    DOUBTS_BEFORE = 4
    DOUBTS_BOTH = 5
    ENDS = 6  # a clause ends here: nothing reaches over it
    ENDS_DENIAL = 7  # only a denial ends here: what is likely due to something is likely due to it
    DOUBTS_ANEW = 8  # a clause ends here, and what follows is doubted
    NOTHING = 9  # looks like a denial and is none


_OBSERVED = (
    "observed|detected|seen|identified|noted|found|present|visualized|visualised|appreciated|demonstrated|evident"
)
_OBSERVED += "|distinguished|monitored|encountered|apparent|visible|shown|followed|selected|watched|traced|suggested"
_OBSERVED += "|included|developed|occurred|recorded|described|determined|available|viewed|measured"
_BE = "is|are|was|were|be|been"

_CUES = {
    Cue.DENIES_AFTER: f"""
        no, not, without, none of, neither, nor, never, denies, denied, absence of, lack of, lacks, free of,
        free from, clear of, negative for, devoid of, no evidence of, no sign|signs of, no longer, rather than,
        resolution of, clearance of, clearing of, interval removal of, removal of, cleared of,
        excludes|excluding, rules out, fails|failed to show|reveal|demonstrate, can not see,
        {_BE} not, did|does|do not show|reveal|demonstrate|have, status post removal of, aside from, apart from,
        instead of, nothing to suggest, no findings of|for, insufficient for""",
    Cue.DENIES_BEFORE: f"""
        not {_OBSERVED}, {_BE} not {_OBSERVED}, has|have not been {_OBSERVED}, {_BE} _ not {_OBSERVED},
        not _ {_OBSERVED}, could|can not be {_OBSERVED}, cannot be {_OBSERVED}, {_BE} absent, absent, : none, : no,
        : absent, : negative, none {_OBSERVED}, no longer {_OBSERVED}, {_BE} no longer {_OBSERVED}, has|have resolved,
        has|have completely|fully|now|since|essentially|nearly|largely|almost resolved, completely|fully|now resolved,
        has|have nearly|almost|now completely|fully resolved, resolved, {_BE} resolved, has|have disappeared|cleared,
        {_BE} gone, disappeared, {_BE} ruled out, ruled out, {_BE} excluded, {_BE} negative, {_BE} unlikely, unlikely,
        has|have been removed, {_BE} removed, removed, removal, {_BE} not significant, {_BE} nil, nil,
        {_BE} not evident, {_BE} not included, not include*""",
    Cue.DOUBTS_AFTER: """
        may, might, could, can, possible, possibly, probable, probably, likely, presumed, presumably, perhaps, maybe,
        potential, potentially, question of, question, questionable, query, suspicious for, suspicion of|for, suspected,
        suspect, suspicious of, concern for, concerning for, concerns for, worrisome for, suggest, suggests,
        suggesting, suggestive of, suggested, equivocal, indeterminate for, cannot exclude, can not exclude,
        could not exclude, cannot rule out, can not rule out, not exclude, does not exclude, do not exclude,
        without excluding, not excluding, to exclude, to rule out, rule out, r o, evaluate for, assess for,
        appears to be, appear to be, seems to be, differential, vague, borderline, may not, might not, more likely,
        less likely, not necessarily, uncertain, if clinical concern for, raises|raise|raising the possibility of,
        correlate _ for, correlation _ for, correlate clinically for, difficult|hard to exclude,
        cannot completely|entirely exclude, can not completely|entirely exclude, considerations include,
        differential diagnosis|considerations|includes""",
    Cue.DOUBTS_BEFORE: """
        cannot be excluded, can not be excluded, could not be excluded, not excluded, is|are not excluded,
        not be excluded, cannot be ruled out, can not be ruled out, not ruled out, is|are not ruled out,
        not be ruled out, not be entirely|completely excluded, cannot be entirely|completely excluded,
        cannot entirely|completely be excluded, is|are|remains possible, remain|remains a|in possibility,
        is a possibility, is|are|was|were possible|probable|likely|suspected|questionable|questioned|considered,
        possible, is|are not entirely|completely excluded, in the differential,
        in the differential diagnosis, is|are in the differential, is|are in the differential diagnosis,
        is|are difficult to exclude, hard to exclude,
        difficult to exclude, should be considered, must be considered, may be considered, could be considered,
        could be present, may be present, may be considered, is|are equivocal, suspected, if any|present,
        is|are _ if any|present, is|are less likely, would|may be difficult to exclude, ?""",
    Cue.DOUBTS_BOTH: "versus, vs, and or, or possibly, or less likely, or even",
    Cue.ENDS: """
        but, however, although, though, except, except for, while, whereas, yet, otherwise, nevertheless, nonetheless,
        still, because, since, besides, with the exception of, other than, and there, there is|are|was|were,
        and the, and is, and are, and has, and a, and an, in addition, when, where, if, despite, even though,
        instead""",
    Cue.ENDS_DENIAL: "secondary to, due to, related to, caused by, after, following, status post",
    Cue.DOUBTS_ANEW: "which|that may|might|could, which|that is|are likely|probably|possibly|suspicious",
    Cue.NOTHING: """
        no change, no interval change, no significant change, no significant interval change, no appreciable change,
        no substantial change, no definite change, no new change, no relevant change, no obvious change,
        no other change, no major change, no short|short term change, no marked change, no overall change,
        no difference, no significant difference, no interval difference, without change, without interval change,
        without significant change, without significant interval change, without difference, not changed,
        not significantly changed, not substantially changed, not appreciably changed, has|have not changed,
        has|have not significantly|substantially|appreciably changed, is|are not changed, not clearly changed,
        no increase, no interval increase, no significant increase, no decrease, no interval decrease,
        no significant decrease, no improvement, no interval improvement, no significant improvement,
        no worsening, no interval worsening, no enlargement of the known, no progression, no interval progression,
        no regression, no resolution, has|have not increased, has|have not decreased, has|have not improved,
        has|have not resolved, has|have not worsened, has|have not cleared, not increased, not decreased, not improved,
        not resolved, not yet resolved, not cleared, not completely resolved, has not completely|fully resolved,
        have not completely|fully resolved, incompletely resolved, partially resolved, not only, not just, no doubt,
        not well seen|seen|evaluated|visualized|assessed|delineated, not removed, has not been removed, no mistake,
        which|that was|were observed|seen|detected|noted|present in the previous|prior examination|study|ct|radiograph,
        which|that was|were previously observed|seen|noted|present, previously observed|seen|noted|described,
        without removal, can be seen, can be observed, could be seen, as far as can be observed|seen, may be seen,
        not the only, as can be seen, no comparison, no prior, no previous, not optimally _ evaluated, removed and,
        could not be evaluated|assessed, cannot be evaluated|assessed, can not be evaluated|assessed, not evaluated,
        not be evaluated optimally, could not be evaluated optimally, no doubt, negative pressure,
        not fully evaluated""",
}
_BOOK: Phrasebook[Cue] = Phrasebook((phrase, cue) for cue, table in _CUES.items() for phrase in listed(table))

_VERBS = frozenset(
    ["is", "are", "was", "were", "has", "have", "had", "shows", "show", "remains", "remain", "demonstrates", "there"]
)
_PREDICATES = _VERBS | frozenset(_OBSERVED.split("|"))
# after a comma these begin a statement of their own: "no pneumothorax, small effusion"
_STATES = frozenset(
    listed("""
        small, mild, mildly, moderate, moderately, large, minimal, minimally, slight, slightly, severe,
        severely, marked, markedly, stable, unchanged, persistent, new, increased, increasing, decreased,
        decreasing, worsening, improved, improving, there, the, a, an, bilateral, right, left, known, again,
        status, post, tiny, trace, extensive, diffuse, residual, interval""")
)
_BEHIND = frozenset(
    listed("in, on, at, within, along, to, by, throughout, there, this, or, nor, with, for, from, over")
)
_BEHIND |= {",", "and", ":", "(", ")", "?"}
"""What may stand behind a predicate; behind an adjective stands a noun."""
_ALTERNATIVES = frozenset({"or", "nor", "and/or"})


class Scopes(NamedTuple):
    """Per word of a sentence, whether it is denied or doubted by what stands before it, or after it."""

    denied_from_left: list[bool]
    denied_from_right: list[bool]
    doubted_from_left: list[bool]
    doubted_from_right: list[bool]

    def denied(self, start: int, end: int) -> bool:
        """A denial reaches the phrase ``words[start:end]``; a cue within it counts."""
        return self.denied_from_left[end - 1] or self.denied_from_right[start]

    def doubted(self, start: int, end: int) -> bool:
        return self.doubted_from_left[end - 1] or self.doubted_from_right[start]


def scopes(words: Sequence[str]) -> Scopes:
    """Reach of every cue in a sentence, in one pass to the right and one to the left.

    To the right, a cue reaches to the end of its clause: a conjunction such as *but*, *and* after the predicate, or a
    comma after it or before a new statement ("no pneumothorax, small effusion") unless an *or* still follows ("no
    edema, large effusion or pneumothorax"). *Seen* and the like are predicates where no noun follows ("no visible
    pneumothorax, effusion, or edema"). To the left, it reaches to the predicate or the clause before its own.
    """
    cues = _BOOK.cover(words)
    denied, doubted = _to_the_right(words, cues)
    denied_back, doubted_back = _to_the_left(words, cues)
    return Scopes(denied, denied_back, doubted, doubted_back)


def _to_the_right(words: Sequence[str], cues: Sequence[Match[Cue]]) -> tuple[list[bool], list[bool]]:
    starting = {cue.start: cue for cue in cues}
    alternative = _alternative_ahead(words, starting)
    denied, doubted = [False] * len(words), [False] * len(words)
    denying = doubting = predicate = False
    inside = 0  # end of the cue that is being passed
    for i, word in enumerate(words):
        cue = starting.get(i)
        if cue:
            inside = cue.end
            if cue.tag is Cue.ENDS:
                denying = doubting = False
            elif cue.tag is Cue.ENDS_DENIAL:
                denying = False
            elif cue.tag is Cue.DENIES_AFTER or (cue.tag is Cue.DENIES_BEFORE and not i):  # "resolved effusion"
                denying, predicate = True, False
            elif cue.tag in (Cue.DOUBTS_AFTER, Cue.DOUBTS_BOTH):
                doubting, predicate = True, False
            elif cue.tag is Cue.DOUBTS_ANEW:
                denying, doubting, predicate = False, True, False
        elif i >= inside:
            if word in (",", "and"):
                following = words[i + 1] if i + 1 < len(words) else ""
                ends = predicate or (word == "," and following in _STATES)
                if ends and not (word == "," and alternative[i]):
                    denying = doubting = predicate = False
            elif word in (":", ")"):
                denying = doubting = False
            elif _predicates(words, i):
                predicate = True
        denied[i], doubted[i] = denying, doubting
    return denied, doubted


def _predicates(words: Sequence[str], i: int) -> bool:
    """Whether a word is a predicate, and no adjective of a noun behind it."""
    observed = words[i] in _PREDICATES and (i + 1 == len(words) or words[i + 1] in _BEHIND)
    return words[i] in _VERBS or observed


def _alternative_ahead(words: Sequence[str], starting: dict[int, Match[Cue]]) -> list[bool]:
    """Per word, whether *or* follows in the same clause, before any other cue and predicate."""
    ahead = [False] * len(words)
    found = False
    for i in range(len(words) - 1, -1, -1):
        ahead[i] = found
        found = words[i] in _ALTERNATIVES or (found and i not in starting and words[i] not in _VERBS)
    return ahead


def _to_the_left(words: Sequence[str], cues: Sequence[Match[Cue]]) -> tuple[list[bool], list[bool]]:
    ending = {cue.end - 1: cue for cue in cues}
    stated = _predicate_before(words, {cue.start: cue for cue in cues})
    denied, doubted = [False] * len(words), [False] * len(words)
    denying = doubting = False
    inside = len(words)  # start of the cue that is being passed
    for i in range(len(words) - 1, -1, -1):
        word = words[i]
        cue = ending.get(i)
        if cue:
            inside = cue.start
            if cue.tag in (Cue.ENDS, Cue.DOUBTS_ANEW, Cue.DENIES_AFTER, Cue.DOUBTS_AFTER):
                denying = doubting = False
            elif cue.tag is Cue.DENIES_BEFORE:
                denying, doubting = True, False
            elif cue.tag in (Cue.DOUBTS_BEFORE, Cue.DOUBTS_BOTH):
                denying, doubting = False, True
        elif i < inside:
            if word == ",":
                doubting = False
                denying = denying and not stated[i]
            elif word == "and":
                denying, doubting = denying and not stated[i], doubting and not stated[i]
            elif word == "(":
                doubting = False
            elif word in _VERBS or word == ":":
                denying = doubting = False
        denied[i], doubted[i] = denying, doubting
    return denied, doubted


def _predicate_before(words: Sequence[str], starting: dict[int, Match[Cue]]) -> list[bool]:
    """Per word, whether its clause has a predicate before it."""
    before = [False] * len(words)
    found = False
    passed = 0  # end of a phrase that does nothing
    for i, word in enumerate(words):
        cue = starting.get(i)
        if cue and cue.tag in (Cue.ENDS, Cue.DOUBTS_ANEW):
            found = word == "there"
        elif cue and cue.tag is Cue.NOTHING:
            passed = cue.end
        before[i] = found
        found = found or (i >= passed and word in _PREDICATES)
    return before
