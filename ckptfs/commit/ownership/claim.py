"""Claiming a run: ``prepare_run`` fences every older writer, then recovers what they left.

    survey    every owner folds its log              -> the run is free, ours, or must be watched
    watch     every owner watches its lease          -> it changed: RunBusyError; it did not: free;
                                                        it changes for another call: survey again
    fence     every owner appends fence(generation)  -> another fence came first: undo, survey again
    report    what is in every domain                -> one plan for all domains
    settle    abort, record, project, wipe
    token     every rank reads the new fence through its own path

After the fence, an older generation cannot append, and therefore cannot commit or delete. ``overwrite``
moves nothing: it is a flag in the fence.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.decisions import may_claim, unreleased
from ckptfs.commit.log.append import Appended, Means, RefusedAppend, append, catch_up_again
from ckptfs.commit.log.entries import GENESIS, Fence, FenceMode, Generation, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import control_is_plain, drive, read_limited
from ckptfs.commit.ownership.background_owner import Background
from ckptfs.commit.ownership.lease import (
    Keeper,
    LeaseTimes,
    LeaseWatch,
    Pulse,
    alive_here,
    describe,
    who_am_i,
)
from ckptfs.commit.ownership.recovery import DomainLog, plan_recovery, report, settle
from ckptfs.commit.ownership.recovery_plan import RecoveryPlan, with_equal_seals_once
from ckptfs.commit.ownership.run import (
    Caller,
    Ownership,
    Run,
    ownership_of,
    release_fence,
    wait_until_left,
)
from ckptfs.commit.paths import LOG, log_key
from ckptfs.commit.save.owner_steps import survey
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.commit.session import RunSession, View, step_with_views
from ckptfs.commit.state import catalog
from ckptfs.control.messages import apart
from ckptfs.errors import (
    AccessError,
    ArgumentChoice,
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    FencedError,
    ManifestError,
    NotFoundError,
    RunBusyError,
    StaleError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Shape, Storage

__all__ = ["Mode", "Takeover", "claim"]

logger = logging.getLogger("ckptfs.commit")

_LOOKS = 20  # 0.05 s apart: an NFSv3 client is fresh after one tick of the server
ORPHAN_S = 7 * 24 * 3600.0  # 7 days: the writer of an older multipart upload is dead
_Refusal = SymlinkError | ManifestError
LEFT_S = 60.0  # how long a claim waits for an earlier one of its process that is being released
GIVE_BACK_S = 5.0  # how long a failed claim tries to release its fence
# A call that waits for another one watches its lease for this long between two reads of the log,
# and twice as long each time, up to the second number.
LOOK_S = 0.25
LONGEST_LOOK_S = 2.0
TRIES = 16  # newcomers that race for one number: each loss means that another one got it


class Mode(ArgumentChoice, parameter="mode"):
    """What to do about existing checkpoints."""

    RESUME = "resume"
    OVERWRITE = "overwrite"  # they leave the catalog now and are deleted after the first commit
    FAIL = "fail"  # CommitConflictError when there are any


class Takeover(ArgumentChoice, parameter="takeover"):
    """What to do about an owner that did not release the run."""

    AUTO = "auto"  # the same job, a dead process of this node, or a lease that does not change
    NEVER = "never"
    FORCE = "force"
    DEAD = "dead"  # as AUTO, but the same job is no reason: for a process that runs next to a job


@dataclass(frozen=True, slots=True)
class _Look:
    """What one owner saw of its lease.

    is_of_call: The lease changed, and says that the run is held for one call.
    """

    pulse: Pulse
    is_of_call: bool


@dataclass(frozen=True, slots=True)
class _Survey:
    number: int
    fence: Fence | None  # the owner to watch
    last: Seal | None


@dataclass(frozen=True, slots=True)
class _Round:
    """One try at the fence: None if every domain took it, otherwise the current number."""

    beaten_by: int | None


def claim(
    session: RunSession,
    mode: Mode = Mode.RESUME,
    takeover: Takeover = Takeover.AUTO,
    times: LeaseTimes = LeaseTimes(),
    *,
    defer_deletes: bool = False,
    keep: Collection[str] = (),
    caller: Caller | None = None,
) -> Run:
    """Take the run. Returns on every rank with the same generation. Collective.

    After an error other than those below, the fence is released again, so that no process has to
    wait for it. After a crash during the claim, the next claim does the same again.

    Args:
        session: The session at the run.
        mode: What to do about existing checkpoints.
        takeover: From which owners the run may be taken over.
        times: The times of the lease.
        defer_deletes: Leave the bytes of deleted saves to a ``Retirer``, which gives readers their
            time. Their ids are in ``session.deferred_deletes``.
        keep: save_ids that this process is about to seal itself. All other saves that began before
            the fence are aborted.
        caller: The call that claims, for messages that name this process as the owner. The claim
            waits up to its wait_s for others that hold the run for one call. If the owner holds the
            run for longer, RunBusyError is raised at once.

    Returns:
        The held run.

    Raises:
        RunBusyError: A living owner holds the run; the message names it and its last commit.
            Nothing was written but the log's directories.
        CommitConflictError: The mode is FAIL, and there are checkpoints.
        CollectiveError: It is also a FencedError if a newer owner took the run while this one
            recovered it.
    """
    claimant = _Claimant(session, mode, takeover, times, defer_deletes=defer_deletes, keep=keep)
    claimant.caller = caller or Caller()
    return claimant.claim()


class _Claimant:
    def __init__(
        self,
        session: RunSession,
        mode: Mode,
        takeover: Takeover,
        times: LeaseTimes,
        *,
        defer_deletes: bool,
        keep: Collection[str],
    ) -> None:
        self._keep = frozenset(keep)
        self._session, self._mode, self._takeover, self._times = session, mode, takeover, times
        self._deferred_deletes = session.deferred_deletes if defer_deletes else None
        self._owner = session.placement.is_owner
        self._domain = session.placement.mine.id
        self._ids = fresh_ids()
        self._stamp = session.stamp()
        self._judged = GENESIS  # the newest fence of this domain when its owner was judged
        self._surveyed = False
        self._fenced: Appended | None = None
        self._reported: LogState | None = None  # the log of this domain, as the report has it
        self._until = math.inf  # the coordinator's; for a call that waits
        self.caller = Caller()

    def claim(self) -> Run:
        control = self._session.control
        self._until = time.monotonic() + self.caller.wait_s
        # If many calls wait for their turn, each may lose it to all others.
        for tries in itertools.count():
            number = self._until_free()
            fence = control.step("number", lambda: None, lambda _: self._new_fence(number, tries))  # noqa: B023
            try:
                outcome = control.step("fence", lambda: self._fence(fence), _beaten)  # noqa: B023
                if outcome.beaten_by is not None:
                    control.step("give back", lambda: self._give_back(fence.generation))  # noqa: B023
                    continue
                return self._recover(fence.generation)
            except CollectiveError:
                # Also for a FencedError of the recovery: the newer owner may hold the run for long.
                self._let_go(fence.generation)
                raise
            except FencedError:
                # Only a prepare_run that has not returned may fence again, higher. A process that came after
                # it may have returned: neither the same job nor force is a reason to take the run from it.
                if self._takeover is not Takeover.NEVER:
                    self._takeover = Takeover.DEAD
                continue
            except Exception:
                self._let_go(fence.generation)
                raise
        raise AssertionError("nobody ends this loop but by an answer")

    @property
    def _waits(self) -> bool:
        """Whether this claim waits for other calls that hold the run."""
        return self.caller.wait_s > 0

    def _until_free(self) -> int:
        """Return the number of the current fence, once its owner left or is gone. Collective."""
        control, look_s = self._session.control, LOOK_S
        watch = LeaseWatch(self._session.storage, self._times)
        watched: Fence | None = None
        while True:
            found = step_with_views(control, "survey", self._survey, _view_of, self._judge)
            if found.fence is None:
                return found.number
            if found.fence != watched:
                watched, watch = found.fence, LeaseWatch(self._session.storage, self._times)
            if not self._watch(found, watch, look_s):
                return found.number
            look_s = min(2 * look_s, LONGEST_LOOK_S)

    def _survey(self, ids: Collection[str]) -> View | _Refusal | None:
        again = self._judged != GENESIS
        wait_until_left(self._session.storage.root, LEFT_S, patient=not self._surveyed)
        self._surveyed = True
        if not self._owner:
            return None
        try:
            drive(control_is_plain(self._session.caps.shape), self._session.storage)
            look = catch_up_again(self._known) if again else survey()
            state = drive(look, self._session.storage)
        except (SymlinkError, ManifestError) as error:
            # A value, so that it is raised as its type: a person has to look, and nothing is fenced.
            error.uri = error.uri or str(self._session.storage.root)
            return error
        self._session.known.learn(state)
        self._judged = state.generation
        return self._domain, state.to_send(ids)

    @property
    def _known(self) -> LogState | None:
        return self._session.fold_from

    def _judge(self, answers: Sequence[View | _Refusal | None]) -> _Survey:
        for answer in answers:
            if isinstance(answer, _Refusal):
                raise answer
        views = dict(a for a in answers if isinstance(a, tuple))
        lives = catalog(views)
        last = lives[-1].seal if lives else None
        if self._mode is Mode.FAIL and last is not None:
            raise CommitConflictError(
                f"the run has {len(lives)} checkpoints; the last is {last.name}",
                uri=self._session.storage.root,
                hint='pass mode="resume" to continue with them, or mode="overwrite" to replace '
                "them",
            )
        number = max(view.generation.number for view in views.values())
        me = who_am_i(self._session.control.world)
        claims = unreleased(views)
        if self._takeover is not Takeover.DEAD and me.job is not None:
            claims = tuple(fence for fence in claims if fence.job != me.job)
        if not claims or self._takeover is Takeover.FORCE:
            return _Survey(number, None, last)
        if self._takeover is Takeover.NEVER:
            raise self._busy(claims[0], last, waited=False)
        # If the process ran on this node and its pid is gone, there is no need to wait for its lease.
        perhaps = [fence for fence in claims if fence.node != me.node or alive_here(fence)]
        if not perhaps:
            return _Survey(number, None, last)
        return _Survey(number, perhaps[0], last)

    def _watch(self, found: _Survey, watch: LeaseWatch, look_s: float) -> bool:
        """Whether to survey the log again; False if the leases of all domains stopped changing.

        Raises RunBusyError on every rank if one of them changes, unless it is held for one call and
        there is time to wait for the end of that call.
        """
        waits = self._waits

        def local() -> _Look | None:
            if not self._owner:
                return None
            own = None if found.fence is None else self._own(found.fence)
            if own is not None and own.stays:
                return _Look(Pulse.MOVES, is_of_call=False)  # alive, however old its lease is
            pulse = watch.look(look_s if waits else math.inf)
            return _Look(pulse, pulse is Pulse.MOVES and watch.is_of_call)

        def decide(answers: Sequence[_Look | None]) -> bool:
            looks = [look for look in answers if look is not None]
            moved = [look for look in looks if look.pulse is Pulse.MOVES]
            if moved and found.fence is not None:
                of_calls = waits and all(look.is_of_call for look in moved)
                if not of_calls or self._until <= time.monotonic():
                    raise self._busy(found.fence, found.last, waited=of_calls)
            return any(look.pulse is not Pulse.STILL for look in looks)

        return self._session.control.step("watch", local, decide)

    def _own(self, fence: Fence) -> Ownership | None:
        """Return this process's own claim with that fence, or None if it has none."""
        me = who_am_i(self._session.control.world)
        return (
            ownership_of(fence.generation) if (fence.node, fence.job) == (me.node, me.job) else None
        )

    def _busy(self, fence: Fence, last: Seal | None, *, waited: bool) -> RunBusyError:
        last_commit = "nothing committed yet" if last is None else f"last commit {last.name}"
        root, own = self._session.storage.root, self._own(fence)
        if own is not None:
            return RunBusyError(
                f"the run is held by this process (pid {fence.pid}) since {own.since}, "
                f"by {own.call}, {last_commit}",
                uri=root,
                hint="close that one, or drop every reference to it, or use it",
            )
        if waited:
            return RunBusyError(
                f"the run was held by other calls for {self.caller.wait_s:g} s, now by "
                f"{describe(fence)}, {last_commit}",
                uri=root,
                hint="only one call at a time can replace checkpoints in a run: try again, or "
                "pass a longer timeout_s",
            )
        if self._waits:
            return RunBusyError(
                f"the run is held by {describe(fence)} for more than one call, {last_commit}",
                uri=root,
                hint="save through its holder (a manager, or run=), choose a new name, or wait "
                "until it ends",
            )
        return RunBusyError(
            f"the run is held by {describe(fence)}, {last_commit}",
            uri=root,
            hint='wait until it ends, give this job another run, or pass takeover="force"',
        )

    def _new_fence(self, number: int, tries: int) -> Fence:
        if tries >= TRIES and time.monotonic() >= self._until:
            raise RunBusyError(
                f"{tries} other jobs took the run one after the other",
                uri=self._session.storage.root,
                hint="several jobs start on one run at once: give each job its own run, or wait",
            )
        mode = FenceMode.OVERWRITE if self._mode is Mode.OVERWRITE else FenceMode.RESUME
        me = who_am_i(self._session.control.world)
        generation = Generation(number + 1, secrets.token_hex(4))
        return Fence(generation, mode, me.host, me.pid, me.job, me.node, me.started)

    def _fence(self, fence: Fence) -> int | None:
        """Append the fence here; if another fence came first, return its number instead."""
        if not self._owner:
            return None
        judged, self._fenced = self._judged, None
        outcome = drive(
            append(
                lambda current: may_claim(current, fence, judged),
                write_id=next(self._ids),
                stamp=self._stamp,
                state=self._known,
            ),
            self._session.storage,
        )
        self._session.known.learn(outcome.state)
        if isinstance(outcome, RefusedAppend):
            return outcome.state.generation.number
        self._fenced = outcome
        self._session.touch_log_later()
        return None

    def _give_back(self, generation: Generation) -> None:
        """Release the fence if this domain took it and another domain did not.

        If two newcomers each got some of the domains, each would take the other for the owner.
        """
        if self._owner and self._fenced is not None:
            program = release_fence(generation, self._ids, self._known, self._stamp)
            self._session.known.learn(drive(program, self._session.storage).state)
            self._session.touch_log_later()
            self._fenced = None

    def _let_go(self, generation: Generation) -> None:
        """Release the fence of a claim that was not completed. Local, best effort."""
        if self._fenced is None:
            return
        program = release_fence(generation, self._ids, self._known, self._stamp)
        try:
            drive(program, self._session.storage, deadline_s=GIVE_BACK_S)
            self._session.touch_log_later()
        except (StorageError, CkptfsError) as error:
            logger.warning("a fence was not released, so the next owner has to wait: %s", error)

    def _recover(self, generation: Generation) -> Run:
        session = self._session
        caps = session.caps

        def local(ids: Collection[str]) -> DomainLog | None:
            if not self._owner:
                return None
            found = drive(report(self._domain, generation, caps, self._known), session.storage)
            session.known.learn(found.state)
            self._reported = found.state
            # An aborted attempt in this domain may have lost its record: then only the log knows it.
            here = {attempt.save_id for attempt in found.attempts}
            return replace(found, state=found.state.to_send({*ids, *here}))

        def decide(
            reports: Sequence[DomainLog | None],
        ) -> tuple[tuple[str, ...], RecoveryPlan | None]:
            known = {r.domain: r for r in reports if r is not None}
            plan = plan_recovery(known, generation, self._keep)
            if any(view.generation > generation for view in plan.views.values()):
                raise FencedError("a newer owner took the run at the same time")
            names = tuple(seal.name for seal in plan.in_doubt)
            # The saves that are living in some log are in it: for the owners that carry the plan
            # out, and each seal once.
            plan = replace(plan, views=with_equal_seals_once(plan.views))
            owners = {domain.owner for domain in session.placement.domains}
            return apart(
                names, [plan if r in owners else None for r in range(session.control.size)]
            )

        in_doubt, plan = step_with_views(
            session.control,
            "report",
            local,
            lambda found: None if found is None else (found.domain, found.state),
            decide,
            also=lambda found: {a.save_id for r in found if r is not None for a in r.attempts},
        )

        def carry_out() -> None:
            if plan is not None and self._reported is not None:
                program = settle(
                    replace(plan, views={**plan.views, self._domain: self._reported}),
                    Means(self._domain, caps, self._ids, self._stamp).held_by(generation),
                    left_to_caller=self._deferred_deletes,
                )
                try:
                    session.known.learn(drive(program, session.storage))
                finally:
                    session.touch_log_later()  # the fence's own touch may have come before all this

        session.control.step("settle", carry_out)
        self._read_token(generation)
        for name in in_doubt:
            logger.warning("%s is in doubt: one of its domains cannot be reached", name)
        keeper = None
        if self._owner:
            brief = self.caller.for_call
            keeper = Keeper(session.storage, generation, self._times, for_call=brief)
            keeper.start()
        if self._owner and caps.shape is Shape.OBJECT:
            _sweep(session.storage)
            session = replace(session, background=Background())
        root = session.storage.root
        return Run(root, generation, session, in_doubt, _keeper=keeper, _caller=self.caller)

    def _read_token(self, generation: Generation) -> None:
        """Read this fence on every rank through the rank's own path.

        The existence of an entry does not show that it is this fence, so its content is compared.
        """
        session = self._session
        own_fence = (self._domain, self._fenced.number) if self._fenced is not None else None
        numbers = session.control.step("numbers", lambda: own_fence, _by_domain)

        def read() -> None:
            key = log_key(numbers[self._domain])
            if session.placement.is_node_lead:
                session.storage.refresh(LOG)
            data = _read_fresh(session.storage, key)
            if generation.nonce.encode() not in data:
                raise NotFoundError(
                    "this rank sees another run log than the owner of its domain",
                    uri=session.storage.uri(key),
                    hint="if two file servers share this path, pass scope='node'",
                )

        session.control.step("token", read)


def _view_of(answer: View | _Refusal | None) -> View | None:
    return answer if isinstance(answer, tuple) else None


def _read_fresh(storage: Storage, key: str) -> bytes:
    """Read an entry that exists, although this node may have cached its absence.

    A process that read the end of the log a moment ago left its absence in the node's NFS cache,
    and the other processes of the node read while the node's lead still refreshes.
    """
    for _ in range(_LOOKS):
        try:
            return read_limited(storage, key)
        except (NotFoundError, StaleError):
            storage.refresh(LOG)
            time.sleep(0.05)
    return read_limited(storage, key)


def _sweep(storage: Storage) -> None:
    """Abort multipart uploads that a dead process left, if they are old by the server's clock.

    This runs before this owner's first upload, because some servers report one date for all
    uploads.
    """
    try:
        swept = storage.sweep_uploads(ORPHAN_S)
    except (AccessError, UnsupportedError) as error:
        # Most policies do not grant this permission; a lifecycle rule of the bucket does the same.
        logger.info("unfinished uploads were not removed: %s", error)
        return
    except StorageError as error:
        logger.warning("unfinished uploads were not removed: %s", error)
        return
    if swept:
        logger.info("%d unfinished uploads under %s were aborted", swept, storage.root)


def _by_domain(answers: Sequence[tuple[str, int] | None]) -> dict[str, int]:
    return dict(pair for pair in answers if pair is not None)


def _beaten(answers: Sequence[int | None]) -> _Round:
    return _Round(max((a for a in answers if a is not None), default=None))
