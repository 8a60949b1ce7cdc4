"""The exhaustive search: every scenario to its end.

python -m tests.model.campaign [name prefix ...] [--seconds 600] [--states 3000000]
"""

from __future__ import annotations

import argparse
import sys

from tests.model.scenarios import SCENARIOS, build
from tests.model.search import explore


def main() -> int:
    """Print states per scenario and every counterexample; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=600.0, help="per scenario")
    parser.add_argument("--states", type=int, default=3_000_000, help="per scenario")
    parser.add_argument("--ends", action="store_true", help="how each process may end")
    options = parser.parse_args()
    broken, total = 0, 0
    for name in SCENARIOS:
        if not any(name.startswith(p) for p in options.prefixes or [""]):
            continue
        result = explore(build(name), max_states=options.states, max_seconds=options.seconds)
        total += result.states
        broken += len(result.found)
        print(
            f"{name:32} {result.states:9,} states {'all ' if result.complete else 'SOME'} "
            f"{result.seconds:6.1f} s  {result.locals:6,} local states  {len(result.found)} broken",
            flush=True,
        )
        if options.ends:
            print(f"    {result.ends}", flush=True)
        for found in result.found:
            print(f"  {found}", flush=True)
    print(f"{total:,} states, {broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
