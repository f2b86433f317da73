"""Adds Debian's packages and Python to a bill of materials: ``python3 sbom.py FILE``, dpkg-query's lines on stdin."""

import json
import platform
import sys
from pathlib import Path
from urllib.parse import quote

file = Path(sys.argv[1])
bill = json.loads(file.read_text())
system = platform.freedesktop_os_release()
found = [("python", platform.python_version(), f"pkg:generic/python@{platform.python_version()}")]
for name, version, machine in map(str.split, sys.stdin):
    distribution = f"arch={machine}&distro={system['ID']}-{system['VERSION_ID']}"
    found.append((name, version, f"pkg:deb/{system['ID']}/{name}@{quote(version, safe='')}?{distribution}"))
for name, version, purl in found:
    bill["components"].append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
file.write_text(json.dumps(bill, indent=2) + "\n")
