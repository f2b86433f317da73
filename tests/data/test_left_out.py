"""Studies that are left out: counted in a site's log once, and named to nobody who only reads that."""

from __future__ import annotations

import logging

from fedtar_flare.data.sources.reading import log_left_out
from fedtar_flare.errors import DataError


def test_the_same_studies_are_told_once_and_named_at_the_debug_level_alone(tmp_path, caplog):
    problems = [DataError(f"{tmp_path}/patient-17/2020-03-04: row {n}", reason="no-image") for n in range(3)]
    problems.append(DataError(f"{tmp_path}/patient-18", reason="no-report"))
    caplog.set_level(logging.DEBUG)
    for _ in range(3):  # as each task of a run does
        log_left_out(problems)
    shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert ["3 study(ies) left out: no-image" in shown[0], "1 study(ies) left out: no-report" in shown[1]] == [True] * 2
    assert len(shown) == 2
    assert "patient-1" not in " ".join(shown) and str(tmp_path) not in " ".join(shown)
    assert sum("patient-1" in record.getMessage() for record in caplog.records) == 4
    log_left_out(problems[:1])  # others than before are told
    assert len([record for record in caplog.records if record.levelno >= logging.INFO]) == 3
