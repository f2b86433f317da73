"""FLARE's side: a model of as many tensors and values as our sites exchange."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn


class Payload(nn.Module):
    """Zeros, of the shapes in ``shapes.json`` beside this file."""

    def __init__(self):
        super().__init__()
        shapes = json.loads(Path(__file__).with_name("shapes.json").read_text())
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
