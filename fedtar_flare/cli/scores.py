"""``fedtar score``: drafts of any system, or of a run, against their reports."""

import argparse
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import Commands, add_command, show
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import clean

OF_RUN = "the site's state of that run, <state folder>/<run id>/<site>, or a comparison's run, <folder>/runs/<run>"


def add_score(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, score, "score files of drafts, or label a run's reports again; export their pairs")
    command.add_argument("state", type=Path, nargs="?", help=f"to label or export: {OF_RUN}")
    text = "drafts of any system by study (CSV, JSON, JSON lines); a second file is compared with the first"
    command.add_argument("--drafts", type=Path, nargs="+", metavar="FILE", help=text)
    command.add_argument("--reports", type=Path, metavar="FILE", help="the reports that --drafts are scored against")
    command.add_argument("-o", "--out", type=Path, metavar="PAGE", help="with --drafts: the tables as a page (HTML)")
    text = "write the run's pairs for ReXrank (.csv: study_id, report, prediction) or RadEval (.json: refs, hyps)"
    command.add_argument("--export", type=Path, metavar="FILE", help=text)
    command.add_argument("--visit-ids", action="store_true", help="with --export: the site's own ids, not keyed ones")
    which = "chexpert-rules, ctrate-rules, the folder of 'fedtar labeler import', one of another package, or chexbert "
    which += "or radbert, whose labels the run kept where the site file names one; with --drafts: which rules"
    command.add_argument("--labeler", help=f"{which} (default chexpert-rules)")
    text = "write cases drawn at random for staff to label, to a new CSV file: 1 where a text states a class"
    command.add_argument("--check-sample", type=Path, metavar="FILE", help=text)
    command.add_argument("--cases", type=int, default=50, help="how many cases --check-sample draws (default 50)")
    text = "that file with staff's labels: the labeler's precision and recall, and F1 corrected for its errors"
    command.add_argument("--checked", type=Path, metavar="FILE", help=text)
    add_metrics(command)
    command.add_argument("--against", type=Path, help="state of another run on the same reports, to compare with")
    text = "what --against draws, by --labeler; --metrics draws patients"
    command.add_argument("--drawn", choices=("patients", "studies"), default="patients", help=text)
    command.add_argument("--round", type=int, help="default: the last one that was scored")
    command.add_argument("--shared", action="store_true", help="reports of the shared adapter alone")


def add_metrics(command: argparse.ArgumentParser) -> None:
    """Add the options that choose RadEval's metrics and their weights."""
    text = "of RadEval (extra radeval): radgraph, ratescore, green, radcliq, bertscore, semb_score, crimson"
    command.add_argument("--metrics", metavar="NAME,...", help=text)
    text = "cache folder of 'hf download' with their weights (default: the usual one); nothing is fetched"
    command.add_argument("--weights", type=Path, metavar="FOLDER", help=text)


def score(arguments: argparse.Namespace) -> None:
    """Score drafts of any system (--drafts, --reports) by the scores that need no model, with 95 % intervals and, of
    two files, paired tests; --out writes a page. --metrics adds scores of RadEval's models, also of a STATE. Or, of a
    STATE, write the pairs of draft and reference (--export), or label both (--labeler): precision, recall and F1 by
    micro, macro and example average, and of each class. With --against, every score's difference to another run, with
    its interval and tests. --check-sample and --checked tell, of either, how right the labeler is, and correct F1 for
    it. The numbers are for the site: no minimum cell guards them.
    """
    if arguments.drafts or arguments.reports or arguments.metrics:
        return _score_texts(arguments)
    if arguments.state is None or (arguments.labeler is None) == (arguments.export is None):
        raise ConfigError("name --drafts and --reports, or a STATE with --labeler or --export")
    if arguments.export:
        from fedtar_flare.learning.evaluation import report_texts
        from fedtar_flare.suite.drafts import export_pairs

        rows = report_texts(arguments.state, arguments.round, personal=not arguments.shared)
        file = export_pairs(arguments.state, rows, arguments.export, arguments.visit_ids)
        return show(arguments, {"pairs": str(file)}, f"{file}: {len(rows)} patients' reports and drafts, to be guarded")
    from fedtar_flare.metrics.agreement import label_counts
    from fedtar_flare.metrics.labeler import classes_of
    from fedtar_flare.suite.checked import noise_of, noise_tables
    from fedtar_flare.suite.drafts import lines as lines_of
    from fedtar_flare.suite.drafts import matched, run_texts

    name, rows = _labelled(arguments, arguments.state)
    if arguments.check_sample:
        return _write_sample(arguments, name, rows)
    counts = label_counts(classes_of(name), [row["labels"][name] for row in rows])
    averages, classes = counts.averages(), counts.of_classes()
    lines = [f"{len(rows)} reports, {name}"]
    lines += [f"{'':<34}{'precision':>10}{'recall':>8}{'F1':>8}{'n':>7}"]
    every: list[tuple[str, Any]] = [*averages.items(), *classes.items()]
    for title, scores in every:
        values = ["-" if (value := scores[key]) is None else f"{value:.3f}" for key in ("precision", "recall", "f1")]
        values.append(f"{scores['n']:.0f}" if "n" in scores else "")
        lines.append(f"{title:<34}{values[0]:>10}{values[1]:>8}{values[2]:>8}{values[3]:>7}")
    data = {"reports": len(rows), "averages": averages, "classes": classes}
    if arguments.checked:
        noise = noise_of(rows, name, arguments.checked)
        data["label_noise"] = {name: of._asdict() for name, of in noise.items()}
        lines += ["", *lines_of(noise_tables(noise, name))]
    if arguments.against:
        from fedtar_flare.suite.results import compare_scores
        from fedtar_flare.suite.tables import metric_table

        one, other, theirs = str(arguments.state), str(arguments.against), _labelled(arguments, arguments.against)[1]
        matched(run_texts(rows, "reference"), run_texts(theirs, "reference"), other)
        tests = compare_scores(one, [(rows, theirs)], arguments.drawn)
        table = metric_table(tests, {one: one, other: other}, other, arguments.drawn)
        data["against"] = [test._asdict() for test in tests]
        lines += ["", *lines_of([table])]
    show(arguments, clean(data), *lines)


def _score_texts(arguments: argparse.Namespace) -> None:
    from fedtar_flare.data.draft_files import read_texts
    from fedtar_flare.learning.evaluation import report_texts
    from fedtar_flare.metrics.labeler import NEURAL, RuleLabels
    from fedtar_flare.metrics.radeval import RadEvalMetrics
    from fedtar_flare.metrics.text_sums import rules_of
    from fedtar_flare.suite.checked import noise_of, noise_tables
    from fedtar_flare.suite.drafts import case_rows, lines, run_texts, score_drafts, tables, write_page

    files, rules, rule_labels = arguments.drafts or [], arguments.labeler, [*NEURAL.values()]
    if len({bool(files), bool(arguments.reports), not arguments.state}) > 1 or arguments.export:
        raise ConfigError("--drafts and --reports go together, without a STATE; --metrics go with either")
    if len(files) > 2 or len(set(files)) < len(files) or rules not in (None, *rule_labels):
        raise ConfigError(f"--drafts takes one file, or two to compare; --labeler then one of {', '.join(rule_labels)}")
    models = RadEvalMetrics(arguments.metrics.split(","), arguments.weights) if arguments.metrics else None
    if files:
        texts = read_texts(arguments.reports, "report")
        drafts = {str(file): read_texts(file, "draft") for file in files}
    else:
        states = [folder for folder in (arguments.state, arguments.against) if folder]
        runs = [report_texts(folder, arguments.round, personal=not arguments.shared) for folder in states]
        texts, rules = run_texts(runs[0], "reference"), rules or rules_of(runs[0])
        drafts = {str(folder): run_texts(rows, "text") for folder, rows in zip(states, runs, strict=True)}
    labeler: RuleLabels = rules or "chexpert-rules"
    noise = {}
    if arguments.check_sample or arguments.checked:
        if len(files) != 1:
            raise ConfigError("--check-sample and --checked go with one file of --drafts, or with STATE --labeler")
        _, rows = _label(case_rows(texts, drafts[str(files[0])], str(files[0])), labeler, arguments.reports)
        if arguments.check_sample:
            return _write_sample(arguments, labeler, rows)
        noise = noise_of(rows, labeler, arguments.checked)
    scored = score_drafts(texts, drafts, labeler, models)
    made = [*tables(scored), *noise_tables(noise, labeler)]
    shown = lines(made)
    if arguments.out:
        shown.append(f"page: {write_page(made, arguments.out)}")
    data = scored._asdict() | {"tests": [test._asdict() for test in scored.tests]}
    show(arguments, clean(data | {"label_noise": {name: of._asdict() for name, of in noise.items()}}), *shown)


def _write_sample(arguments: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    from fedtar_flare.suite.checked import write_sample

    file = write_sample(rows, name, arguments.cases, arguments.check_sample)
    what = "write 1 where a text states a class, and 0 in any cell of a text that states none; patients' texts"
    show(arguments, {"sample": str(file)}, f"{file}: {what}, to be guarded")


def _labelled(arguments: argparse.Namespace, state: Path) -> tuple[str, list[dict[str, Any]]]:
    """A labeler's name, and a state's reports with the labels that it reads off them."""
    from fedtar_flare.learning.evaluation import report_texts

    return _label(report_texts(state, arguments.round, personal=not arguments.shared), arguments.labeler, state)


def _label(rows: list[dict[str, Any]], name: str, where: Path) -> tuple[str, list[dict[str, Any]]]:
    """A labeler's name, and the rows that it can read, with its labels of reference and draft."""
    from fedtar_flare.core.plugins import announced
    from fedtar_flare.learning.report_labeler import ReportLabeler
    from fedtar_flare.metrics.labeler import NEURAL
    from fedtar_flare.metrics.reports import TextLabeler
    from fedtar_flare.metrics.sentences import readable

    if name in NEURAL:
        if not (labelled := [row for row in rows if name in row.get("labels", ())]):
            raise ConfigError(f"the run has kept no labels by {name}: name the folder of 'fedtar labeler import'")
        return name, labelled
    if name not in announced("labeler") and not (rows := [row for row in rows if readable(row["reference"])]):
        raise ConfigError(f"{where}: {name} reads English, and no report is in English: nothing is graded")
    references, drafts = ([row[key] for row in rows] for key in ("reference", "text"))
    named = name in NEURAL.values() or name in announced("labeler")
    by = TextLabeler.named(name) if named else ReportLabeler(Path(name)).label(references, drafts)
    for row in rows:
        row["labels"] = {by.labeler: [by.code(row["reference"]), by.code(row["text"])]}
    return by.labeler, rows
