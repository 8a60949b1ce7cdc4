"""Runs for the tests of restoring: saved and restored by simulated ranks, on one disk or one each.

site = Site(tmp_path, nodes="aabb", shared=False)      two nodes, a disk each
site.save(1, lambda rank: {...})
outcome = site.restore(lambda rank: {...})              per rank: RestoreOutcome, None, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import Control
from ckptfs.dcp.saving import save_at
from ckptfs.events import SaveResult
from ckptfs.manager.restore import RestoreOutcome, restore
from ckptfs.manager.restore_candidates import RestoreRequest
from ckptfs.manager.run_setup import Template
from ckptfs.manager.state_dict import saveable
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.world import End, simulate
from ckptfs.uri import Uri

State = Callable[[int], Any]
Wrap = Callable[[Storage, int], Storage]
TEMPLATE = Template("step_{N}")


def untouched(storage: Storage, _: int) -> Storage:
    """The storage as it is."""
    return storage


def open_local(uri: Uri, directory: Path) -> Storage:
    """A real directory under a URI that is the same on every node."""
    return LocalStorage(uri, directory=str(directory))


@dataclass
class Site:
    """A place for runs. nodes: one letter for the node of each rank; shared: one disk for all."""

    root: Path
    nodes: str = "a"
    shared: bool = True
    wrap: Wrap = untouched
    open_disk: Callable[[Uri, Path], Storage] = open_local
    states: dict[int, Any] = field(default_factory=dict)

    def disk(self, node: str = "a", run: str = "run") -> Path:
        """The run's directory as one node sees it."""
        return self.root / ("all" if self.shared else node) / run

    @contextmanager
    def session(self, control: Control, *, write: bool, run: str = "run") -> Iterator[RunSession]:
        """A session at a run of this site."""
        directory = self.disk(self.nodes[control.rank], run)
        storage = self.wrap(
            self.open_disk(Uri.parse(f"file:///site/{run}"), directory), control.rank
        )
        yield start_session(control, storage, Place(), write=write)

    def on_ranks(self, fn: Callable[[Control], Any], nodes: str | None = None) -> list[End[Any]]:
        """Run something on every rank; nodes: other ranks than those of the site."""
        self.nodes = nodes or self.nodes
        return simulate(len(self.nodes), fn, nodes=list(self.nodes), timeout_s=120.0)

    def save(
        self, step: int, state: State, *, run: str = "run", claims: bool = True, **spec: Any
    ) -> SaveResult:
        """Claim the run, save one checkpoint, leave it. claims=False: an unfenced save, cheaper."""

        def save(control: Control) -> SaveResult:
            with ExitStack() as stack:
                session = stack.enter_context(self.session(control, write=True, run=run))
                held = stack.enter_context(claim(session)) if claims else None
                found = saveable(state(control.rank))
                full = replace(
                    SaveSpec(
                        f"step_{step}",
                        step,
                        IfExists.REPLACE if claims else IfExists.ERROR,
                        run=held.generation if held else None,
                        per_rank=found.per_rank,
                    ),
                    **spec,
                )
                return save_at(found.state_dict, session, session.storage.uri(full.name), full)

        ends: list[End[SaveResult]] = self.on_ranks(save)
        results = [end.get() for end in ends]
        return results[0]

    def try_restore(
        self, state: State, *, runs: tuple[str, ...] = ("run",), **request: Any
    ) -> list[End[RestoreOutcome | None]]:
        """Restore on every rank; the states are kept in ``states``."""
        asked = replace(RestoreRequest(TEMPLATE.step_of), **request)

        def work(control: Control) -> RestoreOutcome | None:
            self.states[control.rank] = mine = state(control.rank)
            with ExitStack() as stack:
                sessions = [
                    stack.enter_context(self.session(control, write=False, run=run)) for run in runs
                ]
                return restore(sessions, mine, asked)

        return self.on_ranks(work)

    def restore(self, state: State, **request: Any) -> RestoreOutcome | None:
        """The same where every rank succeeds, with one answer."""
        outcomes = [end.get() for end in self.try_restore(state, **request)]
        assert len({o and o.save_id for o in outcomes}) == 1
        return outcomes[0]

    def refused(self, state: State, **request: Any) -> Exception:
        """The one error that every rank gets."""
        ends = self.try_restore(state, **request)
        errors = [end.error for end in ends]
        assert all(isinstance(e, Exception) for e in errors), errors
        assert len({(type(e), str(e)) for e in errors}) == 1, errors
        first = errors[0]
        assert isinstance(first, Exception)
        return first
