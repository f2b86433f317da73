"""Jobs: simulated, exported, compared, described by a page; and those of a real federation, by an admin's kit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from fedtar_flare.cli.commands import (
    PRESETS,
    Commands,
    ProgressLine,
    add_command,
    add_repeated,
    add_sites,
    existing,
    given,
    grouped,
    show,
)
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_yaml, write_text

if TYPE_CHECKING:
    from fedtar_flare.runtime.recipe import MethodRecipe

GROUPS = ("server", "model", "lora", "training", "data")
_OF_RECIPE = {"rounds": "num_rounds"} | {name: name for name in ("time_steps", "preset", "min_sites", "seed")}
_OF_GROUPS = {"local_steps": ("training", "local_steps"), "patients": ("data", "synthetic_patients")}
FILES = ("weights", "encoder_weights", "tokenizer", "encoder_name", "decoder_name")  # a model's files or folders


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, simulate, "simulate a federation on this machine, all sites side by side")
    _add_simulation_options(command)

    command = add_command(commands, evaluate, "score adapters, models and drafts at simulated sites and compare them")
    what = "a candidate: by the site files, by a path (adapter, base model, drafts), or job: the model of the options"
    command.add_argument("candidates", nargs="+", metavar="NAME[=PATH]", help=what)
    _add_simulation_options(command)

    command = add_command(commands, export, "write the job for FLARE, or describe what it asks of a site")
    command.add_argument("-o", "--out", type=Path, default=Path("jobs"), help="folder of jobs (default jobs)")
    command.add_argument("--name", default="", help="name of the job and its folder (default: the method's)")
    command.add_argument("--no-byoc", action="store_true", help="without the custom folder: for production")
    what = "write no job; print which data, model and computer a site needs to join, and what will leave it"
    command.add_argument("--describe", action="store_true", help=what)
    _add_job_options(command)

    command = add_command(commands, compare, "run methods on the same hospitals and compare them", with_json=False)
    command.add_argument("suite", help="a shipped suite by name, such as quick, or a suite file (YAML)")
    command.add_argument("-o", "--out", type=Path, default=Path("comparison"), help="folder of the results")
    command.add_argument("-j", "--workers", type=int, default=1, help="runs at the same time (default 1)")
    command.add_argument("--only", action="append", default=[], metavar="ARM", help="this arm alone; may be repeated")
    command.add_argument("--page", action="store_true", help="run nothing: write the page of what is done")
    command.add_argument("-n", "--sites", type=int, help="the suite's first hospitals alone, so many (default: all)")
    add_repeated(command, "--against", "ARM", "compare with this arm, not the suite's references; may be repeated")
    of_drawn = "what the tables of every metric draw (default: as the suite says, else patients)"
    command.add_argument("--drawn", choices=("patients", "studies"), help=of_drawn)

    command = add_command(commands, report, "make the page of a run, also of one that was killed or downloaded")
    command.add_argument("run_folder", type=existing, help="results of a run, workspace, or a downloaded job's folder")
    what = (
        "run of local_patient at the same hospitals, whose scores then stand beside this run's as each hospital alone"
    )
    command.add_argument("--alone", type=Path, metavar="RUN", help=what)

    command = add_command(commands, status, "round, step, losses and sites of the jobs of a real federation")
    command.add_argument("job_id", nargs="?", help="one job; without it the newest ones")
    command.add_argument("--kit", type=Path, required=True, help="folder of the admin user's kit")
    command.add_argument("--limit", type=int, default=10, help="how many of the newest jobs (default 10)")
    command.add_argument("--prometheus", type=Path, metavar="FILE", help="also write the running ones for Prometheus")

    command = add_command(commands, watch, "follow one job of a real federation until it ends")
    command.add_argument("job_id", help="the job; 'fedtar status' lists them")
    command.add_argument("--kit", type=Path, required=True, help="folder of the admin user's kit")

    command = add_command(commands, resume, "go on with a run whose job was killed, aborted or is to be longer")
    command.add_argument("job_id", help="the ended job; 'fedtar status' lists them")
    command.add_argument("--kit", type=Path, required=True, help="kit of an admin user who may submit jobs")
    submitted = "folder of the job as it was submitted (default: downloaded)"
    command.add_argument("--job", type=Path, dest="job_folder", metavar="JOB", help=submitted)
    command.add_argument("-r", "--rounds", type=int, help="more rounds than the run had")
    fewer = "fewest sites from now on, such as after a hospital has left for good (default: the run's)"
    command.add_argument("--min-sites", type=int, help=fewer)
    command.add_argument("--force", action="store_true", help="although FLARE says it runs (its server was killed)")

    command = add_command(commands, release, "let a run's adapter leave the study, if every site has voted for it")
    command.add_argument("run_folder", type=existing, metavar="run", help="the run's folder, with the sites' votes")
    command.add_argument("--project", type=Path, required=True, help="the project file that the sites have voted by")
    command.add_argument("--kit", type=Path, required=True, help="kit of the study lead, who signs")

    command = add_command(commands, continue_, "go on with a run: rounds on the next period's visits, as a new job")
    command.add_argument("run_to_continue", metavar="RUN", help="id of an ended job, or results of a simulation")
    choice = command.add_mutually_exclusive_group(required=True)
    choice.add_argument("--kit", type=Path, help="of a real federation: kit of an admin user who may submit jobs")
    choice.add_argument("-w", "--workspace", type=Path, help="of a simulation: another workspace than the run's")
    command.add_argument("-r", "--rounds", type=int, required=True, help="rounds of the new period")
    from_help = "day on which it begins (with --kit: by default the day after RUN ended; else no new time step)"
    command.add_argument("--from", dest="begins", metavar="DATE", help=from_help)
    learn_help = "of a new period: learn from the newest alone, or from all so far (default: as RUN did, at first all)"
    command.add_argument("--learn", choices=("newest", "all"), help=learn_help)
    command.add_argument("--job", type=Path, dest="job_folder", metavar="JOB", help=submitted)
    command.add_argument("--min-sites", type=int, help=f"with --kit: {fewer}")

    command = add_command(commands, forget, "make rounds of a run again without patients who withdrew, as a new job")
    command.add_argument("run_to_forget", metavar="RUN", help="id of an ended job, or results of a simulation")
    choice = command.add_mutually_exclusive_group(required=True)
    choice.add_argument("--kit", type=Path, help="of a real federation: kit of an admin user who may submit jobs")
    choice.add_argument("-w", "--workspace", type=Path, help="of a simulation: another workspace than the run's")
    before_help = "the round that the hospital names ('fedtar site purge --patient'); of several, the first"
    command.add_argument("--before", metavar="ROUND", type=int, required=True, help=before_help)
    command.add_argument("--job", type=Path, dest="job_folder", metavar="JOB", help=f"with --kit: {submitted}")
    command.add_argument("--min-sites", type=int, help=f"with --kit: {fewer}")
    command.add_argument("--yes", action="store_true", help="begin; without it the cost is said, and nothing else done")


def simulate(arguments: argparse.Namespace) -> None:
    """Run a method in NVIDIA FLARE's simulator, one process per site.

    Without FEDTAR_SITES they train on the synthetic CT cohort; with it each has a site file in the folder it names.
    """
    from fedtar_flare.reporting.page import REPORT_FILE
    from fedtar_flare.reporting.run import read_run
    from fedtar_flare.runtime.results import box
    from fedtar_flare.runtime.simulation import simulate

    recipe, where = _recipe(arguments, at_once=True), given(arguments, "workspace", "threads")
    with ProgressLine() as line:
        say = None if arguments.verbose else (lambda line: None) if arguments.quiet else line
        results = simulate(recipe, arguments.sites, say=say, every=line.every, **where)
    page = results / REPORT_FILE
    short = arguments.quiet or arguments.verbose  # FLARE's log has the box
    last = f"report: {page}" if short else box(read_run(results), page)
    show(arguments, {"results": str(results), "report": str(page)}, last)


def evaluate(arguments: argparse.Namespace) -> None:
    """Score candidates on the sites' test visits and compare them pairwise, by guarded sums alone; nothing is trained
    (method evaluate). For hospitals, export the job: 'fedtar export --method evaluate --set evaluate.candidates=...'.
    """
    named = [text.partition("=") for text in arguments.candidates]
    if gone := [path for _, _, path in named if path and not Path(path).expanduser().exists()]:
        raise ConfigError(f"{gone[0]}: there is no such file or folder")
    places = {name: str(Path(path).expanduser().resolve()) if path else "" for name, _, path in named}
    if len(places) < len(named):
        names = ", ".join(name for name, *_ in named)
        raise ConfigError(f"two candidates have one name (of {names}): give each a name of its own")
    arguments.method, arguments.set = "evaluate", [*arguments.set, f"evaluate.candidates={json.dumps(places)}"]
    simulate(arguments)


def export(arguments: argparse.Namespace) -> None:
    """Write a job as a folder for 'nvflare simulator' or 'nvflare job submit'.

    For hospitals, use --no-byoc: a job with a custom folder switches their class allow-list off.
    """
    from fedtar_flare.runtime.requirements import describe

    recipe = _recipe(arguments, name=arguments.name)
    if arguments.describe:
        text = describe(recipe)
        show(arguments, {"job": recipe.name, "asks": text}, text)
    else:
        recipe.export(str(arguments.out), byoc=not arguments.no_byoc)
        folder = arguments.out / recipe.name
        show(arguments, {"job": folder, "byoc": not arguments.no_byoc}, str(folder))


def report(arguments: argparse.Namespace) -> None:
    """Write report.html and the adapter's model card from the run record (rounds.jsonl), and print its closing box."""
    from fedtar_flare.reporting.control import keep_control
    from fedtar_flare.reporting.model_card import write_model_card
    from fedtar_flare.reporting.page import write_report
    from fedtar_flare.reporting.run import read_run
    from fedtar_flare.runtime.results import box

    run = read_run(arguments.run_folder)
    if arguments.alone:
        keep_control(run, read_run(arguments.alone))
    page = write_report(run.folder)
    if (run.folder / "adapter").is_dir():
        write_model_card(run, run.folder / "adapter")
    summary = {"report": str(page), "run_id": run.start.run_id, "status": run.status, "rounds": len(run.validations)}
    show(arguments, summary, box(run, page))


def compare(arguments: argparse.Namespace) -> int:
    """Run every arm of a suite with every seed, without FLARE's processes, and write comparison.html.

    What has a result is not run again: the command goes on where it was stopped.
    """
    from fedtar_flare.suite.file import read_suite
    from fedtar_flare.suite.page import write_page
    from fedtar_flare.suite.plan import experiments, require_hospitals
    from fedtar_flare.suite.run import run_suite

    if arguments.workers < 1:
        raise ConfigError(f"--workers must be at least 1, not {arguments.workers}")
    suite = read_suite(arguments.suite)
    if arguments.sites is not None and not 1 <= arguments.sites <= len(suite.sites):
        raise ConfigError(f"-n must be from 1 to {len(suite.sites)}, the suite's hospitals; got {arguments.sites}")
    new = {"references": tuple(arguments.against), "drawn": arguments.drawn, "sites": suite.sites[: arguments.sites]}
    suite = suite.replace(**{name: value for name, value in new.items() if value})
    if odd := sorted(set(arguments.only) - set(suite.arms)):
        raise ConfigError(f"--only {odd[0]}: the suite's arms are {', '.join(suite.arms)}")
    planned = experiments(suite)
    chosen = [experiment for experiment in planned if not arguments.only or experiment.name in arguments.only]
    failed: list[str] = []
    if not arguments.page:
        require_hospitals(suite)
        arguments.out.mkdir(parents=True, exist_ok=True)  # one that cannot be made or written fails here, not in each
        TemporaryFile(dir=arguments.out).close()  # run
        failed = run_suite(arguments.out, chosen, processes=arguments.workers)
    page = write_page(arguments.out, suite, planned)
    none = f"no finished runs in {arguments.out}{'; without --page they are made' if arguments.page else ''}"
    print(f"page: {page}" if page else none)
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed or page is None else 0


def status(arguments: argparse.Namespace) -> None:
    """Ask the server of a provisioned federation, over mTLS, with the startup kit of an admin user."""
    from fedtar_flare.provision.status import ending, job_line, list_jobs, metrics

    jobs, ends = list_jobs(**given(arguments, "kit", "limit", "job_id"))
    if arguments.prometheus:
        write_text(arguments.prometheus, metrics(jobs, ends))
    show(arguments, jobs, *(map(job_line, jobs) if jobs else ["no job was submitted yet"]), *ending(ends))


def watch(arguments: argparse.Namespace) -> int:
    """Print a line whenever a job gets further. Exit code 0 when it completes, 1 otherwise."""
    from fedtar_flare.provision.status import job_line, watch_job

    def say(entry: dict[str, object]) -> None:
        print(json.dumps(entry) if arguments.json else job_line(entry), flush=True)

    return 0 if watch_job(arguments.kit, arguments.job_id, say) == "FINISHED:COMPLETED" else 1


def resume(arguments: argparse.Namespace) -> None:
    """Submit a new job that starts from the last whole round of an ended one.

    The server reads its own copy of the checkpoints (fedtar_checkpoints/<job id> in its kit); nothing is uploaded but
    the job.
    """
    from fedtar_flare.provision.resume import resume

    job_id = resume(**given(arguments, "job_id", "kit", "job_folder", "rounds", "min_sites", "force"))["job_id"]
    show(arguments, {"job_id": job_id, "resumes": arguments.job_id}, job_id)


def release(arguments: argparse.Namespace) -> None:
    """Check the votes that the sites' staff signed (fedtar site vote), and write the model card and the signed
    release.json beside the adapter. Refused, with the reasons, where a vote is missing, says no, was changed, is of
    another adapter or by another project file, or a gate holds it. 'fedtar generate --root' verifies a release.
    """
    from fedtar_flare.reporting.run import read_run
    from fedtar_flare.site.release import read_project, release

    manifest = release(read_run(arguments.run_folder), read_project(arguments.project), arguments.kit)
    show(arguments, {"manifest": manifest}, f"released: {manifest}")


def continue_(arguments: argparse.Namespace) -> None:
    """Submit or simulate the job that goes on with a run when a period has passed, from its last whole round.

    Weights, the method's state and what sites keep go on, and T grows by one. The new job is another one for a site's
    approval. Each site first writes the reports of the new period's visits, which nothing was learnt from.
    """
    from fedtar_flare.provision.resume import continued_recipe, resume
    from fedtar_flare.reporting.run import find_run

    run, rounds, begins = arguments.run_to_continue, arguments.rounds, arguments.begins
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {rounds}")
    if arguments.kit:
        how = given(arguments, "job_folder", "rounds", "begins", "learn", "min_sites")
        job_id = resume(run, arguments.kit, period=True, **how)["job_id"]
        return show(arguments, {"job_id": job_id, "continues": run}, job_id)
    results = find_run(run)
    _simulate_from(arguments, results, continued_recipe(results, rounds, begins, arguments.learn))


def forget(arguments: argparse.Namespace) -> None:
    """Make a run again from the last checkpoint before a round, by the same schedule, as a run of its own. Hospitals
    have to approve it. The old run stays until it is deleted.
    """
    from fedtar_flare.provision.resume import continued_recipe, remake_of, resume
    from fedtar_flare.reporting.run import find_run

    run, before = arguments.run_to_forget, arguments.before
    if arguments.kit:
        how = given(arguments, "job_folder", "min_sites")
        remake = resume(run, arguments.kit, before=before, submit=arguments.yes, **how)
    else:
        results = find_run(run)
        remake = remake_of(results, before)
        if arguments.yes:
            return _simulate_from(arguments, results, continued_recipe(results, 0, again=remake["before"]))
    cost = "{rounds} rounds again, after round {after}; they took {answers} answers of sites and {hours:.1f} h"
    todo = "Nothing was begun. Add --yes once each hospital has excluded those who withdrew."
    cost = f"{cost.format(**remake)}, and privacy budgets are charged a second time"
    show(arguments, remake, cost, remake.get("job_id", todo))


def _simulate_from(arguments: argparse.Namespace, run: Path, recipe: MethodRecipe) -> None:
    """Simulate, in another workspace, what goes on from a simulated run."""
    from fedtar_flare.reporting.page import REPORT_FILE
    from fedtar_flare.reporting.run import read_run
    from fedtar_flare.runtime.simulation import simulate

    if run.resolve().is_relative_to((arguments.workspace / recipe.name).resolve()):
        raise ConfigError(f"--workspace {arguments.workspace} holds the run itself, which would be replaced")
    with ProgressLine() as line:
        sites = read_run(run).start.sites
        results = simulate(recipe, sites, workspace=arguments.workspace, say=line, every=line.every)
    page = results / REPORT_FILE
    show(arguments, {"results": str(results), "report": str(page)}, f"report: {page}")


def _add_simulation_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a simulation and of its job."""
    add_sites(command)
    command.add_argument("-t", "--threads", type=int, help="sites that run at the same time (default: all)")
    workspace = Path("simulator_workspace")
    command.add_argument("-w", "--workspace", type=Path, default=workspace, help="folder, made anew for the run")
    loud = command.add_mutually_exclusive_group()
    loud.add_argument("-q", "--quiet", action="store_true", help="print warnings and the page's place alone")
    loud.add_argument("-v", "--verbose", action="store_true", help="print FLARE's log instead of the progress")
    _add_job_options(command)


def _add_job_options(command: argparse.ArgumentParser) -> None:
    """Add the options that make a job; settings without an option are reached by ``--set`` or ``--settings``."""
    from fedtar_flare.registry import DEFAULT, names

    job = command.add_argument_group("job")
    job.add_argument("--method", default=DEFAULT, help=f"one of {', '.join(names())} (default {DEFAULT})")
    job.add_argument("-r", "--rounds", type=int, help="rounds R (default: the preset's; small: 2)")
    job.add_argument("--time-steps", type=int, help="time steps T (default 3)")
    job.add_argument("--preset", help=f"the whole setting: {PRESETS}")
    job.add_argument("--local-steps", type=int, help="optimiser updates per site and time step")
    job.add_argument("--patients", type=int, help="patients of a synthetic site (default: the preset's; small: 64)")
    job.add_argument("--min-sites", type=int, help="fewer sites taking part stop the job (default 1; at hospitals 2)")
    job.add_argument("--seed", type=int, help="random seed (default 0)")
    any_setting = f"any setting of {', '.join(GROUPS)} or the method's own groups, such as training.lr=5e-4; repeatable"
    add_repeated(job, "--set", "GROUP.NAME=VALUE", any_setting)
    job.add_argument("--settings", type=Path, help="YAML file with arguments of the recipe; the options above win")


def _recipe(arguments: argparse.Namespace, at_once: bool = False, **more: Any) -> MethodRecipe:
    """The recipe that the options describe, to be run ``at_once`` or kept; ConfigError for what does not fit."""
    from fedtar_flare.registry import method
    from fedtar_flare.runtime.recipe import MethodRecipe

    definition = method(arguments.method)
    file = arguments.settings
    settings: dict[str, Any] = read_yaml(file, "'name: value' lines, arguments of the recipe") if file else {}
    groups = (*GROUPS, *definition.settings)
    for name, value in settings.items():
        if name == "method":
            raise ConfigError(f"{file}: 'method' is chosen by the option --method, not in this file")
        if name in groups and not isinstance(value, dict):
            raise ConfigError(f"{file}: '{name}' must be a group of 'name: value' lines, not {value!r}")
    chosen = {option: value for option, value in vars(arguments).items() if value is not None}
    settings |= {name: chosen[option] for option, name in _OF_RECIPE.items() if option in chosen}
    for option, (group, name) in _OF_GROUPS.items():
        if option in chosen:
            settings.setdefault(group, {})[name] = chosen[option]
    for group, values in grouped(arguments.set, groups).items():
        settings[group] = {**settings.get(group, {}), **values}
    if at_once and isinstance(model := settings.get("model"), dict):
        settings["model"] = {name: _whole(name, value) for name, value in model.items()}
    try:
        return MethodRecipe(definition.name, **{**settings, **more})
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # FLARE's, of a name
        raise ConfigError(f"{file or 'the job'}: {error}") from error


def _whole(name: str, value: Any) -> Any:
    """A path of the model from this folder on, as simulated sites start in others; ConfigError where it is missing."""
    from fedtar_flare.site.site_file import sites_folder

    if name not in FILES or not isinstance(value, str) or not {"/", "."} & set(value):
        return value
    if (path := Path(value).expanduser()).exists():
        return str(path.resolve())
    if name.endswith("_name") or sites_folder():  # a name on the hub, or one for which site files have a place
        return value
    raise ConfigError(f"model.{name}: there is no file {value}")
