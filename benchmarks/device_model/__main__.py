"""Each recorded step here and there: python -m benchmarks.device_model [FILE ...]"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.device_model import recorded


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]] or None
    for step in recorded.steps(files):
        print(
            f"{step.model}, {step.rows} rows:",
            *(
                f"{what} {step.here[what]} here, {step.there[what]} there ({step.error(what):+.2%});"
                for what in ("peak_over_base", "reserved_over_base")
            ),
            "events equal" if step.equal else step.first_difference(),
            flush=True,
        )


if __name__ == "__main__":
    main()
