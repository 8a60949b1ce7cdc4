"""CheckpointManager: when to save, what to keep, where to go on.

    with ckptfs.CheckpointManager("s3://bucket/run", keep_latest=3, mode="async") as manager:
        restored = manager.restore(state)
        for step in range(0 if restored is None else restored.step, steps):
            ...
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})

Constructing, restoring and looking append nothing. The first ``save`` (or ``begin``) claims the run;
``close`` releases it. All but ``latest``, ``steps`` and ``poll`` are collective: every rank makes the
same calls in the same order, and every rank gets the same outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from ckptfs.commit.catalog import Checkpoint, logged
from ckptfs.commit.entries import Kind
from ckptfs.commit.looking import looking_at
from ckptfs.commit.opening import Place
from ckptfs.commit.protocol import catalog
from ckptfs.commit.run import Run, Takeover
from ckptfs.commit.spec import IfExists, SaveSpec
from ckptfs.dcp.saving import WriteOptions
from ckptfs.events import Event, SaveBegan, SaveResult
from ckptfs.manager.ground import Ground, Where
from ckptfs.manager.naming import Template
from ckptfs.manager.options import IfSlow, Names, SaveMode, metrics_of
from ckptfs.manager.saver import Follower, Job, Saver
from ckptfs.uri import options_of

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)

Kinds = Literal["checkpoint", "weights"]


class CheckpointManager:
    """Saves, retains and restores the checkpoints of one run. Every rank makes one.

    uri: the run. keep_latest: so many of each kind stay, None deletes nothing. mode: "async" returns
    from ``save`` when the state is staged. name, weights_name: templates of directory names, matched
    exactly; what they do not match is never deleted. per_rank: fnmatch patterns of keys that every
    rank keeps for itself. takeover: as for ``prepare_run``. process_group, timeout_s,
    storage_options, scope, domain: as for ``ckptfs.save``. ground: what it stands on instead, for wrappers.

    Making one appends nothing, so an evaluation job may: the first ``save`` claims the run, and
    RunBusyError names the living owner. After a crash of any rank at any time exactly the committed
    checkpoints are there.
    """

    def __init__(
        self,
        uri: Any,
        *,
        keep_latest: int | None = None,
        mode: Literal["sync", "async"] = "sync",
        name: str = "step_{N}",
        weights_name: str = "weights_{N}",
        max_in_flight: int = 1,
        if_slow: Literal["delay", "skip"] = "delay",
        threads: int = 1,
        per_rank: Sequence[str] = (),
        takeover: Literal["auto", "never", "force"] = "auto",
        process_group: Any = None,
        timeout_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        scope: Literal["auto", "shared", "node"] = "auto",
        domain: str | None = None,
        ground: Ground | None = None,
    ) -> None:
        place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
        where = Where(uri, place, process_group, timeout_s, Takeover(takeover))
        self._ground = ground or Ground(where)
        self._names = Names(Template(name), Template(weights_name))
        self._mode = SaveMode(mode)
        self._if_slow = IfSlow(if_slow)
        self._max_in_flight = max_in_flight
        self._write_options = WriteOptions(threads=threads)
        self._per_rank = tuple(per_rank)
        self._saver: Saver | None = None

    # -- saving -------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        kind: Kinds = "checkpoint",
        failure: bool = False,
    ) -> SaveResult:
        """Collective. Save ``state`` as the checkpoint of ``step``."""
        started = time.perf_counter()
        artifact = Kind(kind)
        name = self._names.of(artifact).name(step)
        told = metrics_of(metrics)  # a wrong call is refused before the run is claimed
        run = self._ground.run()
        spec = SaveSpec(
            name,
            step,
            IfExists.REPLACE,
            artifact=artifact,
            run=run.generation,
            failure=failure,
            per_rank=self._per_rank,
            metrics=told,
        )
        target = self._ground.root / spec.name
        self._tell(SaveBegan(str(target), step, kind, self._mode.value, 0))
        job = Job(state, target, spec, self._write_options, started, {})
        return self._saver_of(run).run(job, run.seat)

    # -- looking: local, read-only, any time ------------------------------------------------

    @property
    def latest(self) -> Checkpoint | None:
        """The last committed checkpoint that a manager with this template made, None without one."""
        return self.latest_of("checkpoint")

    def latest_of(self, kind: Kinds) -> Checkpoint | None:
        """The last committed save of a kind, by commit order; those of a failing run apart."""
        live = self._live(Kind(kind), failures=False)
        return live[-1] if live else None

    @property
    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest commit first."""
        return [c.step for c in self._live(Kind.CHECKPOINT, failures=True) if c.step is not None]

    def _live(self, kind: Kind, *, failures: bool) -> list[Checkpoint]:
        where = self._ground.where
        with looking_at(where.uri, where.place.storage_options) as look:
            failed = {live.seal.save_id for live in catalog(look.views) if live.seal.failure}
            known = logged(look.views, look.root)
        template = self._names.of(kind)
        return [
            c
            for c in known
            if c.kind is kind
            and template.step_of(c.uri.name) is not None
            and (failures or c.save_id not in failed)
        ]

    def _saver_of(self, run: Run) -> Saver:
        if self._saver is None:
            self._saver = Saver(self._tell, self._followers(run))
        return self._saver

    def _followers(self, run: Run) -> list[Follower]:
        return []

    def _tell(self, event: Event) -> None:
        logger.debug("%s", event)

    # -- closing ------------------------------------------------------------------------

    def close(self) -> None:
        """Release the run. Harmless twice."""
        self._ground.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
