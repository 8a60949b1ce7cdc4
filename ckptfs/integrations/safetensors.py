"""Hugging Face checkpoints at any URI: written by all ranks in parallel, committed, read in ranges.

    save_safetensors(model.state_dict(), "s3://bucket/run/hf_100", files={"config.json": ...})
    load_safetensors(model.state_dict(), "s3://bucket/models/llama")

    plan      one step: same keys everywhere, which ranks hold what, tied weights, files and their owners
    write     every rank:  gather a tensor (its holders together)  ->  its owner's queue
              its owner:   header, tensors, digests, one after another, straight into the storage
    commit    the manifest is the marker; index and ``files`` go with it

The format has whole tensors only, so shards have to be gathered somewhere: torch gathers each
tensor on the group that shards it, and all ranks but the owner of its file drop it again. While
owners write, the next tensors are gathered. Every rank holds one whole tensor in memory; the owner
holds two more, and what the storage's writer has under way (16 MiB on object stores). No file is
ever built in memory.

This needs neither the safetensors package nor transformers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ckptfs.commit.catalog.locate import locate_directory, reading_session
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, RunSession, agree_uri, control_for, open_session, step_of
from ckptfs.dcp.api import need_group
from ckptfs.dcp.loading import plan_load, read
from ckptfs.dcp.read.data_file import Verify, source_of
from ckptfs.dcp.safetensors.exporter import Export, plan_export
from ckptfs.dcp.safetensors.safetensors_reader import Layout, read_layout, with_aliases
from ckptfs.errors import StateError
from ckptfs.events import Counters, LoadResult, SaveResult
from ckptfs.text import parse_size
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
    """Export tensors as a Hugging Face checkpoint; committed and durable on return. Collective.

    Names are fixed, so a committed name is refused and stays as it is. Tied weights are written
    once, under the first of their keys, and the header names the others, as
    ``safetensors.torch.save_model`` does. A failure of one rank is the same error on all, and
    nothing is visible; if torch's own gather raises on single ranks, the others get the error
    through their group. After a crash there is the whole export, or none.

    Args:
        state_dict: A tensor or DTensor by key, flat, with the same keys on all ranks that share a
            tensor.
        uri: Run and name, the same on all ranks.
        max_shard_size: The size of a file, in bytes or as "5GB"; there are more files than it
            requires if that lets ranks write in parallel.
        fqn_to_index_mapping: In its place the number of each key's file, from 1; None: by
            ``max_shard_size``.
        files: Further small files by name, such as config.json, from rank 0; None: none.
        metadata: Text for the header of every file, in addition to {"format": "pt"}; None: none.
        step: Completed optimizer steps; None takes the number that ends the name.
        run: A held run, which fences the save; None: exclusive by name only.
        process_group: The ranks that take part; None: the default group.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: "auto", "shared" or "node", as for ``ckptfs.save``.
        domain: A name in place of ``scope``, as for ``ckptfs.save``; None: by ``scope``.

    Returns:
        What was saved, on this rank and on all.

    Raises:
        CommitConflictError: The name is committed already.
        StateError: On every rank and before a byte is written: no tensor, a dtype that the format
            lacks, plain tensors that differ between ranks, disks that not all nodes see.
        CollectiveError: Some ranks failed; every rank raises this same error.
    """
    started = time.perf_counter()
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with _writing(uri, run, process_group, timeout_s, place) as (session, target):
        if len(session.placement.domains) > 1:
            raise StateError(
                "these nodes write to different disks, so a reader would find only some of "
                "the files",
                uri=target,
                hint="export to a URI that all nodes can reach",
            )
        planned = plan_export(
            state_dict,
            session.control,
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
        attempt = SaveAttempt(session, spec)
        try:
            attempt.begin()
            export = Export(attempt, planned, state_dict, extra)
            done = attempt.commit(export.write, export.finish)
        except BaseException:
            attempt.abandon()
            raise
        return done.result(
            str(target), spec.step, session.control.rank, time.perf_counter() - started
        )


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
    """Fill ``state_dict`` in place from a Hugging Face checkpoint, written by any tool. Collective.

    Read-only. Every rank reads only the byte ranges of its own shards, in any sharding that its
    tensors have now: from one model.safetensors, from several with an index, or from the shards of
    torch's HuggingFaceStorageWriter. Headers are read once, by rank 0. A tied weight is found under
    any of its keys. After an error of reading, tensors are undefined.

    Args:
        state_dict: The tensors to fill, by key.
        uri: The checkpoint, the same on all ranks.
        strict: Missing and unexpected keys, and dtypes that differ, are refused before a byte is
            read; False skips them, names them in the result, or converts.
        verify: "read" compares every block that is read with its digest, if ckptfs wrote the files;
            "off" does not.
        process_group: The ranks that take part; None: the default group.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: "auto", "shared" or "node", as for ``ckptfs.save``.
        domain: A name in place of ``scope``, as for ``ckptfs.save``; None: by ``scope``.

    Returns:
        What was read, on this rank and on all, and the keys that were left out.

    Raises:
        NotFoundError: There is nothing.
        IncompleteCheckpointError: Not all of it is there.
        ManifestError: A header or index is impossible.
        IntegrityError: A file is cut short, or changed.
        StateError: Keys or dtypes do not fit, and ``strict`` is True.
        CollectiveError: Some ranks failed; every rank raises this same error.
    """
    started, checking = time.perf_counter(), Verify(verify)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        with reading_session(uri, control, place) as (session, target, name):
            found = locate_directory(session, name)
            layout: Layout = control.step(
                "read the headers",
                lambda: sorted(state_dict),
                lambda wanted: with_aliases(
                    read_layout(session.storage, found, checking),
                    {k for keys in wanted for k in keys},
                ),
            )
            planned = plan_load(state_dict, layout.metadata(), control, strict=strict)
            source = layout.source(
                source_of(session.storage, found, checking, control.rank, control.size)
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
) -> Iterator[tuple[RunSession, Uri]]:
    """Yield the session of a held run, or one for this call."""
    if run is not None:
        target = agree_uri(run.session.control, uri)
        run.check(target)
        yield run.session, target
        return
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        target = agree_uri(control, uri)
        with open_session(target.parent, control, place, write=True) as session:
            yield session, target
