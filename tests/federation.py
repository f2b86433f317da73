"""What tests of the server need besides the kit: a federation of three sites, slow ones, and ones that lie."""

from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.protocol.contract import TRAIN
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


def slowed(controller, site, until):
    """The site's first answer to a training task comes as the (task, round) ``until`` is sent out."""
    send, deliver, held = controller.send_model, controller.deliver, []

    def delivered(name, task, message):
        answer = deliver(name, task, message)
        if (name, task) != (site, TRAIN) or held:
            return answer
        held.append(FLModelUtils.from_shareable(answer))
        held[0].meta["client_name"] = site
        return None

    def sent(task_name, data, callback, **kwargs):
        if (task_name, data.current_round) == until:
            held.pop(1)(held[0])
        send(task_name=task_name, data=data, callback=callback, **kwargs)
        if len(held) == 1 and task_name == TRAIN and data.current_round == 1:
            held.append(callback)

    controller.send_model, controller.deliver = sent, delivered


class Spoilt(QuadraticSite):
    """Changes its answer to one task: ``spoil(header, reply, tensors)`` gives another."""

    def __init__(self, name, spoil, task, targets=None, samples=2):
        super().__init__(name, targets or [pair(4), pair(5)], samples, validation=pair(10))
        self.spoil, self.task = spoil, task

    def __call__(self, task, header, weights):
        answer = super().__call__(task, header, weights)
        return self.spoil(header, *answer) if task == self.task else answer
