"""FLARE's side: a model of as many tensors and values as our sites exchange, and the tasks that come with it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import nvflare.client as flare
import torch
from torch import nn


class Payload(nn.Module):
    """Zeros, of the shapes in ``shapes.json`` beside this file."""

    def __init__(self):
        super().__init__()
        shapes = json.loads(Path(__file__).with_name("shapes.json").read_text())
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def models():
    """What the server sends, task by task; appends the machine's clock to ``$EXCHANGE_STAMPS/SITE`` at each."""
    flare.init()
    while flare.is_running() and (model := flare.receive()) is not None:
        with Path(os.environ["EXCHANGE_STAMPS"], flare.get_site_name()).open("a") as file:
            file.write(f"{time.monotonic()}\n")
        yield model
