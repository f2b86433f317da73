"""The method ``evaluate``: its candidates, its one task, the comparison at the server and its section of the page."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field as Setting

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import write_json
from fedtar_flare.core.settings import Settings
from fedtar_flare.methods.evaluate.site import JOB, SCORED, STATUSES, VALIDATE, EvaluateSite
from fedtar_flare.metrics.paired_sums import RATIOS, Result, SiteSums, compared
from fedtar_flare.protocol import contract
from fedtar_flare.protocol.contract import ADAPTER, HANDSHAKE, PARAMETERS, Contract, Field, Task, handshake
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import WORD, Reply, version
from fedtar_flare.record.events import Event
from fedtar_flare.registry import Method
from fedtar_flare.reporting.format import heading, p_value, score
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, table
from fedtar_flare.runtime.aggregation import PLAUSIBLE
from fedtar_flare.runtime.server_strategy import ServerStrategy

RESULTS_FILE = "cross_val_results.json"
"""FLARE's name; scores by site and candidate."""
MOST_CANDIDATES = 8


class EvaluateConfig(Settings):
    """What is compared."""

    candidates: dict[str, str] = Setting(
        {JOB: ""},
        description="names of what is scored, which each site's own 'candidates' explain; in a simulation a name may "
        "have a path. 'job' is the job's own model with the weights of server.initial_checkpoint",
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if not 1 <= len(self.candidates) <= MOST_CANDIDATES or not all(map(WORD.fullmatch, self.candidates)):
            yield "candidates", f"1 to {MOST_CANDIDATES} short names, each with a path or ''"


class Compared(Event):
    """The candidates over the patients of all sites, and what became of each at a site."""

    kind: ClassVar[str] = "compared"
    round: int
    sites: dict[str, dict[str, str]]
    left_out: dict[str, str]  # reasons by site
    results: dict[str, dict[str, Result]]  # by score, and candidate or pair


class EvaluateServer(ServerStrategy):
    """Asks every site for its sums, and compares the candidates; arguments as :class:`.ServerStrategy`."""

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """One task; its answers are recorded, and written as FLARE's cross-site evaluation is."""
        run, names = self.run, [*self.settings.evaluate.candidates]
        header = run.header(r, run.config.time_steps, after=version(0, 0), evaluate=True)
        answers = run.send_task(VALIDATE, header, w, run.membership.sites, lambda *_: None)
        run.results.evaluation(r, answers)
        found = {site: reply.payload["candidates"] for site, reply in sorted(answers.replies.items())}
        sums = self._believed({site: sums_of(answers.replies[site]) for site in found})
        results = compared([*sums.values()], names)
        run.record.write(Compared(round=r, sites=found, left_out=answers.missing, results=results))
        by_site: dict[str, dict[str, dict[str, float]]] = {}
        for site, of_site in sums.items():
            values = compared([of_site], of_site.candidates)
            by_site[site] = {name: {key: of[name][0] for key, of in values.items()} for name in of_site.candidates}
        write_json(run.results_folder / RESULTS_FILE, by_site)
        return w

    def _believed(self, sums: Mapping[str, SiteSums]) -> dict[str, SiteSums]:
        """Limit each site's say in a score as membership limits its visits: to so many times the others' median."""
        believed, largest = {}, {site: of.largest() for site, of in sums.items()}
        for site, own in largest.items():
            others = {key: [of[key] for name, of in largest.items() if name != site and key in of] for key in own}
            most = {key: PLAUSIBLE * statistics.median(values) for key, values in others.items() if values}
            believed[site] = replace(sums[site], most=most)
            if any(own[key] > limit for key, limit in most.items()):
                text = f"{site} sends sums of far more than the other sites: of each score at most {PLAUSIBLE} times"
                self.run.results.alarm(f"{text} their median counts")
        return believed

    def check_content(self, reply: Reply) -> None:
        """Refuse candidates that the job does not name, and sums that no site can have."""
        super().check_content(reply)
        found, sums = reply.payload.get("candidates") or {}, sums_of(reply)
        if not ({*found} <= {*self.settings.evaluate.candidates} and {*found.values()} <= {*STATUSES}):
            raise ExchangeError("the field 'candidates' does not say what became of the job's candidates")
        try:
            values = [of[name][0] for of in compared([sums], sums.candidates).values() for name in sums.candidates]
        except (LookupError, TypeError, ValueError) as error:
            raise ExchangeError("the field 'sums' has not the sums of its candidates") from error
        if not ({*sums.scores} <= {*RATIOS} and all(0 <= value <= 1 + 1e-9 for value in values)):
            raise ExchangeError("the field 'sums' holds more than scores from 0 to 1")


def sums_of(reply: Reply) -> SiteSums:
    """A site's sums, of the candidates that it scored."""
    found: Mapping[str, str] = reply.payload.get("candidates") or {}
    return SiteSums([name for name, status in found.items() if status == SCORED], reply.payload.get("sums") or {})


def comparison(run: Run) -> Section | None:
    """The candidates' scores and differences over all sites' patients, and what became of each at a site."""
    if not (events := run.events(Compared)):
        return None
    rows, where = [], []
    for key, of_score in events[-1].results.items():
        for label, (*ends, p) in of_score.items():
            shown = "{} ({} to {})".format(*(score(key, end) for end in ends))
            rows.append([heading(key), label, shown, p_value(p)])
    for site, found in events[-1].sites.items():
        where.append([site, ", ".join(f"{name}: {status}" for name, status in found.items())])
    content = table(["score", "candidate or difference", "value", "p"], rows, left={1})
    lead = (
        "Test patients of all sites together, by the sites' sums alone, with 95 % intervals over patients; differences "
        "are on the same patients, p after Holm for the number of pairs. Withheld: the drafts differ from earlier ones "
        "for too few patients. Scores elsewhere on this page are the first candidate's."
    )
    where += [[site, why] for site, why in events[-1].left_out.items()]
    return Section("candidates", "Candidates", lead, content + table(["site", "candidates"], where, left={1}))


validate = Task(
    VALIDATE,
    "score candidates on the test visits",
    down=(ADAPTER.name, PARAMETERS.name),
    follows=(HANDSHAKE,),
    fields=(
        Field("candidates", "words", "whether each was scored, is not here or is withheld", public=True, required=True),
        Field("sums", "tree", "per score the candidates' sums over patients, and those of products", length=200_000),
        contract.SCORES[0],
        contract.PRIVACY,
        contract.SECONDS,
    ),
)


def rounds(groups: Mapping[str, Any]) -> tuple[int, int]:
    """One round; time steps as usual."""
    return 1, 3


METHOD = Method(
    contract=Contract(
        method="evaluate",
        title="Federated evaluation",
        groups=(ADAPTER, PARAMETERS),
        tasks=(handshake, validate),
        stays="patients, images, reports, drafts and their single scores",
    ),
    server=EvaluateServer,
    site=EvaluateSite,
    settings={"evaluate": EvaluateConfig},
    server_groups=("evaluate",),
    events=(Compared,),
    sections=(comparison,),
    rounds=rounds,
)
