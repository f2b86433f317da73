"""What tests of the server need besides the kit: a method's federation as a class, slow sites, and sites that lie."""

from functools import partialmethod

from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair


def federation_of(method):
    """A class like :class:`FunctionFederation`, of this method."""
    return type(method, (FunctionFederation,), {"__init__": partialmethod(FunctionFederation.__init__, method=method)})


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
