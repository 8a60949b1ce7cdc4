"""Plant every mistake, one at a time: ``make campaign-mutants``, or ``python -m tests.mutants commit``.

Prints a table: the mistake, whether a test saw it, and which one failed first. The exit code is 1 where
one went unseen, timed out, or where the tests fail without any mistake.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch

from tests.mutants.mistakes import Mistake, load
from tests.mutants.running import LIMIT_S, Answer, Outcome, failing_without, run_mistake


def main(argv: list[str]) -> int:
    """Run what was chosen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="a floor, a name, or a pattern such as 'commit/*'")
    parser.add_argument("-n", "--processes", type=int, default=1, help="so many copies at a time")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for the tests of one")
    parser.add_argument("--list", action="store_true", help="print what there is")
    asked = parser.parse_args(argv)
    mistakes = [m for m in load() if not asked.names or _chosen(m, asked.names)]
    if not mistakes:
        parser.error("nothing is called that")
    if asked.list:
        print("\n".join(f"{m.name}: {m.what}" for m in mistakes))
        return 0
    tests = sorted({test for mistake in mistakes for test in mistake.tests})
    print(f"{len(mistakes)} mistakes; their tests without any first", flush=True)
    failing = failing_without(tests, asked.limit_s * len(mistakes))
    for name in sorted(failing):
        print(f"{name} fails as it is", flush=True)
    answers: dict[str, Answer] = {}
    with ThreadPoolExecutor(asked.processes) as pool:
        runs = {pool.submit(run_mistake, m, asked.limit_s): m for m in mistakes}
        for done in as_completed(runs):
            answers[runs[done].name] = done.result()
            print(
                f"{done.result().outcome.value:9}  {runs[done].name}", file=sys.stderr, flush=True
            )
    _print_table(mistakes, answers)
    return int(any(a.outcome is not Outcome.SEEN for a in answers.values()))


def _chosen(mistake: Mistake, names: list[str]) -> bool:
    return any(name == mistake.floor or fnmatch(mistake.name, name) for name in names)


def _print_table(mistakes: list[Mistake], answers: dict[str, Answer]) -> None:
    print("| floor | mistake | | failed first |\n|---|---|---|---|")
    for m in mistakes:
        answer = answers[m.name]
        print(f"| {m.floor} | {m.what} | {answer.outcome.value} | {answer.first} |")
    seen = sum(answer.outcome is Outcome.SEEN for answer in answers.values())
    print(f"\n{seen} of {len(mistakes)} seen")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
