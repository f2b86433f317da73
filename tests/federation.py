"""What tests of the server need besides the kit: a federation of three sites, slow ones, and ones that lie."""

from functools import partial

from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.record.events import SHARED
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair

T = 3


def sites(**changes):
    """Three sites of known losses, of which two have no visit at some step or no validation patient."""
    made = {
        "site-a": QuadraticSite("site-a", [pair(1), pair(2), pair(3)], samples=3, validation=pair(9)),
        "site-b": QuadraticSite("site-b", [pair(4), None, pair(5)], samples=5, validation=pair(10)),
        "site-c": QuadraticSite("site-c", [pair(6), None, pair(7)], samples=2, validation=None),
    }
    return made | changes


def federation(folder, local=None, **settings):
    """FedTAR over three rounds of three steps."""
    settings = {"num_rounds": 3, "time_steps": T, "step_time_limit": 1, "eta": 0.1} | settings
    return FunctionFederation(folder, local or sites(), **settings)


def run(controller):
    """The events of a run by kind."""
    controller.run()
    events = read_events(controller.results_folder, (*SHARED, *EVENTS))
    return {kind.kind: of_kind(events, kind) for kind in (*SHARED, *EVENTS)}


def slowed(controller, site, late):
    """The site's answer to the training task of (round, step) comes as ``late``'s (task, round, step) is sent out."""
    send, deliver, held, now = controller.send_model, controller.deliver, {}, []

    def delivered(name, task, message):
        answer, header = deliver(name, task, message), TaskHeader.from_meta(FLModelUtils.from_shareable(message).meta)
        if (name, task) != (site, TRAIN) or (until := late.get((header.round, header.step))) is None:
            return answer
        model = FLModelUtils.from_shareable(answer)
        model.meta["client_name"] = site
        held[until] = partial(now[-1], model)
        return None

    def sent(task_name, data, callback, **kwargs):
        header = TaskHeader.from_meta(data.meta)
        held.pop((task_name, header.round, header.step), int)()
        now.append(callback)
        send(task_name=task_name, data=data, callback=callback, **kwargs)

    controller.send_model, controller.deliver = sent, delivered


class Spoilt(QuadraticSite):
    """Changes its answer to one task: ``spoil(header, reply, tensors)`` gives another."""

    def __init__(self, name, spoil, task, targets=None, samples=2):
        super().__init__(name, targets or [pair(4), pair(5)], samples, validation=pair(10))
        self.spoil, self.task = spoil, task

    def __call__(self, task, header, weights):
        answer = super().__call__(task, header, weights)
        return self.spoil(header, *answer) if task == self.task else answer
