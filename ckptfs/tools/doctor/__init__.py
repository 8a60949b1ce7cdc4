"""The doctor: what a storage does, tried from where the job runs, before it matters.

    report = examine("s3://bucket/run", settings=Settings(expect=Expect.SHARED))
    report.verdict                      OK, WARN or FAIL
    for finding in report.findings: ... finding.name  .verdict  .seen  .meaning  .advice

    corner     .ckptfs-doctor-<id>/ below the run: all that is written lies there, and goes again
    look       what one rank does and sees: one module per theme; the only I/O
    seen       what it saw, as values that travel between ranks
    judge      pure: from what all ranks saw to findings
    driver     the order of it, collective: every rank gets the same report

Alone or under a launcher: where torchrun's environment says so, every rank takes part and no process
group is needed. A run's own log is never written.
"""

from __future__ import annotations

from ckptfs.tools.doctor.driver import examine, examine_with
from ckptfs.tools.doctor.settings import Clock, Expect, Settings
from ckptfs.tools.doctor.verdicts import Finding, Report, Theme, Verdict

__all__ = [
    "Clock",
    "Expect",
    "Finding",
    "Report",
    "Settings",
    "Theme",
    "Verdict",
    "examine",
    "examine_with",
]
