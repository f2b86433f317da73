"""FedKEI at the server: a pool of modules, its mixture for each task, PROBE and ADAPT (Eq. 3 to 11)."""

from statistics import fmean
from typing import Any

import torch
from pydantic import ValidationError

from fedtar_flare.core.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.methods.fedkei.config import PLANS, STEPS
from fedtar_flare.methods.fedkei.contract import ADAPT, PROBE, PULL
from fedtar_flare.methods.fedkei.events import Learnt, Mixed, SiteTask
from fedtar_flare.methods.fedkei.mixture import Mixture, Pool, mixture_of
from fedtar_flare.methods.fedkei.tasks import DiseaseTask
from fedtar_flare.protocol.exchange import Tensors, check_tensors, check_update_size
from fedtar_flare.protocol.messages import LEFT, Reply, version
from fedtar_flare.runtime.aggregation import SpilledUpdates
from fedtar_flare.runtime.checkpoint import SIMULATED_JOB
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers, ReplyHandler
from fedtar_flare.runtime.server_strategy import ServerStrategy

PRODUCTION_CLUSTER_SITES = 2
"""Fewest sites that a cluster stems from in production; a cluster of one is that site's module, sent to all."""


class FedKEIServer(ServerStrategy):
    """FedKEI, its rivals and controls: a round is a task of two steps, PROBE (where the plan has it) and ADAPT."""

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.config = self.settings.fedkei
        self.plan = PLANS[self.config.plan]
        self.pool: Pool | None = None
        self._restored: Tensors = {}
        self._owners: list[dict[str, Any]] = []
        self._final: dict[int, float] = {}
        self._curved = self.plan.objective == "fisher"
        """Whether Fisher information travels with the modules (FedCurv)."""
        steps, rounds = run.config.time_steps, run.config.num_rounds
        if steps != STEPS:
            raise ConfigError(f"time_steps is {steps}: a task of fedkei has {STEPS} steps, PROBE and ADAPT")
        if rounds > len(self.config.tasks):
            raise ConfigError(f"num_rounds is {rounds}, but fedkei.tasks lists {len(self.config.tasks)}")
        if run.config.initial_checkpoint:
            raise ConfigError("initial_checkpoint: fedkei's common start is by the seed")

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """Task r: mix, PROBE, step beta, ADAPT, pool; w is the common start and stays."""
        if self.pool is None:
            self.pool = Pool(w)
            self.pool.load(self._restored, self._owners)  # of the run that is resumed
        pool, probed = self.pool, Answers()
        mixture = mixture_of(self.plan, pool, r, self._mixing)
        if mixture.probes:
            gradients, probed = self._probe(mixture, r)
            if left := self._forget(pool, probed):
                self.run.info(f"task {r}: {', '.join(left)} left: their modules are out of the pool")
                mixture = mixture_of(self.plan, pool, r, self._mixing)
            elif gradients is not None:
                mixture = mixture.step(gradients, self.config.eta_out)
        self._record_mixture(mixture, probed, r, len(pool.before(r)))
        self._forget(pool, self._adapt(mixture, pool, r))
        return w

    # ------------------------------------------------------------------ the two steps
    def _probe(self, mixture: Mixture, r: int) -> tuple[dict[str, torch.Tensor] | None, Answers]:
        """The sum of the sites' gradients in the centres (float64), and the answers; None without any."""
        centres = mixture.centres()

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            self._check(PROBE, tensors, centres)
            updates.add(site, tensors)

        with SpilledUpdates(self.run.results.folder / "updates", sorted(centres)) as updates:
            answers = self._send(PROBE, mixture, r, 1, accept, {})
            total = updates.mean(dict.fromkeys(sorted(answers.replies), 1.0)) if answers.replies else None
        self.run.results.step(r, 1, answers, None)
        return total, answers

    def _adapt(self, mixture: Mixture, pool: Pool, r: int) -> Answers:
        """Every site tunes its module, which goes into the pool."""
        more: Tensors = {}
        if self._curved:  # where the pool may not be mixed yet, nothing of it is revealed this way either
            more = pool.curvature(r if mixture.parts is not None else 0)

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            self._check(ADAPT, tensors, {**mixture.centres(site), **more})
            outcome = self._site_task(reply)
            module = {name: tensors[name] for name in pool.start}
            check_update_size(module, pool.start, self.run.config.update_norm_limit)
            pool.add(site, r, tensors, outcome.gap)

        answers = self._send(ADAPT, mixture, r, 2, accept, more)
        self.run.results.step(r, 2, answers, None)
        learnt = {site: self._site_task(reply) for site, reply in sorted(answers.replies.items())}
        self.run.record.write(Learnt(round=r, sites=learnt))
        last = {site: outcome.auc[-1] for site, outcome in learnt.items() if outcome.auc}
        for site, value in last.items():
            self.run.scalar(f"AUC/{site}", value, r)
        if last:
            self._final[r] = fmean(last.values())
        shown = " ".join(f"{site} {value:.3f}" for site, value in last.items())
        self.run.info(f"task {r}: AUC of test images {shown or 'not reported by any site'}")
        return answers

    def _send(self, task: str, mixture: Mixture, r: int, step: int, accept: ReplyHandler, more: Tensors) -> Answers:
        """Send the centres and ``more``: to each site with centres of its own a message apart, to all others one."""
        header = self.run.header(r, step, after=version(r - 1, STEPS if r > 1 else 0))
        sites = self.run.membership.sites
        groups = [[site] for site in sites if site in mixture.by_site]
        if common := [site for site in sites if site not in mixture.by_site]:
            groups.append(common)
        answers, least = Answers(), self.run.config.min_sites
        for group in groups:
            down = {**mixture.centres(group[0]), **more}
            some = self.run.send_task(task, header, down, group, accept, min_sites=None if len(groups) == 1 else 0)
            answers.add(some)
        if answers.count < least:
            raise FedTARError(f"task {r}: {answers.count} site(s) took part, min_sites is {least}")
        return answers

    def _check(self, task: str, tensors: Tensors, centres: Tensors) -> None:
        """Refuse (:class:`ExchangeError`) other names and shapes than those of the centres (ADAPT: of one centre)."""
        shapes = {name: tuple(value.shape) for name, value in centres.items() if not name.startswith(PULL)}
        check_tensors(self.run.wire_contract, task, tensors, shapes, sends="difference")
        for name, shape in sorted(shapes.items()):
            if name not in tensors:
                raise ExchangeError(f"tensor '{name}' is missing")
            if tuple(tensors[name].shape) != (shape[1:] if task == ADAPT else shape):
                raise ExchangeError(f"tensor '{name}' has shape {tuple(tensors[name].shape)} in task '{task}'")

    # ------------------------------------------------------------------ the pool
    def _forget(self, pool: Pool, answers: Answers) -> list[str]:
        """Remove modules of sites that have left from the pool; returns the sites."""
        return [site for site, why in sorted(answers.absent.items()) if why == LEFT and pool.leave(site)]

    def state(self) -> dict[str, torch.Tensor]:
        """The pool's modules; their sites are in :meth:`info`."""
        return {} if self.pool is None else self.pool.state()[0]

    def load_state(self, state: Tensors) -> None:
        self._restored = dict(state)

    def info(self) -> Any:
        return None if self.pool is None else {"modules": self.pool.state()[1], "auc": self._final}

    def load_info(self, info: Any) -> None:
        self._owners = list(info["modules"])
        self._final = {int(r): float(value) for r, value in info["auc"].items()}

    def numbers(self) -> dict[str, list[float]]:
        """Mean AUC of the sites after each task."""
        return {"auc": [self._final[r] for r in sorted(self._final)]}

    # ------------------------------------------------------------------ start, record, checks
    def on_start(self) -> None:
        simulated = self.run.fl_ctx.get_job_id() in (None, "", SIMULATED_JOB)
        least = max(self.config.min_cluster_sites, 1 if simulated else PRODUCTION_CLUSTER_SITES)
        self._mixing = self.config.replace(min_cluster_sites=least)
        if not simulated and self.plan.weights == "similarity":
            raise FedTARError(f"plan '{self.plan.name}' sends single hospitals' modules: it is for simulations")
        if least < 3 and len(self.run.membership.sites) > 1:
            self.run.info(f"a cluster may stem from {least} site(s): each module in it follows from the others")

    def largest_message(self) -> int:
        """The gradient in K centres; without k-means, K may be the number of modules."""
        centres = self.run.config.num_rounds * len(self.run.membership.sites)
        if self.plan.groups == "kmeans":
            centres = self.config.clusters
        return self.run.membership.schema.parameters * max(centres, 2 if self._curved else 1)

    def _record_mixture(self, mixture: Mixture, probed: Answers, r: int, modules: int) -> None:
        replies = sorted(probed.replies.items())
        self.run.record.write(
            Mixed(
                round=r,
                modules=modules,
                clusters=mixture.report(),
                plane=mixture.plane(),
                probed={site: int(reply.numbers["samples"]) for site, reply in replies},
                clustering_seconds=round(mixture.seconds, 3),
                probe_seconds=max(probed.seconds.values(), default=0.0),
                probe_took={site: reply.numbers.get("seconds", 0.0) for site, reply in replies},
                left=[site for site, why in sorted(probed.absent.items()) if why == LEFT],
            )
        )

    def check_content(self, reply: Reply) -> None:
        """Refuse scores that the record could not hold, and a task that the job does not list."""
        if not {"scores", "counts"} & set(reply.payload) or "versions" in reply.payload:
            super().check_content(reply)
            return
        self._site_task(reply)

    def _site_task(self, reply: Reply) -> SiteTask:
        counts, scores = dict(reply.payload.get("counts") or {}), dict(reply.payload.get("scores") or {})
        number = counts.pop("task", None)
        if not isinstance(number, int) or not 1 <= number <= len(self.config.tasks):
            raise ExchangeError("the field 'counts' names no task of the job")
        name = DiseaseTask.parse(self.config.tasks[number - 1]).name
        try:
            outcome = SiteTask(task=name, counts=counts, **scores)
        except (ValidationError, TypeError) as error:
            raise ExchangeError("the field 'scores' or 'counts' is not what a task gives") from error
        membership = [] if outcome.membership is None else [outcome.membership]
        if not all(0 <= value <= 1 for value in (*outcome.auc, *outcome.rand_auc, *membership)):
            raise ExchangeError("the field 'scores' holds an AUC beyond 0 to 1")
        return outcome
