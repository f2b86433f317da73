"""FedKEI's hypotheses on textures: 4 sites, 5 diseases mixed from 3 hidden patterns, a tiny ViT, in one process.

    python -m tests.benchmarks.bench_fedkei --json out.json [--seeds 5] [--plans rand,fedkei] [--orders synchronous]

The frozen ViT is first trained to tell other textures apart, as a stand-in for published weights. Runs that
``out.json`` already holds are not repeated, so an interrupted benchmark goes on. Prints each hypothesis with its mean
over seeds and a 95 % interval (t), also where it is refuted. Textures are no images of patients: what holds here need
not hold there.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from fedtar_flare.fedkei.config import FedKEIConfig
from fedtar_flare.fedkei.examples import keyed
from fedtar_flare.fedkei.learner import TaskLearner
from fedtar_flare.fedkei.mixing import kind_of
from fedtar_flare.fedkei.plans import PLANS
from fedtar_flare.fedkei.pool import Pool
from fedtar_flare.fedkei.tuning import LearnerSettings
from fedtar_flare.metrics.classification import auc
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from tests.benchmarks.fedkei_hypotheses import report
from tests.fedkei.through_steps import gradient_through_steps
from tests.textures import DISEASES, MAIN_PATTERN, task_data

SITES, TASKS = ("a", "b", "c", "d"), len(DISEASES)
SIZES = (64, 16, 96)
MIXING = FedKEIConfig()
LEARNING = LearnerSettings(epochs=10, batch_size=16, lr=0.05, momentum=0.9)
SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, encoder_config=SIZES)
BY_ORDER = {
    "synchronous": list(PLANS),
    "shuffled": ["rand", "fedavg", "variant_a", "variant_b", "fedkei", "own_last"],
}


# ---------------------------------------------------------------------- the stand-in for published weights
def pretrained(path: Path, steps: int = 400) -> str:
    """The ViT's weights, made where absent: trained on twelve textures that are none of the hidden patterns."""
    if path.exists():
        return str(path)
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = build_classifier(VIT).unload()
    backbone, generator = model.encoder.backbone, keyed("pretraining")
    head = torch.nn.Linear(SIZES["embed_dim"], 12)
    for parameter in backbone.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    right = 0.0
    for _ in range(steps):
        labels = torch.randint(12, (48,), generator=generator)
        images = torch.stack([generic(int(label), generator) for label in labels])[:, None]
        features = model.features(_Batch(images))
        loss = torch.nn.functional.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        right = 0.98 * right + 0.02 * float((head(features).argmax(1) == labels).float().mean())
    print(f"pre-training: {right:.2f} of the last textures told apart", flush=True)
    save_file({name: value.detach().contiguous() for name, value in backbone.state_dict().items()}, path)
    return str(path)


class _Batch:
    def __init__(self, images):
        self.images, self.slice_mask = images, torch.ones(images.shape[:2], dtype=torch.bool)


def generic(kind, generator):
    """A texture (3, 32, 32) of one of twelve kinds: upright or lying waves, blobs of a size, saws, one large edge."""
    y, x = torch.meshgrid(torch.arange(32) / 32, torch.arange(32) / 32, indexing="ij")
    u = torch.rand(4, generator=generator).tolist()
    if kind < 6:
        axis, frequency = (x, y)[kind % 2], (2, 3.5, 7)[kind // 2]
        image = torch.sin(2 * np.pi * (frequency * axis + u[0]))
    elif kind < 9:
        coarse = torch.randn(1, 1, (4, 8, 16)[kind - 6], (4, 8, 16)[kind - 6], generator=generator)
        image = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")[0, 0]
    elif kind < 11:
        image = 2 * ((3 * (x if kind == 9 else y) + u[0]) % 1) - 1
    else:
        image = torch.sign(x * np.cos(6.28 * u[1]) + y * np.sin(6.28 * u[1]) - 0.5 * u[2])
    image = image * (0.5 + 0.5 * u[3]) + 0.6 * torch.randn(32, 32, generator=generator)
    return (128 + 36 * image).clamp(0, 255).to(torch.uint8).expand(3, 32, 32)


# ---------------------------------------------------------------------- one run
def orders(kind: str, seed: int) -> dict[str, tuple[int, ...]]:
    """Each site's order of diseases."""
    if kind == "synchronous":
        return dict.fromkeys(SITES, tuple(range(TASKS)))
    return {s: tuple(torch.randperm(TASKS, generator=keyed("order", seed, s)).tolist()) for s in SITES}


@lru_cache(maxsize=64)
def data_of(site: str, order: tuple[int, ...], task: int, seed: int):
    return task_data(site, order, task, seed, SIZES)


def run(plan_name: str, order_kind: str, seed: int, weights: str, learning: LearnerSettings = LEARNING) -> dict:
    """All tasks of a federation under one plan; the record of each site and task, and of the mixtures."""
    plan, order = PLANS[plan_name], orders(order_kind, seed)
    config = VIT.replace(encoder_weights=weights, seed=seed)
    learners = {s: TaskLearner(config, learning, seed=100 * seed + i) for i, s in enumerate(SITES)}
    pool = Pool(learners["a"].start)
    found: dict = {"plan": plan_name, "order": order_kind, "seed": seed, "sites": [], "mixtures": [], "cosines": []}
    found["membership"] = []
    for task in range(1, TASKS + 1):
        mixture = plan.mixture(pool, task, MIXING)
        probe_seconds = 0.0
        if mixture.probes:
            total: dict[str, torch.Tensor] = {}
            for site, learner in learners.items():
                data = data_of(site, order[site], task, seed)
                probe = learner.probe(mixture.centres(site), data, task, direct=plan.probe == "direct")
                probe_seconds += probe.seconds / len(SITES)
                total = {name: total.get(name, 0) + value for name, value in probe.gradients.items()}
                if plan_name == "fedkei" and order_kind == "synchronous" and site in SITES[:2]:
                    found["cosines"].append(cosine(learner, mixture.centres(site), data, task, probe.gradients))
            mixture = mixture.step(total, MIXING.eta_out)
        if plan_name == "fedkei" and order_kind == "synchronous" and mixture.parts and not seed:
            found["membership"] += membership(learners["a"], pool, mixture, task, order, seed)
            if task == TASKS:
                found["cost"] = cost_of(learners["a"], mixture, data_of("a", order["a"], task, seed), task)
        if mixture.parts is not None and plan.groups == "kmeans":
            found["mixtures"].append(agreement(mixture, order, task))
        curvature = pool.curvature(task) if plan.local.objective == "fisher" else None
        for site, learner in learners.items():
            data, how = data_of(site, order[site], task, seed), {"alpha": mixture.alpha, "local": plan.local}
            out = learner.adapt(mixture.centres(site), data, task, **how, curvature=curvature)
            pool.add(site, task, out.difference, gap=out.gap, importance=out.importance)
            start = mixture.seconds + probe_seconds
            found["sites"].append(
                {
                    "site": site,
                    "task": task,
                    "disease": order[site][task - 1],
                    "curve": out.curve,
                    "seconds": [start + s for s in out.at_epoch],
                    "alpha": out.alpha,
                    "mixture_loss": out.mixture_loss,
                    "start_loss": out.start_loss,
                }
            )
    return found


def cosine(learner, centres, data, task, first_order) -> float:
    """Between the first-order and the exact G, all tensors together."""
    _, other = gradient_through_steps(learner, centres, data.train, task)
    a, b = (torch.cat([one[name].flatten().double() for name in sorted(first_order)]) for one in (first_order, other))
    return float(a @ b / (a.norm() * b.norm()))


def agreement(mixture, order, task) -> dict:
    """Adjusted Rand index of the clusters with the main hidden pattern, the site and the task; how far beta went."""
    found: dict = {"task": task}
    for kind, part in mixture.parts.items():
        planted = [MAIN_PATTERN[order[m.site][m.task - 1]] for m in part.modules]
        found[kind] = {
            "pattern": adjusted_rand_score(planted, part.assignment),
            "site": adjusted_rand_score([m.site for m in part.modules], part.assignment),
            "task": adjusted_rand_score([m.task for m in part.modules], part.assignment),
            "distance": None if part.distance is None else [float(d) for d in part.distance],
        }
    return found


def membership(learner, pool, mixture, task, order, seed) -> list[dict]:
    """How well the loss tells training from test examples of the task before, under the site's module and its centre.

    0.5: not at all. It is what somebody can do who has an example and the module or the centre.
    """
    found, centres = [], mixture.centres()
    for n, module in enumerate(mixture.parts["adapter"].modules):
        if module.task != task - 1:
            continue
        data, losses = data_of(module.site, order[module.site], task - 1, seed), {}
        own = {k: part.assignment[n] for k, part in mixture.parts.items()}
        centre = {name: value[own[kind_of(name)]] for name, value in centres.items()}
        for what, theta in (("module", module.tensors), ("centre", centre)):
            right = [
                torch.where(split.labels == 1, scores, 1 - scores)
                for split in (data.train, data.test)
                for scores in (learner.scores_of(theta, split),)
            ]
            losses[what] = auc([1] * len(right[0]) + [0] * len(right[1]), torch.cat(right).numpy())
        found.append(losses)
    return found


def cost_of(learner, mixture, data, task) -> dict:
    """Values and floating-point operations of a site's part in one task."""
    from torch.utils.flop_counter import FlopCounterMode

    values = sum(value.numel() for value in mixture.pool.start.values())
    down = sum(value.numel() for value in mixture.centres().values())
    found = {"values of a module": values, "values down": 2 * down, "values up": down + values}
    steps = {
        "probe": lambda: learner.probe(mixture.centres(), data, task),
        "adapt": lambda: learner.adapt(mixture.centres(), data, task),
        "adapt without alpha": lambda: learner.adapt(mixture.centres(), data, task, alpha="fixed"),
    }
    for what, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()
        found[f"GFLOPs, {what}"] = round(counter.get_total_flops() / 1e9, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=LEARNING.epochs)
    parser.add_argument("--plans", default="")
    parser.add_argument("--orders", default="synchronous,shuffled")
    parser.add_argument("--report", action="store_true", help="only print what the file holds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    done = {(r["plan"], r["order"], r["seed"]) for r in records}
    wanted = [
        (plan, order, seed)
        for seed in range(0 if arguments.report else arguments.seeds)
        for order in arguments.orders.split(",")
        for plan in arguments.plans.split(",") * bool(arguments.plans) or BY_ORDER[order]
    ]
    for one in wanted:
        if one not in done:
            began = time.monotonic()
            weights = pretrained(arguments.json.with_suffix(".vit.safetensors"))
            records.append(run(*one, weights, LEARNING.replace(epochs=arguments.epochs)))
            arguments.json.write_text(json.dumps(records))
            print(*one, f"{time.monotonic() - began:.1f} s", flush=True)
    report(records)


if __name__ == "__main__":
    main()
