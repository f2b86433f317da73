"""FLARE's relay with a cell that looks at what it passes on; kits start it by ``python -m``.

FLARE's own loads no component and believes a message's sender: behind one, a hospital could speak as the server.
"""

import runpy

from fedtar_flare.provision.wire import guard_cells

if __name__ == "__main__":
    guard_cells()
    runpy.run_module("nvflare.private.fed.app.relay.relay", run_name="__main__", alter_sys=True)
