"""``fedtar doctor``: what a site's staff checks before a study starts; each finding comes with its cure."""

from __future__ import annotations

from pathlib import Path

from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding

__all__ = ["FAIL", "OK", "WARN", "Finding", "diagnose"]


def diagnose(kit: Path | None = None, site_file: Path | None = None, time_steps: int = 3) -> list[Finding]:
    """Look at everything that a site needs; no check changes anything or sends data.

    Without ``kit`` its checks are skipped; without ``site_file`` the kit's ``local/fedtar.yaml`` counts. ``time_steps``
    is the job's T, for the counts of visits. Raises ConfigError if the folder is no kit.
    """
    from fedtar_flare.site.doctor import access, connection, data, environment, policy
    from fedtar_flare.site.place import kit_of
    from fedtar_flare.site.site_file import SITE_FILE

    kit = kit_of(kit) if kit is not None else None
    place = site_file or (kit / "local" / SITE_FILE if kit else None)
    findings = environment.packages()
    config = None
    if place is not None:
        config, found = data.site_file(place)
        findings += found
    findings.append(environment.gpu(config))
    if config is not None:
        findings += data.summary(config, time_steps)
        findings += policy.bounds(kit, config)
    findings += environment.disks(kit, config, data.studies(config) if config is not None else 0)
    if kit is not None:
        findings += data.key(kit, config)
        findings += policy.allow_list(kit)
        findings += policy.privacy(kit, config)
        findings.append(policy.participation(kit))
        findings += access.rights(kit)
        findings.append(access.doors(kit))
        findings += access.places(kit, config)
        findings += access.modes(kit, config)
        findings += connection.certificates(kit)
        findings.append(connection.server(kit))
    return findings
