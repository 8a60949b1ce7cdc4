"""The page says everything that was measured, needs nothing else, and is drawn once per result."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckptfs.bench.analysis import rows_of
from ckptfs.bench.plots import FAINT, INK, Plot, plots_of
from ckptfs.bench.report import Chapter, page, write_report
from ckptfs.bench.results import Phase, Result, Sample, number_text, write_result
from ckptfs.errors import ManifestError, MissingDriverError
from tests.bench.made import FILE, S3, made_result

PNG = b"\x89PNG\r\n\x1a\n"
LOADS = {"load_cold", "load_warm"}
_VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Reader(HTMLParser):
    """What a browser would fetch, run or show; and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}:
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-label" and tag == "svg":
                self.labels.append(value or "")
            assert not name.startswith("on"), f"{tag} {name}: a script"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _small() -> Result:
    """Little to draw: saves in two places, one kind of load, a loop; no figures of memory."""
    base = made_result()
    return replace(
        base,
        workloads=base.workloads[:1],
        samples=tuple(
            replace(one, peak_memory_bytes=None)
            for one in base.samples
            if one.workload == "llm"
            and one.phase not in ({"load_warm"} if one.target == FILE else LOADS)
        ),
    )


@pytest.fixture(scope="module")
def drawn() -> tuple[Plot, ...]:
    """The plots of the small result: drawn once for all tests."""
    return plots_of(_small())


@pytest.fixture(scope="module")
def told(drawn: tuple[Plot, ...]) -> str:
    """Its page."""
    return page([Chapter("small", _small(), drawn)])


def test_the_page_needs_nothing_beside_it(told: str) -> None:
    """No script, no link that leads out, no id twice, well-formed, and a policy that says so."""
    read = _Reader(told)
    assert {"script", "link", "iframe", "object", "base"}.isdisjoint(read.tags)
    assert [link for link in read.links if not link.startswith("#")] == []
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    inside = [url for url in re.findall(r"url\(([^)]*)\)", told) if not url.startswith("#p")]
    assert inside == []
    assert "@import" not in told
    assert "default-src 'none'" in told
    # The only addresses are those that were measured.
    assert set(re.findall(r"https?://[\w.:]*", told)) == {"http://127.0.0.1:9000"}


def test_every_engine_and_every_number_is_on_the_page(told: str) -> None:
    """All medians and their spread, as text; what was cached, promised, noted; versions, settings."""
    words = "\n".join(_Reader(told).words)
    result = _small()
    for row in rows_of(result):
        for values in (row.seconds, row.gb_per_s, row.cpu_s_per_gb):
            if values is not None:
                assert number_text(values.median) in words
                assert f"{number_text(values.least)} to {number_text(values.most)}" in words
        if row.to_limit is not None:
            assert f"{row.to_limit.low:.2f} to {row.to_limit.high:.2f}" in words
    for engine in result.engines:
        assert {engine.name, engine.durable, engine.verified} <= set(words.split("\n"))
    for target in result.targets:
        assert target.cached in words
    assert result.notes[0] in words
    assert result.command in words
    assert "2026-11-22 10:00:00 UTC" in words
    assert "2.13.0+cpu" in words
    assert "AMD EPYC" in words
    assert "seconds by raw's" in words


def test_the_page_says_for_which_tensors_and_threads_a_ratio_holds() -> None:
    """With the summary and with each workload; an older file says what it knows."""
    settings = {"ranks": 2, "omp_num_threads": "1"}
    told = page([Chapter("small", made_result(settings=settings), ())])
    llm = "tensors of 4 B to 64.0 MB, half of the bytes in those up to 4.00 MB; ranks: 2; OMP_NUM_THREADS=1"
    assert f"<p>Ratios of llm: {llm}.</p>" in told
    assert f"<p>Ratios hold for {llm}.</p>" in told
    assert "<p>Ratios hold for ranks: 2; OMP_NUM_THREADS=1.</p>" in told


def test_plots_are_read_aloud(told: str, drawn: tuple[Plot, ...]) -> None:
    """Each has a text with every median that it shows."""
    labels = _Reader(told).labels
    assert labels == [plot.told for plot in drawn]
    medians = [number_text(r.gb_per_s.median) for r in rows_of(_small()) if r.gb_per_s]
    assert all(f" {median}" in labels[0] for median in medians)


def test_the_page_follows_the_reader_s_colours(told: str, drawn: tuple[Plot, ...]) -> None:
    """Ink and grid of inlined plots are the page's; the colours of bars stay as they are."""
    figures = told[told.index("<figure ") : told.rindex("</figure>")]
    assert INK in drawn[0].svg
    assert INK not in figures
    assert FAINT not in figures
    assert "currentColor" in figures
    assert "#0072b2" in figures


def test_plots_are_valid_and_the_same_each_time(drawn: tuple[Plot, ...]) -> None:
    """One per metric; PNG and SVG that parse, with every engine's name in letters; no date in them."""
    assert [plot.name for plot in drawn] == [
        "throughput-llm",
        "cpu-llm",
        "training-llm",
    ]
    for plot in drawn:
        assert plot.png.startswith(PNG)
        assert plot.png.endswith(b"IEND\xaeB\x60\x82")
        letters = set(ET.fromstring(plot.svg).itertext())  # noqa: S314 (made a moment ago)
        assert {"ckptfs", "dcp FileSystemWriter"} <= letters
    again = plots_of(replace(_small(), samples=_only("stall")))
    assert [plot.name for plot in again] == ["training-llm"]
    assert again[0].svg == plots_of(replace(_small(), samples=_only("stall")))[0].svg


def _only(phase: str) -> tuple[Sample, ...]:
    return tuple(one for one in _small().samples if one.phase == phase)


def test_text_of_a_result_stays_text() -> None:
    """Whatever is in a result file, nothing of it becomes a tag of the page."""
    evil = "<script>alert(1)</script>\"'&"
    base = _small()
    result = replace(
        base,
        what=evil,
        command=evil,
        notes=(evil,),
        machine={evil: evil},
        targets=(replace(base.targets[0], cached=evil, kind=evil), base.targets[1]),
        engines=tuple(replace(one, durable=evil) for one in base.engines),
    )
    text = page([Chapter(evil, result, (Plot("x", "m", "llm", evil, evil, PNG, "<svg></svg>"),))])
    assert "script" not in _Reader(text).tags
    assert "<script" not in text


@pytest.mark.parametrize("name", ["/tmp/$a_{$b", "$x$", r"\frac{%#^&~", "\x01\n\u65e5 &<"])
def test_a_name_is_no_formula(name: str) -> None:
    """A dollar sign, a letter that no font has, a control character: drawn, and a valid SVG."""
    (plot,) = plots_of(_named(name, "stall"))
    assert plot.png.startswith(PNG)
    shown = "".join(one if one.isprintable() else "\ufffd" for one in name)
    letters = "\n".join(ET.fromstring(plot.svg).itertext())  # noqa: S314 (made a moment ago)
    assert letters.count(shown) == 4  # the title, the target and what it is, the engine


def _named(name: str, phase: Phase, **changes: Any) -> Result:
    """One engine, target and workload, all with this name."""
    base = _small()
    one = next(sample for sample in base.samples if sample.phase == phase)
    return replace(
        base,
        workloads=(replace(base.workloads[0], name=name),),
        targets=(replace(base.targets[0], uri=name, kind=name),),
        engines=(replace(base.engines[0], name=name),),
        samples=(replace(one, engine=name, workload=name, target=name),),
        **changes,
    )


def test_names_stay_text_in_plots_and_page(tmp_path: Path) -> None:
    """Targets, workloads, engines, notes, commands: neither page, SVG, alt text nor file name runs them."""
    evil = "</text><script>alert('1')</script>\" id=\"x\" onload='y' &amp; url(#z) " + INK
    result = _named(evil, "stall", notes=(evil,), command=evil, what=evil)
    write_result(tmp_path / "a.json", result)
    made = write_report([tmp_path / "a.json"], tmp_path / "out")
    assert all(Path(path).parent == tmp_path / "out" for path in made.plots)
    svg = next(Path(path).read_text() for path in made.plots if path.endswith(".svg"))
    tree = ET.fromstring(svg)  # noqa: S314 (made a moment ago)
    assert not [one for one in tree.iter() if "script" in one.tag or "onload" in one.attrib]
    assert "<script" not in svg
    text = Path(made.page).read_text()
    assert "<script" not in text
    read = _Reader(text)
    assert "script" not in read.tags
    assert evil in read.words  # as it is, in a table
    assert any(evil in label for label in read.labels)
    figure = text[text.index("<svg ") : text.index("</svg>")]
    inside = "".join(_Reader(figure + "</svg>").words)
    assert inside.count("id=\"x\" onload='y' &amp; url(#z) " + INK) == 4  # not one letter changed


def test_names_that_look_alike_have_files_of_their_own() -> None:
    """Two workloads that differ in a letter no file name may have: one does not replace the other."""
    one, two = _named("a/b", "stall"), _named("a?b", "stall")
    both = replace(one, samples=one.samples + two.samples)
    assert [plot.name for plot in plots_of(both)] == ["training-a-b", "training-a-b-2"]


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        (5, "faster than the limit: it is no limit here"),
        (3, "its median is faster than the limit, without a verdict"),
    ],
)
def test_a_limit_that_is_beaten_is_said_to_be_none(rounds: int, told: str) -> None:
    """Where an engine took less time than raw storage, and nowhere else; twice: in short, and in full."""
    base = _small()
    beaten = [
        replace(one, wall_s=one.wall_s / 4) if one.engine == "ckptfs" else one
        for one in base.samples
        if (one.target, one.phase) == (FILE, "save") and one.round < rounds
    ]
    words = _Reader(page([Chapter("x", replace(base, samples=tuple(beaten)), ())])).words
    assert words.count(told) == 2
    held = replace(base, samples=tuple(one for one in base.samples if one.phase == "save"))
    whole = _Reader(page([Chapter("x", held, ())])).words
    assert not [word for word in whole if "no limit here" in word or "its median is" in word]


def test_a_report_of_two_files(tmp_path: Path) -> None:
    """A chapter each, found from the top; files of one name get different plots."""
    for name in ("a", "b"):
        stall = replace(_small(), what=f"run {name}", samples=_only("stall"))
        write_result(tmp_path / name / "result.json", stall)
    files = [tmp_path / name / "result.json" for name in ("a", "b")]
    made = write_report(files, tmp_path / "out")
    names = {"result-training-llm", "result-2-training-llm"}
    expected = {f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    assert {Path(path).name for path in made.plots} == expected
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*expected, "index.html"}
    read = _Reader(Path(made.page).read_text())
    assert read.links[:2] == ["#result-1", "#result-2"]
    assert len(read.ids) == len(set(read.ids))
    assert {"Run a", "Run b"} <= set(read.words)


def test_nothing_is_written_where_a_file_is_no_result(tmp_path: Path) -> None:
    """The second of two is none: no half of a report is left."""
    write_result(tmp_path / "a.json", replace(_small(), samples=_only("stall")))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ManifestError):
        write_report([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_without_a_library_the_extra_is_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typed error that says what to install, before anything is written."""
    monkeypatch.setitem(sys.modules, library, None)
    write_result(tmp_path / "a.json", _small())
    with pytest.raises(MissingDriverError, match=f"needs? {library}") as caught:
        write_report([tmp_path / "a.json"], tmp_path / "out")
    assert caught.value.hint == "pip install 'ckptfs[bench]'"
    assert not (tmp_path / "out").exists()


def test_a_result_without_samples_is_a_page(tmp_path: Path) -> None:
    """An interrupted run, kept: nothing to draw, and the page says what was meant."""
    empty = replace(made_result(), samples=())
    assert plots_of(empty) == ()
    text = page([Chapter("empty", empty, ())])
    assert "a model of 130 million parameters" not in text
    assert FILE in text
    assert S3 in text


def test_the_command_line_s_help_needs_no_matplotlib() -> None:
    """What reads arguments imports neither matplotlib nor torch."""
    code = "import sys, ckptfs.cli.bench; print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
