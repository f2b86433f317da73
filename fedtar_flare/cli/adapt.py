"""``fedtar adapt``: learn a new disease at a hospital from what a run of FedKEI has left."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedtar_flare.cli.commands import Commands, add_command, add_repeated, grouped, show
from fedtar_flare.files import write_json

MODULE_FILE, RESULT_FILE = "module.safetensors", "adaptation.json"


def add_commands(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, adapt, "learn a new disease from a run's knowledge file, on your own images")
    command.add_argument("knowledge", type=Path, help="knowledge.safetensors of a run of fedkei")
    command.add_argument("--site-file", type=Path, required=True, help="where your images and labels are (fedtar.yaml)")
    task = "the new disease, 'name' or 'name=label|label'; may be repeated: the last is new, those before are negatives"
    add_repeated(command, "--task", "NAME", task)
    add_repeated(command, "--base", "LABEL", "label of images that are negatives (default none: those without any)")
    command.add_argument(
        "--labeler",
        choices=("chexpert-rules", "ctrate-rules"),
        help="read labels from the reports of images that have none, by these rules",
    )
    add_repeated(command, "--set", "GROUP.NAME=VALUE", "a setting of training, such as training.epochs=10")
    command.add_argument("-o", "--out", type=Path, default=Path("adapted"), help="folder of the module")
    command.add_argument("--patients", type=int, default=48, help="of a synthetic site (default 48)")
    command.add_argument("--seed", type=int, default=0, help="of the batches, and of a synthetic site (default 0)")
    command.add_argument("--json", action="store_true", help="print the curves as JSON")


def adapt(arguments: argparse.Namespace) -> None:
    """Learn a mixture of a run's clusters for your own images, tune it, and say the AUC of your test patients after
    each epoch, beside the same tuning from the common start. Nothing leaves this machine.
    """
    from fedtar_flare.errors import ConfigError
    from fedtar_flare.methods.fedkei.config import LearnerSettings
    from fedtar_flare.methods.fedkei.outside import adapt_outside, read_knowledge
    from fedtar_flare.settings import build
    from fedtar_flare.site.site_file import read_site_file
    from fedtar_flare.tensor_file import write_tensors

    if not arguments.task:
        raise ConfigError("--task: name the disease that is to be learnt")
    settings = grouped(arguments.set, ("training",))
    knowledge = read_knowledge(arguments.knowledge)
    found = adapt_outside(
        knowledge,
        read_site_file(arguments.site_file, simulated=True),  # no key is made: nothing leaves
        arguments.site_file.stem,
        tasks=arguments.task,
        base=arguments.base or ["none"],
        labeler=arguments.labeler,
        training=build(LearnerSettings, settings.get("training"), "training"),
        patients=arguments.patients,
        seed=arguments.seed,
    )
    result = {
        "task": found.task,
        "images": found.counts,
        "auc": found.informed.curve,
        "rand_auc": found.rand.curve,
        "alpha": found.informed.alpha,
        "fell_back": found.informed.fell_back,
        "knowledge": {"run_id": knowledge.run_id, "modules": knowledge.modules, "tasks": list(knowledge.tasks)},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tensors(arguments.out / MODULE_FILE, found.module, {"task": found.task, "run_id": knowledge.run_id})
    write_json(arguments.out / RESULT_FILE, result)
    lines = [f"{found.task}: AUC of test images by epoch (0: before tuning); negatives, positives: {found.counts}"]
    for name, curve in (("from the knowledge", found.informed.curve), ("from the common start", found.rand.curve)):
        lines.append(f"  {name:<22}" + "  ".join("-" if value is None else f"{value:.3f}" for value in curve))
    show(arguments, result, *lines, f"module: {arguments.out / MODULE_FILE}")
