"""What a rank that fails costs the ranks of a sharded model."""

import sys
from pathlib import Path

# Its models and faults are those of the tests, in the ranks too.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python" / "sharded"))
