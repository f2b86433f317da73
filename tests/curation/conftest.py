"""What the tests of the sources of reports share."""

from itertools import count

import pytest


@pytest.fixture
def collected(tmp_path):
    """Rows as (patient, its issuer, number, issuer, study, text) of files, and reasons with their counts."""
    from fedtar_flare.curation.report_sources import collect
    from fedtar_flare.data.sources.reading import by_reason

    folders = count()

    def collected(files, **options):
        (folder := tmp_path / str(next(folders))).mkdir()
        for n, content in enumerate(files):
            (folder / f"{n}").write_bytes(content if isinstance(content, bytes) else content.encode())
        rows, problems, notes = collect(folder, **options)
        names = ("patient_id", "patient_issuer", "accession_number", "issuer", "study_instance_uid", "report")
        return sorted(tuple(row[name] for name in names) for row in rows), by_reason([*problems, *notes])

    return collected
