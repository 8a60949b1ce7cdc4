"""``ckptfs.save`` and ``ckptfs.load``: a sharded state by URI, whole on every rank or not at all.

    save   plan (checks, who writes what)  begin  space  write  seal  project     -> SaveResult
    load   look  find  plan (checks)  read and verify                             -> LoadResult

Both are collective: every rank of the group calls them with its own state dict, in the same order,
and every rank gets the same outcome. No collective runs on the user's group; a thread of its own may
call them while the main thread trains.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ckptfs.commit.locate import locate
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, step_of
from ckptfs.commit.run import Run, claim
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import IfExists, SaveSpec
from ckptfs.dcp.loading import load_at
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.errors import StateError
from ckptfs.events import LoadResult, SaveResult
from ckptfs.topology.control import Control
from ckptfs.uri import Uri, options_of

__all__ = ["load", "save"]

logger = logging.getLogger(__name__)

Scope = Literal["auto", "shared", "node"]


def save(
    state_dict: Mapping[str, Any],
    uri: Any,
    *,
    step: int | None = None,
    if_exists: Literal["error", "replace"] = "error",
    run: Run | None = None,
    per_rank: Sequence[str] = (),
    require_space: bool = False,
    threads: int = 1,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> SaveResult:
    """Collective. Save a state dict to ``uri``; committed and durable when it returns.

    state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors, plain objects, and
    objects with state_dict() at the top level. uri: run and name, ``s3://bucket/run/step_100``; the
    run is the parent. step: completed optimizer steps; None takes the number that ends the name.
    if_exists: "error" is CommitConflictError when the name is committed; "replace" keeps the old
    one until the new one is committed. run: a held Run fences the save; without it the save is
    exclusive by name only, and "replace" claims the run for the call. per_rank: fnmatch patterns of
    flattened keys whose values differ by rank and are kept for each; unasked a difference is
    StateError. require_space: NoSpaceError before a byte is written where it cannot fit; otherwise
    a warning. threads: data files written at once by each rank. timeout_s: the longest silence of a
    rank that is waited out, 600 s unless CKPTFS_TIMEOUT_S says otherwise.

    Before the commit any failure, on any rank, is the same error on every rank, and the old state
    stands. CommitInDoubtError: the next save or prepare_run settles it. After a crash there is
    exactly the old or the new checkpoint.
    """
    started = time.perf_counter()
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with (
        _seat_for(uri, run, process_group, timeout_s, place) as (seat, target),
        _claimed(seat, run, IfExists(if_exists)) as holder,
    ):
        spec = SaveSpec(
            target.name,
            step_of(target.name, step),
            IfExists(if_exists),
            run=None if holder is None else holder.generation,
            per_rank=tuple(per_rank),
        )
        options = WriteOptions(threads, require_space)
        return save_at(state_dict, seat, target, spec, options, started=started)


def load(
    state_dict: dict[str, Any],
    uri: Any,
    *,
    strict: bool = True,
    verify: Literal["read", "off"] = "read",
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> LoadResult:
    """Collective. Load a checkpoint into ``state_dict``, in place, with any number of ranks.

    Tensors are filled where they are, whatever sharding they have now; objects with
    load_state_dict() at the top level get theirs. strict: missing and unexpected keys and dtypes
    that differ are StateErrors before a byte is read; otherwise they are skipped, named in the
    result, or converted. verify: "read" compares every block that is read with its digest.
    Checkpoints written by stock torch load too, unverified. Reads only; repairs nothing.

    NotFoundError, IncompleteCheckpointError: no such checkpoint, or not all of it. What single ranks
    meet while they read (IntegrityError, ManifestError, a missing file) is a CollectiveError on all;
    its ``failures`` name rank, URI and file. After an error tensors are undefined.
    """
    started = time.perf_counter()
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with _control(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        with open_seat(target.parent, control, place, write=False) as seat:
            found = locate(seat, target.name)
            return load_at(
                state_dict, seat, target, found, strict=strict, verify=verify, started=started
            )


@contextlib.contextmanager
def _control(process_group: Any, timeout_s: float | None) -> Iterator[Control]:
    with control_for(process_group, timeout_s) as control:
        _need_group(control)
        yield control


def _need_group(control: Control) -> None:
    if control.size > 1 and not control.world.has_group:
        raise StateError(
            f"WORLD_SIZE is {control.size}, but torch.distributed is not initialised",
            rank=control.rank,
            hint="call torch.distributed.init_process_group() before saving or loading tensors",
        )


@contextlib.contextmanager
def _seat_for(
    uri: Any, run: Run | None, process_group: Any, timeout_s: float | None, place: Place
) -> Iterator[tuple[Seat, Uri]]:
    """The held run's seat, or a new one for this call."""
    if run is not None:
        _need_group(run.seat.control)
        target = agree_uri(run.seat.control, uri)
        run.check(target)
        yield run.seat, target
        return
    with _control(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        with open_seat(target.parent, control, place, write=True) as seat:
            yield seat, target


@contextlib.contextmanager
def _claimed(seat: Seat, run: Run | None, if_exists: IfExists) -> Iterator[Run | None]:
    """The held run; a run claimed for this call where replacing needs one; else None."""
    if run is not None or if_exists is IfExists.ERROR:
        yield run
        return
    with claim(seat) as claimed:
        yield claimed
