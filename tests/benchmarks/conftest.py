"""The bench is a module of the repository's folder, which its tests find last: the installed package comes first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
