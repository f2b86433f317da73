"""What an update of two small models takes at most, and what was estimated, as JSON: ``python memory_peak.py FOLDER``.

Each in a process of its own, forked from one that has computed something already: a peak is never given back.
"""

import json
import os
import sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from batches import noise
from tiny_vlms import vlm_config, write_gemma

from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.training import adamw
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.runtime.requirements import AdaptedModel, update_memory


def update(config: ModelConfig, reports: int, checkpointing: bool = False) -> None:
    model = build_model(config)
    add_lora(model, targets=config.lora_targets, rank=4, seed=0)
    if checkpointing:
        model.recompute_layers()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    ids, labels = build_tokenizer(config).batch(["No pleural effusion. " * config.max_length] * reports)
    model(noise(reports, slices=config.slices, size=config.image_size), ids, labels).mean().backward()
    optimizer.step()


def measure(config: ModelConfig, reports: int, checkpointing: bool) -> dict[str, float]:
    training = TrainingConfig(batch_size=reports, gradient_checkpointing=checkpointing)
    needs = update_memory(AdaptedModel(config, LoRAConfig()), training, 0, half=False, on_cpu=True)
    update(config, reports, checkpointing)
    return {"estimate": sum(needs.values()) - needs["the process"], "peak": 1024 * getrusage(RUSAGE_SELF).ru_maxrss}


if __name__ == "__main__":
    gemma = write_gemma(Path(sys.argv[1]), width=256)
    vlm = vlm_config(gemma, max_length=90, slices=2, image_size=28)
    torch.set_num_threads(1)  # a child has not its parent's threads, and would wait for them
    update(preset("tiny"), 1)
    for case in ((preset("small"), 12, False), (preset("small"), 12, True), (vlm, 24, False)):
        if (child := os.fork()) == 0:
            before = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
            found = measure(*case)
            print(json.dumps(found | {"peak": found["peak"] - before}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
