"""FedTAR over three sites of known losses, of which two have no visit at some step or no validation patient."""

from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.record.events import SHARED
from fedtar_flare.record.log import read_events
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair

T = 3


def sites(**changes):
    made = {
        "site-a": QuadraticSite("site-a", [pair(1), pair(2), pair(3)], samples=3, validation=pair(9)),
        "site-b": QuadraticSite("site-b", [pair(4), None, pair(5)], samples=5, validation=pair(10)),
        "site-c": QuadraticSite("site-c", [pair(6), None, pair(7)], samples=2, validation=None),
    }
    return made | changes


def federation(tmp_path, local=None, **settings):
    settings = {"num_rounds": 3, "time_steps": T, "step_time_limit": 1, "eta": 0.1} | settings
    return FunctionFederation(tmp_path, local or sites(), **settings)


def run(controller):
    controller.run()
    events = read_events(controller.results_folder, (*SHARED, *EVENTS))
    return {kind.kind: [e for e in events if isinstance(e, kind)] for kind in (*SHARED, *EVENTS)}
