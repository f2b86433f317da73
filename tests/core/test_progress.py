"""Lines on the progress of long work."""

from fedtar_flare.core.text import Progress


def test_progress_estimates_what_is_left_from_a_tenth_on():
    lines, seconds = [], iter([0.0, 20.0, 25.0, 40.0])
    progress = Progress("task", 40, lines.append, every=15, clock=lambda: next(seconds))
    for done in (2, 3, 4):
        progress(done)
    assert lines == ["task 2 of 40, 0.1/s", "task 4 of 40, 0.1/s, 6 min left"]
