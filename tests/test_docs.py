"""What the documentation quotes, names and promises, against the code."""

import json
import math
import re
import shlex
from dataclasses import fields
from importlib import import_module  # noqa: TID251
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

import fedtar_flare
from fedtar_flare.cli import commands
from fedtar_flare.cli.main import parser
from fedtar_flare.core.files import parse_yaml
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.data.sources import READERS
from fedtar_flare.data.sources.manifest import KNOWN
from fedtar_flare.data.sources.reading import COMMON_OPTIONS
from fedtar_flare.imaging.limits import Limits
from fedtar_flare.learning.config import LEAST_PERIOD
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedtar import release
from fedtar_flare.presets import papers
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.registry import contract_of, names
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.requirements import leaving
from fedtar_flare.runtime.server_strategy import ServerStrategy
from fedtar_flare.runtime.task import PRODUCTION_MIN_CELL
from fedtar_flare.site.site_file import Bounds, SiteConfig
from fedtar_flare.suite.file import Suite, shipped
from fedtar_flare.suite.plan import experiments

BASES = {base.__name__: base for base in (ServerStrategy, ReportSite, ReportLearner)}
HERE = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(HERE)) for kind in ("*.md", "docs/**/*.md", "provisioning/*.md") for page in HERE.glob(kind)
)


def read(repository, page):
    return (repository / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_fragments_that_a_page_quotes_are_the_code_itself(repository, page):
    text = read(repository, page)
    quotes = re.findall(r"^<!-- from (\S+) -->\n```(?:python|toml)\n(.*?)^```", text, flags=re.M | re.S)
    if "add-a-method" in page:
        assert len(quotes) == text.count("```python") + text.count("```toml") > 8, "each fragment names its file"
    for file, fragment in quotes:
        assert fragment in read(repository, file), f"{file} no longer has:\n{fragment}"


def test_public_names_are_there_and_on_their_page(repository):
    rows = re.findall(r"^\| (`.+?) \|", read(repository, "docs/reference/python-api.md"), flags=re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(fedtar_flare.__all__)
    assert all(hasattr(fedtar_flare, name) for name in fedtar_flare.__all__)
    assert not hasattr(fedtar_flare, "load_everything")


def test_pages_show_a_suite_that_can_be_read_and_every_column_of_a_manifest(repository):
    example = re.search(r"```yaml\n(.*?)```", read(repository, "docs/how-to/compare.md"), re.S)[1]
    assert experiments(build(Suite, parse_yaml(example, "the page"), "the page"))
    rows = re.findall(r"^\| (`.+?) \|", read(repository, "docs/how-to/prepare-data.md"), flags=re.M)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(KNOWN)


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_shows_are_of_the_command_line(repository, page, monkeypatch):
    monkeypatch.setattr(commands, "is_file_or_folder", lambda path: True)
    blocks = re.findall(r"^```(?:bash|console)?\n(.*?)^```", read(repository, page), flags=re.M | re.S)
    for line in "".join(blocks).replace("\\\n", "").splitlines():
        if found := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*fedtar (.+)", line):
            lexer = shlex.shlex(found[1], posix=True, punctuation_chars="|>&;")
            lexer.whitespace_split = True
            try:
                parser().parse_args([*takewhile(lambda word: word[0] not in "|>&;", lexer)])
            except SystemExit as ended:
                assert ended.code == 0, line


def test_the_page_of_the_papers_tables_says_of_each_by_which_command_or_why_not(repository):
    text = read(repository, "docs/how-to/real-tables.md")
    compared = set(re.findall(r"`fedtar compare (\w+)[` ]", text))
    assert {name for name in shipped() if re.match("fedtar_table|fedmrg_|fedkei_", name)} <= compared <= set(shipped())
    assert set(re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, flags=re.M)))) == set(papers())
    for paper, items in PAPERS.items():
        section = text.split(f"\n## {paper}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (.+?) \| (.+?) \| *(.*?) *\|$", section, flags=re.M)
        named = [{word.rstrip("s") + " " + n for word, of in re.findall(r"(Tables?|Figures?) ([\w, ]+)", item)
                  for n in re.split(", | ", of)} | {*item.split(", ")} for item, *_ in rows]  # fmt: skip
        assert [item for item in items if not any(item in of for of in named)] == []
        assert [row for row in rows if row[1] == "not available" and not row[2]] == [], "with its reason"


PAPERS = {
    "FedTAR": [f"Table {n}" for n in range(1, 6)] + [f"Figure {n}" for n in (1, 3, 4, 5, 6, 7)],
    "FedMRG": [f"Table {n}" for n in ("I", "II", "III", "IV")] + ["Figure 5", "Figure 6", "WCL", "DCL", "Fed-Prefix"],
    "FedKEI": ["Derm-FL", "CXR-FL", "OCT", "cost", "CC-CCII with VoCo", "ELCFS", "Figure 8"],
}


def test_the_method_page_has_five_steps_and_names_hooks_and_files_that_exist(repository):
    text = read(repository, "docs/how-to/add-a-method.md")
    assert re.findall(r"^## (\d+)\.", text, flags=re.M) == [str(n) for n in range(1, 6)]
    hooks = re.findall(r"`(\w+)\.(\w+)`", text)
    hooks = [(base, hook) for base, hook in hooks if base in BASES]
    assert len(hooks) > 15
    assert [hook for hook in hooks if not hasattr(BASES[hook[0]], hook[1])] == []
    files = re.findall(r"`(fedtar_flare/[\w/]+(?:\.py|/))`", text)
    assert files and [file for file in files if not (repository / file).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_and_headings_that_a_page_links_to_exist(repository, page):
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", read(repository, page)):
        file = (repository / page).parent / link if link else repository / page
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)", file.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings], anchor


def test_the_page_of_the_site_file_has_every_key_with_its_default(repository):
    def shown(field):
        if field.is_required():
            return "must be given"
        value = field.get_default(call_default_factory=True)
        if value is None or isinstance(value, Settings):
            return "none" if value is None else "see below"
        return f"`{value if isinstance(value, str) else json.dumps(value)}`"

    sections = re.split(r"^## ", read(repository, "docs/reference/site-file.md"), flags=re.M)[1:]
    for section, kind in zip(sections, (SiteConfig, Limits, Bounds), strict=True):
        rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section, flags=re.M))
        no_keys = {"origin", "simulated"} if kind is SiteConfig else set()
        assert rows == {n: shown(field) for n, field in kind.model_fields.items() if n not in no_keys}
    example = re.search(r"```yaml\n(.*?)```", read(repository, "docs/reference/site-file.md"), re.S)[1]
    content = yaml.safe_load(example)
    groups = ((content, SiteConfig), (content["policy"], Bounds), (content["limits"], Limits))
    assert all(set(keys) <= set(kind.model_fields) for keys, kind in groups)


def test_the_page_of_what_leaves_has_every_field_in_its_table_and_the_numbers_of_the_code(repository):
    text = read(repository, "docs/reference/what-leaves.md")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    named = {name for row in rows[1:] for name in re.findall(r"`(\w+)`", row[1])} - set(names())
    declared = {field.name for name in names() for task in contract_of(name).tasks for field in task.fields}
    assert named == declared | {field.name for field in fields(Reply)}
    assert all(row[2].strip() and row[3].strip() for row in rows), "each says when, and what it can tell"
    for said, true in (
        (r"without one of its own has (\d+)", PRODUCTION_MIN_CELL),
        (r"at least (\d+) days long", LEAST_PERIOD.days),
        (r"must change (\d+) % of", 100 * release.LEAST_SPREAD),
        (r"in steps of 2\^(-\d+) of", math.log2(release.RESOLUTION)),
    ):
        assert [float(number) for number in re.findall(said, text)] == [true]


@pytest.mark.parametrize("name", names())
def test_the_description_of_a_job_names_every_field_and_group(name):
    contract = contract_of(name)
    said = iter([line.partition(":")[0] for line in leaving(contract)])
    for task in contract.tasks:
        assert next(said).startswith(f"{task.name} (")
        for about in (*(f"tensors {group}" for group in task.up), *(field.name for field in task.fields)):
            assert next(said) == f"  {about}"
    assert not list(said)


def test_the_readme_stays_short(repository):
    text = read(repository, "README.md")
    lines = text.splitlines()
    assert len(lines) <= 120 and len(text.split()) <= 1200 and max(map(len, lines)) <= 130


@pytest.mark.parametrize("source", READERS)
def test_every_option_of_a_source_is_documented(repository, source):
    table = read(repository, "docs/reference/site-file.md").split("### How the source is read")[1].split("\n###")[0]
    rows = re.split(r"\n\| \w", table.split(f"| {source} |")[1])[0]
    own = import_module(f"fedtar_flare.data.sources.{source}").OPTIONS
    assert [name for name in own if f"`{name}`" not in rows] == []
    assert all(f"`{name}`" in table for name in COMMON_OPTIONS)
