"""One rank's storage fails at one operation: every rank ends with an error that names rank and cause.

Here a sample, always with what once left the others waiting; ``make campaign-crash`` does all of it.
"""

from __future__ import annotations

import fnmatch
import re

import pytest

from ckptfs.errors import AccessError, IntegrityError, TransientError
from tests.crash.one_rank import CALLS, GROUNDS, MADE, Case, Stage, cases_of, verdict

pytestmark = pytest.mark.timeout(300)

EVERY = 25  # of the other operations one in so many, and each first of its kind

# What went on outside of a step once: one rank failed there, and the others waited for it.
FAILED_BEFORE = (
    "stat .ckptfs/log/00000000",
    "refresh .ckptfs/attempts*",
    "read .ckptfs/attempts/*/ckptfs.json",
    "read step_1/*ckptfs.json",
    "refresh step_1",
    "make_dir .ckptfs/attempts/*",
)

# What a call that reads does without, and why. One that saves may do without whatever its checkpoint is
# there without: ``verdict`` reads it.
OPTIONAL = {
    "refresh .ckptfs": "only makes what the hint says newer",
    "read .ckptfs/hint": "without it the log is read from its first entry on",
    "read .ckptfs/log/*": "what was read ahead is read again (TransientError)",
    "stat .ckptfs/log/*": "above a copied checkpoint nothing need be permitted",
    "list .ckptfs/log": "above a copied checkpoint nothing need be permitted",
    "read .ckptfs/domain": "above a copied checkpoint nothing need be permitted",
    "remove .ckptfs/tmp/*": "a token that stays is nobody's",
    "remove */.ckptfs-dir-*": "a token that stays is nobody's",
    "touch .ckptfs/log": "of two entries of one tick NFSv3 may show the second late",
    "replace .ckptfs/lease": "it is rewritten every few seconds",
    "* .ckptfs/log/*": "a release that is not told: the next owner waits for the lease",
    "sweep_uploads": "another owner sweeps them",
}


@pytest.fixture(scope="module", params=sorted(GROUNDS))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A site for all cases of one kind of storage."""
    return Stage(tmp_path_factory.mktemp("site"), GROUNDS[request.param])


def _kind(case: Case) -> str:
    """An operation without what differs from run to run."""
    return re.sub(r"[0-9a-f]{8,}|\d{8}T\d+-\w+", "*", f"{case.op} {case.key}".strip())


def _sample(cases: list[Case]) -> list[Case]:
    chosen, seen = [], set()
    for number, case in enumerate(cases):
        text = f"{case.op} {case.key}"
        known = any(fnmatch.fnmatchcase(text, pattern) for pattern in FAILED_BEFORE)
        kind = (case.rank, _kind(case))
        if (known and kind not in seen) or number % EVERY == 0:
            chosen.append(case)
        seen.add(kind)
    return chosen


def _may_be_missed(case: Case) -> bool:
    if case.call in MADE:
        return True
    text = f"{case.op} {case.key}".strip()
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in OPTIONAL)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_rank_names_the_one_that_failed(stage: Stage, name: str) -> None:
    """A collective call in which one rank's storage refuses an operation ends on every rank, with that
    rank and its cause, or it does without what failed.
    """
    wrong = []
    for case in _sample(cases_of(stage, name)):
        found = verdict(stage, case, AccessError)
        if found != "failed" and not (found == "succeeded" and _may_be_missed(case)):
            wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.campaign
@pytest.mark.parametrize("error", [AccessError, TransientError, IntegrityError])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_operation_of_every_rank(stage: Stage, name: str, error: type) -> None:
    """The same for every operation, and with errors that pass and damage too."""
    wrong = []
    for case in cases_of(stage, name):
        if error in case.errors:
            found = verdict(stage, case, error)
            if found != "failed" and not (found == "succeeded" and _may_be_missed(case)):
                wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join(wrong)
