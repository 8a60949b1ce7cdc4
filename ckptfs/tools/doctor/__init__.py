"""The doctor: test what a storage does, from where the job runs, before a job depends on it.

    report = examine("s3://bucket/run", settings=Settings(expect=Expect.SHARED))
    report.verdict                      OK, WARN or FAIL
    for finding in report.findings: ... finding.name  .verdict  .seen  .meaning  .advice

    report     findings, and how they are written
    session    the scratch directory .ckptfs-doctor-<id>/ below the run, and how a check is made. The
               doctor writes only in that directory, and removes it again
    access  commit  sharing  mount  bucket  speed      the checks, by theme
    CHECKS     their order; every rank gets the same report

The doctor runs in one process, or under a launcher: if torchrun's environment says so, every rank takes
part, and no process group is needed. The log of a run is never written.

If a place cannot be reached, or permits neither reading nor writing, a typed error is raised. If nothing
can be written, the doctor makes the checks that only read. If a rank fails or gets Ctrl-C, the step ends
on all ranks, and each removes what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ckptfs.commit.session import agree_uri
from ckptfs.control.control import Control, open_control
from ckptfs.control.rank_errors import collective_error, failure_of
from ckptfs.errors import AccessError, CkptfsError, StateError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.storage.registry import open_storage
from ckptfs.tools.doctor import access, bucket, commit, mount, sharing, speed
from ckptfs.tools.doctor.report import Finding, Report, Theme, Verdict
from ckptfs.tools.doctor.session import (
    Clock,
    Expect,
    Findings,
    Opener,
    ScratchDirectory,
    Session,
    Settings,
    check,
    cleaning,
    leftovers,
    new_id,
)
from ckptfs.uri import Uri

__all__ = [
    "Clock",
    "Expect",
    "Finding",
    "Report",
    "Settings",
    "Theme",
    "Verdict",
    "examine",
    "examine_with",
]

T = TypeVar("T")

_RETRY_S = 10.0  # for one request: a user who asks whether a store answers should not wait a minute
_NOT_TESTED = (
    ("atomic-replace", Theme.COMMIT),
    ("domains", Theme.SHARING),
    ("visibility-delay", Theme.SHARING),
    ("latency", Theme.SPEED),
    ("write-bandwidth", Theme.SPEED),
)


@check()
def not_tested(session: Session) -> Findings:
    """Report the checks that were not made because nothing could be written."""
    if session.is_writable:
        return ()
    why = "not tested: nothing could be written"
    create = "exclusive-create" if session.is_mounted else "conditional-create"
    names = ((create, Theme.COMMIT), *_NOT_TESTED)
    return tuple(Finding(name, theme, Verdict.UNKNOWN, why) for name, theme in names)


# In the order of importance within each theme; cleaning is the last.
CHECKS = (
    access.permissions,
    commit.exclusive_create,
    commit.atomic_replace,
    commit.rename_directory,
    commit.fsync,
    commit.hard_links,
    commit.conditional_replace,
    commit.multipart,
    sharing.domains,
    sharing.shared_directory,
    sharing.visibility_delay,
    sharing.clocks,
    mount.free_space,
    mount.inodes,
    mount.quota,
    bucket.bucket_rules,
    bucket.data_path,
    mount.mount,
    not_tested,
    mount.names,
    speed.latency,
    speed.bandwidth,
    bucket.requests,
    leftovers,
    cleaning,
)


def examine(
    uri: object,
    storage_options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Examine a storage.

    Collective if there is torchrun's environment or a process group; else this process works alone. The
    doctor's directory is always removed, also after Ctrl-C. After SIGKILL it stays, and a later
    examination removes it once it is a day old.

    Args:
        uri: The run, or the place for a new one.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        settings: What to measure; None: the defaults.

    Returns:
        The report, the same on every rank.

    Raises:
        CredentialsError: Credentials are missing, wrong or expired.
        AccessError: Neither reading nor writing is permitted.
        NotFoundError: There is no such bucket.
        StorageError: The storage does not answer.
        UriError: The URI cannot be read.
        CollectiveError: Only some ranks met such an error; every rank raises this same one.
    """
    with open_control() as control:
        return examine_with(control, uri, storage_options, settings)


def examine_with(
    control: Control,
    uri: object,
    storage_options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    *,
    opener: Opener = open_storage,
) -> Report:
    """Examine a storage as ``examine`` does, over an open control plane.

    Args:
        control: The ranks that take part.
        uri: The run, or the place for a new one.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        settings: What to measure; None: the defaults.
        opener: How the storage is opened.

    Returns:
        The report, the same on every rank.

    Raises:
        CkptfsError: As for ``examine``.
    """
    wanted = settings or Settings()
    place = agree_uri(control, uri)
    doctor_id = control.step(
        "doctor.id", lambda: new_id(wanted.clock.wall_s()), lambda ids: str(ids[0])
    )
    options = _impatient(place, storage_options or {})
    scratch = _agreed(
        control, "doctor.open", lambda: ScratchDirectory(place, doctor_id, options, opener)
    )
    session = Session(control, scratch, wanted, place)
    try:
        _agreed(control, "doctor.file", lambda: _refuse_file(scratch.run, place))
        findings = _findings(session)
    except BaseException:
        scratch.clean_quietly()
        raise
    finally:
        scratch.close()
    worlds = control.worlds
    sites = dict.fromkeys(w.site for w in worlds)
    shape = scratch.run.capabilities.shape
    shapes = control.step("doctor.end", lambda: shape.value, lambda answers: str(answers[0]))
    return Report(str(place), doctor_id, shapes, control.size, tuple(sites), tuple(findings))


def _refuse_file(storage: Storage, place: Uri) -> None:
    """Raise StateError if a filesystem has a file at that name: a file cannot contain a run."""
    if storage.capabilities.shape is Shape.OBJECT:
        return
    try:
        is_file = not storage.stat("").is_dir
    except CkptfsError:
        return  # the checks say what is wrong with the place
    if is_file:
        raise StateError(
            "this is a plain file: doctor tests directories and prefixes",
            uri=place,
            hint="pass the directory of the file; ckptfs inspect shows a file",
        )


def _impatient(uri: Uri, options: Mapping[str, Any]) -> dict[str, Any]:
    ours = {"retry_s": _RETRY_S} if uri.protocol in PROTOCOLS else {}
    return {**ours, **uri.options, **options}


def _agreed(control: Control, label: str, act: Callable[[], T]) -> T:
    """Return the result of ``act`` on this rank.

    If it failed on every rank, the first rank's error is raised unchanged; if it failed on some, a
    CollectiveError is raised on all.
    """
    results: list[T] = []

    def local() -> CkptfsError | None:
        try:
            results.append(act())
        except CkptfsError as error:
            return error
        return None

    control.step(label, local, lambda answers: _raise_any(control, label, answers))
    return results[0]


def _raise_any(control: Control, label: str, errors: Sequence[CkptfsError | None]) -> None:
    wrong = {rank: error for rank, error in enumerate(errors) if error is not None}
    if not wrong:
        return
    if len(wrong) == len(errors):
        raise wrong[0]
    worlds = control.worlds
    failures = {rank: failure_of(error, worlds[rank]) for rank, error in wrong.items()}
    raise collective_error(label, failures, worlds)


def _findings(session: Session) -> list[Finding]:
    control, scratch = session.control, session.scratch
    control.step(
        "doctor.reach",
        lambda: access.reach(scratch),
        lambda errors: _raise_any(control, "doctor.reach", errors),
    )
    session.access = control.step(
        "doctor.access", lambda: access.look_at_access(scratch, control.rank)
    )
    if all(access.is_shut(refusals) for refusals in session.access):
        raise _shut(session)
    session.is_writable = access.may_write(session.access)
    if session.is_writable:
        session.learn()
    session.mounts = control.step("doctor.mount", lambda: mount.look_at_mount(session.run))
    findings = [
        finding for one in CHECKS if session.offers(one.needs) for finding in one.run(session)
    ]
    if not session.is_writable:
        scratch.clean_quietly()
    return findings


def _shut(session: Session) -> AccessError:
    """Return the error if neither reading nor writing is permitted; the same on every rank."""
    first = next(r for refusals in session.access for r in refusals.values() if r is not None)
    return AccessError(
        f"neither reading nor writing is permitted: {first.text}",
        uri=session.uri,
        hint=first.hint or "check which credentials the job has",
    )
