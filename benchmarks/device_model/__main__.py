"""Each recorded step here and there: python -m benchmarks.device_model [--leave-out size|model] [FILE ...]"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.device_model import recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leave-out", choices=("size", "model"), default="")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    for step in recorded.steps(given.files or None, given.leave_out):
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
