"""The order of a visit, collective: each step is a look on every rank and a judgement on the first.

    uri, id, open       the same on every rank; a place that cannot be reached ends it here, typed
    permissions         in the corner; where nothing can be written, the rest is looked at only
    domains             ckptfs's own probe, in the corner
    commit, sharing, space, rules, mount, speed
    leftovers, cleaning

A rank that fails, or meets Ctrl-C, ends the step on all of them; each removes what it made.
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
from ckptfs.tools.doctor.corner import Corner, Opener, new_id
from ckptfs.tools.doctor.judge.access import judge_access, may_write
from ckptfs.tools.doctor.look.access import is_shut, look_at_access, reach
from ckptfs.tools.doctor.seen import Access
from ckptfs.tools.doctor.settings import Settings
from ckptfs.tools.doctor.verdicts import Finding, Report
from ckptfs.tools.doctor.visit import Visit
from ckptfs.tools.doctor.visit_commit import check_commit
from ckptfs.tools.doctor.visit_place import check_place
from ckptfs.tools.doctor.visit_sharing import check_sharing, find_domains, groups_of
from ckptfs.uri import Uri

__all__ = ["examine", "examine_with"]

T = TypeVar("T")

_RETRY_S = (
    10.0  # of one request: whoever asks whether a store answers does not wait a minute for no
)


def examine(
    uri: object,
    storage_options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Examine a storage. Collective where torchrun's environment, or a process group, says so; else alone.

    In any case, and after Ctrl-C, the doctor's directory is removed; after SIGKILL it stays, and a later
    visit removes it once it is a day old.

    Args:
        uri: The run, or what is to become one.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.
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
    """As ``examine``, over a control plane that is open.

    Args:
        control: The ranks that take part.
        uri: The run, or what is to become one.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.
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
    corner = _agreed(control, "doctor.open", lambda: Corner(place, doctor_id, options, opener))
    visit = Visit(control, corner, wanted, place)
    try:
        _agreed(control, "doctor.file", lambda: _refuse_file(corner.run, place))
        findings = _findings(visit)
    except BaseException:
        corner.clean_quietly()
        raise
    finally:
        corner.close()
    worlds = control.worlds
    sites = dict.fromkeys(w.site for w in worlds)
    shape = corner.run.capabilities.shape
    shapes = control.step("doctor.end", lambda: shape.value, lambda told: str(told[0]))
    return Report(str(place), doctor_id, shapes, control.size, tuple(sites), tuple(findings))


def _refuse_file(storage: Storage, place: Uri) -> None:
    """StateError: a file lies at that name on a filesystem, and below it there can be no run."""
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
            hint="give it the directory that the file lies in; ckptfs inspect shows a file",
        )


def _impatient(uri: Uri, options: Mapping[str, Any]) -> dict[str, Any]:
    ours = {"retry_s": _RETRY_S} if uri.protocol in PROTOCOLS else {}
    return {**ours, **uri.options, **options}


def _agreed(control: Control, label: str, act: Callable[[], T]) -> T:
    """What ``act`` returned here; where it failed on every rank, the first one's error as it is."""
    kept: list[T] = []

    def local() -> CkptfsError | None:
        try:
            kept.append(act())
        except CkptfsError as error:
            return error
        return None

    control.step(label, local, lambda told: _raise_any(control, label, told))
    return kept[0]


def _raise_any(control: Control, label: str, told: Sequence[CkptfsError | None]) -> None:
    wrong = {rank: error for rank, error in enumerate(told) if error is not None}
    if not wrong:
        return
    if len(wrong) == len(told):
        raise wrong[0]
    worlds = control.worlds
    failures = {rank: failure_of(error, worlds[rank]) for rank, error in wrong.items()}
    raise collective_error(label, failures, worlds)


def _findings(visit: Visit) -> list[Finding]:
    control, corner = visit.control, visit.corner

    def reached() -> CkptfsError | None:
        return reach(corner)

    control.step("doctor.reach", reached, lambda e: _raise_any(control, "doctor.reach", e))
    seen = control.step("doctor.access", lambda: look_at_access(corner, control.rank))
    if all(is_shut(s) for s in seen):
        raise _shut(visit, seen)
    findings = list(judge_access(control.worlds, seen))
    writable, groups = may_write(seen), [tuple(range(control.size))]
    if writable:
        visit.learn()
        domains = find_domains(visit)
        groups = groups_of(visit, domains)
        findings += check_commit(visit, domains)
        findings += check_sharing(visit, domains)
    findings += check_place(visit, seen, groups, writable=writable)
    if writable:
        findings += visit.clean()
    else:
        corner.clean_quietly()
    return findings


def _shut(visit: Visit, seen: Sequence[Access]) -> AccessError:
    """Neither reading nor writing: the same on every rank, from what all of them saw."""
    first = next(r for s in seen for r in s.tried.values() if r is not None)
    return AccessError(
        f"neither reading nor writing is permitted: {first.text}",
        uri=visit.uri,
        hint=first.hint or "check whose credentials the job has",
    )
