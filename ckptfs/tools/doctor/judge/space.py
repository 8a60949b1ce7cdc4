"""Judges space, inodes, quota, the mount and names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptfs.control.world import World
from ckptfs.tools.doctor.judge.ranks import on_ranks, size
from ckptfs.tools.doctor.seen import Mounted, Names, Room
from ckptfs.tools.doctor.verdicts import Finding, Theme, Verdict

__all__ = ["judge_mount", "judge_names", "judge_room"]

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


def judge_room(
    worlds: Sequence[World],
    seen: Sequence[Room],
    mounts: Sequence[Mounted | None],
    needs_bytes: int | None,
) -> tuple[Finding, ...]:
    """Free bytes against what the job needs; free inodes; quota."""
    return (
        _space(worlds, seen, needs_bytes),
        *_inodes(worlds, seen),
        *_quota(mounts),
    )


def _space(worlds: Sequence[World], seen: Sequence[Room], needs_bytes: int | None) -> Finding:
    name, theme = "free-space", Theme.SPACE
    full = {rank: room.full for rank, room in enumerate(seen) if room.full is not None}
    meaning = "the next save fails; what was committed stays"
    if full:
        first = next(iter(full.values()))
        text = f"{on_ranks(worlds, full)}{first.text}"
        return Finding(name, theme, Verdict.FAIL, text, meaning, "free space, or ask for quota")
    told = {rank: room.free_bytes for rank, room in enumerate(seen) if room.free_bytes is not None}
    if not told:
        seen_text = (
            "the place does not tell"
            if needs_bytes is None
            else (f"the place does not tell whether {size(needs_bytes)} fit")
        )
        return Finding(
            name, theme, Verdict.UNKNOWN, seen_text, "", "look at the bucket's quota, if it has one"
        )
    least = min(told, key=lambda rank: told[rank])
    free, where = told[least], on_ranks(worlds, [least] if len(set(told.values())) > 1 else told)
    data = {"free_bytes": free, "needs_bytes": needs_bytes}
    text = f"{where}{size(free)} free"
    if needs_bytes is not None and free < needs_bytes:
        wanted = f"{text}, {size(needs_bytes)} needed"
        advice = "free space, ask for quota, or keep fewer checkpoints (keep_latest=)"
        return Finding(
            name, theme, Verdict.FAIL, wanted, "the job would run out of space", advice, data
        )
    if free < _LITTLE_BYTES:
        return Finding(
            name, theme, Verdict.WARN, text, meaning, "free space, or ask for quota", data
        )
    return Finding(name, theme, Verdict.OK, text, data=data)


def _inodes(worlds: Sequence[World], seen: Sequence[Room]) -> tuple[Finding, ...]:
    told = {
        rank: room.free_inodes for rank, room in enumerate(seen) if room.free_inodes is not None
    }
    if not told:
        return ()
    least = min(told, key=lambda rank: told[rank])
    free = told[least]
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


def _quota(mounts: Sequence[Mounted | None]) -> tuple[Finding, ...]:
    mount = mounts[0]
    if mount is None:
        return ()
    name, theme = "quota", Theme.SPACE
    on = sorted(set(_QUOTAS) & set(mount.options))
    if mount.kind in _WITHOUT_QUOTA or (mount.kind in _WITH_QUOTA_OPTIONS and not on):
        return (Finding(name, theme, Verdict.OK, f"{mount.kind} mounted without quotas"),)
    tool = _QUOTA_TOOLS.get(mount.kind, "quota -s")
    told = f"{mount.kind} mounted with {', '.join(on)}" if on else f"{mount.kind} does not tell"
    meaning = "free space may be more than this user is allowed"
    return (Finding(name, theme, Verdict.UNKNOWN, told, meaning, f"look with `{tool}`"),)


def judge_mount(worlds: Sequence[World], mounts: Sequence[Mounted | None]) -> tuple[Finding, ...]:
    """What is mounted, and options that change what a job may rely on. Types decide nothing else."""
    told = [mount for mount in mounts if mount is not None]
    if not told:
        return ()
    kinds = {rank: mount.kind for rank, mount in enumerate(mounts) if mount is not None}
    first = told[0]
    shown = [o for o in first.options if _SHOWN_OPTIONS.fullmatch(o.partition("=")[0])]
    text = f"{first.kind} at {first.at}"
    if first.kind in _NETWORK or first.kind.startswith("fuse"):
        text += f" from {first.source} ({','.join(shown)})"
    data = {"kind": first.kind, "at": first.at, "options": shown}
    if len(set(kinds.values())) > 1:
        odd = next(rank for rank in kinds if kinds[rank] != first.kind)
        text += f"; {kinds[odd]} on rank {odd}, {worlds[odd].site}"
    notes = [note for mount in told for note in _notes(mount)]
    if notes:
        meaning, advice = notes[0]
        return (Finding("mount", Theme.MOUNT, Verdict.WARN, text, meaning, advice, data),)
    meaning = ""
    if first.kind.startswith("fuse"):
        meaning = "a FUSE mount: what it did above decides, not its name"
    return (Finding("mount", Theme.MOUNT, Verdict.OK, text, meaning, data=data),)


def _notes(mount: Mounted) -> list[tuple[str, str]]:
    """What a mount's type or options mean for checkpoints, and what to do, worst first."""
    options = dict(o.partition("=")[::2] for o in mount.options)
    notes = []
    if mount.kind in ("tmpfs", "ramfs"):
        notes.append(
            ("memory: gone when the machine or the container ends", "use it for fast copies only")
        )
    if mount.kind == "overlay":
        notes.append(
            ("a container's own layer: gone with the container", "mount a volume at this path")
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
            ("mounted nocto: an opened file may be an older one", "mount it without nocto")
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
            (f"{late[0]}: new files of other nodes are seen late", "leave it at 60 s or below")
        )
    return notes


def judge_names(worlds: Sequence[World], seen: Sequence[Names]) -> tuple[Finding, ...]:
    """Names that steps, ranks and parts may have."""
    name, told = "names", [s for s in seen if s.case_kept is not None]
    if not told:
        return ()
    refused = {what: r for s in told for what, r in s.refused.items() if r is not None}
    if any(s.case_kept is False for s in told):
        refused["names that differ in case only"] = None  # type: ignore[assignment] # it has no error
    if not refused:
        return (Finding(name, Theme.MOUNT, Verdict.OK, "case, length and accents are kept"),)
    del worlds
    return (
        Finding(
            name,
            Theme.MOUNT,
            Verdict.WARN,
            f"not kept: {', '.join(sorted(refused))}",
            "checkpoints or parts with such names clash, or cannot be made",
            "name runs, steps and parts in short plain ASCII",
            {"not_kept": sorted(refused)},
        ),
    )
