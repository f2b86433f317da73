"""The doctor's findings as a text file for Prometheus' node exporter (``--collector.textfile``)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from fedtar_flare.files import write_text
from fedtar_flare.site.doctor.connection import valid_until
from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding

_LEVEL = {OK: 0, WARN: 1, FAIL: 2}


def metrics(findings: Iterable[Finding], kit: Path | None) -> str:
    """The worst status of each check (0 OK, 1 WARN, 2 FAIL), when the doctor looked, and the ends of certificates.

    No finding's text is in it: it may name files.
    """
    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.check] = max(worst.get(finding.check, 0), _LEVEL[finding.status])
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


def write(file: Path, findings: Iterable[Finding], kit: Path | None) -> Path:
    """Write :func:`metrics` in one step, as the exporter wants it; returns the file."""
    return write_text(file, metrics(findings, kit))
