"""The public API as one process meets it: by URI, on a filesystem and on an object store.

    save load latest list_checkpoints     prepare_run     checkpoint_dir     save_object load_object

Everything here goes through ``import ckptfs`` and real storages; what several ranks do is in
``tests/multiprocess/test_api_save.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint
from ckptfs.commit.log.advisory_log import ADVICE
from ckptfs.commit.manifest import digest_of
from ckptfs.commit.parts.tickets import begin_parts
from ckptfs.commit.save.spec import IfExists
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

_numbers = itertools.count()


def state(value: float) -> dict[str, Any]:
    """A small state with ``value`` in every leaf."""
    return {
        "model": {"w": torch.full((300, 7), float(value)), "b": torch.arange(5) + int(value)},
        "step": int(value),
    }


def loaded(uri: Any, **options: Any) -> float:
    """The one value that the whole state at ``uri`` has."""
    got = state(-1.0)
    ckptfs.load(got, uri, **options)
    value = float(got["step"])
    assert torch.equal(got["model"]["w"], torch.full((300, 7), float(value))), "a mix of states"
    assert torch.equal(got["model"]["b"], torch.arange(5) + int(value)), "a mix of states"
    return value


def names(run: Any) -> list[str]:
    """The names of a run's checkpoints, oldest first."""
    return [c.uri.name for c in ckptfs.list_checkpoints(run)]


def latest_name(run: Any) -> str:
    """The name of the latest checkpoint, "" for none."""
    found = ckptfs.latest(run)
    return "" if found is None else found.uri.name


@dataclass(frozen=True)
class Place:
    """A run: called with a name, the URI of what is there."""

    root: str
    query: str = ""

    def __call__(self, name: str = "") -> str:
        return f"{self.root}/{name}".rstrip("/") + self.query


@pytest.fixture(params=["file", "filesystem", "object"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a run is: a directory, and memory stores of both shapes."""
    if request.param == "file":
        return Place(f"{tmp_path}/run")
    return Place(f"memory://api{next(_numbers)}/run", f"?shape={request.param}")


# -- save and load -------------------------------------------------------------------------------


def test_save_load_and_replace(run: Place) -> None:
    """What was saved comes back; "replace" puts the new state in its place, and only that name's."""
    ckptfs.save(state(1), run("step_1"))
    ckptfs.save(state(2), run("step_2"))
    result = ckptfs.save(state(3), run("step_1"), if_exists="replace")
    assert [loaded(run("step_1")), loaded(run("step_2"))] == [3.0, 2.0]
    assert names(run("")) == ["step_2", "step_1"]
    assert ckptfs.latest(run("")).save_id == result.save_id  # type: ignore[union-attr]


def test_a_committed_name_is_refused_unless_replacing_is_asked(run: Place) -> None:
    """if_exists="error", the default, is CommitConflictError that says both ways out."""
    ckptfs.save(state(1), run("step_1"))
    with pytest.raises(ckptfs.CommitConflictError, match='if_exists="replace"') as caught:
        ckptfs.save(state(2), run("step_1"))
    assert (caught.value.uri or "").partition("?")[0].endswith("/run/step_1")
    assert loaded(run("step_1")) == 1.0


def test_results_tell_bytes_files_seconds_and_speed(tmp_path: Path) -> None:
    """The counters are the bytes on the disk, and nothing is left out of them."""
    saved = ckptfs.save(state(1), tmp_path / "run" / "step_1", threads=2)
    data = [*(tmp_path / "run" / "step_1" / saved.save_id).glob("__*")]
    assert saved.total.size_bytes == sum(file.stat().st_size for file in data)
    assert saved.total.files == len(data) == 4  # two threads: two data files, two sidecars
    assert saved.total.payload_bytes >= 300 * 7 * 4 + 5 * 8
    assert saved.total.items == 3
    assert (saved.per_rank, saved.total) == ((saved.mine,), saved.mine)
    assert (saved.step, saved.uri) == (1, f"file://{tmp_path}/run/step_1")
    got = ckptfs.load(state(0), tmp_path / "run" / "step_1")
    assert (got.step, got.save_id, got.verified) == (1, saved.save_id, True)
    assert got.total.payload_bytes == saved.total.payload_bytes
    for counters in (saved.total, got.total):
        assert counters.data_s > 0
        assert counters.mib_per_s == pytest.approx(counters.size_bytes / 2**20 / counters.data_s)
        assert counters.as_dict()["mib_per_s"] == counters.mib_per_s
    assert saved.wall_s >= saved.total.commit_s > 0


@pytest.mark.parametrize(
    ("name", "told", "step"),
    [
        ("step_100", None, 100),
        ("ckpt-0007", None, 7),
        ("42", None, 42),
        ("final", None, None),
        ("step_100_backup", None, None),
        ("step_100", 5, 5),
        ("final", 9, 9),
    ],
)
def test_the_step_is_told_or_ends_the_name(
    tmp_path: Path, name: str, told: int | None, step: int | None
) -> None:
    """The number that ends the name, unless the caller says it; the name is kept as it is."""
    assert ckptfs.save({"x": 1}, tmp_path / name, step=told).step == step
    [found] = ckptfs.list_checkpoints(tmp_path)
    assert (found.uri.name, found.step) == (name, step)
    assert ckptfs.load({"x": 0}, tmp_path / name).step == step


def test_a_negative_step_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """StateError, and not even the run's directory is there."""
    with pytest.raises(ckptfs.StateError, match="-1"):
        ckptfs.save({"x": 1}, tmp_path / "run" / "final", step=-1)
    assert names(tmp_path / "run") == []


# -- the catalog ---------------------------------------------------------------------------------


def test_latest_is_the_last_commit_and_not_the_largest_step(run: Place) -> None:
    """Restored at 50 and trained again to 70, the run continues at 70, not at 100."""
    for step in (50, 100):
        ckptfs.save(state(step), run(f"step_{step}"))
    assert latest_name(run("")) == "step_100"
    with ckptfs.prepare_run(run("")) as held:
        ckptfs.save(state(70), run("step_70"), run=held)
    assert latest_name(run("")) == "step_70"
    assert names(run("")) == ["step_50", "step_100", "step_70"]


def test_a_missing_run_has_no_checkpoints_and_is_not_made(run: Place) -> None:
    """Looking writes nothing."""
    assert ckptfs.list_checkpoints(run("")) == []
    assert ckptfs.latest(run("")) is None
    if "://" not in run(""):
        assert not os.path.exists(run(""))


def test_loading_what_is_not_there_names_it_and_says_where_to_look(
    run: Place,
) -> None:
    """NotFoundError with the URI and a hint, in a run that exists and in one that does not."""
    for _ in range(2):
        with pytest.raises(ckptfs.NotFoundError, match="list_checkpoints") as caught:
            loaded(run("step_9"))
        assert "/run/step_9" in str(caught.value.uri)
        ckptfs.save(state(1), run("step_1"), if_exists="replace")


# -- a held run ----------------------------------------------------------------------------------


def test_a_run_is_good_for_its_own_checkpoints_only(run: Place) -> None:
    """A checkpoint of another run, one deeper, or a run that was released: StateError, no bytes."""
    held = ckptfs.prepare_run(run(""))
    for elsewhere in (run("deeper/step_1"), run("").replace("/run", "/other/step_1")):
        with pytest.raises(ckptfs.StateError, match="not directly in the run"):
            ckptfs.save(state(1), elsewhere, run=held)
        with (
            pytest.raises(ckptfs.StateError, match="not directly in the run"),
            ckptfs.checkpoint_dir(elsewhere, run=held),
        ):
            pass
    held.release()
    held.release()  # harmless twice
    with pytest.raises(ckptfs.StateError, match="released"):
        ckptfs.save(state(1), run("step_1"), run=held)
    assert names(run("")) == []


def test_an_older_owner_is_fenced_by_the_next(run: Place) -> None:
    """After a takeover the old Run cannot save, replace or make a directory; the new one can."""
    old = ckptfs.prepare_run(run(""))
    ckptfs.save(state(1), run("step_1"), run=old)
    with ckptfs.prepare_run(run(""), takeover="force") as new:
        with pytest.raises(ckptfs.FencedError, match="taken over"):
            ckptfs.save(state(2), run("step_2"), run=old)
        with pytest.raises(ckptfs.FencedError):
            ckptfs.save(state(2), run("step_1"), run=old, if_exists="replace")
        ckptfs.save(state(3), run("step_3"), run=new)
    old.release()  # late: takes nothing from anybody
    assert names(run("")) == ["step_1", "step_3"]
    assert loaded(run("step_1")) == 1.0


def test_mode_fail_refuses_a_run_that_has_checkpoints(run: Place) -> None:
    """An empty run is taken; one with a checkpoint is CommitConflictError that says how many."""
    ckptfs.prepare_run(run(""), mode="fail").release()
    ckptfs.save(state(1), run("step_1"))
    with pytest.raises(ckptfs.CommitConflictError, match="1 checkpoints; the last is step_1"):
        ckptfs.prepare_run(run(""), mode="fail")


def test_overwrite_hides_and_without_a_commit_all_comes_back(run: Place) -> None:
    """Overwriting moves nothing: until the first commit the next owner finds all that was there."""
    ckptfs.save(state(1), run("step_1"))
    ckptfs.save(state(2), run("step_2"))
    with ckptfs.prepare_run(run(""), mode="overwrite"):
        assert (names(run("")), ckptfs.latest(run(""))) == ([], None)
        with pytest.raises(ckptfs.NotFoundError):
            loaded(run("step_2"))
    with ckptfs.prepare_run(run("")):
        assert names(run("")) == ["step_1", "step_2"]
        assert [loaded(run("step_1")), loaded(run("step_2"))] == [1.0, 2.0]


def test_overwritten_checkpoints_go_after_the_first_commit(run: Place) -> None:
    """The first commit under "overwrite" deletes them for good, same names and others."""
    ckptfs.save(state(1), run("step_1"))
    ckptfs.save(state(2), run("step_2"))
    with ckptfs.prepare_run(run(""), mode="overwrite") as held:
        ckptfs.save(state(3), run("step_1"), run=held)
        assert names(run("")) == ["step_1"]
    with ckptfs.prepare_run(run("")):
        assert names(run("")) == ["step_1"]
    assert loaded(run("step_1")) == 3.0
    storage = open_storage(run(""))
    left = {entry.name for entry in storage.list("") if entry.is_dir}
    storage.close()
    assert left == {".ckptfs", "step_1"}


# -- checkpoint_dir ------------------------------------------------------------------------------


def files_of(run: Place, name: str) -> dict[str, bytes]:
    """Every file below a checkpoint by its path, the manifest and what is under save ids aside."""
    storage = open_storage(run(""))

    def walk(key: str) -> Iterator[str]:
        for entry in storage.list(key):
            yield from walk(f"{key}/{entry.name}") if entry.is_dir else [f"{key}/{entry.name}"]

    try:
        [found] = [c for c in ckptfs.list_checkpoints(run("")) if c.uri.name == name]
        paths = [key.removeprefix(f"{name}/") for key in walk(name)]
        plain = [p for p in paths if not p.startswith(f"{found.save_id}/") and p != "ckptfs.json"]
        return {path: storage.read(f"{name}/{path}") for path in plain}
    finally:
        storage.close()


def test_files_of_a_directory_are_committed_together(run: Place) -> None:
    """Plain files and nested directories keep their names; before the end nothing is visible."""
    with ckptfs.checkpoint_dir(run("epoch_3")) as path:
        Path(path, "config.json").write_text("{}")
        Path(path, "weights", "deep").mkdir(parents=True)
        Path(path, "weights", "deep", "part.bin").write_bytes(b"x" * 100_000)
        assert names(run("")) == []
    [found] = ckptfs.list_checkpoints(run(""))
    assert (found.uri.name, found.step, found.kind) == ("epoch_3", 3, "directory")
    assert files_of(run, "epoch_3") == {
        "config.json": b"{}",
        "weights/deep/part.bin": b"x" * 100_000,
    }
    assert ckptfs.latest(run("")) is None, "latest is for what load() loads"


def test_an_exception_inside_commits_nothing_and_leaves_nothing(run: Place) -> None:
    """The block's own exception comes out, the attempt's bytes are gone, the name is free."""
    paths = []

    def leave() -> None:
        with ckptfs.checkpoint_dir(run("d_1")) as path:
            paths.append(path)
            Path(path, "half").write_bytes(b"half")
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        leave()
    assert names(run("")) == []
    assert not os.path.exists(paths[0])
    storage = open_storage(run(""))
    assert [e.name for e in storage.list("") if e.is_dir] == [".ckptfs"]
    assert storage.list(".ckptfs/attempts") == []
    storage.close()
    with ckptfs.checkpoint_dir(run("d_1")) as path:
        Path(path, "whole").write_bytes(b"whole")
    assert files_of(run, "d_1") == {"whole": b"whole"}


def test_a_directory_without_files_is_refused(run: Place) -> None:
    """No writer used it: IncompleteCheckpointError, so a path that was ignored is noticed."""
    with (
        pytest.raises(ckptfs.IncompleteCheckpointError, match="no rank wrote"),
        ckptfs.checkpoint_dir(run("d_1")),
    ):
        pass
    assert names(run("")) == []


def test_a_directory_never_replaces_what_is_committed(run: Place) -> None:
    """A checkpoint and a directory of that name are both refused before the block is entered."""
    ckptfs.save(state(1), run("step_1"))
    with ckptfs.checkpoint_dir(run("d_2")) as path:
        Path(path, "a").write_bytes(b"a")
    for name in ("step_1", "d_2"):
        with (
            pytest.raises(ckptfs.CommitConflictError),
            ckptfs.checkpoint_dir(run(name)),
        ):
            pytest.fail("the block was entered")
    assert loaded(run("step_1")) == 1.0
    assert files_of(run, "d_2") == {"a": b"a"}


def test_a_directory_of_an_overwritten_run_has_its_own_files_only(run: Place) -> None:
    """Under "overwrite" a directory's name is free once the old one went, and never mixes both."""
    for content in (b"old", b"new"):
        with ckptfs.prepare_run(run(""), mode="overwrite") as held:
            if content == b"new":
                with (
                    pytest.raises(ckptfs.CommitConflictError, match="still has"),
                    ckptfs.checkpoint_dir(run("d_1"), run=held),
                ):
                    pytest.fail("the block was entered")
            ckptfs.save(state(1), run("step_1"), run=held)
            with ckptfs.checkpoint_dir(run("d_1"), run=held) as path:
                Path(path, "only-" + content.decode()).write_bytes(content)
    ckptfs.prepare_run(run("")).release()
    assert files_of(run, "d_1") == {"only-new": b"new"}


# -- objects -------------------------------------------------------------------------------------


class Own:
    """A class that torch.load does not make by default."""

    value = 5


def test_objects_come_back_replaced_in_one_step(run: Place) -> None:
    """The later object is there, its parents were made, and no temporary file is left."""
    where = run("objects/stats.pt")
    for number in (1, 2):
        uri = ckptfs.save_object({"mean": torch.full((3,), float(number)), "n": number}, where)
    got = ckptfs.load_object(uri)
    assert (got["n"], got["mean"].tolist()) == (2, [2.0] * 3)
    storage = open_storage(uri.parent)
    assert [entry.name for entry in storage.list("")] == ["stats.pt"]
    storage.close()


def test_an_object_of_an_own_class_needs_trust(run: Place) -> None:
    """Unpickling can run code: refused with the words that allow it, loaded when they are said."""
    ckptfs.save_object(Own(), run("own.pt"))
    with pytest.raises(ckptfs.IntegrityError, match="trusted=True"):
        ckptfs.load_object(run("own.pt"))
    assert ckptfs.load_object(run("own.pt"), trusted=True).value == 5


def test_missing_and_cut_objects_are_typed(tmp_path: Path) -> None:
    """NotFoundError and IntegrityError, both with the URI."""
    with pytest.raises(ckptfs.NotFoundError, match=r"none\.pt"):
        ckptfs.load_object(tmp_path / "none.pt")
    ckptfs.save_object(torch.zeros(1000), tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 900)
    with pytest.raises(ckptfs.IntegrityError, match=r"cut\.pt"):
        ckptfs.load_object(tmp_path / "cut.pt")


def test_an_object_in_a_step_outlives_its_commit_and_replacement(run: Place) -> None:
    """Put there before the step is saved, or after, it stays when the step is replaced."""
    ckptfs.save_object("early", run("step_1/early.pt"))
    ckptfs.save(state(1), run("step_1"))
    ckptfs.save_object("late", run("step_1/late.pt"))
    ckptfs.save(state(2), run("step_1"), if_exists="replace")
    ckptfs.prepare_run(run("")).release()
    assert [ckptfs.load_object(run(f"step_1/{n}.pt")) for n in ("early", "late")] == [
        "early",
        "late",
    ]
    assert loaded(run("step_1")) == 2.0


# -- space ---------------------------------------------------------------------------------------

TIGHT = """
from ckptfs.storage.base import Space
from ckptfs.storage.local import LocalStorage

class Tight(LocalStorage):
    def space(self):
        return Space(*SPACE)

def open_tight(uri, storage_options):
    return Tight(uri.with_protocol("file"))

SPACE = (None, None)
"""


@pytest.fixture
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A third party's backend, installed for real: a disk that says how little is free."""
    site = tmp_path / "site"
    (site / "tight-1.dist-info").mkdir(parents=True)
    (site / "tight-1.dist-info" / "METADATA").write_text("Name: tight\nVersion: 1\n")
    (site / "tight-1.dist-info" / "entry_points.txt").write_text(
        "[ckptfs.backends]\ntight = tight_disk:open_tight\n"
    )
    (site / "tight_disk.py").write_text(TIGHT)
    monkeypatch.syspath_prepend(site)

    def make(free_bytes: int | None, free_inodes: int | None) -> str:
        import tight_disk  # type: ignore[import-not-found]

        monkeypatch.setattr(tight_disk, "SPACE", (free_bytes, free_inodes))
        return f"tight://{tmp_path}/run/step_1"

    return make


@pytest.mark.parametrize(
    ("free_bytes", "free_inodes", "told"),
    [(8000, None, "8000 free"), (None, 3, "3 inodes free"), (0, 0, "0 free")],
)
def test_too_little_space_is_told_before_a_byte_is_written(
    tight: Callable[..., str],
    tmp_path: Path,
    free_bytes: int | None,
    free_inodes: int | None,
    told: str,
) -> None:
    """require_space=True: NoSpaceError, no attempt, the next save works. Otherwise a warning."""
    uri = tight(free_bytes, free_inodes)
    with pytest.raises(ckptfs.NoSpaceError, match=told) as caught:
        ckptfs.save(state(1), uri, require_space=True)
    assert "require_space=False" in str(caught.value)
    assert not list((tmp_path / "run").rglob("*.distcp"))
    assert not (tmp_path / "run" / ".ckptfs" / "attempts").exists() or not os.listdir(
        tmp_path / "run" / ".ckptfs" / "attempts"
    )
    assert any(told in text for text in ckptfs.save(state(1), uri).warnings)
    assert loaded(uri) == 1.0


def test_enough_or_unknown_space_says_nothing(tight: Callable[..., str]) -> None:
    """No warning where it fits, nor where the storage cannot tell."""
    assert ckptfs.save(state(1), tight(10**9, 10**6), require_space=True).warnings == ()
    uri = tight(None, None)
    assert ckptfs.save(state(2), uri, if_exists="replace", require_space=True).warnings == ()


# -- a store where no one can win ----------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def advisory(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A run on a store without an exclusive create."""
    if request.param == "file":
        return Place(f"fsspec+file://{tmp_path}/run")
    return Place(f"fsspec+memory://advisory{next(_numbers)}/run")


def test_without_exclusive_create_saves_work_and_say_what_is_lost(
    advisory: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Every result and its log line warn that fences are advice; load, list, replace, order hold."""
    for step in (100, 50):
        assert ADVICE in ckptfs.save(state(step), advisory(f"step_{step}")).warnings
        assert f"step_{step} is committed; {ADVICE}" in caplog.text
    assert (names(advisory("")), latest_name(advisory(""))) == (["step_100", "step_50"], "step_50")
    with pytest.raises(ckptfs.CommitConflictError):
        ckptfs.save(state(1), advisory("step_50"))
    with ckptfs.prepare_run(advisory("")) as held:
        ckptfs.save(state(7), advisory("step_100"), run=held, if_exists="replace")
    assert names(advisory("")) == ["step_50", "step_100"]
    assert [loaded(advisory("step_50")), loaded(advisory("step_100"))] == [50.0, 7.0]


# -- bad input -----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with step_1 and step_2."""
    for step in (1, 2):
        ckptfs.save(state(step), tmp_path / "run" / f"step_{step}")
    return tmp_path / "run"


def inner(step: Path) -> Path:
    """The directory with a step's data."""
    [directory] = [path for path in step.iterdir() if path.is_dir()]
    return directory


def rewrite(file: Path, **fields: Any) -> None:
    """Change fields of a manifest."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def first_file(file: Path, **fields: Any) -> None:
    """Change fields of the first file that a manifest lists."""
    files = json.loads(file.read_text())["files"]
    rewrite(file, files=[{**files[0], **fields}, *files[1:]])


MANIFESTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("future", lambda m: rewrite(m, min_reader_version=99), "upgrade ckptfs"),
    ("foreign", lambda m: m.write_text('{"model": "gpt"}'), "another tool"),
    ("no JSON", lambda m: m.write_bytes(b"\x80\x02not json"), "another tool"),
    ("a list", lambda m: m.write_text("[1, 2]"), "another tool"),
    ("up", lambda m: first_file(m, path="../step_1/x"), "leaves the checkpoint"),
    ("absolute", lambda m: first_file(m, path="/etc/passwd"), "leaves the checkpoint"),
    ("name", lambda m: rewrite(m, name="../../elsewhere"), "leaves|component"),
]


@pytest.mark.parametrize(("_", "spoil", "told"), MANIFESTS, ids=[m[0] for m in MANIFESTS])
def test_a_copied_manifest_is_judged_before_anything_is_opened(
    saved: Path, tmp_path: Path, _: str, spoil: Callable[[Path], object], told: str
) -> None:
    """In a copy, which no log vouches for: ManifestError with URI and advice; tensors untouched."""
    copy = tmp_path / "copies" / "mine_7"
    shutil.copytree(saved / "step_2", copy)
    spoil(copy / "ckptfs.json")
    got = state(-1)
    with pytest.raises((ckptfs.ManifestError, ckptfs.CollectiveError), match=told) as caught:
        ckptfs.load(got, copy)
    assert "copies/mine_7" in str(caught.value)
    assert torch.equal(got["model"]["w"], state(-1)["model"]["w"])
    assert names(tmp_path / "copies") == [], "what cannot be loaded is not listed"
    assert loaded(saved / "step_2") == 2.0


def test_a_manifest_changed_after_the_commit_is_noticed(saved: Path) -> None:
    """The log has its digest: IntegrityError, even where the change would be harmless by itself."""
    rewrite(inner(saved / "step_2") / "ckptfs.json", created_at="yesterday")
    with pytest.raises((ckptfs.IntegrityError, ckptfs.CollectiveError), match="sealed") as caught:
        loaded(saved / "step_2")
    assert "step_2" in str(caught.value)
    assert loaded(saved / "step_1") == 1.0


@pytest.mark.parametrize("how", ["noise", "cut", "empty", "gone", "another save's"])
def test_damaged_metadata_is_named(saved: Path, how: str) -> None:
    """Changed, cut, emptied or removed after the commit: a typed error that names the file."""
    file = inner(saved / "step_2") / ".metadata"
    raw = file.read_bytes()
    file.unlink()
    other = (inner(saved / "step_1") / ".metadata").read_bytes()
    if how != "gone":
        changed = {"noise": b"\x00" * len(raw), "cut": raw[:-9], "empty": b""}
        file.write_bytes(changed.get(how, other))
    with pytest.raises(ckptfs.CkptfsError, match=r"step_2/.*\.metadata") as caught:
        loaded(saved / "step_2")
    assert how == "gone" or "IntegrityError" in str(caught.value)
    assert loaded(saved / "step_1") == 1.0


@pytest.mark.parametrize("how", ["noise", "cut", "empty"])
def test_damaged_metadata_of_a_stock_checkpoint_is_a_manifest_error(
    saved: Path, tmp_path: Path, how: str
) -> None:
    """No digest helps: what cannot be decoded is said to be no DCP metadata, with its URI."""
    copy = tmp_path / "stock" / "step_2"
    shutil.copytree(saved / "step_2", copy)
    (copy / "ckptfs.json").unlink()
    raw = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes({"noise": b"\x00" * 99, "cut": raw[:-9], "empty": b""}[how])
    with pytest.raises(ckptfs.CkptfsError, match=r"stock/step_2/\.metadata") as caught:
        loaded(copy)
    assert "ManifestError" in f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("how", ["gone", "cut", "bit"])
def test_a_damaged_shard_is_named(saved: Path, how: str) -> None:
    """Missing, truncated or with a flipped bit: the file and the rank are in the error."""
    [data] = inner(saved / "step_2").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    data.unlink()
    if how == "cut":
        data.write_bytes(raw[:-100])
    if how == "bit":
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    with pytest.raises(ckptfs.CkptfsError, match=rf"{data.name}.*rank 0|rank 0.*{data.name}"):
        loaded(saved / "step_2")
    assert loaded(saved / "step_1") == 1.0


@pytest.mark.parametrize("what", ["run", "step", "data"])
def test_a_vanished_directory_is_named(saved: Path, what: str) -> None:
    """The run, the step or the step's data removed by hand: typed, with the URI and advice."""
    step = saved / "step_2"
    shutil.rmtree({"run": saved, "step": step, "data": inner(step)}[what])
    kind: type[ckptfs.CkptfsError] = (
        ckptfs.NotFoundError if what == "run" else ckptfs.IncompleteCheckpointError
    )
    with pytest.raises(kind, match="step_2") as caught:
        loaded(step)
    assert caught.value.hint
    if what != "run":
        assert loaded(saved / "step_1") == 1.0


def test_a_run_that_vanishes_under_its_owner_is_an_error_and_no_new_run(saved: Path) -> None:
    """Removed while it is held: the save fails with a typed error instead of committing nowhere."""
    held = ckptfs.prepare_run(saved)
    shutil.rmtree(saved)
    with pytest.raises(ckptfs.FencedError, match="the claimed run is gone"):
        ckptfs.save(state(3), saved / "step_3", run=held)
    held.release()
    assert names(saved) == []


def test_digests_of_the_manifest_are_over_its_bytes(saved: Path) -> None:
    """The control of the tests above: untouched, the projected manifest is the sealed one."""
    step = saved / "step_2"
    outer, sealed = (step / "ckptfs.json").read_bytes(), inner(step) / "ckptfs.json"
    assert digest_of(outer) == digest_of(sealed.read_bytes())


# -- checkpoints of several parts ------------------------------------------------------------------


def _parts(held: Any, name: str, value: float, **how: Any) -> Any:
    ticket = begin_parts(held, name, None, ["actor", "driver"], **how)
    return ticket, [ckptfs.save(state(value), ticket.part(p)) for p in ("actor", "driver")]


def test_parts_of_a_checkpoint_are_committed_together(run: Place) -> None:
    """Until the ticket's commit nothing is there; then every part loads from below the checkpoint,
    by us and, where it is a directory, by stock torch.
    """
    with ckptfs.prepare_run(run()) as held:
        ticket, sealed = _parts(held, "step_7", 1)
        assert names(run()) == []
        with pytest.raises(ckptfs.NotFoundError):
            loaded(run("step_7/actor"))
        decision = ticket.commit(sealed)
    (found,) = ckptfs.list_checkpoints(run())
    assert (found.uri.name, found.parts) == ("step_7", ("actor", "driver"))
    assert [loaded(uri) for uri in decision.parts.values()] == [1, 1]
    assert loaded(run("step_7/actor")) == 1
    with pytest.raises(ckptfs.StateError, match="consists of parts"):
        loaded(run("step_7"))
    with pytest.raises(ckptfs.NotFoundError, match="no part critic"):
        loaded(run("step_7/critic"))
    if "://" not in run():
        got = state(-1)
        torch.distributed.checkpoint.load(got, checkpoint_id=run("step_7/actor"), no_dist=True)
        assert torch.equal(got["model"]["w"], torch.full((300, 7), 1.0))


def test_parts_are_replaced_and_given_up_together(run: Place) -> None:
    """The old parts load until the new ones are committed; what a dead driver left is nowhere."""
    with ckptfs.prepare_run(run()) as held:
        ticket, sealed = _parts(held, "step_1", 1)
        ticket.commit(sealed)
        ticket, sealed = _parts(held, "step_1", 2, if_exists=IfExists.REPLACE)
        assert loaded(run("step_1/actor")) == 1
        ticket.commit(sealed)
        assert loaded(run("step_1/actor")) == 2
        _parts(held, "step_2", 3)  # never committed
        ticket, sealed = _parts(held, "step_3", 4)
        ticket.abandon()
    with ckptfs.prepare_run(run()):
        assert names(run()) == ["step_1"]
        for name in ("step_2", "step_3"):
            with pytest.raises(ckptfs.NotFoundError):
                loaded(run(f"{name}/actor"))
    storage = open_storage(run())
    assert [e.name for e in storage.list("") if e.name.startswith("step")] == ["step_1"]
    storage.close()


def test_a_copy_beside_the_log_of_its_own_run_is_a_checkpoint(tmp_path: Path) -> None:
    """``cp -r run/step_100 run/best`` loads and is listed, while step_100 lives and after it went; what
    was deleted under its own name is not believed all the same.
    """
    run = tmp_path / "run"
    ckptfs.save(state(1), run / "step_100")
    shutil.copytree(run / "step_100", run / "best")
    shutil.copytree(run / "step_100", tmp_path / "kept")
    found = state(0)
    ckptfs.load(found, run / "best")
    assert torch.equal(found["model"]["w"], state(1)["model"]["w"])
    assert [one.uri.name for one in ckptfs.list_checkpoints(run)] == ["best", "step_100"]
    newest = ckptfs.latest(run)
    assert newest is not None
    assert newest.uri.name == "step_100"
    with closing(open_storage(Uri.parse(run), {})) as storage:
        assert delete_checkpoint(storage, "step_100")
    ckptfs.load(state(0), run / "best")
    shutil.copytree(tmp_path / "kept", run / "step_100")
    with pytest.raises(ckptfs.NotFoundError, match="deleted, overwritten or aborted"):
        ckptfs.load(state(0), run / "step_100")
