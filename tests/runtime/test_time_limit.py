import pytest

from fedtar_flare.runtime.exchange import advice


@pytest.mark.parametrize("slowest", [0.0, 0.1, 5.0, 59.0, 100.0])
def test_what_is_advised_after_a_miss_gives_the_site_more_time(slowest):
    assert advice(0, slowest, 3) is None  # no limit
    line = advice(60, slowest, 2)
    assert line.startswith("2 site(s)")
    assert int(line.rsplit("try ", 1)[1].removesuffix(" s")) >= max(2 * 60, slowest)


def test_a_close_call_and_a_wasteful_limit_are_told_and_what_lies_between_is_not():
    advised = [slowest for slowest in range(1, 600) if advice(600, float(slowest), 0)]
    assert advised == [s for s in range(1, 600) if s > 0.8 * 600 or 20 * s < 600] and advice(600, 0.0, 0) is None
    line = advice(7200, 30.0, 0, "handshake_time_limit")
    assert line == "the slowest answer took 30 s of handshake_time_limit = 7200 s; consider 90 s"
    assert advice(60, 55.0, 0) == "the slowest answer took 55 s of step_time_limit = 60 s; 165 s would be safe"
