"""What commits rely on: exclusive creation of a name, atomic replacement, atomic directory renames.

On a mounted place the checks also sync a directory and link a file; on an object store they replace an
object by its etag and upload one in parts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckptfs.control.world import World
from ckptfs.errors import AlreadyExistsError, CkptfsError, NotFoundError, StorageError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.clients.base import Limits, ObjectClient
from ckptfs.text import counted
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, on_ranks
from ckptfs.tools.doctor.session import (
    Clock,
    FailedOperation,
    Findings,
    Need,
    ReadFailedError,
    Session,
    Settings,
    Why,
    check,
    failure,
)

__all__ = [
    "atomic_replace",
    "conditional_replace",
    "exclusive_create",
    "fsync",
    "hard_links",
    "multipart",
    "rename_directory",
]

_THEME = Theme.COMMIT
_TWO_WRITERS = "two jobs on one run are not kept apart: fences and exclusive names are advice, every save says so"
_THREADS = 4
_SEEN_S = 5.0
_DIGITS, _REPEATS = 9, 500
_FILE = b"%09d" * _REPEATS
_FILES = 8
_MOST = 50_000  # replaces, whatever the clock says
FEW_LOOKS = 20  # reads while a file is replaced; fewer prove nothing
_PART_BYTES = 5 << 20
_TAIL = b"the last part"


# -- one of many wins a name -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Race:
    """One rank's results in the races."""

    wins: tuple[tuple[str, ...], ...]  # by round, the marks of its threads that believe they won
    holds: tuple[str, ...]  # by round, the content of the name afterwards; "" if there is none


@check(Need.WRITE)
def exclusive_create(session: Session) -> Findings:
    """Let the ranks that share the place race for names, to test exclusive creation.

    The finding is "exclusive-create" on a mounted place and "conditional-create" on an object store.
    """
    name = "exclusive-create" if session.is_mounted else "conditional-create"
    groups = session.groups
    if isinstance(session.placement, FailedOperation) and len(groups) > 1:
        why = "not tested: who shares the place is not known"
        return (Finding(name, _THEME, Verdict.UNKNOWN, why),)
    control = session.control
    racer = _Racer(session.storage, session.rank, session.settings.clock)
    control.step("doctor.race.make", racer.make)
    without = [rank for rank, caps in enumerate(session.caps) if not caps.exclusive_create]
    if without:
        return (_no_create(session.worlds, name, without),)
    for _ in range(session.settings.rounds):
        control.step("doctor.race", racer.run)

    def judge(_: Sequence[World], reports: Sequence[_Race]) -> Findings:
        return (_judge_race(name, reports, groups),)

    def failed(worlds: Sequence[World], refused: Mapping[int, FailedOperation]) -> Finding:
        return failure(name, _THEME, worlds, refused, _TWO_WRITERS)

    return session.step(name, _THEME, racer.result, judge, failed)


class _Racer:
    """One rank's threads in the races. Each ``run`` is one round; all ranks begin it together."""

    def __init__(self, storage: Storage, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._storage = storage
        self._rank = rank
        self._wins: list[tuple[str, ...]] = []
        self._refusal: FailedOperation | None = None

    def make(self) -> None:
        """Make the directory of the races."""
        self._storage.make_dir("race")

    def run(self) -> None:
        """Let every thread try to create this round's name, with bytes that identify the thread."""
        if self._refusal is not None:
            return
        start, key = threading.Barrier(_THREADS), f"race/{len(self._wins)}"
        wins: list[str] = []

        def try_once(thread: int) -> None:
            mark = f"{self._rank}.{thread}"
            start.wait()
            try:
                self._storage.create(key, mark.encode(), staging=f"{key}.staging.{mark}")
            except AlreadyExistsError:
                return
            except StorageError as error:
                self._refusal = FailedOperation.of(error)
                return
            wins.append(mark)

        threads = [threading.Thread(target=try_once, args=(n,)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._wins.append(tuple(sorted(wins)))

    def result(self) -> _Race | FailedOperation:
        """Return the wins, and what the names hold after all rounds."""
        if self._refusal is not None:
            return self._refusal
        return _Race(tuple(self._wins), tuple(self._held(n) for n in range(len(self._wins))))

    def _held(self, number: int) -> str:
        until_s = self._clock.now_s() + _SEEN_S
        while True:
            self._storage.refresh("race")
            try:
                return self._storage.read(f"race/{number}").decode(errors="replace")
            except NotFoundError:
                # How soon others see the file is another question than which bytes they see.
                if self._clock.now_s() > until_s:
                    return ""
            self._clock.wait(0.05)


def _judge_race(name: str, reports: Sequence[_Race], groups: Sequence[Sequence[int]]) -> Finding:
    rounds, racers, wrong = len(reports[0].wins), 0, []
    for ranks in groups:
        racers += _THREADS * len(ranks)
        for number in range(rounds):
            won = [mark for rank in ranks for mark in reports[rank].wins[number]]
            held = {reports[rank].holds[number] for rank in ranks}
            if len(won) != 1 or held != set(won):
                wrong.append(f"round {number}: {counted(len(won), 'winner')}, {_read(held)}")
    data = {"rounds": rounds, "racers": racers, "wrong": len(wrong)}
    if wrong:
        return Finding(
            name,
            _THEME,
            Verdict.FAIL,
            f"{racers} writers raced for one name, {counted(rounds, 'round')}: {wrong[0]}",
            "two jobs can both believe that they own a run: a checkpoint can be lost",
            "do not save here; `ckptfs doctor` on the bucket's own URI, without gateway or cache, "
            "may show who breaks it",
            data,
        )
    text = f"one of {racers} writers won each of {counted(rounds, 'race')}, and all read its bytes"
    return Finding(name, _THEME, Verdict.OK, text, data=data)


def _read(held: set[str]) -> str:
    return "and what was read is another's" if len(held) == 1 else "and ranks read different bytes"


def _no_create(worlds: Sequence[World], name: str, without: Sequence[int]) -> Finding:
    advice = (
        "use a filesystem with hard links, or the object store's own URI instead of its mount"
        if name == "exclusive-create"
        else "use a server that honours If-None-Match (AWS, GCS, Azure, MinIO, Ceph do), or make "
        "sure that only one job at a time writes a run"
    )
    return Finding(
        name,
        _THEME,
        Verdict.WARN,
        f"{on_ranks(worlds, without)}no exclusive create here",
        _TWO_WRITERS,
        advice,
    )


# -- a file is replaced whole, a directory moves at once -------------------------------------


@check(Need.WRITE)
def atomic_replace(session: Session) -> Findings:
    """Replace a file while a thread reads it."""
    name = "atomic-replace"

    def judge(worlds: Sequence[World], reports: Sequence[_Sightings]) -> Findings:
        done, wrong = (
            f"replaced {max(s.times for s in reports)} times",
            "a reader saw neither version complete",
        )
        return (_of_looks(worlds, reports, name, done, wrong, least=FEW_LOOKS),)

    look = partial(_look_at_replace, session.storage, session.rank, session.settings)
    return session.step(name, _THEME, look, judge)


@check(Need.WRITE | Need.MOUNT)
def rename_directory(session: Session) -> Findings:
    """Rename a directory on a mounted place while a thread lists it."""
    name = "rename-directory"
    copies = [rank for rank, caps in enumerate(session.caps) if caps.shape is Shape.OBJECT]
    if copies:
        mount = session.mounts[copies[0]]
        kind = "" if mount is None else mount.kind  # only for the message
        return (
            Finding(
                name,
                _THEME,
                Verdict.WARN,
                f"{on_ranks(session.worlds, copies)}a renamed directory was copied file by file"
                f"{f' ({kind} mount)' if kind else ''}",
                "this is an object store behind a mount, and ckptfs uses it as one; other "
                "tools that rely on rename (torch.save and mv) can leave half a checkpoint",
                "give ckptfs the store's own URI (s3://, gs://, az://): it is faster, and commits there "
                "are exclusive",
            ),
        )

    def judge(worlds: Sequence[World], reports: Sequence[_Sightings]) -> Findings:
        done, wrong = "renamed with files in it", "half a directory was seen"
        return (_of_looks(worlds, reports, name, done, wrong),)

    look = partial(_look_at_rename, session.storage, session.rank)
    return session.step(name, _THEME, look, judge)


@dataclass(slots=True)
class _Looks:
    """What a reader has seen so far while a writer works."""

    done: threading.Event = field(default_factory=threading.Event)
    looks: int = 0
    missing: int = 0
    torn: int = 0


@dataclass(frozen=True, slots=True)
class _Sightings:
    """What one rank's reader saw."""

    times: int = 0
    looks: int = 0
    missing: int = 0
    torn: int = 0


def _watched(look: Callable[[_Looks], None], act: Callable[[_Looks], int]) -> _Sightings:
    """Run ``act`` while another thread repeats ``look``; return the counts of both."""
    counts, failed = _Looks(), list[CkptfsError]()

    def watch() -> None:
        try:
            while not counts.done.is_set():
                look(counts)
                counts.looks += 1
        except CkptfsError as error:
            failed.append(error)
            counts.done.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        times = act(counts)
    finally:
        counts.done.set()
        thread.join()
    if failed:
        raise ReadFailedError(failed[0])
    return _Sightings(times, counts.looks, counts.missing, counts.torn)


def _look_at_replace(storage: Storage, rank: int, settings: Settings) -> _Sightings:
    """Replace one file many times while a thread reads it, so that even a short gap is noticed."""
    key, clock = f"replace/rank-{rank}", settings.clock

    def look(reports: _Looks) -> None:
        try:
            data = storage.read(key)
        except NotFoundError:
            reports.missing += 1
            return
        if data != data[:_DIGITS] * _REPEATS:
            reports.torn += 1

    def act(reader: _Looks) -> int:
        begun_s, times = clock.now_s(), 1
        while True:
            elapsed_s = clock.now_s() - begun_s
            long_enough = elapsed_s >= settings.replace_s and reader.looks >= FEW_LOOKS
            ended = reader.done.is_set() or elapsed_s >= settings.patience_s or times >= _MOST
            if times >= settings.replaces and (long_enough or ended):
                return times
            storage.replace(key, _FILE % ((times,) * _REPEATS))
            times += 1

    storage.make_dir("replace")
    storage.replace(key, _FILE % ((0,) * _REPEATS))
    return _watched(look, act)


def _look_at_rename(storage: Storage, rank: int) -> _Sightings:
    """Rename a directory of files while a thread lists it: a partial listing counts as torn."""
    before, after = f"rename/before-{rank}", f"rename/after-{rank}"

    def look(reports: _Looks) -> None:
        try:
            names = storage.list(after)
        except NotFoundError:
            return
        if len(names) != _FILES:
            reports.torn += 1

    def act(_: _Looks) -> int:
        storage.rename(before, after)
        try:
            storage.stat(before)
        except NotFoundError:
            return 1
        raise StorageError("both names stand after a rename", uri=storage.uri(before))

    storage.make_dir(before)
    for number in range(_FILES):
        storage.replace(f"{before}/{number}", b"x")
    return _watched(look, act)


def _of_looks(
    worlds: Sequence[World],
    reports: Sequence[_Sightings],
    name: str,
    done: str,
    wrong: str,
    *,
    least: int = 0,
) -> Finding:
    """Return the finding on what readers saw. least: looks that each rank needs for a verdict."""
    bad = [rank for rank, s in enumerate(reports) if s.missing or s.torn]
    looks = sum(s.looks for s in reports)
    data = {"looks": looks, "wrong": sum(s.missing + s.torn for s in reports)}
    if bad:
        torn, missing = sum(s.torn for s in reports), sum(s.missing for s in reports)
        return Finding(
            name,
            _THEME,
            Verdict.FAIL,
            f"{on_ranks(worlds, bad)}{wrong}: of {looks} looks {torn} torn, {missing} missing",
            "a reader, or a restart at the wrong moment, can meet a torn file",
            "use a filesystem with an atomic rename, or an object store's own URI",
            data,
        )
    text = f"{done}; {counted(looks, 'look')}, all whole"
    if least and min(s.looks for s in reports) < least:
        advice = "ask again when the place is less busy"
        return Finding(name, _THEME, Verdict.UNKNOWN, f"{text}: too few to tell", "", advice, data)
    return Finding(name, _THEME, Verdict.OK, text, data=data)


# -- a mounted place -------------------------------------------------------------------------


@check(Need.WRITE | Need.MOUNT)
def fsync(session: Session) -> Findings:
    """Report whether a directory can be synced. Files can, or earlier writes would have failed."""
    without = [rank for rank, caps in enumerate(session.caps) if not caps.durable]
    if not without:
        return (Finding("fsync", _THEME, Verdict.OK, "accepted for files and directories"),)
    return (
        Finding(
            "fsync",
            _THEME,
            Verdict.WARN,
            f"{on_ranks(session.worlds, without)}fsync of a directory is not accepted",
            "a checkpoint that was acknowledged may be gone after a power cut of the file server",
            "ask for a mount that accepts it; keep a copy elsewhere (`ckptfs cp`)",
        ),
    )


@check(Need.WRITE | Need.MOUNT)
def hard_links(session: Session) -> Findings:
    """Test hard links: exclusive create relies on them, and they share unchanged data."""
    if any(caps.shape is Shape.OBJECT for caps in session.caps):
        return ()

    def judge(_: Sequence[World], __: Sequence[None]) -> Findings:
        return (Finding("hard-links", _THEME, Verdict.OK, "a file got a second name"),)

    def failed(worlds: Sequence[World], refused: Mapping[int, FailedOperation]) -> Finding:
        first = next(iter(refused.values()))
        known = first.why in (Why.UNSUPPORTED, Why.ACCESS)
        return Finding(
            "hard-links",
            _THEME,
            Verdict.WARN if known else Verdict.FAIL,
            f"{on_ranks(worlds, refused)}{first.text}",
            "no exclusive create, and unchanged tensors are written again at each save",
            "use a filesystem with hard links for fences that hold",
        )

    look = partial(_look_at_links, session.storage, session.rank)
    return session.step("hard-links", _THEME, look, judge, failed)


def _look_at_links(storage: Storage, rank: int) -> None:
    """Give a file a second name, and read it under that name."""
    first, second = f"links/{rank}.first", f"links/{rank}.second"
    storage.make_dir("links")
    storage.replace(first, b"linked")
    storage.link(first, second)
    if storage.read(second) != b"linked":
        raise StorageError("the second name holds other bytes", uri=storage.uri(second))


# -- an object store -------------------------------------------------------------------------


@check(Need.WRITE | Need.CLIENT)
def conditional_replace(session: Session) -> Findings:
    """Report whether an object can be replaced by its etag, as the probe found."""
    without = [rank for rank, caps in enumerate(session.caps) if not caps.conditional_replace]
    name = "conditional-replace"
    if not without:
        return (Finding(name, _THEME, Verdict.OK, "honoured: a stale etag was refused"),)
    return (
        Finding(
            name,
            _THEME,
            Verdict.WARN,
            f"{on_ranks(session.worlds, without)}the store or its client does not honour If-Match",
            "what stock readers see of a step may be an older writer's for a moment; commits are safe",
            "nothing, where ckptfs reads its own checkpoints",
        ),
    )


# What was tried with uploads. "multipart-list" is absent if the client cannot list uploads.
_Uploads = Mapping[str, FailedOperation | None]


@check(Need.WRITE | Need.CLIENT)
def multipart(session: Session) -> Findings:
    """Test uploads in parts: complete one, abort one, and list unfinished ones."""
    storage, rank, client = session.storage, session.rank, session.client
    if client is None:
        return ()
    return session.step(
        "multipart", _THEME, lambda: _look_at_uploads(storage, client, rank), _judge_uploads
    )


def _judge_uploads(worlds: Sequence[World], reports: Sequence[_Uploads]) -> Findings:
    found = []
    forgets = all("multipart-list" not in uploads for uploads in reports)
    for name, done, meaning in (
        ("multipart", "two parts were put and completed",
         "files of more than one part cannot be saved"),
        ("multipart-abort", "an upload was thrown away",
         "uploads that were cut short stay, invisible and paid for"),
        ("multipart-list",
         "the store drops unfinished uploads by itself" if forgets
         else "an upload under way is listed",
         "`ckptfs gc` cannot find what killed jobs left behind; a lifecycle rule can"),
    ):  # fmt: skip
        answers = (uploads.get(name) for uploads in reports)
        refused = {rank: r for rank, r in enumerate(answers) if r is not None}
        if not refused:
            found.append(Finding(name, _THEME, Verdict.OK, done))
            continue
        failed = failure(name, _THEME, worlds, refused, meaning)
        is_needed = name == "multipart"
        found.append(failed if is_needed else replace(failed, verdict=Verdict.WARN))
    return tuple(found)


def _look_at_uploads(storage: Storage, client: ObjectClient, rank: int) -> _Uploads:
    """Complete an upload of two parts; begin another, check that it is listed, and abort it."""
    part = _part_bytes(client.limits)

    def at(name: str) -> str:
        return storage.uri(f"uploads/{rank}-{name}").path.lstrip("/")

    def complete() -> None:
        key = at("completed")
        upload = client.begin_upload(key, part_bytes=part)
        with _abort_on_error(upload.abort):
            upload.put_part(0, bytes(part))
            upload.put_part(1, _TAIL)
            upload.complete()
        size_bytes = client.head(key).size_bytes
        if size_bytes != part + len(_TAIL):
            raise StorageError(f"{size_bytes} bytes stand there after {part + len(_TAIL)} were put")
        client.delete([key])

    forgets = type(client).list_uploads is ObjectClient.list_uploads
    listed = None if forgets else FailedOperation(Why.OTHER, "not tried: no upload could be begun")

    def look() -> None:
        if at("aborted") not in [upload.key for upload in client.list_uploads(at(""))]:
            raise StorageError("an upload that is under way is not in the list of unfinished ones")

    def abort() -> None:
        nonlocal listed
        upload = client.begin_upload(at("aborted"), part_bytes=part)
        with _abort_on_error(upload.abort):
            upload.put_part(0, bytes(part))  # a whole one: a smaller part may wait for the end
            if not forgets:
                listed = _tried(look)
        upload.abort()

    # ``abort`` lists the uploads before it aborts its own.
    found = {"multipart": _tried(complete), "multipart-abort": _tried(abort)}
    return found if forgets else {**found, "multipart-list": listed}


def _part_bytes(limits: Limits) -> int:
    least = max(limits.min_part_bytes, min(_PART_BYTES, limits.max_part_bytes))
    return -(-least // limits.part_multiple_bytes) * limits.part_multiple_bytes


def _tried(act: Callable[[], None]) -> FailedOperation | None:
    try:
        act()
    except CkptfsError as error:
        return FailedOperation.of(error)
    return None


@contextlib.contextmanager
def _abort_on_error(abort: Callable[[], None]) -> Iterator[None]:
    """Abort an upload that failed or was interrupted, so that its parts are discarded."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptfsError):
            abort()
        raise
