"""Modules of this folder that tests import by name."""

import sys
from pathlib import Path

# Processes of ranks import the modules by name.
sys.path.insert(0, str(Path(__file__).parent))
