"""One rank's storage fails at one operation: every rank ends with an error that names rank and cause.

Here a sample, always with what once left the others waiting; ``make campaign-crash`` does all of it.
"""

from __future__ import annotations

import fnmatch
import re

import pytest

from ckptfs.errors import AccessError, IntegrityError, TransientError
from tests.crash.one_rank import CALLS, CAUSE, GROUNDS, MADE, Case, Stage, cases_of, verdict

EVERY = 25  # of the other operations one in so many, and each first of its kind

# What once happened outside of a step: one rank failed there, and the others waited for it.
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
    "sweep_uploads": "another owner sweeps them",
}

# The first of its kind in a call, which the call does without. A second one that fails ends it.
OPTIONAL_FIRST = {
    "load read step_1/.metadata": "if it does not name the save, the stats and a second read decide",
    "load-in-a-run read step_1/.metadata": "the same",
    "load read step_1/*/.metadata": "it is read ahead with the manifest, and again if that failed",
    "load-in-a-run read step_1/*/.metadata": "the same",
    "load-stock refresh .ckptfs/log": "that of a run above; nothing need be permitted there",
}

# What one of several ranks does, whichever comes first: in another run that may be another one.
RACED = ("create .ckptfs/domain",)

# What is asked again after a TransientError, and why it may be.
REPEATED = {
    "create .ckptfs/log/*": "the same create until its answer is known; the entry carries a write-id",
}


@pytest.fixture(scope="module", params=sorted(GROUNDS))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """A site for all cases of one kind of storage."""
    return Stage(tmp_path_factory.mktemp("site"), GROUNDS[request.param])


def _sample(cases: list[Case]) -> list[Case]:
    chosen, seen = [], set()
    for number, case in enumerate(cases):
        text = f"{case.op} {case.key}"
        known = any(fnmatch.fnmatchcase(text, pattern) for pattern in FAILED_BEFORE)
        # Of the log the first entry represents all of them.
        kind = (case.rank, re.sub(r"/\d{8}$", "/*", case.kind))
        if (known and kind not in seen) or number % EVERY == 0 or case.leaving:
            chosen.append(case)
        seen.add(kind)
    return chosen


def _is_right(case: Case, found: str, error: type = AccessError) -> bool:
    text = f"{case.op} {case.key}".strip()
    patterns = [*OPTIONAL, *(REPEATED if error is TransientError else ())]
    optional = any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns) or (
        case.nth == 1 and any(fnmatch.fnmatchcase(f"{case.call} {text}", p) for p in OPTIONAL_FIRST)
    )
    if found == "succeeded":
        # A run that is not released: the next owner reads no release, and waits for the lease to stand still.
        return optional or case.leaving or case.call in MADE
    # Another thread may come only after the end, with what is not waited for.
    return found == "failed" or (found == "was not asked" and (optional or text in RACED))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_rank_names_the_one_that_failed(stage: Stage, name: str) -> None:
    """A collective call in which one rank's storage refuses an operation ends on every rank, with that
    rank and its cause, or it does without what failed.
    """
    wrong = []
    for case in _sample(cases_of(stage, name)):
        found = verdict(stage, case, AccessError)
        if not _is_right(case, found):
            wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join(wrong)


def test_no_save_fails_for_the_time_of_the_last_one(stage: Stage) -> None:
    """The coordinator alone reads the last seal again, for a warning: damage there ends no save. What no
    storage should raise ends it on every rank, with that rank and its cause.
    """
    again = [
        case
        for case in cases_of(stage, "manager-save")
        if (case.op, case.key, case.nth) == ("read", ".ckptfs/log/00000000", 2)
    ]
    assert [case.rank for case in again] == [0]
    assert verdict(stage, again[0], IntegrityError) == "succeeded"
    assert verdict(stage, again[0], RuntimeError) == "failed"


def test_a_run_is_left_whose_release_fails(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The block of ``prepare_run`` ends well on every rank, the log says that the release is missing, and
    the run can be claimed again.
    """
    leaving = [case for case in cases_of(stage, "prepare_run") if case.leaving]
    assert {case.op for case in leaving} == {"refresh", "read", "create"}
    for case in leaving:
        caplog.clear()
        assert verdict(stage, case, AccessError) == "succeeded", case
        assert f"the run was not released, so the next owner has to wait: {CAUSE}" in caplog.text
        for end in stage.go_on(CALLS["prepare_run"], {}):
            end.get()


@pytest.mark.campaign
@pytest.mark.timeout(0)  # hundreds of cases; each has its deadline
@pytest.mark.parametrize("error", [AccessError, TransientError, IntegrityError])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_operation_of_every_rank(stage: Stage, name: str, error: type) -> None:
    """The same for every operation, and with errors that pass and damage too."""
    wrong = []
    for case in cases_of(stage, name):
        if error in case.errors:
            found = verdict(stage, case, error)
            if not _is_right(case, found, error):
                wrong.append(f"{case}: {found}")
    assert not wrong, "\n".join(wrong)
