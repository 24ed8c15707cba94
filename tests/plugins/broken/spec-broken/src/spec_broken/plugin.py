"""A module that prints and ends its process when it is imported."""

from __future__ import annotations

import os
import sys

print("spec-broken is here")
os.write(1, b"and writes to the descriptor\n")
sys.exit(0)
