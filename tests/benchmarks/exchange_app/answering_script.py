"""FLARE's side: a training script that sends back what came, and notes when it came."""

from stamped_model import flare, models

for model in models():
    flare.send(flare.FLModel(params=model.params, metrics={"accuracy": 0.5}))
