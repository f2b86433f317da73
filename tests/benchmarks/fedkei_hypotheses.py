"""What the runs of ``bench_fedkei`` say: the table of plans, and each hypothesis with its interval over seeds."""

from __future__ import annotations

import numpy as np
from scipy import stats

from fedtar_flare.fedkei.plans import PLANS
from fedtar_flare.metrics.classification import epochs_to, lca, welch_against
from tests.textures import DISEASES, RELATED, UNRELATED

TASKS = len(DISEASES)
ORDERS = S, SHUFFLED = ("synchronous", "shuffled")


class Runs:
    """Records by plan, order and seed; every number of a seed is a mean over sites and tasks (the first left out)."""

    def __init__(self, records: list[dict]):
        self.by = {(r["plan"], r["order"], r["seed"]): r for r in records}

    def seeds(self, order: str, *plans: str) -> list[int]:
        """Seeds that have all of these plans."""
        return sorted(s for s in {key[2] for key in self.by} if all((p, order, s) in self.by for p in plans))

    def values(self, plan: str, order: str, measure, tasks=range(2, TASKS + 1), seeds=None) -> np.ndarray:
        seeds = self.seeds(order, plan) if seeds is None else seeds
        return np.array(
            [
                np.mean([measure(site["curve"]) for site in self.by[plan, order, s]["sites"] if site["task"] in tasks])
                for s in seeds
            ]
        )

    def gain(self, plan: str, order: str, measure, over: str = "rand", over_measure=None, **which) -> np.ndarray:
        """Paired by site, task and seed."""
        seeds = self.seeds(order, plan, over)
        mine = self.values(plan, order, measure, seeds=seeds, **which)
        return mine - self.values(over, order, over_measure or measure, seeds=seeds, **which)


def start(curve):
    return curve[0]


def final(curve):
    return curve[-1]


def lca0(curve):
    return lca(curve, with_start=True)


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
    """Print everything."""
    runs = Runs(records)
    for order in ORDERS:
        table(runs, order)
    print("\nhypotheses (tasks 2 to 5; mean and 95 % interval over seeds)")
    for what, tasks in (("related", RELATED), ("unrelated", UNRELATED)):
        for plan in ("rand", "fedavg", "fedkei"):
            print(f"epoch-0 AUC, {what} task, {plan}: {told(runs.values(plan, S, start, tasks))}")
        print(f"  LCA of FedKEI over Rand, {what}: {told(runs.gain('fedkei', S, lca, tasks=tasks))}")
    kei, a = runs.gain("fedkei", S, lca), runs.gain("variant_a", S, lca)
    print(f"LCA of FedKEI over Rand: {told(kei)}; final AUC: {told(runs.gain('fedkei', S, final))}")
    if len(a) == len(kei) > 0:
        print(f"A's share of the LCA gain: {a.mean() / kei.mean():.2f} (A over Rand {told(a)})")
    for base in ("variant_a", "variant_b", "variant_c", "pool_mean", "best_cluster", "apple", "fedavg", "own_last"):
        print(f"FedKEI over {base}: LCA {told(runs.gain('fedkei', S, lca, base))}")
    longer_training(runs)
    shuffled_orders(runs)
    inside(records)
    welch_table(runs)
    for plan in ("rand", "fedavg", "apple", "fedkei"):
        seconds(runs, plan)
    for one in (r["cost"] for r in records if r.get("cost")):
        print(f"cost of a task at a site: {one}")


def table(runs: Runs, order: str) -> None:
    plans = [p for p in PLANS if runs.seeds(order, p)]
    for i, plan in enumerate(plans):
        if not i:
            print(f"\n{order}, tasks 2 to {TASKS}, mean over {len(runs.seeds(order, plan))} seed(s), sites and tasks")
            print(f"{'plan':14} {'epoch 0':>8} {'LCA':>7} {'LCA0':>7} {'final':>7}   gain in LCA over Rand")
        row = [runs.values(plan, order, measure).mean() for measure in (start, lca, lca0, final)]
        numbers = f"{row[0]:8.3f} {row[1]:7.3f} {row[2]:7.3f} {row[3]:7.3f}"
        print(f"{plan:14} {numbers}   {told(runs.gain(plan, order, lca))}")


def longer_training(runs: Runs) -> None:
    """Rand with the epochs that FedKEI spends on its start: three more."""

    def gain(measure, over):
        return runs.gain("rand_3", S, measure, over_measure=over)

    print(f"Rand + 3 epochs over Rand: final AUC {told(gain(final, final))}")
    print(f"  LCA of its first epochs {told(gain(lambda c: lca(c[:-3]), lca))}")
    print(f"  LCA of its last, three epochs being the start: {told(gain(lambda c: lca(c[3:]), lca))}")
    kei, more = runs.gain("fedkei", S, final), gain(final, final)
    if len(kei) == len(more) > 0:
        print(f"  its share of FedKEI's gain: final AUC {more.mean() / kei.mean():.2f}")
    print(f"  FedKEI over it: LCA of the last {told(runs.gain('fedkei', S, lca, 'rand_3', lambda c: lca(c[3:])))}")


def shuffled_orders(runs: Runs) -> None:
    both = sorted(set(runs.seeds(S, "fedkei", "rand")) & set(runs.seeds(SHUFFLED, "fedkei", "rand")))
    gains = [
        runs.values("fedkei", order, lca, seeds=both) - runs.values("rand", order, lca, seeds=both) for order in ORDERS
    ]
    print(f"FedKEI's LCA gain, shuffled less synchronous: {told(gains[1] - gains[0])}")
    for order in ORDERS:
        print(f"FedKEI over own_last, {order}: LCA {told(runs.gain('fedkei', order, lca, 'own_last'))}")


def inside(records: list[dict]) -> None:
    """Gradients, clusters, weights, and what modules tell of their patients."""
    kept = [r for r in records if r["plan"] == "fedkei"]
    cosines = [r["cosines"] for r in kept if r["cosines"]]
    if cosines:
        lowest = min(min(one) for one in cosines)
        print(f"cosine of first order to exact G: {told([np.mean(one) for one in cosines])}, lowest {lowest:.3f}")
    for order in ORDERS:
        last = [r["mixtures"][-1] for r in kept if r["order"] == order and r["mixtures"]]
        for kind in ("adapter", "head") if last else ():
            ari = ", ".join(f"{what} {told([m[kind][what] for m in last])}" for what in ("pattern", "site", "task"))
            print(f"ARI of the last task's {kind} clusters, {order}: {ari}")
    moved = [d for r in kept for m in r["mixtures"] for kind in ("adapter", "head") for d in m[kind]["distance"] or []]
    if moved:
        print(f"distance of beta from its start: median {np.median(moved):.4f}, most {max(moved):.4f} (limit 1)")
    worse = [s["mixture_loss"] > s["start_loss"] for r in kept for s in r["sites"] if s["task"] > 1]
    if worse:
        print(f"mixture's validation loss above the common start's: {np.mean(worse):.0%} of tasks")
    for what in ("module", "centre"):
        found = [np.mean([m[what] for m in r["membership"]]) for r in kept if r.get("membership")]
        if found:
            print(f"membership AUC by the loss under a {what}: {told(found)}")


def welch_table(runs: Runs) -> None:
    others = {p: runs.values(p, S, lca) for p in PLANS if p != "rand" and len(runs.seeds(S, p)) > 1}
    if others and len(runs.seeds(S, "rand")) > 1:
        for plan, (test, p) in welch_against(others, runs.values("rand", S, lca)).items():
            interval = f"[{test.low:+.3f}, {test.high:+.3f}]"
            print(f"Welch against Rand, LCA, {plan}: {test.difference:+.3f} {interval}, Holm p {p:.4f}")


def seconds(runs: Runs, plan: str) -> None:
    """Seconds of one site and task, the start included, until Rand's final AUC."""
    reached, cost, whole = [], [], []
    for seed in runs.seeds(S, plan, "rand"):
        pairs = zip(runs.by[plan, S, seed]["sites"], runs.by["rand", S, seed]["sites"], strict=True)
        for mine, theirs in ((m, t) for m, t in pairs if m["task"] > 1):
            epoch = epochs_to(mine["curve"], theirs["curve"][-1])
            whole.append(mine["seconds"][-1])
            reached.append(epoch is not None)
            cost += [] if epoch is None else [(epoch, mine["seconds"][epoch])]
    if cost:
        epochs, taken = np.mean(cost, axis=0)
        print(
            f"{plan}: Rand's final AUC reached in {np.mean(reached):.0%} of tasks, there after {epochs:.1f} epochs and "
            f"{taken:.2f} s; a whole task takes {np.mean(whole):.2f} s"
        )
