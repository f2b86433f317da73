"""Mutated messages, Bundles, SRs and tables: no study gets another's report, or one that has lost a negation.

``FEDTAR_FUZZ=5000 pytest tests/curation/test_documents_fuzz.py -m slow -s`` makes five thousand and prints the counts;
``FEDTAR_FUZZ_SEED`` gives others.
"""

import base64
import json
import os
import random
import re
import shutil
from collections import Counter
from contextlib import suppress
from io import BytesIO

import pytest
from make_documents import OMOP, acsn, bundle, deletion, joined, lines, note, oru, patient, report, text_sr
from pydicom import dcmread

from fedtar_flare.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
COUNT = int(os.environ.get("FEDTAR_FUZZ", "500"))
SEED = int(os.environ.get("FEDTAR_FUZZ_SEED", "20260"))
PDF = "OBX|4|ED|PDF^Report||^application^pdf^Base64^JVBERi0xLjQK||||||F\r"
STUDIES = [("P1", "A1", "1.2.1", "20240105"), ("P1", "A2", "1.2.2", "20240106"), ("P2", "A3", "1.2.3", "20240107")]
WORDS = """P1 P2 A1 A2 A3 1.2.1 1.2.2 1.2.3 Patient/1 Patient/2 final amended entered-in-error preliminary text/plain
text/html MR ACSN TX FT NM CE ED OBX OBR PID NTE MSH |F| |C| |X| |P| | ^ ~ \\ & TEXT NUM COMPLETE nan urn:mrn
urn:dicom:uid 2024"""
TOKENS = [*WORDS.split(), "\r", "\n", ",", '"']


def text(study):
    n = study[2][-1]
    return f"Pleural effusion ({n}):\nabsent ({n}).\nPneumothorax ({n}): none."


def resources(study):
    owner, number, uid, _ = study
    images = [{"identifier": {"system": "urn:dicom:uid", "value": f"urn:oid:{uid}"}}]
    own = {"identifier": [acsn(number, "")], "imagingStudy": images, "subject": {"reference": f"Patient/{owner[1]}"}}
    return patient(owner, owner[1]), report(uid, text(study), id=f"r{uid[-1]}", **own)


def bases():
    one, two, three = STUDIES
    messages = [oru(s[0], s[1], text(s), study=s[2]) for s in STUDIES]
    named = {f"{s[1]}.hl7": message for s, message in zip(STUDIES, messages, strict=True)}
    second = messages[1].split("\rOBR", 1)[1]
    rows = [note(n, s[0], f"{s[3][:4]}-{s[3][4:6]}-{s[3][6:]}", text(s)) for n, s in enumerate(STUDIES, 1)]
    table = [
        "patient_id,accession_number,study_instance_uid,report",
        *(f'{",".join(s[:3])},"{text(s)}"' for s in STUDIES),
    ]
    files = {
        "bundles": {f"{s[1]}.json": bundle(*resources(s), root=f"http://{s[1]}/fhir") for s in STUDIES},
        "one bundle": {"a.json": bundle(*resources(one), resources(two)[1], *resources(three))},
        "an export": {"p.ndjson": lines(*(resources(s)[0] for s in (one, three))),
                      "r.ndjson": lines(*(resources(s)[1] for s in STUDIES)),
                      "deleted/r.ndjson": bundle(deletion("r9"))},
        "messages": named,
        "a batch": {"a.hl7": "".join(messages)},
        "two orders": {"a.hl7": f"{messages[0]}OBR{second}", "b.hl7": messages[2]},
        "notes": {"note.csv": "\n".join([OMOP, *rows])},
        "table": {"reports.csv": "\n".join(table)},
        "with PDFs": {name: f"{message}{PDF}" for name, message in named.items()},
        "without status": {name: message.replace("||||||F", "||||||") for name, message in named.items()},
        "about two": {"a.hl7": messages[0].replace("A1^RIS", "A1~A2^RIS").replace("1.2.1", ""), "b.hl7": messages[2]},
        "SR": {f"{s[1]}.dcm": text_sr(*s[:2], text(s), s[2]) for s in STUDIES},
    }  # fmt: skip
    return {
        kind: {name: content if isinstance(content, bytes) else content.encode() for name, content in held.items()}
        for kind, held in files.items()
    }


def inside(value, path=()):
    """Paths of all that a JSON value holds."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from inside(item, (*path, key))


def restructured(content, rng):
    """A JSON text with one value deleted, doubled, or replaced by one of another type."""
    value = json.loads(content)
    *parents, last = rng.choice([path for path in inside(value) if path])
    holder = value
    for key in parents:
        holder = holder[key]
    match rng.randrange(3):
        case 0:
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, holder[last])
        case _:
            holder[last] = rng.choice([None, 0, True, "", [], {}, [None], [{}], {"value": "P1"}, rng.choice(TOKENS)])
    return json.dumps(value).encode()


def mutated(files, rng):
    files = dict(files)
    name = rng.choice(sorted(files))
    content = files[name]
    at, size = rng.randrange(len(content)), rng.randint(1, 12)  # less than what stands between two rows
    tokens = [token for token in TOKENS if token.encode() in content]
    match rng.randrange(8):
        case 0:
            content = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        case 1:
            content = content[:at] + content[at + size :]
        case 2:
            content = content[:at] + content[at : at + size] + content[at:]
        case 3:
            content = content[:at]
        case 4:
            files[f"x{name}" if "/" not in name else f"{name}x.ndjson"] = content
        case 5 if name.endswith("json") and b"\n" not in content:
            content = restructured(content, rng)
        case 5 if name.endswith("ndjson"):
            rows = content.split(b"\n")
            n = rng.randrange(len(rows))
            content = b"\n".join([*rows[:n], restructured(rows[n], rng), *rows[n + 1 :]])
        case 5 | 6:
            content = content[:at] + rng.choice(TOKENS).encode() + content[at:]
        case _:
            token = rng.choice(tokens).encode()
            count = rng.choice([1, -1])
            content = content.replace(token, rng.choice(TOKENS).encode(), count)
    return files | {name: content}


def readable(files):
    """All that files say: as it stands, and out of base64."""
    parts = [content.decode("utf-8", "replace") for content in files.values()]
    for run in re.findall(r"[A-Za-z0-9+/]{8,}={0,2}", "".join(parts)):
        parts += [base64.b64decode(run[: len(run) // 4 * 4]).decode("utf-8", "replace")]
    return "\n".join(parts)


def unseen(part, view, files):
    """Whether no reader could see that a part is lost: lengths of a DICOM file that are not those of its content, a
    code by which the part is no finding, or two HL7 results that became one segment, whose later fields nobody reads.
    """
    for content in (content for name, content in files.items() if name.endswith(".dcm")):
        whole = False
        with suppress(Exception):
            ds = dcmread(BytesIO(content))
            codes = {element.value for element in ds.iterall() if element.keyword == "CodeValue"}
            ds.save_as(held := BytesIO(), enforce_file_format=True)
            whole = held.getvalue() == content and codes == {"18748-4", "121071"}
        if not whole:
            return True
    return bool(re.search(rf"OBX(\|[^|\r\n]*){{6,}}{re.escape(part)}", view))


def wrong(reports, files, shared):
    """What must not be of the studies' reports, and whether somebody could have seen it."""
    view = readable(files)
    for _, _, uid, _ in STUDIES:
        got, n = reports.get(uid, ""), "1" if shared and uid == "1.2.2" else uid[-1]
        if any(f"({other})" in got for other in "123" if other != n):
            yield f"{uid} has another's report", False
        for part in (f"absent ({n})", f"({n}): none"):
            if f"effusion ({n})" in got and part not in got and part in view:
                yield f"{uid} has lost '{part}'", unseen(part, view, files)
        for line in got.split("\n"):
            parts = re.split(r"(?:; | \()Finding: ", line)  # of items of an SR, which damage may put into each other
            whole = line.strip(), line.split(": ", 1)[-1].strip()
            if not any(text in view for text in whole) and not all(
                re.sub(r"^Finding: |\)*$", "", part).strip() in view for part in parts
            ):
                yield f"{uid} has a line that no file has: {line}", False


def test_no_mutated_document_goes_astray(tmp_path):
    counts, faults = Counter(), []
    for kind, files in (kinds := bases()).items():
        rng = random.Random(f"{SEED} {kind}")
        for i in range(max(1, COUNT // len(kinds)) + 1):
            changed = mutated(files, rng) if i else files  # the first is the untouched one
            shutil.rmtree(tmp_path / "all", ignore_errors=True)
            for name, content in changed.items():
                (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "all" / name).write_bytes(content)
            try:
                lost: list[str] = []
                reports = joined(tmp_path / "all" / ("reports.csv" if kind == "table" else ""), STUDIES, lost)
                faults += [f"{kind} {i}: {file} is not counted" for file in lost]
            except ConfigError:
                counts[kind, "refused"] += 1
                continue
            except Exception as error:
                faults.append(f"{kind} {i}: {type(error).__name__}: {error}")
                continue
            assert i or {uid: got.count("\n") for uid, got in reports.items()} == {s[2]: 2 for s in STUDIES}, kind
            counts[kind, f"{len(reports)} reports"] += 1
            for fault, hidden in wrong(reports, changed, kind == "about two"):
                counts[kind, "lost, unseen"] += hidden
                faults += [] if hidden else [f"{kind} {i}: {fault}"]
    print(f"\nseed {SEED}: {sum(counts.values())} copies: {dict(sorted(counts.items()))}")
    assert not faults, "\n".join([f"{len(faults)}:", *faults[:60]])
