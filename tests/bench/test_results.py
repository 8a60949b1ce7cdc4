"""A result file that was once written can be read forever, and nothing else passes for one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.bench.analysis import compare_results
from ckptfs.bench.report import Chapter, page
from ckptfs.bench.results import (
    SCHEMA,
    Engine,
    Result,
    Sample,
    Target,
    Workload,
    decode_result,
    encode_result,
    read_result,
    write_file,
    write_result,
)
from ckptfs.errors import ManifestError, NotFoundError, UriError
from tests.bench.made import made_result

GOLDEN = Path(__file__).with_name("schema1.json")
WORDS = st.text(max_size=12)
SIZES = st.integers(0, 2**62)
SECONDS = st.floats(0, 1e6)
VALUES = st.dictionaries(WORDS, st.one_of(WORDS, st.integers(0, 99), st.booleans()), max_size=3)
SAMPLES = st.builds(
    Sample,
    engine=WORDS,
    workload=WORDS,
    target=WORDS,
    phase=st.sampled_from(["save", "load_cold", "load_warm", "stall", "steps", "steps_saving"]),
    round=st.integers(0, 99),
    wall_s=SECONDS,
    cpu_s=SECONDS,
    size_bytes=SIZES,
    sent_bytes=st.none() | SIZES,
    received_bytes=st.none() | SIZES,
    peak_memory_bytes=st.none() | SIZES,
)
RESULTS = st.builds(
    Result,
    what=WORDS,
    date=WORDS,
    command=WORDS,
    machine=VALUES,
    versions=st.dictionaries(WORDS, WORDS, max_size=3),
    settings=VALUES,
    workloads=st.lists(st.builds(Workload, WORDS, SIZES, SIZES, WORDS), max_size=2).map(tuple),
    targets=st.lists(st.builds(Target, WORDS, WORDS, WORDS), max_size=2).map(tuple),
    engines=st.lists(st.builds(Engine, WORDS, WORDS, WORDS, WORDS, st.booleans()), max_size=2).map(
        tuple
    ),
    samples=st.lists(SAMPLES, max_size=3).map(tuple),
    notes=st.lists(WORDS, max_size=2).map(tuple),
    schema=st.just(SCHEMA),
)


def test_a_file_of_schema_1_is_read_as_it_was_meant() -> None:
    """The golden file, field by field where something could be taken for something else."""
    result = read_result(GOLDEN)
    assert (result.schema, result.what) == (1, "throughput of checkpoints")
    assert result.settings == {"ranks": 2, "durable": True, "rounds": 1}
    assert result.workloads == (Workload("llm", 344, 2_000_000_000, "a model"),)
    assert result.targets == (Target("file:///mnt/fast", "ext4", "the page cache"),)
    assert [engine.is_limit for engine in result.engines] == [False, True]
    ours, raw = result.samples
    assert ours == Sample(
        "ckptfs",
        "llm",
        "file:///mnt/fast",
        "save",
        0,
        1.25,
        0.5,
        2_000_000_000,
        peak_memory_bytes=64 << 20,
    )
    assert (ours.gb_per_s, ours.cpu_s_per_gb) == (1.6, 0.25)
    assert raw.peak_memory_bytes is None
    assert result.notes == ("nothing else ran",)


def test_the_golden_file_is_what_is_written_today() -> None:
    """Schema 1 did not move: the same fields, in the same places. What came later is null in an older file."""
    wanted = json.loads(GOLDEN.read_text())
    for one in wanted["workloads"]:
        one |= {f"{which}_tensor_bytes": None for which in ("least", "half", "largest")}
    assert json.loads(encode_result(read_result(GOLDEN))) == wanted


@given(RESULTS)
def test_samples_are_rows_of_a_table(result: Result) -> None:
    """Flat records with the same fields: what a data frame is made of."""
    rows = json.loads(encode_result(result))["samples"]
    assert len({tuple(row) for row in rows}) <= 1
    assert all(not isinstance(value, dict | list) for row in rows for value in row.values())


@given(RESULTS)
def test_what_is_written_is_read_again(result: Result) -> None:
    """Every field of every record, through JSON and back."""
    assert decode_result(encode_result(result), "x.json") == result


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([1e-300, 1e300, 10**30, -1, "\ud800", [[]]])
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something is in a document, the document itself included."""
    items = dict(enumerate(value)) if isinstance(value, list) else value
    inside = items.items() if isinstance(items, dict) else ()
    return [path, *(place for key, one in inside for place in _places(one, (*path, key)))]


def _put(path: tuple[Any, ...], value: Any) -> str:
    """The golden file with something else at one place."""
    record = whole = {"": json.loads(GOLDEN.read_text())}
    for key in ("", *path)[:-1]:
        record = record[key]
    record[("", *path)[-1]] = value
    return json.dumps(whole[""])


@given(st.sampled_from(_places(json.loads(GOLDEN.read_text()))), _JSON)
def test_any_document_is_a_result_or_a_typed_error(path: tuple[Any, ...], value: Any) -> None:
    """Whatever is at whichever place; what was decoded can be shown, compared and encoded."""
    try:
        result = decode_result(_put(path, value), "x.json")
    except ManifestError:
        return
    again = decode_result(encode_result(result), "again")
    assert again == result
    compare_results(result, again)
    assert page([Chapter("x", result, ())]).encode()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("wall_s", math.inf, "inf is no number"),
        ("wall_s", math.nan, "nan is no number"),
        ("wall_s", "x", r"Expected `float`, got `str` - at `\$.samples\[0\].wall_s`"),
        ("wall_s", -1.0, "Expected `float` >= -0.001"),
        ("wall_s", True, "got `bool`"),
        ("wall_s", None, "got `null`"),
        ("cpu_s", 1e300, "Expected `float` <= 1000000000.0"),
        ("size_bytes", 10**400, "Integer value out of range|Expected `int` <="),
        ("size_bytes", 1.5, "Expected `int`, got `float`"),
        ("peak_memory_bytes", [], r"Expected `int \| null`, got `array`"),
        ("engine", {}, r"Expected `str`, got `object` - at `\$.samples\[0\].engine`"),
    ],
)
def test_a_value_that_nobody_measured_is_refused(path: str, value: Any, told: str) -> None:
    """With its place: else it would be a traceback, or a wrong number on a page."""
    with pytest.raises(ManifestError, match=told):
        decode_result(_put(("samples", 0, path), value), "x.json")


@pytest.mark.parametrize(
    "text",
    [
        _put(("machine", "fsync_ms"), 7.25).replace("7.25", "1e999"),
        GOLDEN.read_text().replace('"a model"', '"\\ud800"'),
        "[" * 100_000,
        _put(("machine", "deep"), json.loads("[" * 40 + "]" * 40)),
        _put(("notes",), "one"),
        _put(("versions", "torch"), 2),
        _put(("settings",), []),
        _put(("schema",), "1"),
    ],
)
def test_what_json_allows_and_a_page_does_not(text: str) -> None:
    """Infinite when read, written in no encoding, endless; a text in the place of a list."""
    with pytest.raises(ManifestError, match="no benchmark result"):
        decode_result(text, "x.json")


def test_cpu_seconds_may_be_rounded_below_nothing() -> None:
    """They are a difference of sums: a result that was measured can be read."""
    text = _put(("samples", 0, "cpu_s"), -2e-16)
    assert decode_result(text, "x.json").samples[0].cpu_s == -2e-16


def _with(**changes: Any) -> str:
    return json.dumps({**json.loads(GOLDEN.read_text()), **changes})


def test_fields_of_a_later_version_are_ignored() -> None:
    """Unknown fields, in the file and in a record, change nothing that is known."""
    record = json.loads(GOLDEN.read_text())
    record["weather"] = "rain"
    for name in ("workloads", "targets", "engines", "samples"):
        record[name] = [{**one, "colour": [1, 2]} for one in record[name]]
    assert decode_result(json.dumps(record), "x") == read_result(GOLDEN)


def test_a_newer_schema_is_refused() -> None:
    """With what to do, and the file's name: half of a newer file is not a result."""
    with pytest.raises(ManifestError, match="has schema 2") as caught:
        decode_result(_with(schema=SCHEMA + 1), "new.json")
    assert caught.value.uri == "new.json"
    assert caught.value.hint == "upgrade ckptfs"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "no json", _with(samples=[{"engine": "x"}]), _with(schema="one")],
)
def test_what_is_no_result_is_said_to_be_none(text: str) -> None:
    """One error for everything that a person could pass by mistake; it names the file."""
    with pytest.raises(ManifestError, match="no benchmark result") as caught:
        decode_result(text, "notes.json")
    assert caught.value.uri == "notes.json"


def test_files_on_the_disk(tmp_path: Path) -> None:
    """Written whole, replaced whole, nothing left next to it; a missing or binary one is typed."""
    path = tmp_path / "made" / "result.json"
    write_result(path, read_result(GOLDEN))
    write_result(path, made_result())
    assert read_result(path) == made_result()
    assert [one.name for one in path.parent.iterdir()] == ["result.json"]
    with pytest.raises(NotFoundError):
        read_result(tmp_path / "none.json")
    with pytest.raises(UriError):
        read_result("s3://bucket/result.json")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="not even text"):
        read_result(path)


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    """A failed write leaves what was there, and nothing of its own."""
    (tmp_path / "result.json").mkdir()
    (tmp_path / "result.json" / "kept").write_text("x")
    with pytest.raises(OSError, match="write"):
        write_file(tmp_path / "result.json", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]


def test_samples_know_their_fields() -> None:
    """The made result that other tests draw is one that the format can carry."""
    again = decode_result(encode_result(made_result()), "x")
    assert asdict(again) == asdict(made_result())
