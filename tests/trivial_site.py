"""A site without a model, for :class:`federation.LocalFederation`: updates that cost next to nothing to make."""

import hashlib

import torch

from fedtar_flare.data.splits import SPLITS
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import ok
from fedtar_flare.protocol.tasks import HANDSHAKE, TRAIN
from fedtar_flare.version import __version__

VALUES = 77_568
"""Of LoRA of rank 4 in the small model's encoder and decoder, in 128 tensors: 310 kB."""


class TrivialSite:
    """Answers every task at once, the same each time; ``layers`` (divides 64) pairs of factors share the values."""

    def __init__(self, name: str, layers: int = 64):
        self.name = name
        width = 64 // layers
        self.shapes = {}
        for i in range(layers):
            self.shapes[f"base_model.model.layer_{i:02d}.lora_A.weight"] = (4, 101 * width)
            self.shapes[f"base_model.model.layer_{i:02d}.lora_B.weight"] = (202 * width, 4)

    def tensors(self, *key: object) -> dict[str, torch.Tensor]:
        """Random numbers that depend on the key alone."""
        seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "big")
        generator = torch.Generator().manual_seed(seed)
        return {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}

    def __call__(self, task, header, weights):
        samples = 1 + sum(self.name.encode()) % 7
        if task == HANDSHAKE:
            payload = {
                "schema": ExchangeSchema(tuple(sorted(self.shapes.items()))).to_dict(),
                "versions": {"fedtar_flare": __version__},
                "settings": "same",
                "counts": {split: [samples] * header.time_steps for split in SPLITS},
                "adapter_config": {"peft_type": "LORA"},
                "model": {"parameters": VALUES},
            }
            return ok(header, payload=payload), self.tensors("start") if header.initial_site == self.name else None
        if task == TRAIN:
            update = self.tensors(self.name, header.round, header.step)
            return ok(header, {"samples": samples, "train_loss": 1.0}), update
        numbers = {"validation_loss": 1.0, "reports": 1}
        return ok(header, numbers, {"t_numbers": [0.1 * t for t in range(1, header.time_steps + 1)]}), None
