"""FLARE's side: a script with the small preset's model and PEFT's LoRA; one update on random images a task."""

import torch
from stamped_model import flare, models

from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.adapters.lora import add_lora, load_shared_state, shared_state
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.runtime.recipe import SMALL

REPORTS = 8
torch.set_num_threads(1)
config = preset("small", **SMALL["model"])
model = add_lora(build_model(config), targets=config.lora_targets, seed=0)
names = sorted(shared_state(model))
generator = torch.Generator().manual_seed(0)
size = (REPORTS, config.slices, 3, config.image_size, config.image_size)
images = ImageBatch(
    torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),
    torch.arange(float(config.slices)).repeat(REPORTS, 1),
    torch.ones(REPORTS, config.slices, dtype=torch.bool),
)
text = "The lungs are clear. The heart is of normal size. No effusion is seen on either side."
texts = build_tokenizer(config).batch([text] * REPORTS)
for received in models():
    load_shared_state(model, {name: received.params[f"values.{i}"] for i, name in enumerate(names)})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.get_base_model()(images, *texts).mean().backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    state = shared_state(model)
    params = {f"values.{i}": state[name].detach().cpu() for i, name in enumerate(names)}
    flare.send(flare.FLModel(params=params, metrics={"accuracy": 0.5}))
