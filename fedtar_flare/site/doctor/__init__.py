"""``fedtar doctor``: what a site's staff checks before a study starts; each finding comes with its cure."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedtar_flare.core.text import gauges

OK, WARN, FAIL = LEVELS = "OK", "WARN", "FAIL"
"""All is well; goes on, but look; a run cannot work."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report: a level, the name of the check, its result, and what to do (empty: nothing); its
    numbers for Prometheus, by name.
    """

    status: str
    check: str
    text: str
    cure: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def diagnose(kit: Path | None = None, site_file: Path | None = None, time_steps: int = 3) -> list[Finding]:
    """Check everything that a site needs; no check changes anything or sends data."""
    from fedtar_flare.site.context import kit_of
    from fedtar_flare.site.doctor import connection, environment, policy
    from fedtar_flare.site.site_file import SITE_FILE

    kit = kit_of(kit) if kit is not None else None
    file = site_file or (kit / "local" / SITE_FILE if kit else None)
    findings, config, studies = environment.packages(), None, 0
    if file is not None:
        config, of_file = environment.site_file(file)
        findings += of_file
    findings.append(environment.gpu(config))
    if config is not None:
        studies, of_data = environment.data(config, time_steps)
        findings += [*of_data, *policy.bounds(kit, config)]
    findings += environment.disks(kit, config, studies)
    if kit is not None and config is not None:
        findings.append(environment.retention(kit, config))
    if kit is not None:
        findings += [
            *environment.key(kit, config),
            *policy.allow_list(kit),
            *policy.privacy(kit, config),
            policy.participation(kit),
            policy.rights(kit),
            policy.shell(kit),
            *policy.locations(kit, config),
            *policy.modes(kit, config),
            *connection.certificates(kit),
            *connection.clock(kit),
            connection.server(kit),
        ]
    return findings


def metrics(findings: Iterable[Finding], kit: Path | None) -> str:
    """Write findings for Prometheus' node exporter (``--collector.textfile``), without texts, which name files."""
    from fedtar_flare.site.audit import FOLDER, audit_files, read_audit, totals
    from fedtar_flare.site.context import state_of

    values = {"fedtar_doctor_time_seconds": time.time()}
    for finding in findings:
        status = f'fedtar_doctor_status{{check="{finding.check}"}}'
        values |= {status: max(values.get(status, 0), LEVELS.index(finding.status)), **finding.numbers}
    if kit is not None and (state_of(kit) / FOLDER).is_dir():
        values["fedtar_sent_bytes"] = sum(total["bytes"] for total in totals(read_audit(audit_files(kit))))
    return gauges(values)
