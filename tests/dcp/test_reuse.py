"""unchanged="reference": what the last committed checkpoint holds costs no bytes, and stays whole."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.manifest import Manifest, decode_manifest
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    IncompleteCheckpointError,
    ManifestError,
    NotFoundError,
    StateError,
    UnsupportedError,
)
from ckptfs.storage.base import Shape
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, Plan, When
from ckptfs.uri import Uri
from tests.dcp.reuse_rig import Run, same, walk

_numbers = itertools.count()
FROZEN = {f"layer{n}": torch.randn(100, 500) for n in range(4)}
FROZEN_BYTES = sum(t.numel() * 4 for t in FROZEN.values())


def state(value: float, frozen: dict[str, torch.Tensor] = FROZEN) -> dict[str, Any]:
    """A frozen base and something small that is trained."""
    return {**frozen, "w": torch.full((1000,), float(value)), "step": int(value)}


def blank() -> dict[str, Any]:
    """The same with nothing in it."""
    return {
        **{k: torch.zeros_like(t) for k, t in FROZEN.items()},
        "w": torch.zeros(1000),
        "step": 0,
    }


def loaded(uri: str) -> dict[str, Any]:
    """What is at ``uri``."""
    found = blank()
    ckptfs.load(found, uri)
    return found


@pytest.fixture(params=["file", "object"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A run's URI and the query that goes behind a name in it: links, and keys."""
    if request.param == "file":
        yield f"{tmp_path}/run", ""
    else:
        yield f"memory://reuse{next(_numbers)}/run", "?shape=object"


def stored_bytes(run: str, query: str) -> int:
    """Bytes of all files of a run; of one inode once."""
    storage = open_storage(run + query)
    path = storage.local_path("")
    if path is None:
        return sum(storage.stat(key).size_bytes for key in walk(storage, ""))
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            seen = os.stat(os.path.join(folder, name))
            found[seen.st_ino] = seen.st_size
    return sum(found.values())


def manifest(run: str, query: str, name: str) -> Manifest:
    """The manifest of a projected checkpoint."""
    return decode_manifest(open_storage(run + query).read(f"{name}/ckptfs.json"), name)


def test_a_frozen_base_costs_nothing(place: tuple[str, str]) -> None:
    """Ten saves store the frozen part once, whatever counts: the writers, the inodes, the store."""
    run, query = place
    with ckptfs.prepare_run(run + query) as held:
        for step in range(1, 11):
            uri = f"{run}/step_{step}{query}"
            saved = ckptfs.save(state(step), uri, run=held, unchanged="reference")
            if step > 1:
                assert saved.total.size_bytes < 20_000
                assert FROZEN_BYTES < saved.total.referenced_bytes < FROZEN_BYTES + 20_000
    assert stored_bytes(run, query) < FROZEN_BYTES + 200_000
    for step in (1, 5, 10):
        assert same(loaded(f"{run}/step_{step}{query}"), state(step))


def test_without_being_asked_everything_is_written(place: tuple[str, str]) -> None:
    """The default writes what has not changed too: no file of one save is another's."""
    run, query = place
    with ckptfs.prepare_run(run + query) as held:
        for step in (1, 2):
            saved = ckptfs.save(state(step), f"{run}/step_{step}{query}", run=held)
            assert saved.total.referenced_bytes == 0
            assert not any(f.origin for f in manifest(run, query, f"step_{step}").files)
    assert stored_bytes(run, query) > 2 * FROZEN_BYTES


def test_n3_an_older_step_gets_that_steps_policy(place: tuple[str, str]) -> None:
    """A reference policy that is swapped later does not change what older steps load."""
    run, query = place
    other = {key: value + 1 for key, value in FROZEN.items()}
    with ckptfs.prepare_run(run + query) as held:
        for step, policy in ((1, FROZEN), (2, FROZEN), (3, other), (4, other)):
            uri = f"{run}/step_{step}{query}"
            ckptfs.save(state(step, policy), uri, run=held, unchanged="reference")
    for step, policy in ((1, FROZEN), (2, FROZEN), (3, other), (4, other)):
        assert same(loaded(f"{run}/step_{step}{query}"), state(step, policy))


def test_the_writer_of_the_bytes_is_told_and_never_a_chain(place: tuple[str, str]) -> None:
    """Manifest and log name the save that wrote the bytes, also of the third that uses them."""
    run, query = place
    with ckptfs.prepare_run(run + query) as held:
        saves = [
            ckptfs.save(state(n), f"{run}/step_{n}{query}", run=held, unchanged="reference")
            for n in (1, 2, 3)
        ]
    last = manifest(run, query, "step_3")
    assert last.references == ()
    assert {f.origin for f in last.files} <= {None, saves[0].save_id, saves[2].save_id}
    log = b"".join(open_storage(run + query).read_ahead([f".ckptfs/log/{n:08d}" for n in range(9)]))
    assert f'"origins":["{saves[0].save_id}"]'.encode() in log
    assert f'"origins":["{saves[1].save_id}"]'.encode() not in log


def test_it_needs_a_run_that_is_held(place: tuple[str, str]) -> None:
    """StateError before anything is written, and it says how."""
    run, query = place
    with pytest.raises(StateError, match="held") as caught:
        ckptfs.save(state(1), f"{run}/step_1{query}", unchanged="reference")
    assert "prepare_run" in str(caught.value)
    assert ckptfs.list_checkpoints(run + query) == []


def test_links_survive_replacing_deleting_and_moving_the_origin(tmp_path: Path) -> None:
    """The first step is replaced, the second removed by hand, the run moved: the third is whole."""
    run = f"{tmp_path}/run"
    with ckptfs.prepare_run(run) as held:
        for step in (1, 2, 3):
            ckptfs.save(state(step), f"{run}/step_{step}", run=held, unchanged="reference")
        ckptfs.save(blank(), f"{run}/step_1", run=held, if_exists="replace")
        shutil.rmtree(f"{run}/step_2")
    os.rename(run, f"{tmp_path}/moved")
    assert same(loaded(f"{tmp_path}/moved/step_3"), state(3))


def test_a_copied_step_is_whole_without_its_run(tmp_path: Path) -> None:
    """``cp -r`` of one step takes every byte along; stock torch opens the copy."""
    run = f"{tmp_path}/run"
    with ckptfs.prepare_run(run) as held:
        for step in (1, 2):
            ckptfs.save(state(step), f"{run}/step_{step}", run=held, unchanged="reference")
    shutil.copytree(f"{run}/step_2", f"{tmp_path}/elsewhere/mine")
    shutil.rmtree(run)
    assert same(loaded(f"{tmp_path}/elsewhere/mine"), state(2))
    found = {key: value for key, value in blank().items() if key != "step"}
    dcp.load(found, checkpoint_id=f"{tmp_path}/elsewhere/mine", no_dist=True)
    assert same(found, {key: value for key, value in state(2).items() if key != "step"})


def test_a_copied_prefix_names_what_it_lacks() -> None:
    """On an object store the shared bytes are outside the step: the error says which, and where."""
    run = Run(Shape.OBJECT)
    run.save("step_1", state(1))
    saved = run.save("step_2", state(2))
    for key in walk(run.plain, "step_2"):
        run.plain.replace(key.replace("step_2", "copied/mine"), run.plain.read(key))
    other = Run(Shape.OBJECT)
    for key in walk(run.plain, "step_2"):
        other.plain.replace(key, run.plain.read(key))
    with pytest.raises(IncompleteCheckpointError, match="_data") as caught:
        other.load("step_2", state(2))
    assert caught.value.uri is not None
    assert "/_data/" in str(caught.value.uri)
    for key in walk(run.plain, "_data"):
        other.plain.replace(key, run.plain.read(key))
    assert same(other.load("step_2", state(2)), state(2))
    assert saved.save_id
    run.bury()
    other.bury()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.ones(900), torch.ones(900).view(torch.int32)),
        (torch.ones(900), torch.ones(30, 30)),
        (torch.ones(30, 30), torch.ones(900)),
        (torch.ones(30, 30), torch.ones(45, 20)),
        (torch.ones(900), torch.ones(901)),
        (torch.ones(900), "no tensor"),
        ("an object", "an object!"),
        (torch.zeros(0), torch.zeros(0, 3)),
    ],
)
def test_what_only_looks_alike_is_written(tmp_path: Path, old: Any, new: Any) -> None:
    """The same bytes of another dtype, shape or kind are another item, for stock readers above all,
    who read what was written and not what it is called.
    """
    run = Run(Shape.FILESYSTEM, storage=LocalStorage(Uri.parse(tmp_path / "run")))
    run.save("step_1", {"x": old, "kept": torch.ones(10)})
    wanted = {"x": new, "kept": torch.ones(10)}
    run.save("step_2", wanted)
    assert same(run.load("step_2", wanted), wanted)
    found = {k: torch.zeros_like(v) for k, v in wanted.items() if isinstance(v, torch.Tensor)}
    dcp.load(found, checkpoint_id=f"{tmp_path}/run/step_2", no_dist=True)
    assert same(found, {key: wanted[key] for key in found}), "stock"
    run.bury()


@pytest.mark.parametrize("at", [0, 262_143, 262_144, 700_000, 786_431])
def test_one_changed_element_is_seen_in_whichever_block(at: int) -> None:
    """Of a tensor of three blocks a single element differs, at the edges of blocks too."""
    run = Run(Shape.OBJECT)
    tensor = torch.zeros(786_432)
    run.save("step_1", {"x": tensor})
    assert run.save("step_2", {"x": tensor}).total.referenced_bytes > 3 << 20
    tensor[at] = 1
    assert run.save("step_3", {"x": tensor}).total.referenced_bytes == 0
    assert run.load("step_3", {"x": tensor})["x"][at] == 1
    assert run.load("step_2", {"x": tensor})["x"][at] == 0
    run.bury()


def test_views_and_strides_are_compared_by_their_values() -> None:
    """A transposed view, a slice of a larger storage and a conjugate are what they show."""
    whole = torch.arange(2000.0).reshape(40, 50)
    views = {"t": whole.t(), "s": whole[3:20, 4:], "c": torch.complex(whole, whole).conj()}
    run = Run(Shape.FILESYSTEM)
    run.save("step_1", views)
    again = {
        "t": whole.t().contiguous(),
        "s": whole[3:20, 4:].clone(),
        "c": views["c"].resolve_conj(),
    }
    assert run.save("step_2", again).total.size_bytes == 0
    whole += 1
    assert run.save("step_3", views).total.referenced_bytes < 20_000
    run.bury()


@pytest.mark.parametrize("shape", list(Shape))
def test_another_process_goes_on_where_the_last_one_ended(shape: Shape) -> None:
    """What the process does not remember it reads from the base, and takes over the same."""
    run = Run(shape)
    run.save("step_1", state(1))
    remembered = run.save("step_2", state(2)).total
    run.restart()
    read = run.save("step_3", state(3)).total
    assert (read.size_bytes, read.referenced_bytes) == (
        remembered.size_bytes,
        remembered.referenced_bytes,
    )
    run.bury()


@pytest.mark.parametrize(
    "lost", ["ckptfs.json", ".metadata", "__0_0.xxh3", "__0_1.distcp", "__0_1.xxh3"]
)
@pytest.mark.parametrize("damage", ["removed", "changed"])
@pytest.mark.parametrize("shape", list(Shape))
def test_a_base_that_is_damaged_costs_bytes_and_not_the_save(
    shape: Shape, lost: str, damage: str
) -> None:
    """A file of it is missing or changed: the next save is whole all the same. (What is changed in a
    data file itself is found by the digests, when it is read.)
    """
    run = Run(shape)
    base = run.save("step_1", state(1))
    run.restart()
    for key in walk(run.plain, ""):
        if key.endswith(f"{base.save_id}/{lost}"):
            data = run.plain.read(key)
            if damage == "removed":
                run.plain.remove(key)
            elif not lost.endswith(".distcp"):
                run.plain.replace(key, data[:-9])
    run.save("step_2", state(2))
    assert same(run.load("step_2", state(2)), state(2))
    run.bury()


def test_each_kind_builds_on_its_own() -> None:
    """Weights-only saves among full ones reference the last of their own kind."""
    run = Run(Shape.OBJECT)
    one = run.save("step_1", state(1)).save_id
    first = run.save("weights_1", FROZEN, Kind.WEIGHTS).total
    again = run.save("weights_2", FROZEN, Kind.WEIGHTS).total
    full = run.save("step_2", state(2)).total
    assert run.seal("step_2").origins == (one,)
    assert (first.referenced_bytes, again.size_bytes) == (0, 0)
    assert again.referenced_bytes > FROZEN_BYTES
    assert full.referenced_bytes > FROZEN_BYTES
    run.bury()


def test_a_rooted_path_that_the_manifest_does_not_list_is_refused() -> None:
    """``.metadata`` may name shared files of this run, by whatever root; nothing else."""
    run = Run(Shape.OBJECT)
    run.save("step_1", state(1))
    saved = run.save("step_2", state(2))
    data = run.plain.read("step_2/.metadata")
    listed = {f.path for f in decode_manifest(run.plain.read("step_2/ckptfs.json"), "x").files}
    found = decode_metadata(data, "here", listed)
    assert {info.relative_path for info in found.storage_data.values()} <= listed
    for known in ((), listed - {f"{saved.save_id}/__0_0.distcp"}):
        with pytest.raises(ManifestError, match="leaves the checkpoint"):
            decode_metadata(data, "here", known)
    run.bury()


def test_a_faulty_link_means_that_the_bytes_are_written() -> None:
    """Whatever a link answers, the save is whole and nothing of the base is touched."""
    errors: list[CkptfsError] = [
        UnsupportedError("no links"),
        AccessError("not permitted"),
        NotFoundError("gone"),
        AnswerLostError("lost"),
    ]
    for error, nth in itertools.product(errors, (1, 2, 3, 4)):
        run = Run(Shape.FILESYSTEM)
        run.save("step_1", state(1))
        files = [e.name for e in run.plain.list("step_1") if e.is_dir]
        assert len([*run.plain.list(f"step_1/{files[0]}")]) > 2 * 4, "several files to link"
        run.restart(Plan([Fault("link", "*", nth, Fail(error, When.BEFORE))]))
        run.save("step_2", state(2))
        assert same(run.load("step_2", state(2)), state(2))
        assert same(run.load("step_1", state(1)), state(1))
        run.bury()


def test_a_save_that_failed_is_not_built_on() -> None:
    """What this process wrote last is believed only where the log calls it the last committed."""
    run, other = Run(Shape.OBJECT), {key: value + 1 for key, value in FROZEN.items()}
    run.save("step_1", state(1))
    run.restart(Plan([Fault("create", "*/log/*", 2, Fail(AccessError("full"), When.BEFORE))]))
    with pytest.raises(CkptfsError):
        run.save("step_2", other)
    known = run.options.memory.known
    (failed,) = [save_id for save_id in known if save_id != run.seal("step_1").save_id]
    # As if its bytes were still there: in doubt, they might be, until the next owner removes them.
    for path, file in known[failed].files.items():
        run.plain.replace(f"_data/{path}", bytes(file.record.size_bytes))
    assert run.save("step_3", other).total.referenced_bytes == 0
    run.bury()


def test_the_place_of_shared_files_is_no_name_of_a_checkpoint(tmp_path: Path) -> None:
    """``_data`` is the run's own, like ``.ckptfs``."""
    with pytest.raises(CkptfsError, match="belongs to the run itself"):
        ckptfs.save(state(1), f"{tmp_path}/run/_data")
