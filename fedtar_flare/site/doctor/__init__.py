"""``fedtar doctor``: what a site's staff checks before a study starts; each finding comes with its cure."""

import time
from collections.abc import Iterable
from pathlib import Path

from fedtar_flare.site.doctor.finding import LEVELS, Finding


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
            connection.server(kit),
        ]
    return findings


def metrics(findings: Iterable[Finding], kit: Path | None) -> str:
    """Write findings for Prometheus' node exporter (``--collector.textfile``), without texts, which name files."""
    from fedtar_flare.site.doctor.connection import valid_until

    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.check] = max(worst.get(finding.check, 0), LEVELS.index(finding.status))
    lines = [
        "# HELP fedtar_doctor_status Worst finding of a check: 0 OK, 1 WARN, 2 FAIL.",
        "# TYPE fedtar_doctor_status gauge",
        *(f'fedtar_doctor_status{{check="{check}"}} {level}' for check, level in sorted(worst.items())),
        "# HELP fedtar_doctor_time_seconds When the doctor looked.",
        "# TYPE fedtar_doctor_time_seconds gauge",
        f"fedtar_doctor_time_seconds {time.time():.0f}",
    ]
    if kit is not None and (ends := valid_until(kit)):
        lines += [
            "# HELP fedtar_certificate_end_seconds When a certificate of the kit ends.",
            "# TYPE fedtar_certificate_end_seconds gauge",
            *(f'fedtar_certificate_end_seconds{{file="{name}"}} {end.timestamp():.0f}' for name, end in ends.items()),
        ]
    return "\n".join(lines) + "\n"
