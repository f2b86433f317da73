"""FLARE's side: a model of as many tensors and values as our sites exchange."""

from __future__ import annotations

import torch
from torch import nn
from trivial_site import TrivialSite


class Payload(nn.Module):
    """The tensors of :class:`TrivialSite` as parameters."""

    def __init__(self):
        super().__init__()
        shapes = TrivialSite("any").shapes.values()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
