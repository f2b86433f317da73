"""FLARE's side: a training script that sends back what came, and notes when it came."""

import os
import time
from pathlib import Path

import nvflare.client as flare

flare.init()
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    with Path(os.environ["EXCHANGE_STAMPS"], flare.get_site_name()).open("a") as file:
        file.write(f"{time.monotonic()}\n")
    flare.send(flare.FLModel(params=model.params, metrics={"accuracy": 0.5}))
