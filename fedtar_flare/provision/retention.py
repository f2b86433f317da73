"""A running site deletes what has had its time, once a day, in a process of its own."""

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import PRIVATE, private_folder

EVERY = 86400.0  # seconds
STAMP = "retention-looked"  # file in the site's folder, written at each look
COMMAND = ("-m", "fedtar_flare.provision.retention")

logger = logging.getLogger(__name__)


def look(kit: Path) -> None:
    """Run :func:`main` in a process of its own, for the libraries that deleting needs, and log what it says."""
    command = [sys.executable, *COMMAND, str(kit)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    say = logger.error if done.returncode else logger.info
    say("retention: %s", done.stdout.strip().replace("\n", "; "))


def main(argv: Sequence[str] | None = None) -> int:
    """Delete what has had its time; nothing after two days without a look: clocks may jump."""
    from fedtar_flare.site.context import Site

    (kit,) = sys.argv[1:] if argv is None else argv
    try:
        site = Site.outside_of_jobs(Path(kit))
        stamp = private_folder(site.records) / STAMP
        since = time.time() - stamp.stat().st_mtime if stamp.exists() else -1
        stamp.touch(PRIVATE)
        if not 0 <= since <= 2 * EVERY:
            print("nothing deleted today: the clock was changed, or nobody has looked for two days")
            return 0
        from fedtar_flare.site.purge import plan  # with PyTorch, which the first look is spared

        due = plan(site, retention=True)
        due.carry_out()
    except (FedTARError, OSError) as error:
        print(error)
        return 1
    print("\n".join(f"deleted: {what}: {path.name}" for path, what in due.remove) or "nothing to delete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
