"""``bench report``: plots as PNG and SVG, and one HTML page with all of them inside.

    DIR/index.html                       by itself: no script, nothing fetched, nothing beside it needed
    DIR/NAME-throughput-WORKLOAD.png     and .svg, for slides and pages of others

Files of an earlier report with the same names are replaced, each as a whole; nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfs.bench.files import read_result, write_file
from ckptfs.bench.page import Chapter, page
from ckptfs.bench.plots import plots_of

__all__ = ["Report", "write_report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was written.

    Attributes:
        page: The path of the page.
        plots: The paths of all PNG and SVG files.
        results: The files that it was made of.
    """

    page: str
    plots: tuple[str, ...]
    results: tuple[str, ...]


def write_report(files: Sequence[str | Path], out: str | Path) -> Report:
    """Write a report of result files, a chapter each.

    Args:
        files: The result files.
        out: A directory, which is made where it is missing.

    Returns:
        What was written.

    Raises:
        NotFoundError: A file is not there; nothing was written.
        ManifestError: A file is no result; nothing was written.
        MissingDriverError: matplotlib is not installed; nothing was written.
        AccessError: The directory may not be written.
        NoSpaceError: The disk is full.
    """
    names = _names([Path(file) for file in files])
    results = [read_result(file) for file in files]
    chapters = []
    for name, result in zip(names, results, strict=True):
        plots = tuple(replace(one, name=f"{name}-{one.name}") for one in plots_of(result))
        chapters.append(Chapter(name, result, plots))
    directory = Path(out)
    written = []
    for chapter in chapters:
        for plot in chapter.plots:
            for ending, data in (("png", plot.png), ("svg", plot.svg.encode())):
                path = directory / f"{plot.name}.{ending}"
                write_file(path, data)
                written.append(str(path))
    index = directory / "index.html"
    write_file(index, page(chapters).encode())
    return Report(str(index), tuple(written), tuple(str(file) for file in files))


def _names(files: Sequence[Path]) -> list[str]:
    """The files' names without endings; two that are alike get a number."""
    found: list[str] = []
    for file in files:
        name, number = file.stem, 2
        while name in found:
            name, number = f"{file.stem}-{number}", number + 1
        found.append(name)
    return found
