"""A federation in which a hospital's or relay's own process sends what a test asks for, beside FLARE's requests."""

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
if any(argument.endswith(("client_train", ".relay")) for argument in sys.orig_argv):
    threading.Thread(target=work, daemon=True).start()
"""


class Attacked(Federation):
    """A federation in which the cells ``attackers`` belong to participants that attack."""

    attackers = ("hospital-b",)

    def start(self, *names, **named):
        honest = self.environment
        for name in names:
            for cell in self.attackers:
                if name == cell.rpartition(".")[2]:
                    folder = self.folder / cell
                    (folder / "attacks").mkdir(parents=True, exist_ok=True)
                    process = PROCESS.format(cell=cell, folder=str(folder / "attacks"))
                    (folder / "sitecustomize.py").write_text(process)
                    paths = [folder, Path(__file__).parent, os.environ.get("PYTHONPATH", "")]
                    self.environment = honest | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
            super().start(name, **named)
            self.environment = honest

    def attack(self, *requests, cell=""):
        """Answers to requests from an attacker's own cell, by default the first: arguments of :func:`sending.send`."""
        attacks = self.folder / (cell or self.attackers[0]) / "attacks"
        (attacks / "a.new").write_text(json.dumps(requests))
        (attacks / "a.new").rename(attacks / "a.json")
        answers = wait_for("the attacker's requests are sent", lambda: next(attacks.glob("*.out"), None), 200)
        text = answers.read_text()
        answers.unlink()
        return json.loads(text)
