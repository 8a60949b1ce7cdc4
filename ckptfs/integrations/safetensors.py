"""Hugging Face checkpoints at any URI: written by all ranks in parallel, committed, read in ranges.

    save_safetensors(model.state_dict(), "s3://bucket/run/hf_100", files={"config.json": ...})
    load_safetensors(model.state_dict(), "s3://bucket/models/llama")

    plan      one step: same keys everywhere, who holds what, tied weights, files and their owners
    write     every rank:  gather a tensor (its holders together)  ->  its owner's queue
              its owner:   header, tensors, digests, one after another, straight into the storage
    commit    the manifest is the marker; index and ``files`` go with it

The format knows whole tensors only, so shards have to meet somewhere: each tensor is gathered by
torch, on the group that shards it, and dropped again by all but the owner of its file. While owners
write, the next tensors are gathered. In memory on every rank: one whole tensor; on its owner two more,
and what the storage's writer has under way. No file is ever built in memory (16 MiB on object stores).

Nothing of this needs the safetensors package or transformers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.entries import Kind
from ckptfs.commit.locate import locate_directory, reading_seat
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, step_of
from ckptfs.commit.run import Run
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import SaveSpec
from ckptfs.dcp.api import need_group
from ckptfs.dcp.datafile import Verify
from ckptfs.dcp.load_pipeline import plan_load, read
from ckptfs.dcp.opened import source_of
from ckptfs.dcp.safetensors_layout import Layout, read_layout, with_aliases
from ckptfs.dcp.safetensors_save import Export, plan_export
from ckptfs.dcp.sizes import parse_size
from ckptfs.errors import StateError
from ckptfs.events import Counters, LoadResult, SaveResult
from ckptfs.uri import Uri, options_of

__all__ = ["load_safetensors", "save_safetensors"]

Scope = Literal["auto", "shared", "node"]


def save_safetensors(
    state_dict: Mapping[str, Any],
    uri: Any,
    *,
    max_shard_size: int | str = "5GB",
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
    step: int | None = None,
    run: Run | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> SaveResult:
    """Collective. Export tensors as a Hugging Face checkpoint; committed and durable on return.

    state_dict: key -> tensor or DTensor, flat, with the same keys on all ranks that share a tensor.
    max_shard_size: of a file; there are more files than it asks for where that lets ranks write in
    parallel. fqn_to_index_mapping: key -> number of its file, from 1, instead. files: further small
    files, such as config.json, from rank 0. metadata: text for the header of every file, beside
    {"format": "pt"}. Tied weights are written once, under the first of their keys, and the header
    names the others, as safetensors.torch.save_model does.

    Names are fixed, so a committed name is CommitConflictError and stays as it is. StateError, on
    every rank and before a byte is written: no tensor, a dtype that the format has not, plain tensors
    that differ between ranks, disks that not all nodes see. A failure of one rank is the same
    CollectiveError on all, and nothing is visible; what torch's own gather raises on single ranks,
    the others hear of from their group. After a crash there is the whole export, or none.
    """
    started = time.perf_counter()
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with _writing(uri, run, process_group, timeout_s, place) as (seat, target):
        if len(seat.placement.domains) > 1:
            raise StateError(
                "these nodes see different disks, and a reader would find a part of the files",
                uri=target,
                hint="export to a URI that all nodes see",
            )
        planned = plan_export(
            state_dict,
            seat.control,
            max_bytes=parse_size(max_shard_size),
            fqn_to_index_mapping=fqn_to_index_mapping,
            metadata={"format": "pt", **(metadata or {})},
            beside=tuple(files or ()),
        )
        extra = {n: t.encode() if isinstance(t, str) else t for n, t in (files or {}).items()}
        spec = SaveSpec(
            target.name,
            step_of(target.name, step),
            artifact=Kind.DIRECTORY,
            run=None if run is None else run.generation,
        )
        attempt = Attempt(seat, spec)
        try:
            attempt.begin()
            export = Export(attempt, planned, state_dict, extra)
            done = attempt.commit(export.write, export.finish)
        except BaseException:
            attempt.abandon()
            raise
        return done.result(str(target), spec.step, seat.control.rank, time.perf_counter() - started)


def load_safetensors(
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
    """Collective. Fill ``state_dict`` in place from a Hugging Face checkpoint, whoever wrote it.

    Every rank reads only the byte ranges of its own shards, whatever sharding its tensors have now:
    from one model.safetensors, from several with an index, or from the shards of torch's
    HuggingFaceStorageWriter. Headers are read once, by rank 0. strict: keys missing or not asked for,
    and dtypes that differ, are StateErrors before a byte is read; otherwise they are skipped, named in
    the result, or converted. A tied weight is found under any of its keys. verify: compares every
    block that is read with its digest, where ckptfs wrote the files.

    NotFoundError, IncompleteCheckpointError: nothing there, or not all of it. ManifestError: a header
    or index that cannot be. IntegrityError: cut short, or changed. After an error of reading, tensors
    are undefined.
    """
    started, checking = time.perf_counter(), Verify(verify)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        target = agree_uri(control, uri)
        with reading_seat(target, control, place) as (seat, name):
            found = locate_directory(seat, name)
            layout: Layout = control.step(
                "read the headers",
                lambda: sorted(state_dict),
                lambda asked: with_aliases(
                    read_layout(seat.storage, found, checking), {k for keys in asked for k in keys}
                ),
            )
            planned = plan_load(state_dict, layout.metadata, control, strict=strict)
            source = layout.source(
                source_of(seat.storage, found, checking, control.rank, control.size)
            )
            per_rank = tuple(control.step("read", lambda: read(planned, source)))
        manifest = found.manifest
        return LoadResult(
            uri=str(target),
            step=step_of(target.name, None) if manifest is None else manifest.step,
            save_id=None if manifest is None else manifest.save_id,
            mine=per_rank[control.rank],
            total=Counters.together(per_rank),
            per_rank=per_rank,
            wall_s=time.perf_counter() - started,
            verified=checking is Verify.READ and manifest is not None and bool(source.sidecars),
            missing_keys=planned.missing_keys,
            unexpected_keys=planned.unexpected_keys,
        )


@contextlib.contextmanager
def _writing(
    uri: str | os.PathLike[Any] | Uri,
    run: Run | None,
    process_group: Any,
    timeout_s: float | None,
    place: Place,
) -> Iterator[tuple[Seat, Uri]]:
    """The seat of a held run, or one for this call."""
    if run is not None:
        target = agree_uri(run.seat.control, uri)
        run.check(target)
        yield run.seat, target
        return
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        target = agree_uri(control, uri)
        with open_seat(target.parent, control, place, write=True) as seat:
            yield seat, target
