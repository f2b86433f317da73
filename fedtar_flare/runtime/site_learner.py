"""The learner of a site that trains a report generator: built, charged, shown canaries, its drafts scored."""

from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import checksum, locked
from fedtar_flare.data.cohort import Cohort, Split
from fedtar_flare.imaging.batch import change_of
from fedtar_flare.learning.evaluation import write_report_scores
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.protocol.contract import CLOSE_ROUND
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.runtime.requirements import AdaptedModel, require_memory
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.cohort import labeler_of_site


def may_be_private(kind: type[ReportLearner]) -> bool:
    """Whether per-patient DP-SGD covers the updates: not where the class makes them in its own way."""
    changed = ("_accumulate", "local_update", "after_backward")
    return all(getattr(kind, name) is getattr(ReportLearner, name) for name in changed)


def build_learner(
    kind: type[ReportLearner], task: Task, cohort: Cohort, adapted: AdaptedModel, **others: Any
) -> ReportLearner:
    """Build the learner of a run, unless the site has not the memory, or the warm start has seen its test patients."""
    from fedtar_flare.learning.pretraining import refuse_known_tests

    settings, config, site, data = task.settings, task.config, task.site, task.settings.data
    # shares of periods may differ by a few visits, and images are changed at random: neither is for patients
    if not site.simulated and (data.image_changes or 0 < data.replay_share < 1):
        text = "data.image_changes, and data.replay_share between 0 and 1, are for simulations"
        raise ConfigError(text, public=text)
    require_memory(adapted, settings.training, cohort.timeline, config)
    refuse_known_tests(task.cohort, settings.model.with_local_paths(config.policy.models).weights)
    return kind(
        model=settings.model,
        lora=settings.lora,
        training=settings.training,
        cohort=cohort,
        seed=task.job_seed,
        device=config.device,
        precision=config.precision,
        local_paths=config.policy.models,
        lora_rank=adapted.lora.rank,
        ranks=task.ranks,
        transforms=data.transforms,
        image_change=change_of(site.name, task.job_seed, data.image_changes) if data.image_changes else None,
        report_labeler=labeler_of_site(config),
        scores=config.scores,
        has_patients=not config.without_patients,
        **others,
    )


def with_canaries(task: Task, cohort: Cohort, learner: ReportLearner) -> Cohort:
    """The cohort with the made-up patients that the site file asks for."""
    from fedtar_flare.learning.canaries import canaries

    number = task.config.canaries
    task.logger.info(f"trained on {number} made-up patients too (canaries): for a trial, not for use")
    made_up = canaries(cohort, task.header.run_id, number, learner.tokenizer, task.state.folder)
    return cohort.with_samples([*cohort.samples(None), *made_up])


def charge(task: Task, rate: float, updates: int) -> bool:
    """Count updates that each patient is in with probability ``rate`` before they are made; False beyond the budget."""
    from fedtar_flare.site.accountant import PATIENT_FILE, PatientLedger

    if (noise_multiplier := task.settings.training.noise_multiplier) is None:
        return True
    most, file = task.config.policy.max_patient_epsilon, task.site.records / PATIENT_FILE
    with locked(file):
        ledger = PatientLedger(file, scope=task.header.run_id if task.site.simulated else None)
        epsilon = ledger.epsilon_with(noise_multiplier, rate, updates)
        if most is not None and epsilon > most:
            return False
        ledger.add(task.header.run_id, noise_multiplier, rate, updates)
    task.logger.info(f"per-patient DP-SGD: epsilon {epsilon:.3g} after this task")
    return True


def may_score(task: Task, learner: ReportLearner, weights: Tensors) -> bool:
    """Decide whether these are the weights, and the private part, that the scores after a round, or before a resumed
    run's first, are of.
    """
    ahead = task.state.ahead(task.header)
    question = f"scores ahead of step {ahead[0]}" if ahead else f"scores after round {int(task.header.after[:4])}"
    # where no weights come down, scores are of what the site keeps
    digest = checksum(weights) if task.contract.task(CLOSE_ROUND).down else ""
    if task.state.may_answer(question, digest, checksum(learner.private()), task.cohort.digest()):
        return True
    task.logger.warning(f"{question} were asked for again, of other weights, patients or tasks before it: withheld")
    return False


def score_drafts(task: Task, learner: ReportLearner) -> dict[str, Any]:
    """Score the drafts for the patients that a task names; scores of single reports, and all texts, stay at the site.

    Where visits arrive period by period, scores are of the next period's visits of all patients, ahead of time, and
    the site keeps those of test patients' earlier visits. A job that adds periods begins with these alone.
    """
    from fedtar_flare.reporting.examples import SiteExamples, examples_of, scores_by_group, write_examples
    from fedtar_flare.reporting.periods import write_periods

    header, state, least = task.header, task.state, task.min_cell
    whose: Split | None = "test" if header.score == "test" else None
    earlier: list[dict[str, Any]] = []
    if ahead := state.ahead(header) if header.arrived is None else None:
        learner.newest_step = ahead[0] - 1
        scored = learner.evaluate(least, whose, ahead, generic=False)
    elif header.arrived is None:
        scored = learner.evaluate(least, whose)
    else:
        scored = learner.evaluate(least, None, header.arrived + 1, generic=False)
        if header.round:  # what is forgotten at last, of what was known in its own time
            steps = range(1, header.arrived + 1) if header.round == header.rounds else header.arrived
            earlier = learner.evaluate(least, whose, steps, generic=False).rows
    by_period = ahead or header.arrived is not None
    if task.ranks.rank or (by_period and not scored.samples):
        return {}
    synthetic, modality = task.config.source == "synthetic", learner.cohort.modality
    shown = examples_of(scored, learner)
    groups = scores_by_group(scored.samples, scored.rows[: len(scored.samples)], least)
    examples = SiteExamples(task.site.name, header.round, synthetic, modality, shown, groups)
    pages = [write_examples(state.folder, examples)]
    if any(group.behind for group in groups):
        task.logger.warning(f"the drafts of a group of patients fall behind all others': {pages[0]}")
    write_report_scores(state.folder, header.round, [*scored.rows, *earlier])
    if by_period:
        pages.append(write_periods(state.folder, learner, scored.rows))
    task.logger.info(f"for this site alone: {', '.join(map(str, pages))}")
    return {"scores": scored.scores} | ({"scores_generic": scored.scores_generic} if scored.scores_generic else {})
