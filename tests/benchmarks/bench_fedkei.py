"""FedKEI's hypotheses on textures: 4 sites, 5 diseases mixed from 3 hidden patterns, a tiny ViT, in one process.

    python -m tests.benchmarks.bench_fedkei --json out.json [--seeds 5] [--plans rand,fedkei] [--orders synchronous]

The frozen ViT is first trained to tell other textures apart, as a stand-in for published weights. Runs that ``out.json``
already holds are not repeated, so an interrupted benchmark goes on. Prints each hypothesis with its mean over seeds and
a 95 % interval (t), also where it is refuted. Textures are no images of patients: what holds here need not hold there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from sklearn.metrics import adjusted_rand_score

from fedtar_flare.fedkei.examples import keyed
from fedtar_flare.fedkei.learner import TaskLearner
from fedtar_flare.fedkei.plans import PLANS, MixingSettings
from fedtar_flare.fedkei.pool import Pool
from fedtar_flare.fedkei.tuning import LearnerSettings
from fedtar_flare.metrics.classification import epochs_to, lca, welch_against
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from tests.textures import DISEASES, MAIN_PATTERN, RELATED, UNRELATED, task_data

SITES, TASKS, EPOCHS = ("a", "b", "c", "d"), len(DISEASES), 10
SIZES = (96, 48, 192)
MIXING = MixingSettings()
LEARNING = LearnerSettings(epochs=EPOCHS, batch_size=16, lr=0.05, momentum=0.9)
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, width=64, depth=3, heads=4, patch=8)
SYNCHRONOUS = [name for name in PLANS if name != "own_last"] + ["own_last"]
SHUFFLED = ["rand", "fedavg", "variant_a", "variant_b", "fedkei", "own_last"]


# ---------------------------------------------------------------------- the stand-in for published weights
def pretrained(folder: Path, steps: int = 700) -> str:
    """Path of the ViT's weights, trained to tell apart twelve textures that are none of the hidden patterns."""
    path = folder / "vit.safetensors"
    if path.exists():
        return str(path)
    from safetensors.torch import save_file

    model = build_classifier(VIT).unload()
    backbone, generator = model.encoder.backbone, keyed("pretraining")
    head = torch.nn.Linear(VIT.width, 12)
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


def run(plan_name: str, order_kind: str, seed: int, weights: str) -> dict:
    """All tasks of a federation under one plan; the record of each site and task, and of the mixtures."""
    plan, order = PLANS[plan_name], orders(order_kind, seed)
    config = VIT.replace(encoder_weights=weights, seed=seed)
    learners = {s: TaskLearner(config, LEARNING, seed=100 * seed + i) for i, s in enumerate(SITES)}
    pool = Pool(learners["a"].start())
    found: dict = {"plan": plan_name, "order": order_kind, "seed": seed, "sites": [], "mixtures": [], "cosines": []}
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
                if plan_name == "fedkei" and order_kind == "synchronous":
                    found["cosines"].append(cosine(learner, mixture.centres(site), data, task, probe.gradients))
            mixture = mixture.step(total, MIXING.eta_out)
        if mixture.parts is not None and plan.groups == "kmeans":
            found["mixtures"].append(agreement(mixture, order, task))
        for site, learner in learners.items():
            data = data_of(site, order[site], task, seed)
            out = learner.adapt(mixture.centres(site), data, task, alpha=mixture.alpha, local=plan.local)
            pool.add(site, task, out.difference)
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
    exact = TaskLearner.__new__(TaskLearner)
    exact.__dict__ |= learner.__dict__ | {"settings": LEARNING.replace(hypergradient="exact")}
    other = exact.probe(centres, data, task).gradients
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


# ---------------------------------------------------------------------- what it says
class Runs:
    """Records by plan, order and seed; every number of a seed is a mean over sites and tasks."""

    def __init__(self, records: list[dict]):
        self.by = {(r["plan"], r["order"], r["seed"]): r for r in records}

    def seeds(self, *wanted: tuple[str, str]) -> list[int]:
        """Seeds that have all of these runs (plan, order)."""
        return sorted(s for s in {key[2] for key in self.by} if all((p, o, s) in self.by for p, o in wanted))

    def values(self, plan: str, order: str, measure, tasks=range(2, TASKS + 1), seeds=None) -> np.ndarray:
        seeds = self.seeds((plan, order)) if seeds is None else seeds
        return np.array(
            [np.mean([measure(s["curve"]) for s in self.by[plan, order, seed]["sites"] if s["task"] in tasks]) for seed in seeds]
        )

    def gain(self, plan: str, order: str, measure, over: str = "rand", over_measure=None, **which) -> np.ndarray:
        """Paired by site, task and seed."""
        seeds = self.seeds((plan, order), (over, order))
        mine = self.values(plan, order, measure, seeds=seeds, **which)
        return mine - self.values(over, order, over_measure or measure, seeds=seeds, **which)


def start(curve):
    return curve[0]


def final(curve):
    return curve[-1]


def told(values) -> str:
    """Mean and 95 % interval over seeds."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        return "no runs"
    if len(values) == 1:
        return f"{values[0]:+.3f} (one seed)"
    reach = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.3f} [{values.mean() - reach:+.3f}, {values.mean() + reach:+.3f}]"


def report(records: list[dict]) -> None:
    """Print the table of plans and the hypotheses."""
    runs = Runs(records)
    for order in ("synchronous", "shuffled"):
        plans = [p for p in PLANS if runs.seeds((p, order))]
        if not plans:
            continue
        print(f"\n{order}, tasks 2 to {TASKS}, {len(runs.seeds((plans[0], order)))} seed(s): mean over seeds, sites, tasks")
        print(f"{'plan':14} {'epoch 0':>8} {'LCA':>7} {'LCA0':>7} {'final':>7}   gain in LCA over Rand")
        for plan in plans:
            row = [runs.values(plan, order, m).mean() for m in (start, lca, lambda c: lca(c, with_start=True), final)]
            print(f"{plan:14} {row[0]:8.3f} {row[1]:7.3f} {row[2]:7.3f} {row[3]:7.3f}   {told(runs.gain(plan, order, lca))}")
    s = "synchronous"
    print("\nhypotheses (tasks 2 to 5; mean and 95 % interval over seeds)")
    for what, tasks in (("related", RELATED), ("unrelated", UNRELATED)):
        for plan in ("rand", "fedavg", "fedkei"):
            print(f"epoch-0 AUC, {what} task, {plan}: {told(runs.values(plan, s, start, tasks))}")
        print(f"  LCA of FedKEI over Rand, {what}: {told(runs.gain('fedkei', s, lca, tasks=tasks))}")
    kei = runs.gain("fedkei", s, lca)
    print(f"LCA of FedKEI over Rand: {told(kei)}; final AUC: {told(runs.gain('fedkei', s, final))}")
    if len(runs.seeds(("variant_a", s), ("fedkei", s), ("rand", s))) == len(kei) > 0:
        a = runs.gain("variant_a", s, lca)
        print(f"A's share of the LCA gain: {a.mean() / kei.mean():.2f} (A over Rand {told(a)})")
    for base in ("variant_a", "variant_b", "variant_c", "pool_mean", "best_cluster", "apple", "fedavg", "own_last"):
        print(f"LCA of FedKEI over {base}: {told(runs.gain('fedkei', s, lca, base))}")
    print(f"final AUC of Rand + 3 epochs over Rand: {told(runs.gain('rand_3', s, final, over_measure=final))}")
    print(f"  LCA over its first {EPOCHS} epochs: {told(runs.gain('rand_3', s, lambda c: lca(c[: EPOCHS + 1]), over_measure=lca))}")
    print(f"  LCA over its last {EPOCHS} (three epochs given for the start): {told(runs.gain('rand_3', s, lambda c: lca(c[3:]), over_measure=lca))}")
    both = runs.seeds(("fedkei", s), ("fedkei", "shuffled"), ("rand", s), ("rand", "shuffled"))
    if both:
        gains = [np.array([runs.gain("fedkei", o, lca)[runs.seeds(("fedkei", o), ("rand", o)).index(x)] for x in both]) for o in ("shuffled", s)]
        print(f"FedKEI's LCA gain, shuffled less synchronous: {told(gains[0] - gains[1])}")
        print(f"FedKEI over own_last, LCA, shuffled: {told(runs.gain('fedkei', 'shuffled', lca, 'own_last'))}; synchronous: {told(runs.gain('fedkei', s, lca, 'own_last'))}")
    kept = [r for r in records if r["plan"] == "fedkei"]
    cosines = [np.mean(r["cosines"]) for r in kept if r["cosines"]]
    lowest = min((min(r["cosines"]) for r in kept if r["cosines"]), default=float("nan"))
    print(f"cosine of first order to exact G: {told(cosines)}, lowest {lowest:.3f}")
    for order in ("synchronous", "shuffled"):
        for kind in ("adapter", "head"):
            for planted in ("pattern", "site", "task"):
                last = [r["mixtures"][-1][kind][planted] for r in kept if r["order"] == order and r["mixtures"]]
                print(f"ARI of {kind} clusters with the {planted}, {order}, last task: {told(last)}")
    moved = [d for r in kept for m in r["mixtures"] for k in ("adapter", "head") for d in m[k]["distance"] or []]
    if moved:
        print(f"distance of beta from its start: median {np.median(moved):.4f}, most {max(moved):.4f}")
    paired = runs.seeds(("rand", s), *((p, s) for p in ("variant_b", "fedkei")))
    if len(paired) > 1:
        others = {p: runs.values(p, s, lca) for p in PLANS if p != "rand" and len(runs.seeds((p, s))) > 1}
        for plan, (test, p) in welch_against(others, runs.values("rand", s, lca)).items():
            print(f"Welch against Rand, LCA, {plan}: {test.difference:+.3f} [{test.low:+.3f}, {test.high:+.3f}], Holm p {p:.4f}")
    seconds(runs, s)


def seconds(runs: Runs, order: str) -> None:
    """Seconds of one site and task, the start included, until Rand's final AUC."""
    for plan in ("rand", "fedavg", "apple", "fedkei"):
        reached, cost, whole = [], [], []
        for seed in runs.seeds((plan, order), ("rand", order)):
            for mine, theirs in zip(runs.by[plan, order, seed]["sites"], runs.by["rand", order, seed]["sites"], strict=True):
                if mine["task"] > 1:
                    epoch = epochs_to(mine["curve"], theirs["curve"][-1])
                    whole.append(mine["seconds"][-1])
                    reached.append(epoch is not None)
                    cost += [] if epoch is None else [(epoch, mine["seconds"][epoch])]
        if cost:
            e, t = np.mean(cost, axis=0)
            print(
                f"{plan}: Rand's final AUC reached in {np.mean(reached):.0%} of tasks, there after {e:.1f} epochs and "
                f"{t:.2f} s; a whole task {np.mean(whole):.2f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plans", default="")
    parser.add_argument("--orders", default="synchronous,shuffled")
    parser.add_argument("--report", action="store_true", help="only print what the file holds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    done = {(r["plan"], r["order"], r["seed"]) for r in records}
    with tempfile.TemporaryDirectory() as folder:
        weights = "" if arguments.report else pretrained(Path(folder))
        for seed in range(0 if arguments.report else arguments.seeds):
            for order in arguments.orders.split(","):
                chosen = arguments.plans.split(",") if arguments.plans else SYNCHRONOUS if order == "synchronous" else SHUFFLED
                for plan in chosen:
                    if (plan, order, seed) in done:
                        continue
                    began = time.monotonic()
                    records.append(run(plan, order, seed, weights))
                    arguments.json.write_text(json.dumps(records))
                    print(f"seed {seed}, {order}, {plan}: {time.monotonic() - began:.1f} s", flush=True)
    report(records)


if __name__ == "__main__":
    main()
