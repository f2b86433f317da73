import logging

from federation import LocalFederation, QuadraticSite, pair

from fedtar_flare.record.events import End, Joined, Step
from fedtar_flare.record.log import of_kind, read_events


def federation(folder, sites, **settings):
    controller = LocalFederation(folder, sites, num_rounds=3, time_steps=1, step_time_limit=1, **settings)
    controller.run()
    return read_events(controller.results_folder)


def quadratic(name):
    return QuadraticSite(name, [pair(1)], validation=pair(2))


def test_a_late_site_takes_part_from_its_round_on(tmp_path):
    events = federation(tmp_path, {name: quadratic(name) for name in ("a", "b")}, joins={"b": 3})
    assert [(event.round, event.sites) for event in of_kind(events, Joined)] == [(3, ["b"])]
    assert [sorted(step.sites) for step in of_kind(events, Step)] == [["a"], ["a"], ["a", "b"]]
    assert of_kind(events, End)[0].status == "completed"


def test_what_a_site_raises_is_logged_with_its_place(tmp_path, caplog):
    good, bad = quadratic("a"), quadratic("b")

    def broken(task, header, weights):
        if task == "train":
            raise ZeroDivisionError("no such weight")
        return bad(task, header, weights)

    with caplog.at_level(logging.ERROR):
        events = federation(tmp_path, {"a": good, "b": broken})
    lines = [record for record in caplog.records if "no such weight" in record.getMessage()]
    assert lines and lines[0].levelno == logging.ERROR and "at b" in lines[0].getMessage()
    assert all("b" in step.absent for step in of_kind(events, Step))
