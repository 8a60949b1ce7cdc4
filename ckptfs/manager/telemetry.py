"""OpenTelemetry: a span per save, its phases as children, and metrics.

``pip install 'ckptfs[otel]'``

    ckptfs.save                        from the call to the commit, or to the failure
      ckptfs.save.stage                until training may change its tensors again
      ckptfs.save.write                until this rank's part is durable
      ckptfs.save.commit               until the checkpoint exists

Only the API is used: the application chooses the SDK and its exporters, and without an SDK nothing
is recorded. Times are those at which events happened, not those at which they reached the listener.
Attributes carry the counters of the writers: bytes, files, seconds per phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptfs._version import __version__
from ckptfs.errors import MissingDriverError
from ckptfs.events import (
    Deleted,
    DeleteFailed,
    Event,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    Staged,
    Written,
)
from ckptfs.manager.listeners import TimedListener, rank_rates
from ckptfs.manager.prometheus import error_type

__all__ = ["TelemetryListener"]


@dataclass(slots=True)
class _Saving:
    """A save under way: its span, and when its last phase ended."""

    span: Any
    since_ns: int


class TelemetryListener(TimedListener):
    """Spans and metrics of saves, on the coordinator; with ``EveryRank`` on each rank.

    If opentelemetry-api is not installed, making one is a MissingDriverError.

    Args:
        tracer_provider: OpenTelemetry's; None: the global one.
        meter_provider: OpenTelemetry's; None: the global one.
        attributes: Put on every span and metric; None: no attributes.
    """

    def __init__(
        self,
        *,
        tracer_provider: Any = None,
        meter_provider: Any = None,
        attributes: dict[str, str] | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise MissingDriverError(
                "opentelemetry-api is not installed", hint="pip install 'ckptfs[otel]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("ckptfs", __version__, tracer_provider)
        meter = metrics.get_meter("ckptfs", __version__, meter_provider)
        self._duration = meter.create_histogram(
            "ckptfs.save.duration", unit="s", description="Time from the call to the commit."
        )
        self._stall = meter.create_histogram(
            "ckptfs.save.stall", unit="s", description="Time for which a save stopped the training."
        )
        self._size = meter.create_counter(
            "ckptfs.save.size", unit="By", description="Bytes that all ranks committed."
        )
        self._failures = meter.create_counter("ckptfs.save.failures", unit="{save}")
        self._skipped = meter.create_counter("ckptfs.save.skipped", unit="{save}")
        self._deletes = meter.create_counter("ckptfs.deletes", unit="{checkpoint}")
        self._attributes = dict(attributes or {})
        self._saves: dict[tuple[str, int], _Saving] = {}

    def hear(self, event: Event, at_ns: int) -> None:
        """Open, divide or close a span, and count."""
        match event:
            case SaveBegan():
                self._begin(event, at_ns)
            case Staged(uri, step):
                self._phase((uri, step or 0), "stage", at_ns, {"ckptfs.stall_s": event.stall_s})
            case Written(uri, step, counters):
                self._phase((uri, step or 0), "write", at_ns, _numbers("ckptfs.rank", counters))
            case SaveCommitted():
                self._committed(event, at_ns)
            case SaveFailed():
                self._failed(event, at_ns)
            case SaveSkipped(uri, step):
                self._skipped.add(1, self._attributes)
                self._end((uri, step), at_ns, {"ckptfs.skipped": True})
            case Deleted():
                self._deletes.add(1, {**self._attributes, "ckptfs.outcome": "done"})
            case DeleteFailed():
                self._deletes.add(1, {**self._attributes, "ckptfs.outcome": "failed"})
            case _:
                pass

    def _begin(self, event: SaveBegan, at_ns: int) -> None:
        key = (event.uri, event.step)
        self._end(key, at_ns, {})  # an earlier save of that name without an event for its end
        attributes: dict[str, Any] = {
            **self._attributes,
            "ckptfs.uri": event.uri,
            "ckptfs.step": event.step,
            "ckptfs.kind": event.kind,
            "ckptfs.mode": event.mode,
        }
        span = self._tracer.start_span("ckptfs.save", start_time=at_ns, attributes=attributes)
        self._saves[key] = _Saving(span, at_ns)

    def _phase(
        self, key: tuple[str, int], name: str, at_ns: int, attributes: dict[str, float]
    ) -> None:
        saving = self._saves.get(key)
        if saving is None:
            return  # it began before this listener was there
        context = self._trace.set_span_in_context(saving.span)
        child = self._tracer.start_span(
            f"ckptfs.save.{name}",
            context=context,
            start_time=saving.since_ns,
            attributes={**self._attributes, **attributes},
        )
        child.end(at_ns)
        saving.since_ns = at_ns

    def _committed(self, event: SaveCommitted, at_ns: int) -> None:
        result = event.result
        key = (result.uri, result.step or 0)
        slowest, fastest = rank_rates(result.per_rank)
        labels = {**self._attributes, "ckptfs.kind": event.kind}
        self._duration.record(result.wall_s, labels)
        self._stall.record(event.stall_s, labels)
        self._size.add(result.total.size_bytes, labels)
        self._phase(key, "commit", at_ns, {"ckptfs.commit_s": result.total.commit_s})
        self._end(
            key,
            at_ns,
            {
                "ckptfs.save_id": result.save_id,
                "ckptfs.stall_s": event.stall_s,
                "ckptfs.rank_min_mib_per_s": slowest,
                "ckptfs.rank_max_mib_per_s": fastest,
                **_numbers("ckptfs", result.total),
            },
        )

    def _failed(self, event: SaveFailed, at_ns: int) -> None:
        kind = error_type(event.error)
        labels = {**self._attributes, "error.type": kind, "ckptfs.outcome": event.outcome}
        self._failures.add(1, labels)
        saving = self._saves.get((event.uri, event.step))
        if saving is not None:
            saving.span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
        found = {"error.type": kind, "ckptfs.outcome": event.outcome}
        self._end((event.uri, event.step), at_ns, found)

    def _end(self, key: tuple[str, int], at_ns: int, attributes: dict[str, Any]) -> None:
        saving = self._saves.pop(key, None)
        if saving is not None:
            saving.span.set_attributes(attributes)
            saving.span.end(at_ns)


def _numbers(prefix: str, counters: Any) -> dict[str, float]:
    return {f"{prefix}.{name}": value for name, value in counters.as_dict().items()}
