"""The search for planted marks, on which ``test_traces.py`` of production relies."""

import zipfile

from canary import DATE, MARK, marks_in


def test_the_search_finds_a_mark_wherever_it_is(tmp_path):
    (tmp_path / "a.txt").write_text(f"x {MARK} y")
    (tmp_path / "b.bin").write_bytes(b"\0" + DATE.encode() + b"\1")
    (tmp_path / f"{MARK}.txt").write_text("")
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d", MARK * 100)
    (tmp_path / "clean").write_text("x")
    assert len(marks_in(tmp_path)) == 4
