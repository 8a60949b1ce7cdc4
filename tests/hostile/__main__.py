"""``python -m tests.hostile [GLOB ...]``: run the pairs with names that match, and print a table.

--faults    only what is wrong, as lines for known.toml
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from fnmatch import fnmatch

from tests.hostile.corpus import trials
from tests.hostile.warm import Warm


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("globs", nargs="*", default=["*"])
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    warm = Warm()
    faults = defaultdict[str, dict[str, str]](dict)
    for trial in trials():
        if not any(fnmatch(trial.name, f"*{glob}*") for glob in arguments.globs):
            continue
        outcome = warm.run(trial.input.name, trial.command)
        if outcome.fault:
            faults[trial.input.name][trial.command] = outcome.fault
        if not arguments.faults or outcome.fault:
            print(f"{trial.name}: {outcome}", flush=True)
    warm.close()
    print(f"{sum(map(len, faults.values()))} pairs of {len(faults)} inputs are wrong")


if __name__ == "__main__":
    main()
