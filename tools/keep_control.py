"""Keep what each hospital of the first command reaches alone, for the box and the page of that command.

``nvflare simulator jobs/fedtar -n 2 -t 2 -w FIRST``
``fedtar compare first_run --only local_patient -o COMPARISON``
``python -m tools.keep_control FIRST COMPARISON``

writes ``fedtar_flare/reporting/control.json``: means over hospitals, of the seed with the patients of FIRST, for the
very job that FIRST is a run of.
Another job, other weights and other settings do not show them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.control import SHIPPED, write_control
from fedtar_flare.reporting.run import read_run
from fedtar_flare.suite.file import read_suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import read_results, seed_means


def keep(first: Path, comparison: Path, suite_file: str, out: Path = SHIPPED) -> Path:
    """Write the means of the suite's first reference at the hospitals and with the test visits of a run."""
    run, suite = read_run(first), read_suite(suite_file)
    planned = [experiment for experiment in experiments(suite) if experiment.name == suite.compared_with[0]]
    tested = {site: counts["test"] for site, counts in run.start.counts.items()}
    results = [
        result
        for result in read_results(comparison, planned)
        if {site: counts["test"] for site, counts in result.content["counts"].items()} == tested
    ]
    if not results:
        text = f"no run of {suite.compared_with[0]} that is done has the hospitals and test visits of {first}"
        raise ConfigError(f"{comparison}: {text}")
    means = {name: seed_means(results, "members", name) for name in SCORES}
    seeds = ", ".join(str(result.content["seed"]) for result in results)
    scores = {name: round(fmean(values), 4) for name, values in means.items() if values}
    return write_control(out, run, f"kept from suite {suite.name}, seed {seeds}", scores)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="results or workspace of a run of the job")
    parser.add_argument("comparison", type=Path, help="folder of 'fedtar compare'")
    parser.add_argument("--suite", default="first_run", help="suite whose first reference is each hospital alone")
    given = parser.parse_args(arguments)
    print(keep(given.first, given.comparison, given.suite))


if __name__ == "__main__":
    main()
