"""TelemetryListener, recorded by OpenTelemetry's own SDK in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ckptfs.events import (
    Counters,
    Deleted,
    DeleteFailed,
    Event,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveResult,
    SaveSkipped,
    Staged,
    Written,
)
from ckptfs.manager.telemetry import TelemetryListener

URI = "/run/step_7"
MINE = Counters(size_bytes=2 << 20, files=1, items=3, write_s=2.0)


class Recorder:
    """A listener with an SDK of its own."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._metrics = InMemoryMetricReader()
        self.listener = TelemetryListener(
            tracer_provider=tracers,
            meter_provider=MeterProvider(metric_readers=[self._metrics]),
            attributes={"run": "seven"},
        )

    def hear(self, *events: tuple[Event, int]) -> None:
        """Events with the second at which each was sent."""
        for event, at_s in events:
            self.listener.hear(event, at_s * 1_000_000_000)

    def spans(self) -> dict[str, ReadableSpan]:
        """Finished spans by name."""
        return {span.name: span for span in self._spans.get_finished_spans()}

    def points(self) -> dict[str, list[Any]]:
        """Data points by metric."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def began() -> SaveBegan:
    """A save begins."""
    return SaveBegan(URI, 7, "checkpoint", "async")


def committed() -> SaveCommitted:
    """And is committed."""
    result = SaveResult(URI, 7, "id7", MINE, MINE, (MINE,), wall_s=10.0)
    return SaveCommitted(result, "checkpoint", stall_s=1.5)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """When a span began and ended."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_save_is_a_span_and_its_phases_are_children() -> None:
    """Spans are where events were sent, children end to end under the save, with its counters."""
    told = Recorder()
    told.hear(
        (began(), 100),
        (Staged(URI, 7, 2 << 20, 1.5), 102),
        (Written(URI, 7, MINE), 107),
        (committed(), 110),
    )
    spans = told.spans()
    save = spans["ckptfs.save"]
    assert {name: seconds(span) for name, span in spans.items()} == {
        "ckptfs.save": (100, 110),
        "ckptfs.save.stage": (100, 102),
        "ckptfs.save.write": (102, 107),
        "ckptfs.save.commit": (107, 110),
    }
    assert all(
        span.parent is not None and span.parent.span_id == save.context.span_id
        for name, span in spans.items()
        if span is not save and save.context is not None
    )
    assert save.attributes is not None
    assert save.attributes["ckptfs.uri"] == URI
    assert save.attributes["ckptfs.step"] == 7
    assert save.attributes["ckptfs.size_bytes"] == 2 << 20
    assert save.attributes["run"] == "seven"


def test_a_failure_ends_its_span_with_an_error() -> None:
    """The span of a failed save has the error as its status, the class as a label of the count."""
    told = Recorder()
    told.hear((began(), 100), (SaveFailed(URI, 7, "NoSpaceError: full", "failed"), 103))
    save = told.spans()["ckptfs.save"]
    assert save.status.status_code is StatusCode.ERROR
    assert save.status.description == "NoSpaceError: full"
    assert seconds(save) == (100, 103)
    (point,) = told.points()["ckptfs.save.failures"]
    assert point.value == 1
    assert point.attributes["error.type"] == "NoSpaceError"


def test_metrics_of_commits_skips_and_deletes() -> None:
    """Durations and stalls are histograms, bytes and events counters, with the given attributes."""
    told = Recorder()
    told.hear((committed(), 110), (committed(), 120), (SaveSkipped(URI, 7, 1), 121))
    told.hear((Deleted(URI, "id", "keep"), 122), (DeleteFailed(URI, "id", "busy"), 123))
    points = told.points()
    (duration,) = points["ckptfs.save.duration"]
    assert (duration.count, duration.sum) == (2, 20.0)
    assert duration.attributes == {"run": "seven", "ckptfs.kind": "checkpoint"}
    assert points["ckptfs.save.stall"][0].sum == 3.0
    assert points["ckptfs.save.size"][0].value == 4 << 20
    assert points["ckptfs.save.skipped"][0].value == 1
    assert len(points["ckptfs.deletes"]) == 2


def test_a_listener_that_comes_late_or_loses_events_goes_on() -> None:
    """Ends without beginnings make no span; a beginning twice ends the first span."""
    told = Recorder()
    told.hear((Staged(URI, 7, 1, 0.1), 100), (Written(URI, 7, MINE), 101), (committed(), 102))
    assert told.spans() == {}
    told.hear((began(), 103), (began(), 104), (committed(), 105))
    assert len(told._spans.get_finished_spans()) == 3


def test_without_the_package_the_error_names_the_extra() -> None:
    """Only making the listener needs it; the module imports without."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from ckptfs.manager.telemetry import TelemetryListener\n"
        "from ckptfs.errors import MissingDriverError\n"
        "try: TelemetryListener()\n"
        "except MissingDriverError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ckptfs[otel]" in ran.stdout


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    """Other listeners do not pay for OpenTelemetry, nor for torch."""
    code = (
        "import sys, ckptfs.manager.telemetry, ckptfs.manager.prometheus\n"
        "print([m for m in ('opentelemetry', 'torch', 'prometheus_client') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("step", [None, 0])
def test_a_step_that_is_zero_or_untold_finds_its_span(step: int | None) -> None:
    """Step 0 is a step."""
    told = Recorder()
    result = SaveResult(URI, step, "id", MINE, MINE, (MINE,), wall_s=1.0)
    told.hear((SaveBegan(URI, 0, "checkpoint", "sync"), 1), (Staged(URI, step, 1, 0.5), 2))
    told.hear((Written(URI, step, MINE), 3), (SaveCommitted(result, "checkpoint", 1.0), 4))
    assert len(told.spans()) == 4
