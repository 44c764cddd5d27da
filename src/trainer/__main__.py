"""`python -m trainer CONFIG ATTEMPT_DIR`: one rank."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.cli import run

if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2])))
