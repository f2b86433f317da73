"""What the tests of the sources of reports share."""

from itertools import count

import pytest


@pytest.fixture
def collected(tmp_path):
    """Rows as (patient, its issuer, number, issuer, study, text) of files, and reasons with their counts.

    Files are a list, or contents by their names.
    """
    from fedtar_flare.curation.report_sources import collect
    from fedtar_flare.data.sources.reading import by_reason

    folders = count()

    def collected(files, **options):
        folder = tmp_path / str(next(folders))
        for name, content in files.items() if isinstance(files, dict) else enumerate(files):
            (file := folder / str(name)).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        rows, problems, notes = collect(folder, **options)
        names = ("patient_id", "patient_issuer", "accession_number", "issuer", "study_instance_uid", "report")
        return sorted(tuple(row[name] for name in names) for row in rows), by_reason([*problems, *notes])

    return collected
