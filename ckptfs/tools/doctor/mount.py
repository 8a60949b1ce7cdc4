"""Free space and inodes, quotas, the mount that holds a path, and file names."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, NotFoundError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.text import size_text
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, on_ranks
from ckptfs.tools.doctor.session import FailedOperation, Findings, Need, Session, Why, check

__all__ = [
    "FreeSpace",
    "Mount",
    "free_space",
    "inodes",
    "judge_inodes",
    "judge_mount",
    "judge_names",
    "judge_quota",
    "judge_space",
    "look_at_mount",
    "measure_free_space",
    "mount",
    "mounts_of",
    "names",
    "quota",
]

_LITTLE_BYTES = 1 << 30
_FEW_INODES = 10_000
_NO_INODES = 100
_LONG_CACHE_S = 60
_SHOWN_OPTIONS = re.compile(
    r"vers|proto|soft|softerr|hard|ac|noac|nocto|actimeo|acregm(in|ax)|acdirm(in|ax)|lookupcache|nolock|"
    r"local_lock|ro|rw|sync|async|cache|dir_attribute_timeout"
)
_QUOTAS = ("usrquota", "grpquota", "prjquota", "quota", "uquota", "gquota", "pquota", "uqnoenforce")
_WITH_QUOTA_OPTIONS = ("ext4", "ext3", "xfs", "f2fs")
_WITHOUT_QUOTA = ("tmpfs", "ramfs", "overlay")
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "beegfs",
    "gpfs",
    "ceph",
    "glusterfs",
    "9p",
    "virtiofs",
)
_QUOTA_TOOLS = {
    "lustre": "lfs quota -h -u $USER PATH",
    "beegfs": "beegfs-ctl --getquota --uid $USER",
    "gpfs": "mmlsquota",
    "ceph": "getfattr -n ceph.quota.max_bytes PATH",
}


# -- space -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What is free; None if the place does not say."""

    free_bytes: int | None
    free_inodes: int | None
    full: FailedOperation | None = None  # a write that failed for lack of space


def measure_free_space(session: Session) -> list[FreeSpace]:
    """Return the free space by rank, with writes that failed for lack of space. Collective."""
    spaces = session.control.step("doctor.room", lambda: _free_space(session.run))
    full = [
        next((r for r in s.values() if r is not None and r.why is Why.NO_SPACE), None)
        for s in session.access
    ]
    return [replace(t, full=t.full or f) for t, f in zip(spaces, full, strict=True)]


def _free_space(storage: Storage) -> FreeSpace:
    try:
        found = storage.space()
    except StorageError as error:
        return FreeSpace(None, None, FailedOperation.of(error))
    return (
        FreeSpace(None, None) if found is None else FreeSpace(found.free_bytes, found.free_inodes)
    )


@check()
def free_space(session: Session) -> Findings:
    """Compare the free bytes with what the job needs."""
    session.rooms = measure_free_space(session)
    return (judge_space(session.worlds, session.rooms, session.settings.needs_bytes),)


def judge_space(
    worlds: Sequence[World], answers: Sequence[FreeSpace], needs_bytes: int | None
) -> Finding:
    """Return the finding on free space. The rank with the least space decides."""
    name, theme = "free-space", Theme.SPACE
    full = {rank: space.full for rank, space in enumerate(answers) if space.full is not None}
    meaning = "the next save fails; what was committed stays"
    if full:
        first = next(iter(full.values()))
        text = f"{on_ranks(worlds, full)}{first.text}"
        return Finding(name, theme, Verdict.FAIL, text, meaning, "free space, or ask for quota")
    known = {
        rank: space.free_bytes for rank, space in enumerate(answers) if space.free_bytes is not None
    }
    if not known:
        unknown = (
            "the place does not report it"
            if needs_bytes is None
            else (f"the place does not report whether {size_text(needs_bytes)} fit")
        )
        return Finding(
            name, theme, Verdict.UNKNOWN, unknown, "", "look at the bucket's quota, if it has one"
        )
    least = min(known, key=lambda rank: known[rank])
    free, where = known[least], on_ranks(worlds, [least] if len(set(known.values())) > 1 else known)
    data = {"free_bytes": free, "needs_bytes": needs_bytes}
    text = f"{where}{size_text(free)} free"
    if needs_bytes is not None and free < needs_bytes:
        wanted = f"{text}, {size_text(needs_bytes)} needed"
        advice = "free space, ask for quota, or keep fewer checkpoints (keep_latest=)"
        return Finding(
            name, theme, Verdict.FAIL, wanted, "the job would run out of space", advice, data
        )
    if free < _LITTLE_BYTES:
        return Finding(
            name, theme, Verdict.WARN, text, meaning, "free space, or ask for quota", data
        )
    return Finding(name, theme, Verdict.OK, text, data=data)


@check()
def inodes(session: Session) -> Findings:
    """Report the free inodes; no finding if the place has none."""
    return judge_inodes(session.worlds, session.rooms)


def judge_inodes(worlds: Sequence[World], answers: Sequence[FreeSpace]) -> Findings:
    """Return a warning if few inodes are left, a failure if almost none are, whatever the space."""
    known = {
        rank: space.free_inodes
        for rank, space in enumerate(answers)
        if space.free_inodes is not None
    }
    if not known:
        return ()
    least = min(known, key=lambda rank: known[rank])
    free = known[least]
    verdict = (
        Verdict.FAIL if free < _NO_INODES else Verdict.WARN if free < _FEW_INODES else Verdict.OK
    )
    bad = verdict is not Verdict.OK
    where = on_ranks(worlds, [least]) if bad else ""
    return (
        Finding(
            "inodes",
            Theme.SPACE,
            verdict,
            f"{where}{free} free",
            "no file can be made when they are used up, however much space is left" if bad else "",
            "remove small files, or ask for more inodes" if bad else "",
            {"free_inodes": free},
        ),
    )


@check()
def quota(session: Session) -> Findings:
    """Report whether the mount has quotas that free space does not show."""
    return judge_quota(session.mounts)


def judge_quota(mounts: Sequence[Mount | None]) -> Findings:
    """Return OK for a mount without quotas; otherwise the finding names a command to look with."""
    mount = mounts[0]
    if mount is None:
        return ()
    name, theme = "quota", Theme.SPACE
    on = sorted(set(_QUOTAS) & set(mount.options))
    if mount.kind in _WITHOUT_QUOTA or (mount.kind in _WITH_QUOTA_OPTIONS and not on):
        return (Finding(name, theme, Verdict.OK, f"{mount.kind} mounted without quotas"),)
    tool = _QUOTA_TOOLS.get(mount.kind, "quota -s")
    text = (
        f"{mount.kind} mounted with {', '.join(on)}" if on else f"{mount.kind} does not report it"
    )
    meaning = "free space may be more than this user is allowed"
    return (Finding(name, theme, Verdict.UNKNOWN, text, meaning, f"look with `{tool}`"),)


# -- the mount -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that holds a path."""

    kind: str
    source: str
    options: tuple[str, ...]
    at: str


def look_at_mount(storage: Storage) -> Mount | None:
    """Return the mount of the place as this process sees it; None: not mounted, or no /proc."""
    path = storage.local_path("")
    if path is None:
        return None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            table = file.read()
    except OSError:
        return None
    return mounts_of(table, os.path.realpath(path))


def mounts_of(table: str, path: str) -> Mount | None:
    """Return the mount that holds ``path``, from the text of mountinfo. Pure."""
    found: Mount | None = None
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 6 or len(kinds) < 3:  # noqa: PLR2004 - fields of proc(5)
            continue
        at = _plain(words[4])
        inside = path == at or path.startswith(f"{at.rstrip('/')}/")
        # If two mounts have the same mount point, the later one is visible.
        if inside and (found is None or len(at) >= len(found.at)):
            options = tuple(dict.fromkeys([*words[5].split(","), *kinds[2].split(",")]))
            found = Mount(kinds[0], _plain(kinds[1]), options, at)
    return found


def _plain(word: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, character)
    return word


@check()
def mount(session: Session) -> Findings:
    """Report what is mounted, and options that change what a job may rely on."""
    return judge_mount(session.worlds, session.mounts)


def judge_mount(worlds: Sequence[World], mounts: Sequence[Mount | None]) -> Findings:
    """Return a finding with the mount's type; a warning for bad options and temporary places."""
    known = [mount for mount in mounts if mount is not None]
    if not known:
        return ()
    kinds = {rank: mount.kind for rank, mount in enumerate(mounts) if mount is not None}
    first = known[0]
    shown = [o for o in first.options if _SHOWN_OPTIONS.fullmatch(o.partition("=")[0])]
    text = f"{first.kind} at {first.at}"
    if first.kind in _NETWORK or first.kind.startswith("fuse"):
        text += f" from {first.source} ({','.join(shown)})"
    data = {"kind": first.kind, "at": first.at, "options": shown}
    if len(set(kinds.values())) > 1:
        odd = next(rank for rank in kinds if kinds[rank] != first.kind)
        text += f"; {kinds[odd]} on rank {odd}, {worlds[odd].site}"
    notes = [note for mount in known for note in _notes(mount)]
    if notes:
        meaning, advice = notes[0]
        return (Finding("mount", Theme.MOUNT, Verdict.WARN, text, meaning, advice, data),)
    meaning = ""
    if first.kind.startswith("fuse"):
        meaning = "a FUSE mount: what it did above decides, not its name"
    return (Finding("mount", Theme.MOUNT, Verdict.OK, text, meaning, data=data),)


def _notes(mount: Mount) -> list[tuple[str, str]]:
    """Return (meaning, advice) for a mount's type and options, the worst first."""
    options = dict(o.partition("=")[::2] for o in mount.options)
    notes = []
    if mount.kind in ("tmpfs", "ramfs"):
        notes.append(
            (
                "memory: it is lost when the machine or the container ends",
                "use it for fast copies only",
            )
        )
    if mount.kind == "overlay":
        notes.append(
            (
                "a container's own layer: it is lost with the container",
                "mount a volume at this path",
            )
        )
    if mount.kind.startswith("nfs") and ({"soft", "softerr"} & options.keys()):
        notes.append(
            (
                "mounted soft: a busy server becomes an I/O error, and a write may be lost",
                "mount it hard",
            )
        )
    if mount.kind.startswith("nfs") and "nocto" in options:
        notes.append(
            ("mounted with nocto: an opened file may be an older version", "mount it without nocto")
        )
    late = [
        f"{name}={value}"
        for name, value in options.items()
        if name in ("actimeo", "acdirmax", "acregmax", "dir_attribute_timeout")
        and value.isdigit()
        and int(value) > _LONG_CACHE_S
    ]
    if late:
        notes.append(
            (
                f"{late[0]}: this node sees new files of other nodes late",
                "leave it at 60 s or below",
            )
        )
    return notes


# -- names -----------------------------------------------------------------------------------

# By the kind of name; None if the name came back as it was given.
_Names = Mapping[str, FailedOperation | None]
_CASE = "names that differ in case only"


@check(Need.WRITE)
def names(session: Session) -> Findings:
    """Test file names of the kinds that steps, ranks and parts may have."""
    look = partial(_look_at_names, session.storage, session.rank)
    return session.step("names", Theme.MOUNT, look, judge_names)


def _look_at_names(storage: Storage, rank: int) -> _Names | None:
    """Try names that differ in case, are long, or are not ASCII; None if no file could be made."""
    base = f"names/{rank}"
    accented = "étape-größe"
    try:
        storage.make_dir(base)
        storage.replace(f"{base}/Case", b"x")
    except StorageError:
        return None
    folded = None
    try:
        storage.stat(f"{base}/case")
        folded = FailedOperation(Why.EXISTS, "another name answers to it")
    except NotFoundError:
        pass
    tried = {
        "100 characters": "n" * 100,
        "composed accents": unicodedata.normalize("NFC", accented),
        "decomposed accents": unicodedata.normalize("NFD", accented),
        "spaces and signs": "a b+c%d=e",
    }
    found = {kind: _named(storage, base, name) for kind, name in tried.items()}
    return {_CASE: folded, **found}


def judge_names(_: Sequence[World], answers: Sequence[_Names | None]) -> Findings:
    """Return a warning that lists the kinds of names that did not come back as they were given."""
    tried = [names for names in answers if names is not None]
    if not tried:
        return ()
    refused = sorted({kind for names in tried for kind, r in names.items() if r is not None})
    if not refused:
        return (Finding("names", Theme.MOUNT, Verdict.OK, "case, length and accents are kept"),)
    return (
        Finding(
            "names",
            Theme.MOUNT,
            Verdict.WARN,
            f"not kept: {', '.join(refused)}",
            "checkpoints or parts with such names clash, or cannot be made",
            "name runs, steps and parts in short plain ASCII",
            {"not_kept": refused},
        ),
    )


def _named(storage: Storage, base: str, name: str) -> FailedOperation | None:
    try:
        storage.replace(f"{base}/{name}", name.encode())
        if storage.read(f"{base}/{name}") != name.encode():
            raise StorageError("another name answers to it", uri=storage.uri(base))
        if name not in [entry.name for entry in storage.list(base)]:
            raise StorageError("it is listed as another name", uri=storage.uri(base))
        storage.remove(f"{base}/{name}")
    except CkptfsError as error:
        return FailedOperation.of(error)
    return None
