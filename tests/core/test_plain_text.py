from fedtar_flare.core.text import Progress


def test_lines_come_no_faster_than_asked_with_the_time_left():
    now, lines = [0.0], []
    say = Progress("round 1, step 2: update", 100, lines.append, every=10, clock=lambda: now[0])
    for done in range(1, 101):
        now[0] += 1.0
        say(done)
    assert len(lines) == 10
    assert lines[0] == "round 1, step 2: update 10 of 100, 1.0/s, 2 min left"
    assert lines[-1].endswith("0 s left")
