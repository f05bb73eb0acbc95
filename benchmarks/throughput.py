"""Runs ``fastdata bench`` from a checkout, installed or not: ``python benchmarks/throughput.py DATA [OPTIONS]``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastdata.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
