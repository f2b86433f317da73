"""Commands for one hospital: from ``fedtar generate``, ``serve`` and ``push`` to ``warmstart``."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import PRESETS, Commands, add_command, add_group, add_repeated, given, grouped, show
from fedtar_flare.cli.intake import add_login
from fedtar_flare.cli.scores import OF_RUN, add_metrics, add_score
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import clean, read_lines
from fedtar_flare.models.sources import garbage_collection_paused

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
    looks = "what the study is (default: by what it looks like)"
    command.add_argument("--modality", choices=("ct", "radiograph", "photograph"), help=looks)
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

    add_score(commands)
    command = add_command(commands, read, "a blinded reading of a run's drafts: its page, and what readers answered")
    command.add_argument("state", type=Path, help=OF_RUN)
    command.add_argument("--answers", type=Path, nargs="+", metavar="FILE", help="a file of each reader: the table")
    command.add_argument("--cases", type=int, default=50, help="most reports on the page, drawn at random (default 50)")
    command.add_argument("--visit-ids", action="store_true", help="show each visit's id, to find its images by")
    command.add_argument("--images", type=Path, metavar="TABLE", help="the run's manifest or site file: show images")
    command.add_argument("--round", type=int, help="default: the last one that was scored")
    command.add_argument("--shared", action="store_true", help="reports of the shared adapter alone")
    add_metrics(command)
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


@garbage_collection_paused()
def generate(arguments: argparse.Namespace) -> None:
    """Draft a report for one study.

    With --state, the site's patient adapter of that run writes along; without, the shared adapter writes alone, as at a
    hospital outside the run. A model that reads findings lists them below the text, with side, degree, change since
    the previous visit and the probabilities of these; what is not known is left open, and without a previous visit no
    change is claimed. Every output is marked as a draft, not for clinical use.
    """
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
    shown = lines(tables)
    if arguments.out:
        shown.append(f"page: {write_page(tables, arguments.out, read=True)}")
    show(arguments, clean(results), *shown)


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
    from fedtar_flare.learning.config import DataConfig
    from fedtar_flare.learning.device import choose_device
    from fedtar_flare.learning.pretraining import PretrainingConfig, warm_start
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
