"""A federation in which one hospital's own process sends what a test asks for, beside FLARE's requests."""

import json
import os
from pathlib import Path

from federation_process import Federation, wait_for

PROCESS = """
import sys, threading, time
def work():
    cells = {{}}
    while {cell!r} not in cells:  # so that nothing is imported before FLARE has
        time.sleep(0.2)
        cellnet = sys.modules.get("nvflare.fuel.f3.cellnet.core_cell")
        cells = getattr(getattr(cellnet, "CoreCell", None), "ALL_CELLS", cells)
    from sending import work
    work({cell!r}, {folder!r})
if any("client_train" in argument for argument in sys.orig_argv):
    threading.Thread(target=work, daemon=True).start()
"""


class Attacked(Federation):
    """A federation in which the cell named ``attacker`` belongs to the hospital that attacks."""

    attacker = "hospital-b"

    def start(self, *names, **named):
        folder, honest = self.folder / "attacker", self.environment
        (folder / "attacks").mkdir(parents=True, exist_ok=True)
        process = PROCESS.format(cell=self.attacker, folder=str(folder / "attacks"))
        (folder / "sitecustomize.py").write_text(process)
        paths = [folder, Path(__file__).parent, os.environ.get("PYTHONPATH", "")]
        for name in names:
            if name == self.attacker.rpartition(".")[2]:
                self.environment = honest | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
            super().start(name, **named)
            self.environment = honest

    def attack(self, *requests):
        """Answers to requests from the attacker's own cell: arguments of :func:`sending.send`."""
        attacks = self.folder / "attacker" / "attacks"
        (attacks / "a.new").write_text(json.dumps(requests))
        (attacks / "a.new").rename(attacks / "a.json")
        answers = wait_for("the attacker's requests are sent", lambda: next(attacks.glob("*.out"), None), 200)
        text = answers.read_text()
        answers.unlink()
        return json.loads(text)
