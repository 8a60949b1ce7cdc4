"""PrometheusTextfile, read back by Prometheus's own parser."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptfs.errors import StateError, StorageError
from ckptfs.events import (
    CopyCommitted,
    CopyFailed,
    Counters,
    Deleted,
    DeleteFailed,
    Retained,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveResult,
    SaveSkipped,
)
from ckptfs.manager.listeners import EventDispatcher
from ckptfs.manager.prometheus import PrometheusTextfile, error_type
from ckptfs.storage.registry import open_storage

SECOND_NS = 1_000_000_000


def committed(step: int, *, mib: int = 3, kind: str = "checkpoint") -> SaveCommitted:
    """A commit of two ranks."""
    ranks = (
        Counters(size_bytes=(mib - 1) << 20, files=1, write_s=2.0, commit_s=0.5),
        Counters(size_bytes=1 << 20, files=1, write_s=1.0),
    )
    total = Counters.together(ranks)
    result = SaveResult(f"/run/step_{step}", step, "id", ranks[0], total, ranks, wall_s=4.0)
    return SaveCommitted(result, kind, stall_s=0.25)


def samples(file: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, parsed by the library that scrapes it; each series once."""
    text = file.read_text()
    assert text.endswith("\n")
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in {"gauge", "counter"}
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def one(file: Path, name: str, **labels: str) -> float:
    """The value of one series."""
    return samples(file)[name, frozenset(labels.items())]


def test_a_commit_is_in_the_file(tmp_path: Path) -> None:
    """Time, step, bytes, seconds, stall and rates, by kind and with the labels given."""
    file = tmp_path / "ckptfs.prom"
    listener = PrometheusTextfile(file, {"job": 'a "b"\\\nc'})
    listener.hear(committed(100), 1_790_000_000 * SECOND_NS)
    labels = {"job": 'a "b"\\\nc', "kind": "checkpoint"}
    assert one(file, "ckptfs_last_commit_timestamp_seconds", **labels) == 1_790_000_000
    assert one(file, "ckptfs_last_commit_step", **labels) == 100
    assert one(file, "ckptfs_last_commit_bytes", **labels) == 3 << 20
    assert one(file, "ckptfs_last_save_seconds", **labels) == 4.0
    assert one(file, "ckptfs_last_save_phase_seconds", **labels, phase="write") == 2.0
    assert one(file, "ckptfs_last_save_phase_seconds", **labels, phase="commit") == 0.5
    assert one(file, "ckptfs_last_stall_seconds", **labels) == 0.25
    assert one(file, "ckptfs_last_rank_bytes_per_second", **labels, rank="slowest") == 1 << 20
    assert one(file, "ckptfs_commits_total", **labels) == 1


def test_counters_add_up_and_kinds_stay_apart(tmp_path: Path) -> None:
    """Two checkpoints and one set of weights: totals per kind, the last one as the last."""
    file = tmp_path / "x.prom"
    listener = PrometheusTextfile(str(file))
    for event in (committed(1), committed(2, mib=5), committed(2, kind="weights")):
        listener(event)
    assert one(file, "ckptfs_commits_total", kind="checkpoint") == 2
    assert one(file, "ckptfs_committed_bytes_total", kind="checkpoint") == 8 << 20
    assert one(file, "ckptfs_stall_seconds_total", kind="checkpoint") == 0.5
    assert one(file, "ckptfs_last_commit_step", kind="checkpoint") == 2
    assert one(file, "ckptfs_commits_total", kind="weights") == 1


def test_what_goes_wrong_is_counted(tmp_path: Path) -> None:
    """Failures by type and outcome, skips, failed deletes and copies."""
    file = tmp_path / "x.prom"
    listener = PrometheusTextfile(file)
    for error in ("NoSpaceError: no space [uri /run]", "NoSpaceError: again", "OSError(5, 'x')"):
        listener(SaveFailed("/run/step_1", 1, error, "failed"))
    listener(SaveFailed("/run/step_1", 1, "CommitInDoubtError: who knows", "unknown"))
    listener(SaveSkipped("/run/step_2", 2, 1))
    listener(DeleteFailed("/run/step_0", "id", "busy"))
    listener(CopyFailed("/run/step_0", "s3://b/step_0", "no route"))
    listener(CopyCommitted("/run/step_0", "s3://b/step_0", 7, 0.5))
    failures = "ckptfs_save_failures_total"
    assert one(file, failures, type="NoSpaceError", outcome="failed") == 2
    assert one(file, failures, type="OSError", outcome="failed") == 1
    assert one(file, failures, type="CommitInDoubtError", outcome="unknown") == 1
    assert one(file, "ckptfs_saves_skipped_total") == 1
    assert one(file, "ckptfs_delete_failures_total") == 1
    assert one(file, "ckptfs_copy_failures_total") == 1
    assert one(file, "ckptfs_copied_bytes_total") == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NoSpaceError: full", "NoSpaceError"),
        ("RuntimeError('x')", "RuntimeError"),
        ("torch.cuda.OutOfMemoryError: x", "OutOfMemoryError"),
        ("KeyboardInterrupt()", "KeyboardInterrupt"),
        ("step_100: no space left", "other"),
        ("commit failed on 2 of 4 ranks: rank 0: OSError: 5", "other"),
        ("", "other"),
    ],
)
def test_an_error_text_never_becomes_a_label(text: str, expected: str) -> None:
    """Only a class name does: every distinct value would be a time series forever."""
    assert error_type(text) == expected


def test_debris_is_what_is_deleted_and_still_there(tmp_path: Path) -> None:
    """Released: debris until its bytes are gone; a delete that failed stays debris, counted once."""
    file = tmp_path / "x.prom"
    listener = PrometheusTextfile(file)
    seen = []
    for event in (
        Retained(2, ("/run/step_1", "/run/step_2")),
        DeleteFailed("/run/step_1", "id1", "busy"),
        Deleted("/run/step_2", "id2", "keep_latest=2"),
        Deleted("/run/step_1", "id1", "keep_latest=2"),
        DeleteFailed("/run/step_0", "id0", "left by the job before"),
    ):
        listener(event)
        seen.append(one(file, "ckptfs_debris_checkpoints"))
    assert seen == [2, 2, 1, 0, 1]
    assert one(file, "ckptfs_deletes_total") == 2
    assert one(file, "ckptfs_checkpoints_kept") == 2


def test_the_last_commit_outlives_the_process(tmp_path: Path) -> None:
    """A new process that fails before it commits leaves the age of the last commit in the file."""
    file = tmp_path / "x.prom"
    labels = {"job": 'with "quotes", and \\'}
    PrometheusTextfile(file, labels).hear(committed(100), 1000 * SECOND_NS)
    again = PrometheusTextfile(file, labels)
    again.hear(SaveFailed("/run/step_200", 200, "OSError: 5", "failed"), 2000 * SECOND_NS)
    kind = {**labels, "kind": "checkpoint"}
    assert one(file, "ckptfs_last_commit_timestamp_seconds", **kind) == 1000
    assert ("ckptfs_commits_total", frozenset(kind.items())) not in samples(file)
    again.hear(committed(300), 3000 * SECOND_NS)
    assert one(file, "ckptfs_last_commit_timestamp_seconds", **kind) == 3000
    assert one(file, "ckptfs_commits_total", **kind) == 1


def test_a_file_that_is_not_ours_is_not_believed(tmp_path: Path) -> None:
    """Foreign lines, other labels and noise in the old file are dropped, not carried along."""
    file = tmp_path / "x.prom"
    file.write_text(
        'up{job="x"} 1\nnoise\nckptfs_last_unknown{kind="a"} 1\n'
        'ckptfs_last_commit_step{job="other",kind="checkpoint"} 7\n'
        'ckptfs_commits_total{job="mine",kind="checkpoint"} 7\n'
    )
    PrometheusTextfile(file, {"job": "mine"})(SaveSkipped("/run/step_2", 2, 1))
    assert {name for name, _ in samples(file)} == {
        "ckptfs_saves_skipped_total",
        "ckptfs_debris_checkpoints",
    }


def test_a_reader_never_sees_a_part_of_it(tmp_path: Path) -> None:
    """While the file is rewritten over and over, every read of it parses and is whole."""
    file = tmp_path / "x.prom"
    listener = PrometheusTextfile(file)
    listener(committed(0))
    whole = len(samples(file))

    def write() -> None:
        for number in range(1, 60):
            listener(committed(number))

    writer = threading.Thread(target=write)
    writer.start()
    counts = {len(samples(file))}
    while writer.is_alive():
        counts.add(len(samples(file)))
    writer.join()
    assert counts == {whole}
    assert [p.name for p in tmp_path.iterdir()] == ["x.prom"]


def test_events_without_figures_write_nothing(tmp_path: Path) -> None:
    """The beginning of a save changes no figure, so there is no file yet."""
    file = tmp_path / "x.prom"
    PrometheusTextfile(file)(SaveBegan("/run/step_1", 1, "checkpoint", "sync"))
    assert not file.exists()


def test_an_object_serves_as_well() -> None:
    """Any URI that ckptfs can write to."""
    uri = "memory://prom-test/x.prom"
    PrometheusTextfile(uri)(committed(5))
    text = open_storage("memory://prom-test").read("x.prom").decode()
    assert any(f.name == "ckptfs_last_commit_step" for f in text_string_to_metric_families(text))


@pytest.mark.parametrize("name", ["a-b", "__a", "1a", "", "kind"])
def test_a_label_that_prometheus_would_refuse_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """Not at the first commit, hours later."""
    with pytest.raises(StateError, match="label"):
        PrometheusTextfile(tmp_path / "x.prom", {name: "v"})


def test_a_place_that_cannot_be_written_breaks_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is the bell's: logged with the path, and the other listener hears all."""
    (tmp_path / "file").touch()
    listener = PrometheusTextfile(tmp_path / "file" / "x.prom")
    with pytest.raises(StorageError):
        listener(committed(1))
    heard: list[object] = []
    dispatcher = EventDispatcher([listener, heard.append])
    dispatcher.tell(committed(1))
    dispatcher.tell(committed(2))
    assert dispatcher.close(10)
    assert len(heard) == 2
    assert "PrometheusTextfile" in caplog.text
