# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests find their helpers and the examples beside them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
