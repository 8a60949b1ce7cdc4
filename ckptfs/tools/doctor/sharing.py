"""Which ranks share the place, how soon a rank sees another's writes, and how the clocks differ."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, NotFoundError, StaleError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.clients.base import ObjectClient
from ckptfs.text import counted
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, hosts, on_ranks, seconds
from ckptfs.tools.doctor.session import (
    Clock,
    Expect,
    FailedOperation,
    Findings,
    Need,
    Session,
    check,
)
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.topology.storage_domains import Domain

__all__ = ["Clocks", "clocks", "domains", "judge_clocks", "shared_directory", "visibility_delay"]

_PLAIN_S = 2.0  # how long a look without a refresh may wait
_DIR = "seen"
_FIRST_WAIT_S = 0.005
_LONGEST_WAIT_S = 0.25
_DATE_TIMEOUT_S = 5.0
_THEME = Theme.SHARING
_LATE_S = 1.0  # how long a directory call waits for another node's token
_DEAD_S = LeaseTimes().still_s - LeaseTimes().rewrite_s  # beyond it a living owner looks dead
_SKEW_WARN_S = 5.0
_SKEW_FAIL_S = 600.0  # S3 refuses signatures that are 15 minutes off


@check(Need.WRITE)
def domains(session: Session) -> Findings:
    """Report which ranks share the place, and compare that with what the caller expects."""
    placement = session.placement
    if placement is None:
        return ()
    found = placement if isinstance(placement, FailedOperation) else placement.domains
    return _judge_domains(session.worlds, found, session.settings.expect)


def _judge_domains(
    worlds: Sequence[World], found: Sequence[Domain] | FailedOperation, expect: Expect | None
) -> Findings:
    name, nodes = "domains", len({w.node for w in worlds})
    if isinstance(found, FailedOperation):
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                found.text,
                "a run cannot be opened here: it is unknown which nodes share it",
                found.hint or "see the visibility below",
            ),
        )
    texts = [f"{hosts(worlds, d.nodes)} ({counted(len(d.ranks), 'rank')})" for d in found]
    data = {"domains": [{"ranks": list(d.ranks), "nodes": list(d.nodes)} for d in found]}
    shared = next((d for d in found if len(d.nodes) > 1), None)
    if expect is Expect.SHARED and len(found) > 1:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                f"said to be shared, and is not: {'; '.join(texts)} see different bytes",
                "each node would write its part to a disk of its own; another node, or the same job "
                "elsewhere, restores nothing",
                "mount the shared filesystem on every node at this path, or save with --expect node",
                data,
            ),
        )
    if expect is Expect.NODE and shared is not None:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                f"said to be each node's own, and {hosts(worlds, shared.nodes)} see the same bytes",
                "what was sized for a local disk goes to a shared one",
                "give a path on the nodes' own disks",
                data,
            ),
        )
    if expect is not None and nodes == 1:
        text = f"{counted(len(worlds), 'rank')} of one node took part"
        meaning = f"whether nodes share it was not shown (--expect {expect.value})"
        advice = "start it on every node, as the job is: torchrun ... --no-python ckptfs doctor ..."
        return (Finding(name, _THEME, Verdict.UNKNOWN, text, meaning, advice, data),)
    if len(found) == 1:
        text = f"one: {texts[0]}" if nodes == 1 else f"one: {texts[0]} see the same bytes"
        return (Finding(name, _THEME, Verdict.OK, text, data=data),)
    meaning = (
        "every node keeps its own part of a checkpoint: a restart must come back to these nodes"
    )
    return (
        Finding(
            name,
            _THEME,
            Verdict.OK,
            f"{len(found)}: {'; '.join(texts)}",
            meaning,
            "keep copies on a shared place (copies=) if a node may be lost",
            data,
        ),
    )


@check(Need.WRITE | Need.MOUNT)
def shared_directory(session: Session) -> Findings:
    """Make a directory that all ranks use, by ckptfs's own ``ensure_dir``."""
    placement = session.placement
    if placement is None or isinstance(placement, FailedOperation):
        return ()
    name = "shared-directory"
    try:
        ensure_dir(session.control, session.storage, placement, "shared")
    except CkptfsError as error:  # the same on every rank
        refusal = FailedOperation.of(error)
        meaning = "ensure_dir, and every save, would fail here the same way"
        return (Finding(name, _THEME, Verdict.FAIL, refusal.text, meaning, refusal.hint),)
    text = f"made by one, seen by {counted(len(session.worlds), 'rank')}"
    return (Finding(name, _THEME, Verdict.OK, text),)


# -- visibility ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """When this rank saw what other ranks wrote."""

    seen_s: Mapping[int, float | None]  # by writing rank; None: never seen
    refusal: FailedOperation | None = None


@check(Need.WRITE)
def visibility_delay(session: Session) -> Findings:
    """Measure how soon a rank sees another's write: with a refresh, and without one (plain)."""
    control, patience_s = session.control, session.settings.patience_s
    # If it is not known who shares the place, all ranks watch each other, so that the numbers show it.
    everybody = [tuple(range(control.size))]
    groups = everybody if isinstance(session.placement, FailedOperation) else session.groups
    own_group = next(group for group in groups if session.rank in group)
    writers = sorted({own_group[0], own_group[-1]})
    plain: list[_Arrivals] = []
    if len({world.node for world in control.worlds}) > 1:
        plain = _arrivals(session, writers, "plain", _PLAIN_S)
    fresh = _arrivals(session, writers, "fresh", patience_s)

    def judge(_: Sequence[None]) -> Findings:
        return _judge_visibility(control.worlds, fresh, plain, patience_s)

    return control.step("doctor.visibility", lambda: None, judge)


def _arrivals(
    session: Session, writers: Sequence[int], name: str, wait_s: float
) -> list[_Arrivals]:
    control, storage = session.control, session.storage
    watcher = _Watcher(storage, control.rank, session.settings.clock, name, fresh=name == "fresh")
    control.step(f"doctor.{name}.prime", lambda: watcher.prime(writers))
    control.step(
        f"doctor.{name}.write", lambda: watcher.write() if control.rank in writers else None
    )
    return control.step(f"doctor.{name}.watch", lambda: watcher.watch(writers, wait_s))


class _Watcher:
    """Watches, on one rank, for the files of the writers.

    All ranks ``prime``, then the writers ``write``, then all ranks ``watch``, each in a step of its own.
    """

    def __init__(
        self, storage: Storage, rank: int, clock: Clock, name: str, *, fresh: bool
    ) -> None:
        self._storage = storage
        self._rank = rank
        self._clock = clock
        self._name = name
        self._fresh = fresh

    def prime(self, writers: Iterable[int]) -> None:
        """Look for the files before they exist, so that clients that cache absence do so now."""
        self._storage.make_dir(_DIR)
        self._storage.list(_DIR)
        for rank in writers:
            self._is_present(rank)

    def write(self) -> None:
        """Write this rank's file."""
        self._storage.replace(self._key(self._rank), b"seen?")

    def watch(self, writers: Iterable[int], patience_s: float) -> _Arrivals:
        """Look until all writers' files exist, or ``patience_s`` is over."""
        begun_s, wait_s = self._clock.now_s(), _FIRST_WAIT_S
        arrived_s: dict[int, float | None] = dict.fromkeys(writers)
        try:
            while True:
                for rank in [rank for rank, at in arrived_s.items() if at is None]:
                    if self._is_present(rank):
                        arrived_s[rank] = self._clock.now_s() - begun_s
                if None not in arrived_s.values() or self._clock.now_s() - begun_s >= patience_s:
                    return _Arrivals(arrived_s)
                self._clock.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except StorageError as error:
            return _Arrivals(arrived_s, FailedOperation.of(error))

    def _is_present(self, rank: int) -> bool:
        try:
            if self._fresh:
                self._storage.refresh(_DIR)
            self._storage.read(self._key(rank))
        except (NotFoundError, StaleError):
            return False
        return True

    def _key(self, rank: int) -> str:
        return f"{_DIR}/{self._name}-{rank}"


def _judge_visibility(
    worlds: Sequence[World],
    fresh: Sequence[_Arrivals],
    plain: Sequence[_Arrivals],
    patience_s: float,
) -> Findings:
    name = "visibility-delay"
    refused = {rank: a.refusal for rank, a in enumerate(fresh) if a.refusal is not None}
    if refused:
        first = next(iter(refused.values()))
        text = f"{on_ranks(worlds, refused)}{first.text}"
        return (Finding(name, _THEME, Verdict.FAIL, text, "what ranks write cannot be read"),)
    waited = {
        (reader, writer): patience_s if at is None else at
        for reader, arrivals in enumerate(fresh)
        for writer, at in arrivals.seen_s.items()
    }
    never = [pair for pair, at in waited.items() if fresh[pair[0]].seen_s[pair[1]] is None]
    (reader, writer), most_s = max(waited.items(), key=lambda item: item[1])
    data = {"max_s": most_s, "never": len(never), "stale_plain_looks": _stale(plain)}
    who = f"rank {reader} on {worlds[reader].site} saw rank {writer}'s write"
    if never:
        who = f"rank {never[0][0]} on {worlds[never[0][0]].site} did not see rank {never[0][1]}'s write"
    delay_text = f"{who} {'in' if never else 'after'} {seconds(most_s)}"
    if most_s > _DEAD_S:
        return (
            Finding(
                name,
                _THEME,
                Verdict.FAIL,
                delay_text,
                f"beyond {_DEAD_S:.0f} s a living job looks dead to the next one, and is taken over",
                "mount without attribute caching (actimeo=1, noac), or use another place",
                data,
            ),
        )
    if most_s > _LATE_S:
        return (
            Finding(
                name,
                _THEME,
                Verdict.WARN,
                delay_text,
                "saves and restores wait this long between nodes; calls on directories give up after "
                f"{_LATE_S:.0f} s",
                "shorten the mount's caching (actimeo=1, lookupcache=positive)",
                data,
            ),
        )
    meaning = ""
    if data["stale_plain_looks"]:
        meaning = "programs that do not look afresh, as ckptfs does, see new files late: absence is cached"
    summary = f"at most {seconds(most_s)} from write to read, {counted(len(worlds), 'rank')}"
    return (Finding(name, _THEME, Verdict.OK, summary, meaning, data=data),)


def _stale(plain: Sequence[_Arrivals]) -> int:
    return sum(at is None for arrivals in plain for at in arrivals.seen_s.values())


# -- clocks ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clock offsets that one rank found: lower and upper bounds in seconds."""

    place_s: tuple[float, float] | None  # the place's clock minus this node's; None: not known
    rank_s: tuple[float, float]  # this rank's clock minus rank 0's
    source: str = ""


@check(Need.WRITE)
def clocks(session: Session) -> Findings:
    """Compare the clocks of the place and of the ranks."""
    control, clock = session.control, session.settings.clock
    called_s = clock.wall_s()
    control.step("doctor.clock.meet", lambda: None, lambda _: None)
    # Every rank reads its clock after rank 0 called the step above and before it leaves this one.
    times_s = control.step("doctor.clock.read", clock.wall_s)
    bounds_s = control.step(
        "doctor.clock.bounds", lambda: (called_s, clock.wall_s()), lambda answers: answers[0]
    )

    def look() -> Clocks:
        own_s = times_s[control.rank]
        place_s, source = _place_clock(session.storage, session.client, clock, control.rank)
        return Clocks(place_s, (own_s - bounds_s[1], own_s - bounds_s[0]), source)

    return session.step("clock-storage", Theme.SHARING, look, judge_clocks)


def _place_clock(
    storage: Storage, client: ObjectClient | None, clock: Clock, rank: int
) -> tuple[tuple[float, float] | None, str]:
    """Return the place's clock minus this node's, as bounds in seconds, and the source of the time.

    The source is a file's modification time, or the Date of one HTTP request without credentials. The
    offset is None if neither is available.
    """
    before_s = clock.wall_s()
    key = f"clock-{rank}"
    path = storage.local_path(key)
    if path is not None:
        storage.replace(key, b"now")
        after_s = clock.wall_s()
        changed_s = os.stat(path).st_mtime
        return (changed_s - after_s, changed_s - before_s), "time of a file"
    server_s = None if client is None else _server_date(client.endpoint)
    if server_s is None:
        return None, ""
    # The header has whole seconds: the server's clock was somewhere within that second.
    return (server_s - clock.wall_s(), server_s + 1 - before_s), "Date of the server"


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, because the clock of this very server is wanted."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect itself is the answer."""


def _server_date(endpoint: str) -> float | None:
    if not endpoint.startswith(("http://", "https://")):
        return None
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - http, see above
    try:
        opener = urllib.request.build_opener(_Stay)
        with opener.open(request, timeout=_DATE_TIMEOUT_S) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        date = error.headers.get("Date")  # a refusal has a Date too
        error.close()
    except (OSError, ValueError):
        return None
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def judge_clocks(worlds: Sequence[World], answers: Sequence[Clocks]) -> Findings:
    """Return the findings on the clocks. No decision of ckptfs depends on a clock."""
    found = []
    if len(worlds) > 1:
        skews = {rank: _least(s.rank_s) for rank, s in enumerate(answers) if rank}
        rank = max(skews, key=lambda r: abs(skews[r]))
        who = f"rank {rank} on {worlds[rank].site} against rank 0"
        found.append(_skew("clock-ranks", skews[rank], who, max(_slack(s.rank_s) for s in answers)))
    measured = {rank: s for rank, s in enumerate(answers) if s.place_s is not None}
    if not measured:
        text = "the place does not report its time"
        return (*found, Finding("clock-storage", _THEME, Verdict.UNKNOWN, text))
    rank = max(measured, key=lambda r: abs(_least(measured[r].place_s)))
    worst = measured[rank]
    who = f"{worst.source} against {worlds[rank].site}"
    found.append(_skew("clock-storage", _least(worst.place_s), who, _slack(worst.place_s)))
    return tuple(found)


def _least(bounds: tuple[float, float] | None) -> float:
    """Return the offset within the bounds that is nearest to 0."""
    low, high = bounds or (0.0, 0.0)
    return low if low > 0 else high if high < 0 else 0.0


def _slack(bounds: tuple[float, float] | None) -> float:
    low, high = bounds or (0.0, 0.0)
    return high - low


def _skew(name: str, off_s: float, who: str, slack_s: float) -> Finding:
    data = {"offset_s": off_s, "uncertainty_s": slack_s}
    if abs(off_s) <= _SKEW_WARN_S:
        text = (
            f"{who}: {'none' if abs(off_s) < 1 else seconds(abs(off_s))}, within {seconds(slack_s)}"
        )
        return Finding(name, _THEME, Verdict.OK, text, data=data)
    ahead = "ahead" if off_s > 0 else "behind"
    return Finding(
        name,
        _THEME,
        Verdict.FAIL if abs(off_s) > _SKEW_FAIL_S else Verdict.WARN,
        f"{who}: {seconds(abs(off_s))} {ahead}",
        "ages in `ckptfs ls`, alerts by age and retention by age are off; S3 refuses signatures that are "
        "15 minutes off",
        "let NTP (chrony) set the clocks",
        data,
    )
