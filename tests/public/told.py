"""Names that dashboards, alerts and scripts go by: metrics, loggers, variables, exit codes, entry points.

Metrics are what the listeners of ckptfs make of each of its events. Everything that the pages name of
these kinds has to be among what the code has.
"""

from __future__ import annotations

import ast
import itertools
import re
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import ckptfs
from ckptfs import events
from ckptfs.cli.output import Exit, exit_of
from ckptfs.errors import CkptfsError
from ckptfs.manager.listeners import MetricsListener
from ckptfs.manager.prometheus import PrometheusTextfile
from ckptfs.manager.telemetry import TelemetryListener
from tests.public.shown import ROOT

__all__ = [
    "entry_points",
    "exit_codes",
    "loggers",
    "metrics",
    "metrics_named",
    "spans_and_metrics",
    "variables",
]

_LOGGER = re.compile(r"logger `(\w[\w.]*)`")
_VARIABLE = re.compile(r"\b_?CKPTFS_[A-Z_]+\b")
# Read by the suite or by programs of the docs, and not by ckptfs.
_NOT_OURS = {"CKPTFS_URI", "CKPTFS_MATRIX", "CKPTFS_NFS_DIR", "CKPTFS_GOLDEN"}


def _one_of(kind: Any) -> Any:
    """Some value of the type that an event's field has."""
    origin = typing.get_origin(kind)
    if origin in {types.UnionType, typing.Union}:
        return _one_of(typing.get_args(kind)[0])
    if origin is tuple:
        return (_one_of(typing.get_args(kind)[0]),)
    if isinstance(kind, type) and kind in {str, int, float, bool}:
        return {str: "failed", int: 3, float: 3.0, bool: True}[kind]
    hints = typing.get_type_hints(kind)
    return kind(**{name: _one_of(hint) for name, hint in hints.items()})


def _told() -> Iterator[events.Event]:
    """Each event once, and what differs by its kind twice."""
    for kind in typing.get_args(events.Event):
        event = _one_of(kind)
        names = ("checkpoint", "weights") if hasattr(event, "kind") else (None,)
        for name in names:
            fields = {f: getattr(event, f) for f in typing.get_type_hints(kind)}
            yield kind(**(fields | ({} if name is None else {"kind": name})))


def metrics() -> Iterator[str]:
    """Names that MetricsListener and PrometheusTextfile give, with types and labels."""
    flat: set[str] = set()
    listener = MetricsListener(lambda numbers, step: flat.update(numbers))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "ckptfs.prom")
        textfile = PrometheusTextfile(str(file))
        for event in itertools.chain(_told(), _told()):
            listener(event)
            textfile(event)
        text = file.read_text()
    yield from sorted(flat)
    labels: dict[str, set[str]] = {}
    for name, told in re.findall(r"^(ckptfs_\w+)(?:\{(.*)\})? ", text, flags=re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', told))
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.MULTILINE):
        with_labels = ", ".join(sorted(labels.get(name, ())))
        yield f"{name}: {kind}" + (f" by {with_labels}" if with_labels else "")


def metrics_named(pages: Iterable[Path]) -> set[str]:
    """Metrics that pages name in full."""
    named = re.compile(r"`(ckptfs_\w+|ckptfs/\w+(?:/\w+)?|ckptfs\.save\.\w+|ckptfs\.deletes)`")
    found = {name for page in pages for name in named.findall(page.read_text())}
    return {name for name in found if not ROOT.joinpath(name).exists()}  # ckptfs/tools is none


def spans_and_metrics() -> Iterator[str]:
    """What TelemetryListener hands to OpenTelemetry, with attributes."""
    spans, found = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider(metric_readers=[found])
    listener = TelemetryListener(tracer_provider=tracers, meter_provider=meters)
    began: list[Any] = [e for e in _told() if isinstance(e, events.SaveBegan)]
    rest: list[Any] = [e for e in _told() if not isinstance(e, events.SaveBegan)]
    at = itertools.count(1_000_000_000)
    for event in rest:
        for first in began[:1]:
            listener.hear(first, next(at))
        listener.hear(event, next(at))
    attributes: dict[str, set[str]] = {}
    for span in spans.get_finished_spans():
        attributes.setdefault(f"span {span.name}", set()).update(span.attributes or ())
    data = found.get_metrics_data()
    for one in () if data is None else data.resource_metrics:
        for metric in itertools.chain.from_iterable(s.metrics for s in one.scope_metrics):
            kind = type(metric.data).__name__.lower()
            name = f"{metric.name} ({kind}, {metric.unit})"
            attributes.setdefault(name, set())
            for point in metric.data.data_points:
                attributes[name].update(point.attributes or ())
    for name, told in sorted(attributes.items()):
        yield f"{name}: {', '.join(sorted(told))}" if told else name
    meters.shutdown()
    tracers.shutdown()


def exit_codes() -> Iterator[str]:
    """Every code, and the code of every error."""
    for code in Exit:
        yield f"{code.value}: {code.name.lower()}"
    for name in ckptfs.__all__:
        value = getattr(ckptfs, name)
        if isinstance(value, type) and issubclass(value, CkptfsError):
            yield f"{name}: {exit_of(value('')).value}"


def entry_points() -> Iterator[str]:
    """What a package manager, fsspec and others find, the extras, and the groups that ckptfs reads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in project["scripts"]:
        yield f"console_scripts {name}"
    for group, points in project["entry-points"].items():
        yield from (f"{group} {name}" for name in points)
    for extra in project["optional-dependencies"]:
        if extra not in {"dev", "docs", "lab", "test"}:
            yield f"extra {extra}"
    registry = (ROOT / "ckptfs" / "storage" / "registry.py").read_text()
    yield from (
        f"read {group}" for group in re.findall(r'^GROUP = "(.+)"$', registry, re.MULTILINE)
    )


def loggers(pages: Iterable[Path]) -> Iterator[str]:
    """Loggers that a page names and that the code logs to, or below which it does."""
    used = set()
    for file in (ROOT / "ckptfs").rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Name(id="__name__")]):
                    used.add(module)
                case ast.Call(
                    func=ast.Attribute(attr="getLogger"), args=[ast.Constant(value=str(name))]
                ):
                    used.add(name)
                case _:
                    pass
    named = {name for page in pages for name in _LOGGER.findall(page.read_text())}
    for name in sorted(named):
        if any(one == name or one.startswith(f"{name}.") for one in used):
            yield name
    # All of ckptfs is silenced or collected at one name.
    yield from sorted(one for one in used if one.partition(".")[0] != "ckptfs")


def variables(pages: Iterable[Path]) -> Iterator[str]:
    """Variables of the environment that a page names and the code reads."""
    named = {name for page in pages for name in _VARIABLE.findall(page.read_text())}
    code = "\n".join(file.read_text() for file in (ROOT / "ckptfs").rglob("*.py"))
    for name in sorted(named - _NOT_OURS):
        if re.search(rf"\b{name}\b", code) or name == "_CKPTFS_COMPLETE":  # click's own
            yield name
