"""Reports of HL7 v2: whose they are, what is in force, what is text, and in which characters."""

import functools
import re
from itertools import permutations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from make_documents import TEXT
from tables import cases

pytest.importorskip("hl7", reason="of the extra 'pacs'")
WHEN, LATER = "20240131120000", "20240201120000"
PID = "PID|1||P1^^^H&1.2&ISO^MR~X^^^H^NI\r"
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def head(charset="UNICODE UTF-8", sent=WHEN):
    return f"MSH|^~\\&|R|H|F|H|{sent}+0100||ORU^R01|1|P|2.5||||||{charset}\r"


def obr(number="A1^RIS", code="71250^CT", status="F", when=WHEN, **fields):
    values = {3: number, 4: code, 22: when, 24: "RAD", 25: status} | {int(name[1:]): v for name, v in fields.items()}
    return "|".join(["OBR", "1", *(values.get(n, "") for n in range(2, 26))]) + "\r"


def obx(*values, kind="TX", code="", sub="", status="F", first=1):
    return "".join(f"OBX|{n}|{kind}|{code}|{sub}|{v}||||||{status}\r" for n, v in enumerate(values, first))


def oru(*texts, pid=PID, charset="UNICODE UTF-8", **order):
    return head(charset, order.get("when", WHEN)) + pid + obr(**order) + obx(*(texts or TEXT.split("\n")))


def a(text, number="A1", issuer="RIS", patient="P1", owner="H|1.2", study=""):
    return patient, owner, number, issuer, study, text


ORDERS = head() + PID + "ORC|RE|O1\r" + obr("F1") + obx("a") + "ORC|RE|O2\r" + obr("F2") + obx("b") + obr("F3")
USUAL = head() + PID + obr()
CORRECTED = head(sent=LATER) + PID + obr(when=LATER, status="C")
PARTS = USUAL + obx("a", sub="1") + obx("b", sub="2", first=2)
PDF = obx("^application^pdf^Base64^JVBERi0xLjQK", kind="ED", code="PDF^Report", first=2)
WHOSE = {
    "each order has the numbers of its own ORC": (
        [ORDERS], [a("a", "O1", ""), a("b", "O2", "")], {"no-accession-number": 1, }, {"accession": "ORC-2"}),
    "several results under one number": (
        [oru("a", code="1^CT"), oru("b", code="2^CT", when=LATER)], [], {"several-reports": 2}),
    "also where the procedure has a name alone": (
        [oru("a", code="^CT"), oru("b", code="^MR", when=LATER)], [], {"several-reports": 2}),
    "also where its code is HL7's null": (
        [oru("a", code='""^CT'), oru("b", code='""^MR', when=LATER)], [], {"several-reports": 2}),
    "fillers tell versions from reports, the number tells the study": (
        [oru("a", number="F1", f18="A1"), oru("b", number="F1", f18="A1", when=LATER)],
        [a("b", issuer="")], {"superseded": 1}),
    "a report of two numbers": ([oru("a", f18="A1~A2")], [a("a", "A1", ""), a("a", "A2", "")], {}),
    "a study of one of two numbers": (
        [oru("a", f18="A1~A2") + obx("1.2", kind="ST", code="113014", first=0)], [], {"several-studies": 1}),
    "a report of two studies": (
        [oru() + obx("1.2", "1.3", kind="ST", code="113014")], [], {"several-studies": 1}),
    "a study by its UID": ([oru("a") + obx("1.2", kind="ST", code="113014", first=0)], [a("a", study="1.2")], {}),
    "authorities of a patient's number": (
        [oru("a", pid=f"PID|1||P1^^^{name}^MR\r", number=f"A{n}") for n, name in enumerate(("H", "&1.2&ISO", ""))],
        [a("a", "A0", "", owner="H"), a("a", "A1", "", owner="1.2"), a("a", "A2", "", owner="")], {}),
    "two of one patient's records": ([oru(pid="PID|1||P1^^^H^MR~P2^^^I^MR\r")], [], {"several-patients": 1}),
    "more numbers than a patient has": (
        [oru(pid=f"PID|1||{'~'.join(map(str, range(99)))}\r")], [], {"several-patients": 1}),
    "without an MR the internal number (PI)": (
        [oru("a", pid="PID|1||P1^^^H^PI~4^^^H^MC\r")], [a("a", owner="H")], {}),
    "HL7's null is no number": ([oru(pid='PID|1||""^^^H^MR\r')], [], {"no-patient-id": 1}),
    "a PID without an order": ([oru(pid=PID.replace("P1", "P2") + PID)], [], {"stray-segment": 1}),
    "no PID": ([head() + obr() + obx("a")], [], {"no-patient-id": 1}),
    "no OBR": ([head() + PID + obx("a")], [], {"bad-message": 1}),
}  # fmt: skip
FORCE = {
    "OBR-25 withdraws": ([oru(), oru(when=LATER, status="X")], [], {"withdrawn": 1, "superseded": 1}),
    "also at a time that cannot be read": ([oru(), oru(when="soon", status="X")], [], {"withdrawn": 2}),
    "also under a name that tells less": (
        [oru("a"), oru(when=LATER, status="X", number="A1", code="")], [], {"withdrawn": 1, "withdrawn-elsewhere": 1}),
    "not another procedure": ([oru("a"), oru(when=LATER, status="X", code="1^MR")], [a("a")], {"withdrawn": 1}),
    "all results wrong or deleted": (
        [oru(), CORRECTED + obx("a", status="W")], [], {"withdrawn": 1, "superseded": 1}),
    "one result wrong": ([oru("a") + obx("b", status="W", first=2)], [], {"status-W": 1}),
    "a deleted result": ([oru("a") + obx("b", status="D", first=2)], [a("a")], {}),
    "a correction of all results": (
        [PARTS, CORRECTED + obx("c", sub="1") + obx("d", sub="2", first=2, status="C")],
        [a("c\nd")], {"superseded": 1}),
    "a correction of one result": (
        [PARTS, CORRECTED + obx("c", sub="2", status="C")], [], {"part-of-a-report": 1, "superseded": 1}),
    "a correction without the PDF": (
        [oru("a") + PDF, oru("b", when=LATER, status="C")], [a("b")], {"superseded": 1}),
    "a later PDF alone": (
        [oru("a"), head(sent=LATER) + PID + obr(when=LATER) + obx("") + PDF], [],
        {"superseded": 1, "result-type-ED": 1}),
    "no status of results, which are final by OBR-25": ([USUAL + obx("a", "b", status="")], [a("a\nb")], {}),
    "no status of results, which are preliminary by OBR-25": (
        [head() + PID + obr(status="P") + obx("a", "b", status="")], [], {"status-P": 1}),
    "no status at all": ([head() + PID + obr(status="") + obx("a", "b", status="")], [], {"status-unknown": 1}),
    "an addendum alone": ([USUAL + obx("a", code="18782-3&ADT")], [], {"addendum-alone": 1}),
    "a newer version in other characters": (
        [oru("a"), oru(when=LATER).encode("latin-1")], [], {"bad-charset": 1, "superseded": 1}),
    "the header's zone is that of OBR-22": (
        [head() + PID + obr(when=WHEN + "+0000") + obx("a"), head() + PID + obr(when="20240131123000") + obx("b")],
        [a("a")], {"superseded": 1}),
    "a status that is none": ([oru(status="Doe")], [], {"status-unknown": 1}),
    "another section": ([oru(f24="LAB")], [], {"other-section": 1}),
}  # fmt: skip
CASES = cases(__file__, "hl7v2.yaml")
RESULTS, BESIDE = CASES["results"], CASES["beside"]


@pytest.mark.parametrize("case", [*WHOSE, *FORCE])
def test_a_report_is_of_its_own_order_while_it_is_in_force(collected, case):
    files, rows, left_out, *options = (WHOSE | FORCE)[case]
    for some in permutations(files):
        assert collected(some, **dict(*options)) == (sorted(rows), left_out)


@pytest.mark.parametrize("case", RESULTS)
def test_results_are_text_as_it_is_written_or_left_out(collected, case):
    results, expected = RESULTS[case]
    for end in ("\r", "\n", "\r\n"):
        rows, left_out = collected([(USUAL + results).replace("\r", end)])
        assert [row[-1] for row in rows] + [*left_out] == [expected]


@pytest.mark.parametrize("case", BESIDE)
def test_a_file_beside_a_text_is_counted_and_no_words_are_passed_over(collected, case):
    kind, value, expected = BESIDE[case]
    for order in (1, -1):
        results = [obx("Knoten rechts."), obx(value, kind=kind)][::order]
        rows, left_out = collected([USUAL + "".join(results)])
        assert left_out == {expected: 1}
        assert rows == ([a("Knoten rechts.")] if expected == "attachment" else [])


@pytest.mark.parametrize("text", ["Befund siehe Anhang.", "See attached PDF", "\u898b\u9644\u4ef6", ""])
def test_a_text_that_only_points_to_a_file_is_none(collected, text):
    rows, left_out = collected([USUAL + obx(text) + PDF])
    assert (rows, [*left_out]) == ([], ["text-in-attachment" if text else "result-type-ED"])


WORDS = st.lists(st.sampled_from(["Kein Erguss.", "x\ny", ""]), min_size=1, max_size=4).filter(any)


@QUICK
@given(st.lists(WORDS, min_size=1, max_size=5), st.data())
def test_the_order_of_groups_and_files_does_not_matter(collected, texts, data):
    groups = [f"ORC|RE|O{n}\r{obr(f'A{n}')}{obx(*words)}" for n, words in enumerate(texts)]
    groups = data.draw(st.permutations(groups))
    cut = data.draw(st.integers(0, len(groups)))
    files = [head() + PID + "".join(part) for part in (groups[:cut], groups[cut:]) if part]
    assert collected(files) == ([a("\n".join(words), f"A{n}", "") for n, words in enumerate(texts)], {})


ADDED = ["NTE|1||x\r", "ADD|x\r", "DSC|1\r", "ZZZ|x\r", "SPM|1\r", "OBX|", "x\r", "MSH|\r", *map(obx, ("", "x")),
         obx("x", kind="CWE"), obx("x", status="P"), obx("x", status="D"), obx("x", status="")]  # fmt: skip


@QUICK
@given(st.data())
def test_a_segment_dropped_or_added_gives_no_shorter_text_in_silence(collected, data):
    """Only the loss of whole results at the end cannot be seen."""
    lines = ["Erguss:", "keiner", "", "links"]
    segments = [*(USUAL + obx(*lines)).splitlines(keepends=True)]
    at = data.draw(st.integers(0, len(segments) - 1))
    if data.draw(st.booleans()):
        segments.insert(at + 1, data.draw(st.sampled_from(ADDED)))
    elif at < len(segments) - 1:
        del segments[at]
    else:
        segments[at] = segments[at][: data.draw(st.integers(1, 16))]
    rows, left_out = collected(["".join(segments)])
    (texts,) = [iter(row[-1].split("\n")) for row in rows] or [iter(lines)]
    assert (rows or left_out) and all(line in texts for line in lines)


SETS = {"": "ascii", "UNICODE UTF-8": "utf-8", "8859/7": "iso8859-7", "8859/15": "iso8859-15", "BIG-5": "big5",
        "GB 18030-2000": "gb18030", "KS X 1001": "euc_kr", "~ISO IR87": "iso2022_jp"}  # fmt: skip
PRINTED = [c for c in map(chr, (*range(0x21, 0x180), *range(0x390, 0xD800, 5))) if c.isprintable() and c != "\xa5"]
SEPARATORS = st.permutations("!\"#$%&'*;<=>?@[\\]^_{|}~").map(lambda order: order[:5])
UTF_8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}")


@functools.cache
def in_set(name):
    known = [c for c in PRINTED if c.encode(SETS[name], "ignore").decode(SETS[name], "ignore") == c]
    character = st.tuples(st.sampled_from(["\n", *known]), st.booleans())
    return st.tuples(st.just(name), st.lists(character), SEPARATORS)


@QUICK
@given(st.sampled_from([*SETS]).flatmap(in_set))
def test_any_character_set_and_separators_give_the_same_report(collected, made):
    """Whether a character is written as it is, or as the bytes of its set; also beside a name with it in the header."""
    name, characters, own = made
    codec, (_, _, _, esc, _) = SETS[name], own
    printed = "Klar." + "".join(c for c, _ in characters)
    assume(not codec.startswith("iso8859") or not UTF_8.search(printed.encode(codec)))
    codes = {c: f"{esc}{code}{esc}" for c, code in zip((*own, "\n"), ("F", "S", "R", "E", "T", ".br"), strict=True)}
    codes |= {c: f"{esc}X{c.encode(codec).hex()}{esc}" for c, bits in characters if bits and codec != "iso2022_jp"}
    text = "Klar." + "".join(codes.get(c, c) for c, _ in characters)
    message = oru("TEXT", charset=name).translate(str.maketrans("|^~\\&", "".join(own))).replace("TEXT", text)
    message = message.replace(f"{own[0]}R{own[0]}", f"{own[0]}{text}{own[0]}", 1)  # MSH-3
    assert collected([message.encode(codec)]) == ([a(printed)], {})


def test_characters_are_read_exactly_or_left_out(collected):
    lung = "\u80ba".encode("iso2022_jp")  # switches there and back
    texts = [
        ("ISO IR87", rb"a \M2442\%b\C2842\ b" % lung[3:5], "a \u80ba b"),
        ("", rb"\C2D42\%b" % "\u0159".encode("iso8859-2"), "\u0159"),
        ("ISO IR14", b"\\E\\100 \xca\xb2", "\xa5100 \uff8a\uff72"),
        ("", rb"\H\Neu\N\:\.sp2\\.in+2\3\F\4\X0D0A\5", "Neu:\n\n  3|4\n5"),
        ("8859/1", "\xfcber".encode(), "bad-charset"),
        ("8859/1", rb"\XC3BC\ber", "bad-escape"),
        ("~ISO IR87", lung[:-3], "bad-charset"),
        ("~ISO IR87", lung + b"\xfc", "bad-charset"),
        ("8859/1", b"\x93Windows\x94", "bad-charset"),
        ("CNS 11643-1992", b"a", "bad-charset"),
        ("", "\xfcber".encode(), "bad-charset"),
        ("UNICODE UTF-8", rb"Gr\XF6\\XDF\e", "bad-escape"),
        ("", rb"a\Zx\b", "bad-escape"),
        ("", rb"T1\T2 bright", "bad-escape"),
    ]  # fmt: skip
    for name, raw, expected in texts:
        rows, left_out = collected([oru("<>", charset=name).encode().replace(b"<>", raw)])
        assert [row[-1] for row in rows] + [*left_out] == [expected]


def test_escape_sequences_that_stand_for_far_more_text_than_there_is_are_given_up(collected, monkeypatch):
    """Those of a message of 320 kB made 40 million characters."""
    monkeypatch.setattr("fedtar_flare.curation.hl7v2.MOST_TEXT", 5000)
    spaces = r"a\.sp999\b"
    assert collected([oru(*[spaces] * 6)]) == ([], {"bad-escape": 1})
    assert len(collected([oru(*[spaces] * 4)])[0]) == 1


def test_a_header_in_any_characters_and_none(collected):
    name = b"|\x81\x7c|"  # of one character, whose second byte is the separator's
    chinese = oru("a", charset="GB 18030-2000", number="A2^RIS").encode("gb18030").replace(b"|R|", name)
    framed = b"\x0b" + oru("a").encode() + b"\x1c\r\0"
    batch = "FHS|^~\\&\rBHS|^~\\&\r" + oru("a") + "BTS|1\rFTS|1\r"
    others = oru().encode("utf-16"), oru("a").replace("ORU", "ADT"), "PID|1\r" + oru("a"), ""
    files = [framed, b"\xef\xbb\xbf" + framed[1:], batch, chinese, *others]
    assert collected(files) == ([a("a"), a("a", "A2")], {"no-report": 4})
