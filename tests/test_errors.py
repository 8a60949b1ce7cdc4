"""The exception tree is the one that is drawn, and every error survives a trip between processes."""

from __future__ import annotations

import builtins
import copy
import errno
import importlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfs
from ckptfs import errors
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    DeadlineError,
    Failure,
    NoSpaceError,
    StateError,
    StorageError,
)

# One row per error: itself, its parent in the tree, the builtin that it also is. Rows are added and
# never changed: users' except clauses depend on them.
FROZEN = {
    "UriError": ("CkptfsError", "ValueError"),
    "MissingDriverError": ("UriError", "ImportError"),
    "StateError": ("CkptfsError", "ValueError"),
    "AmbiguousCheckpointError": ("StateError", None),
    "StorageError": ("CkptfsError", "OSError"),
    "NotFoundError": ("StorageError", "FileNotFoundError"),
    "AlreadyExistsError": ("StorageError", "FileExistsError"),
    "AccessError": ("StorageError", "PermissionError"),
    "CredentialsError": ("AccessError", None),
    "NoSpaceError": ("StorageError", None),
    "StaleError": ("StorageError", None),
    "SymlinkError": ("StorageError", None),
    "TransientError": ("StorageError", None),
    "AnswerLostError": ("StorageError", None),
    "UnsupportedError": ("StorageError", None),
    "CollectiveError": ("CkptfsError", "RuntimeError"),
    "DeadlineError": ("CkptfsError", "TimeoutError"),
    "ControlPlaneLostError": ("CkptfsError", "ConnectionError"),
    "FencedError": ("CkptfsError", "RuntimeError"),
    "RunBusyError": ("CkptfsError", "RuntimeError"),
    "CommitConflictError": ("CkptfsError", "FileExistsError"),
    "CommitInDoubtError": ("CkptfsError", "RuntimeError"),
    "IncompleteCheckpointError": ("CkptfsError", "FileNotFoundError"),
    "IntegrityError": ("CkptfsError", "ValueError"),
    "ManifestError": ("CkptfsError", "ValueError"),
}

ALL = sorted(
    (e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, CkptfsError)),
    key=lambda e: e.__name__,
)


def _drawn() -> dict[str, tuple[str, str | None]]:
    """Read the tree off the drawing in the module's docstring."""
    rows: dict[str, tuple[str, str | None]] = {}
    parents: dict[int, str] = {0: "CkptfsError"}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"( *[| ]*)[|`]-- (\w+)(?: \((\w+)\))?", line)
        if found:
            depth = len(found[1]) // 4
            parents[depth] = found[2]
            rows[found[2]] = (parents[depth - 1], found[3])
    return rows


def test_the_tree_is_frozen() -> None:
    """Each error has the parent and the builtin that users' except clauses rely on."""
    assert {e.__name__ for e in ALL} == {*FROZEN, "CkptfsError"}
    for name, (parent, builtin) in FROZEN.items():
        kind = getattr(errors, name)
        assert kind.__bases__[0] is getattr(errors, parent), name
        assert builtin is None or issubclass(kind, getattr(builtins, builtin)), name


def test_the_drawing_is_the_tree() -> None:
    """The docstring that users read draws the classes that exist, no more and no fewer."""
    assert _drawn() == FROZEN


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_pickles_to_an_equal_error(kind: type[CkptfsError]) -> None:
    """Type, text and every attribute come back; a custom __init__ does not break the trip."""
    error = kind(
        "it broke", uri="s3://bucket/run", rank=3, node="n1", hint="mend it", outcome="unknown"
    )
    if isinstance(error, StorageError):
        error.errno = errno.EDQUOT
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    # Whom a collective error met is in its message, by the names of hosts.
    who = "" if kind is CollectiveError else ", rank 3, node n1"
    assert str(back) == str(error) == f"it broke [uri s3://bucket/run{who}] -- mend it"
    assert vars(back) == vars(error)
    assert back.args == error.args
    assert getattr(back, "errno", None) == getattr(error, "errno", None)


class PickyError(CkptfsError):
    """An error as a user may derive it: it cannot be made without its own argument."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class PickyStorageError(StorageError):
    """The same below an error that is an OSError too, which pickles in its own way."""

    def __init__(self, needed: int, /) -> None:
        super().__init__(f"needed {needed}")
        self.needed = needed


@pytest.mark.parametrize("error", [PickyError("x", needed=3), PickyStorageError(3)], ids=repr)
def test_a_derived_error_with_its_own_arguments_travels(error: CkptfsError) -> None:
    """Stock DCP loses the coordinator to an exception that needs arguments to be unpickled."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)


def test_attributes_of_their_own_travel_too() -> None:
    """Failures by rank and silent ranks are there after pickling."""
    failure = Failure(2, "n1", "ckptfs.errors.NoSpaceError", "full", errno.ENOSPC, "Traceback ...")
    collective = CollectiveError("1 of 4 ranks failed", failures={2: failure})
    assert pickle.loads(pickle.dumps(collective)).failures == {2: failure}
    silent = DeadlineError("ranks 1 and 3 are silent", silent=(1, 3))
    assert pickle.loads(pickle.dumps(silent)).silent == (1, 3)


def test_all_are_follows_the_tree() -> None:
    """all_are answers for subclasses, and is false for a mix and for no failures at all."""

    def of(*kinds: str) -> CollectiveError:
        return CollectiveError(
            "failed", failures={n: Failure(n, "n1", k, "text") for n, k in enumerate(kinds)}
        )

    full = of("ckptfs.errors.NoSpaceError", "ckptfs.errors.NoSpaceError")
    assert full.all_are(NoSpaceError)
    assert full.all_are(StorageError)
    assert not full.all_are(StateError)
    assert not of("ckptfs.errors.NoSpaceError", "builtins.OSError").all_are(StorageError)
    assert not of().all_are(CkptfsError)


# What says something about the collective call, and not about what single ranks met.
OF_THE_CALL = {
    "CkptfsError",
    "CollectiveError",
    "CommitInDoubtError",
    "ControlPlaneLostError",
    "DeadlineError",
}


def _failed(*kinds: str) -> CollectiveError:
    failures = {
        n: Failure(n, "n1", f"ckptfs.errors.{kind}", "text", errno.EDQUOT)
        for n, kind in enumerate(kinds)
    }
    return CollectiveError("failed", failures=failures, uri="s3://bucket/run", hint="mend it")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_collective_error_is_also_the_type_of_its_failures(kind: type[CkptfsError]) -> None:
    """Both for ``except``, one by its name; no type of failure makes it say more of its outcome."""
    error = _failed(kind.__name__, kind.__name__)
    assert isinstance(error, CollectiveError)
    assert type(error).__name__ == "CollectiveError"
    is_both = isinstance(error, kind) and kind not in {CkptfsError, CollectiveError}
    assert is_both is (kind.__name__ not in OF_THE_CALL)
    assert error.outcome == "failed"
    assert str(error) == "failed [uri s3://bucket/run] -- mend it"
    assert error.args == ("failed",)
    if isinstance(error, StorageError):
        assert error.errno == errno.EDQUOT
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is type(error)
        assert (str(back), vars(back), back.args) == (str(error), vars(error), error.args)
        assert getattr(back, "errno", None) == getattr(error, "errno", None)


@given(st.lists(st.sampled_from([e.__name__ for e in ALL] + ["Unknown"]), max_size=4))
def test_what_a_collective_error_is_is_what_all_failures_are(kinds: list[str]) -> None:
    """The class and ``all_are`` give one answer, whatever the ranks met together."""
    error = _failed(*kinds)
    for kind in ALL:
        if kind.__name__ not in OF_THE_CALL:
            assert isinstance(error, kind) is error.all_are(kind), kind.__name__


def test_a_derived_collective_error_stays_its_class() -> None:
    """A class that derives one gets it, whatever its failures are; it travels as itself."""
    error = DerivedCollectiveError("x", failures=_failed("NoSpaceError").failures)
    assert type(error) is DerivedCollectiveError
    assert type(pickle.loads(pickle.dumps(error))) is DerivedCollectiveError


class DerivedCollectiveError(CollectiveError):
    """As a plug-in may have it."""


@given(
    message=st.text(max_size=900),
    uri=st.none()
    | st.text(st.characters(codec="ascii", categories=["L", "P", "N", "Z"]), max_size=700),
    hint=st.none() | st.text(max_size=500),
)
def test_the_text_of_a_collective_error_is_bounded(
    message: str, uri: str | None, hint: str | None
) -> None:
    """At most 400 characters of whatever it is made of, and all of it where that fits."""
    text = str(CollectiveError(message, uri=uri, hint=hint))
    assert len(text) <= 400
    whole = message + (f" [uri {uri}]" if uri is not None else "") + (f" -- {hint}" if hint else "")
    assert text == whole or len(whole) > 400


def test_a_place_with_blanks_in_it_is_bounded_as_well() -> None:
    """Directories may be called so: each word of it alone would be short enough."""
    text = str(
        CollectiveError("write failed", uri="file:///my runs" + " and more" * 90 + "/step_1")
    )
    assert len(text) <= 400
    assert text.startswith("write failed [uri file:///my runs and more")
    assert text.endswith("…step_1]")


def test_a_message_of_many_words_loses_its_end() -> None:
    """No word of it is long enough to be shortened; the place stays."""
    text = str(CollectiveError("too many words " * 100, uri="s3://bucket/run/step_1", hint="wait"))
    assert len(text) == 400
    assert text.startswith("too many words too many words")
    assert text.endswith("… [uri s3://bucket/run/step_1]")


def test_long_paths_lose_their_middle_before_anything_else_goes() -> None:
    """The beginning and the file stay, so do the checkpoint and what to do."""
    path = "/mnt/" + "deep/" * 60 + "__3_0.distcp"
    error = CollectiveError(
        f"write failed on 1 of 2 ranks: rank 1 on host-1 (pid 7): NoSpaceError: full at {path}",
        uri="s3://bucket/run/step_7",
        hint="free space",
    )
    assert str(error).startswith("write failed on 1 of 2 ranks: rank 1 on host-1 (pid 7): ")
    assert "full at /mnt/deep/" in str(error)
    assert str(error).endswith("__3_0.distcp [uri s3://bucket/run/step_7] -- free space")


def test_outcome_defaults_say_what_is_known() -> None:
    """Only the errors that leave a commit open say "unknown" by default."""
    unknown = {e.__name__ for e in ALL if e("x").outcome == "unknown"}
    assert unknown == {"AnswerLostError", "CommitInDoubtError"}


LOOSE: Any = ckptfs  # mypy would refuse these words


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: LOOSE.CheckpointManager(run, mode="asnc"), '"sync" or "async"'),
        (lambda run: LOOSE.CheckpointManager(run, if_slow="wait"), '"delay" or "skip"'),
        (lambda run: LOOSE.save({}, run / "a", if_exists="overwrite"), '"error" or "replace"'),
        (lambda run: LOOSE.prepare_run(run, mode="new"), '"resume", "overwrite" or "fail"'),
    ],
)
def test_a_word_that_is_no_choice_is_told_with_those_that_are(
    tmp_path: Path, call: Callable[[Path], Any], words: str
) -> None:
    """A StateError that lists the words, and names no class of ours."""
    with pytest.raises(ckptfs.StateError) as caught:
        call(tmp_path / "run")
    assert words in str(caught.value)
    assert "valid" not in str(caught.value)


def test_a_word_that_is_no_choice_is_refused_by_its_parameter() -> None:
    """The error says which argument it was, and what it takes; of a value as long as one likes a part."""
    for module in (
        "manager.run_setup",
        "manager.restore_candidates",
        "dcp.incremental.reuse",
        "dcp.torch_hooks.storage_writer",
        "dcp.read.load_planner",
    ):
        importlib.import_module(f"ckptfs.{module}")
    choices: list[Any] = errors.ArgumentChoice.__subclasses__()
    assert {"if_exists", "mode", "fallback", "objects"} <= {one.parameter for one in choices}
    for choice in choices:
        with pytest.raises(
            StateError, match=f"^{choice.parameter}='nosuch' is not one of the choices: "
        ) as caught:
            choice("nosuch")
        assert all(f'"{one.value}"' in caught.value.message for one in choice)
        with pytest.raises(StateError) as caught:
            choice("x" * 1_000_000)
        assert len(str(caught.value)) < 1000
