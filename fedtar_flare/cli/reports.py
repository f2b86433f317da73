"""Commands for one hospital: from ``fedtar generate``, ``serve`` and ``push`` to ``warmstart``."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import PRESETS, Commands, add_command, add_group, add_repeated, given, grouped, show
from fedtar_flare.cli.intake import add_login
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import clean, read_lines

ADAPTER = "the adapter folder that a run left, or an id on the Hugging Face hub: OWNER/NAME[@REVISION]"
ROOT = "root certificate of its federation (rootCA.pem of a kit): an adapter that was not released is refused"


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    what = "draft a report of a study from a trained adapter (not for clinical use)"
    command = add_command(commands, generate, what, with_json=False)
    command.add_argument("study", type=Path, help="DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM radiograph")
    command.add_argument("--adapter", type=Path, required=True, help=ADAPTER)
    command.add_argument("--root", type=Path, metavar="FILE", help=ROOT)
    command.add_argument("--state", type=Path, help="the site's state of that run: <state folder>/<run id>/<site>")
    command.add_argument("--key", type=Path, help="the site's key file, fedtar.key (not needed for a simulated site)")
    command.add_argument("--patient-id", help="as the site knows it (default: the DICOM header's)")
    command.add_argument("--age", type=float, help="years at this study (default: the DICOM header's)")
    command.add_argument("--sex", choices=("F", "M"), help="default: the DICOM header's")
    command.add_argument("--time-step", type=int, help="which of the patient's visits this is, from 1")
    command.add_argument("--lateral", type=Path, help="the radiograph's lateral view, for model.lateral")
    before: dict[str, Any] = {"action": "append", "default": []}
    text = "previous study, for an adapter trained with it; again: the one before that (data.priors)"
    command.add_argument("--prior-image", type=Path, help=text, **before)
    command.add_argument("--prior-report", type=Path, help="text file with the previous report, likewise", **before)
    command.add_argument("--prior-lateral", type=Path, help="its lateral view, likewise", **before)
    text = "days between the two studies, likewise (default: by DICOM dates)"
    command.add_argument("--prior-days", type=float, help=text, **before)
    command.add_argument("--modality", choices=("ct", "radiograph"), help="default: by what the study looks like")
    form = "sr: a DICOM SR, fhir: a DiagnosticReport of FHIR R4 (default text)"
    command.add_argument("--format", choices=("text", "json", "sr", "fhir"), default="text", help=form)
    command.add_argument("-o", "--out", type=Path, help="file to write (default: standard output; needed for sr)")
    command.add_argument("--stow", metavar="URL", help="DICOMweb service of the study's PACS, to store the SR there")
    add_login(command)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<i> (default auto)")
    command.add_argument("--online", action="store_true", help="adapter and model may be fetched from the hub")
    add_repeated(command, "--set", "GROUP.NAME=VALUE", "a setting of the base model, such as model.weights=PATH")

    command = add_command(commands, serve, "draft reports of studies that local programs post", with_json=False)
    command.add_argument("adapter", type=Path, help=ADAPTER)
    command.add_argument("--root", type=Path, metavar="FILE", help=ROOT)
    command.add_argument("--port", type=int, default=8080, help="of 127.0.0.1 (default 8080; 0: a free one)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<i> (default auto)")

    command = add_command(commands, push, "upload a run's adapter to the Hugging Face hub", with_json=False)
    command.add_argument("adapter", type=Path, help="the adapter folder that a run left")
    command.add_argument("hub_id", metavar="hub-id", help="OWNER/NAME; who you are there says 'hf auth login'")
    whose = command.add_mutually_exclusive_group(required=True)
    whose.add_argument("--root", type=Path, metavar="FILE", help=ROOT)
    text = "it was trained on made-up or public data alone, so that no hospital had to vote"
    whose.add_argument("--no-patients", action="store_true", help=text)
    command.add_argument("--yes", action="store_true", help="do not ask before the upload")

    command = add_command(commands, score, "score files of drafts, or label a run's reports again; export their pairs")
    of_run = "the site's state of that run, <state folder>/<run id>/<site>, or a comparison's run, <folder>/runs/<run>"
    command.add_argument("state", type=Path, nargs="?", help=f"to label or export: {of_run}")
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
    _add_metrics(command)
    command.add_argument("--against", type=Path, help="state of another run on the same reports, to compare with")
    text = "what --against draws, by --labeler; --metrics draws patients"
    command.add_argument("--drawn", choices=("patients", "studies"), default="patients", help=text)
    command.add_argument("--round", type=int, help="default: the last one that was scored")
    command.add_argument("--shared", action="store_true", help="reports of the shared adapter alone")

    command = add_command(commands, read, "a blinded reading of a run's drafts: its page, and what readers answered")
    command.add_argument("state", type=Path, help=of_run)
    command.add_argument("--answers", type=Path, nargs="+", metavar="FILE", help="a file of each reader: the table")
    command.add_argument("--cases", type=int, default=50, help="most reports on the page, drawn at random (default 50)")
    command.add_argument("--visit-ids", action="store_true", help="show each visit's id, to find its images by")
    command.add_argument("--images", type=Path, metavar="TABLE", help="the run's manifest or site file: show images")
    command.add_argument("--round", type=int, help="default: the last one that was scored")
    command.add_argument("--shared", action="store_true", help="reports of the shared adapter alone")
    _add_metrics(command)
    text = "page to write: of cases (default: reading-ID.html in the state), or with --answers of the tables"
    command.add_argument("-o", "--out", type=Path, help=text)

    group = add_group(commands, "labeler", "neural labelers of reports, for clinical efficacy (CheXbert, RadBERT)")
    command = add_command(group, import_, "read a published checkpoint, and write the folder that a site file names")
    command.add_argument("file", type=Path, help="chexbert.pth, or CT-RATE's RadBertClassifier.pth")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    of_encoder = "config.json and the tokenizer of bert-base-uncased or RadBERT-RoBERTa-4m (default: FILE's folder)"
    command.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=of_encoder)

    command = add_command(commands, warmstart, "pre-train a report generator on a site's studies")
    command.add_argument("--site-file", type=Path, required=True, help="site file, with the key where it is in a kit")
    split = command.add_mutually_exclusive_group()
    seed = "the site is simulated; --seed of its jobs (there: 0), which makes a synthetic cohort"
    split.add_argument("--job-seed", type=int, help=seed)
    split.add_argument("--key", type=Path, help="the real site's key file, fedtar.key, where it is not beside the data")
    command.add_argument("--preset", default="small", help=f"of the model: {PRESETS}")
    add_repeated(command, "--set", "GROUP.NAME=VALUE", "a setting of model or data, such as model.slices=1; repeatable")
    command.add_argument("--train", choices=("all", "new"), default="all", help="all weights, or only untrained ones")
    command.add_argument("--steps", type=int, default=1500, help="optimiser updates (default 1500)")
    command.add_argument("--batch-size", type=int, default=8, help="reports per update (default 8)")
    command.add_argument("--lr", type=float, default=5e-4, help="highest learning rate (default 5e-4)")
    command.add_argument("--seed", type=int, default=0, help="of order and new weights (default 0)")
    command.add_argument("--torch-threads", type=int, default=2, help="torch threads (default 2)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<i> (default auto)")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder to write")


def _add_metrics(command: argparse.ArgumentParser) -> None:
    text = "of RadEval (extra radeval): radgraph, ratescore, green, radcliq, bertscore, semb_score, crimson"
    command.add_argument("--metrics", metavar="NAME,...", help=text)
    text = "cache folder of 'hf download' with their weights (default: the usual one); nothing is fetched"
    command.add_argument("--weights", type=Path, metavar="FOLDER", help=text)


def generate(arguments: argparse.Namespace) -> None:
    """Draft a report for one study.

    With --state, the site's patient adapter of that run writes along; without, the shared adapter writes alone, as at a
    hospital outside the run. A model that reads findings lists them below the text, with side, degree, change since
    the previous visit and the probabilities of these; what is not known is left open, and without a previous visit no
    change is claimed. Every output is marked as a draft, not for clinical use.
    """
    from fedtar_flare.models.sources import garbage_collection_paused

    with garbage_collection_paused():
        from fedtar_flare.learning.draft_documents import draft_file, structured_report
        from fedtar_flare.learning.drafting import DISCLAIMER, Drafter
        from fedtar_flare.learning.study import study_of
        from fedtar_flare.site.release import released_adapter

    adapter = released_adapter(arguments.adapter, arguments.root, arguments.online)
    if arguments.format == "sr" and arguments.out is None:
        raise ConfigError("a DICOM SR is a file: name it with --out")
    if arguments.stow and arguments.format != "sr":
        raise ConfigError("--stow stores a DICOM SR: choose --format sr")
    priors = given(arguments, "prior_image", "prior_lateral", "prior_days")
    texts = ["\n".join(read_lines(path, "the previous report")).strip() for path in arguments.prior_report]
    if not all(texts):
        raise ConfigError(f"{arguments.prior_report[texts.index('')]}: the previous report is empty")
    priors["prior_report"] = texts
    if len({len(values) for values in priors.values() if values}) > 1:
        raise ConfigError("--prior-image, --prior-report and the like: each as often as the others, or not at all")
    prior: dict[str, Any] = {}
    for i in reversed(range(max(map(len, priors.values())))):
        prior |= {name: values[i] for name, values in priors.items() if values}
        if i:  # the visit so many before the present one
            prior = {"before": study_of([*arguments.prior_image, *[arguments.study] * i][i - 1], None, **prior)}
    about = given(arguments, "patient_id", "age", "sex", "time_step", "lateral") | prior
    study = study_of(arguments.study, arguments.modality, **about)
    model = grouped(arguments.set, ("model",)).get("model", {})
    how = given(arguments, "state", "key", "device", "online")
    draft = Drafter(adapter, model=model, **how).draft(study)
    if arguments.format == "sr":
        report = structured_report(draft, arguments.study)
        report.save_as(arguments.out)
        if arguments.stow:
            from fedtar_flare.curation.pacs import Pacs

            new = Pacs(arguments.stow, **given(arguments, "token", "cert", "ca")).store(report)
            print(f"{'stored' if new else 'there already'}: {report.SOPInstanceUID}", file=sys.stderr)
    else:
        text = draft_file(draft, arguments.study, arguments.format).decode()
        if not arguments.out:
            print(text)
            return
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(f"{arguments.out}: {DISCLAIMER}", file=sys.stderr)


def serve(arguments: argparse.Namespace) -> None:
    """Draft a report of each study that is posted to http://127.0.0.1:PORT/json, /fhir or /sr, by the shared adapter
    alone; not for clinical use. The body is a DICOM file, a zip of one study, NIfTI (gzip), PNG or JPEG, by its
    Content-Type. Requests need the header 'Authorization: Bearer TOKEN', with what FEDTAR_TOKEN holds here.
    """
    from fedtar_flare.learning.drafting import Drafter
    from fedtar_flare.learning.serving import Service
    from fedtar_flare.site.release import released_adapter

    if len(token := os.environ.get("FEDTAR_TOKEN", "")) < 16:
        raise ConfigError("the environment variable FEDTAR_TOKEN must hold a token of 16 characters or more")
    drafter = Drafter(released_adapter(arguments.adapter, arguments.root), device=arguments.device)
    try:
        service = Service(drafter, token, arguments.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {arguments.port}: nothing can listen there ({error})") from error
    print(f"http://127.0.0.1:{service.server_port}", file=sys.stderr, flush=True)
    service.serve_forever()


def push(arguments: argparse.Namespace) -> None:
    """Upload an adapter to the Hugging Face hub, to a repository of yours or a new private one: its files, its card and
    the manifest of its release. What is uploaded is listed, and asked for. A site's state and patient adapters
    never are: a folder that holds anything else is refused, and an adapter that the study's sites have not released.
    """
    from fedtar_flare.models.adapters.hub import files_to_push, push
    from fedtar_flare.site.release import released_adapter

    files = files_to_push(arguments.adapter)
    released_adapter(arguments.adapter, arguments.root)
    print("\n".join(f"{name}, {size:,} bytes" for name, size in files.items()), flush=True)
    if not (arguments.yes or (sys.stdin.isatty() and input(f"Upload to {arguments.hub_id}? (yes/no) ") == "yes")):
        raise FedTARError("nothing was uploaded: that takes a 'yes', or --yes where nobody can be asked")
    print(push(arguments.adapter, arguments.hub_id))


def score(arguments: argparse.Namespace) -> None:
    """Score drafts of any system (--drafts, --reports) by the scores that need no model, with 95 % intervals and, of
    two files, paired tests; --out writes a page. --metrics adds scores of RadEval's models, also of a STATE. Or, of a
    STATE, write the pairs of draft and reference (--export), or label both (--labeler): precision, recall and F1 by
    micro, macro and example average, and of each class. With --against, every score's difference to another run, with
    its interval and tests. The numbers are for the site: no minimum cell guards them.
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

    name, rows = _labelled(arguments, arguments.state)
    counts = label_counts(classes_of(name), [row["labels"][name] for row in rows])
    averages, classes = counts.averages(), counts.of_classes()
    lines = [f"{len(rows)} reports, {name}"]
    lines += [f"{'':<34}{'precision':>10}{'recall':>8}{'F1':>8}{'n':>7}"]
    every: list[tuple[str, Any]] = [*averages.items(), *classes.items()]
    for title, scores in every:
        values = ["-" if (value := scores[key]) is None else f"{value:.3f}" for key in ("precision", "recall", "f1")]
        lines.append(f"{title:<34}{values[0]:>10}{values[1]:>8}{values[2]:>8}{scores.get('n', ''):>7}")
    data = {"reports": len(rows), "averages": averages, "classes": classes}
    if arguments.against:
        from fedtar_flare.suite.results import compare_scores
        from fedtar_flare.suite.tables import metric_table

        tests = compare_scores("", [(rows, _labelled(arguments, arguments.against)[1])], arguments.drawn)
        table = metric_table(tests, {"": str(arguments.state)}, "", arguments.drawn)
        data["against"] = [test._asdict() for test in tests]
        lines += ["", table.title, "  ".join(table.head), *("  ".join(row) for row in table.rows)]
    show(arguments, data, *lines)


def _score_texts(arguments: argparse.Namespace) -> None:
    from fedtar_flare.data.draft_files import read_texts
    from fedtar_flare.learning.evaluation import report_texts
    from fedtar_flare.metrics.labeler import NEURAL
    from fedtar_flare.metrics.radeval import RadEvalMetrics
    from fedtar_flare.metrics.text_sums import rules_of
    from fedtar_flare.suite.drafts import lines, run_texts, score_drafts, tables, text_cell, write_page

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
    scored = score_drafts(texts, drafts, rules or "chexpert-rules", models)
    page = [f"page: {write_page(tables(scored), arguments.out)}"] if arguments.out else []
    data = scored._asdict() | {"tests": [test._asdict() for test in scored.tests]}
    show(arguments, clean(data), *lines(tables(scored, text_cell)), *page)


def _labelled(arguments: argparse.Namespace, state: Path) -> tuple[str, list[dict[str, Any]]]:
    """A labeler's name, and a state's reports with the labels that it reads off them."""
    from fedtar_flare.core.plugins import announced
    from fedtar_flare.learning.evaluation import report_texts
    from fedtar_flare.learning.report_labeler import ReportLabeler
    from fedtar_flare.metrics.labeler import NEURAL
    from fedtar_flare.metrics.reports import TextLabeler
    from fedtar_flare.metrics.sentences import readable

    rows, name = report_texts(state, arguments.round, personal=not arguments.shared), arguments.labeler
    if name in NEURAL:
        if not (labelled := [row for row in rows if name in row.get("labels", ())]):
            raise ConfigError(f"the run has kept no labels by {name}: name the folder of 'fedtar labeler import'")
        return name, labelled
    if name not in announced("labeler") and not (rows := [row for row in rows if readable(row["reference"])]):
        raise ConfigError(f"{state}: {name} reads English, and no report is in English: nothing is graded")
    references, drafts = ([row[key] for row in rows] for key in ("reference", "text"))
    named = name in NEURAL.values() or name in announced("labeler")
    by = TextLabeler.named(name) if named else ReportLabeler(Path(name)).label(references, drafts)
    for row in rows:
        row["labels"] = {by.labeler: [by.code(row["reference"]), by.code(row["text"])]}
    return by.labeler, rows


def read(arguments: argparse.Namespace) -> None:
    """Write a page on which readers judge a site's drafts beside their reference reports without knowing which is
    which; or, with --answers, say what they answered: shares with 95 % intervals over patients, and how readers agree,
    with one another and with each score. The page works offline. Page, key and answers have to stay at the hospital,
    and no minimum cell guards the numbers.
    """
    from fedtar_flare.curation.check import included
    from fedtar_flare.learning.evaluation import report_texts
    from fedtar_flare.metrics.radeval import RadEvalMetrics
    from fedtar_flare.reporting.reading import reading_results, write_reading
    from fedtar_flare.suite.drafts import lines, reading_tables, write_page

    rows = report_texts(arguments.state, arguments.round, personal=not arguments.shared)
    if not arguments.answers:
        studies = included(arguments.images) if arguments.images else None
        page = write_reading(arguments.state, rows, **given(arguments, "cases", "out", "visit_ids"), studies=studies)
        return show(arguments, {"page": str(page)}, f"{page}: to be opened in a browser, and to stay at the hospital")
    models = RadEvalMetrics(arguments.metrics.split(","), arguments.weights) if arguments.metrics else None
    results = reading_results(arguments.state, arguments.answers, rows, models)
    tables = reading_tables(results)
    page_line = [f"page: {write_page(tables, arguments.out)}"] if arguments.out else []
    show(arguments, clean(results), *lines(tables), *page_line)


def import_(arguments: argparse.Namespace) -> None:
    """Read a checkpoint of CheXbert or RadBERT as it is published, without running any code in it, and write what
    'labeler: FOLDER' of a site file names. Nothing is fetched.
    """
    from fedtar_flare.learning.report_labeler import import_labeler

    about = import_labeler(arguments.file, arguments.out, arguments.tokenizer)
    show(arguments, {"labeler": str(arguments.out), **about}, f"{arguments.out}: {about['kind']}")


def warmstart(arguments: argparse.Namespace) -> None:
    """Pre-train centrally what a federation then adapts, on a site's images and reports. Only training patients are
    learned from; validation patients are scored. Who is one decides the site's key, as in its runs: it is in the
    startup kit of --site-file, or name it (--key, --job-seed). Give the result to a job with
    --set model.weights=OUT/model.safetensors.
    """
    import torch

    from fedtar_flare.core.settings import build
    from fedtar_flare.learning.clinical_start import warm_start
    from fedtar_flare.learning.config import DataConfig
    from fedtar_flare.learning.device import choose_device
    from fedtar_flare.learning.pretraining import PretrainingConfig
    from fedtar_flare.models.config import preset
    from fedtar_flare.site.cohort import patients_of_site_file
    from fedtar_flare.site.site_file import cache_folder

    torch.set_num_threads(arguments.torch_threads)
    cohort, config = patients_of_site_file(arguments.site_file, **given(arguments, "job_seed", "key"))
    settings = grouped(arguments.set, ("model", "data"))
    data = build(DataConfig, settings.get("data"), "--set data")
    about = warm_start(
        preset(arguments.preset, **{"seed": arguments.seed, **settings.get("model", {})}),
        cohort,
        cache_folder(config) / "prepared",
        PretrainingConfig(**given(arguments, "steps", "batch_size", "lr", "seed")),
        arguments.out,
        transforms=data.transforms,
        device=choose_device(arguments.device, "float32")[0],
        say=lambda line: print(line, file=sys.stderr, flush=True),
        train=arguments.train,
    )
    weights = arguments.out / "model.safetensors"
    lines = [f"validation studies: {name} {value:.3f}" for name, value in about["validation"].items()]
    show(arguments, {"weights": str(weights), **about}, *lines, f"Use it: --set model.weights={weights}")
