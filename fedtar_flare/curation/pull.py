"""Pull the studies that a query names from a PACS, whole or not at all, into a folder for ``fedtar data index``.

``studies/<study>/<series>/<instance>.dcm``, and ``finished/<study>.json`` for each study that has exactly the instances
that the PACS listed. It is pulled again when that list, or what the PACS says of the study, has changed.
"""

import hashlib
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within
from fedtar_flare.core.files import PRIVATE, locked, private_folder, read_json, write_bytes, write_json
from fedtar_flare.core.text import Progress
from fedtar_flare.curation.pacs import MOST, Pacs, Record, is_uid
from fedtar_flare.data.sources.tables import open_table
from fedtar_flare.imaging.limits import current

STUDY = ["AccessionNumber", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyDescription",
         "ModalitiesInStudy", "StudyInstanceUID"]  # fmt: skip
COUNT = "NumberOfStudyRelatedInstances"
SERIES = ["SeriesInstanceUID", "Modality", "SeriesDescription", "SeriesNumber", "BodyPartExamined"]


def read_query(table: Path) -> list[Record]:
    """Read a query."""
    problems: list[DataError] = []
    with open_table(table, "the query") as opened:
        if other := set(opened.columns) - {*STUDY, *SERIES}:
            known = ", ".join(STUDY + SERIES)
            raise ConfigError(f"{table}: columns {', '.join(sorted(other))} cannot be asked for (known: {known})")
        rows = [{key: value for key, value in row.items() if value} for _, row in opened.rows(problems)]
    if problems or not rows or not all(row.keys() & STUDY for row in rows):
        raise ConfigError(str(problems[0]) if problems else f"{table}: without a row, or with one that names no study")
    return rows


def pull(
    pacs: Pacs, query: Sequence[Record], folder: Path, *, verify: bool = False, say: Any = print, every: float = 15.0
) -> tuple[Counter[str], list[DataError]]:
    """Pull studies into a folder. After an error of the PACS (FedTARError), the next call continues."""
    private_folder(folder / "studies")
    problems: list[DataError] = []
    with locked(folder / "finished"):
        shutil.rmtree(folder / "parts", ignore_errors=True)
        wanted: dict[str, tuple[Record, list[Record]]] = {}  # each study by UID, with the rows that name it
        for row in query:
            asked = {name: row[name] for name in STUDY if name in row}
            fields = [*STUDY[:-1], COUNT]
            for study in pacs.search("studies", STUDY[-1], fields, MOST - len(wanted), problems, search_filters=asked):
                uid = study["StudyInstanceUID"]
                if _fits(row, study, STUDY):  # a PACS may ignore keywords
                    wanted.setdefault(uid, (study, []))[1].append(row)
                else:
                    problems.append(DataError(f"study {uid}: not what the query names", reason="not-asked-for"))
        gone = {file.stem for file in (folder / "finished").glob("*.json")} - wanted.keys()
        done = Counter(asked=len(wanted), there=0, pulled=0, again=0, files=0, bytes=0, gone=len(gone))
        progress = Progress("study", len(wanted), say, every)
        for number, (uid, (study, rows)) in enumerate(sorted(wanted.items()), start=1):
            with collecting(problems), within(f"study {uid}"):
                listed = pacs.search("instances", "SOPInstanceUID", SERIES, study_instance_uid=uid)
                if study[COUNT].isdecimal() and len(listed) < int(study[COUNT]):
                    text = f"the PACS counts {study[COUNT]} instances and lists {len(listed)}"
                    raise DataError(text, reason="may-be-incomplete")
                listed = [i for i in listed if any(_fits(row, i, SERIES) for row in rows)]
                now = [sorted(study.items()), sorted((i["SeriesInstanceUID"], i["SOPInstanceUID"]) for i in listed)]
                mark, record = _digest(json.dumps(now).encode()), folder / "finished" / f"{uid}.json"
                before = read_json(record) if record.exists() else {}
                if before.get("mark") == mark and _complete(folder / "studies" / uid, before["files"], verify):
                    done["there"] += 1
                else:
                    files = _fetch(pacs, study, listed, folder)
                    write_json(record, {"mark": mark, "files": files}, PRIVATE)
                    size = sum(size for size, _ in files.values())
                    done.update(pulled=1, again=len(before) and 1, files=len(files), bytes=size)
            progress(number)
        shutil.rmtree(folder / "parts", ignore_errors=True)
    return done, problems


def _fits(asked: Mapping[str, str], record: Record, names: Sequence[str]) -> bool:
    """Whether a record matches a query by the rules of DICOM (PS3.4, C.2.2.2)."""
    for name in asked.keys() & names:
        if "Date" in name and (ends := re.fullmatch(r"(\d{8})?-(\d{8})?", asked[name])):
            if not record[name] or not (ends[1] or "0") <= record[name] <= (ends[2] or "9"):
                return False
            continue
        rule = re.escape(asked[name]).replace(r"\*", ".*").replace(r"\?", ".")
        flags = re.IGNORECASE if "Description" in name else 0
        if not any(re.fullmatch(rule, value.strip(), flags) for value in record[name].split("\\")):
            return False
    return True


def _fetch(pacs: Pacs, study: Record, listed: Sequence[Record], folder: Path) -> dict[str, tuple[int, str]]:
    """Pull the listed instances, all or none; the size and SHA-256 of each file."""
    uid, room = study["StudyInstanceUID"], current().archive_bytes
    part, target = folder / "parts" / uid, folder / "studies" / uid
    missing: dict[str, set[str]] = defaultdict(set)
    for instance in listed:
        missing[instance["SeriesInstanceUID"]].add(instance["SOPInstanceUID"])
    if not listed or not all(map(is_uid, missing)):
        raise DataError("no series that the query names", reason="no-series")
    files: dict[str, tuple[int, str]] = {}
    for series, expected in sorted(missing.items()):
        for dataset, content in pacs.series(uid, series):
            names = [str(dataset.get(key, "")) for key in ("StudyInstanceUID", "SeriesInstanceUID", "PatientID")]
            if names != [uid, series, study["PatientID"]]:
                raise DataError("an instance of another study, series or patient came", reason="another-study")
            if (sop := str(dataset.get("SOPInstanceUID", ""))) not in expected:
                raise DataError("an instance came that was not listed, or came twice", reason="changed-meanwhile")
            if (room := room - len(content)) < 0:
                raise DataError("more bytes than a study may have", reason="too-large")
            write_bytes(part / series / f"{sop}.dcm", content, PRIVATE)
            files[f"{series}/{sop}.dcm"] = len(content), _digest(content)
            expected.remove(sop)
        if expected:
            text = f"{len(expected)} listed instance(s) did not come; what is still arriving is for the next pull"
            raise DataError(text, reason="changed-meanwhile")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _complete(folder: Path, files: Mapping[str, Sequence[Any]], verify: bool) -> bool:
    return all(
        (file := folder / name).is_file()
        and file.stat().st_size == size
        and (not verify or _digest(file.read_bytes()) == digest)
        for name, (size, digest) in files.items()
    )
