"""The rules of a bucket, as far as the job's credentials may read them, and how requests to it go.

These rules (versions, locks, lifecycle) act on objects without any request of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptfs.control.world import World
from ckptfs.errors import CkptfsError
from ckptfs.storage.base import Storage
from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.bucket_rules import Lock, Rule, Versioning
from ckptfs.tools.doctor.report import Finding, Theme, Verdict
from ckptfs.tools.doctor.session import FailedOperation, Findings, Need, Session, Why, check

__all__ = ["BucketAnswers", "bucket_rules", "data_path", "judge_rules", "requests"]

T = TypeVar("T")

_COMMANDS = {
    "s3": "pip install 'ckptfs[s3]', or: aws s3api get-bucket-versioning, get-object-lock-configuration, "
    "get-bucket-lifecycle-configuration --bucket BUCKET",
    "gs": "gcloud storage buckets describe gs://BUCKET",
    "az": "az storage account blob-service-properties show, az storage account management-policy show",
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_THEME = Theme.RULES
_SOON_DAYS = 7
_SHORT_DAYS = 1
_NAMES = ("versioning", "object-lock", "lifecycle")
_SLOW_CLASSES = ("GLACIER", "DEEP_ARCHIVE", "ARCHIVE", "COLDLINE")


@dataclass(frozen=True, slots=True)
class BucketAnswers:
    """A bucket's rules from its client; a FailedOperation for each that could not be read."""

    prefix: str  # the prefix of the run inside the bucket, with a slash at the end
    versioning: Versioning | FailedOperation
    lock: Lock | FailedOperation | None
    lifecycle: tuple[Rule, ...] | FailedOperation


@check(Need.BUCKET)
def bucket_rules(session: Session) -> Findings:
    """Report versioning, object lock and lifecycle rules."""
    run, rank = session.run, session.rank

    def judge(_: Sequence[World], answers: Sequence[BucketAnswers | None]) -> Findings:
        return judge_rules(answers[0], _how_to_look(session.uri.protocol))

    # One bucket has one set of rules: rank 0 asks.
    return session.step(
        "versioning", _THEME, lambda: _look_at_rules(run) if rank == 0 else None, judge
    )


def _look_at_rules(run: Storage) -> BucketAnswers | None:
    """Return the bucket's rules and the run's prefix; None if its client cannot read rules."""
    client = getattr(run, "client", None)
    found = client.bucket_rules() if isinstance(client, ObjectClient) else None
    if found is None:
        return None
    prefix = run.root.path.strip("/")
    return BucketAnswers(
        f"{prefix}/" if prefix else "",
        _answer(found.versioning),
        _answer(found.lock),
        _answer(found.lifecycle),
    )


def _answer(answer: T | CkptfsError) -> T | FailedOperation:
    return FailedOperation.of(answer) if isinstance(answer, CkptfsError) else answer


def _how_to_look(protocol: str) -> str:
    """Return what a user can do to see the rules if this process cannot read them."""
    return _COMMANDS.get(_ALIASES.get(protocol, protocol), "ask the operator of this store")


def judge_rules(answers: BucketAnswers | None, how_to_look: str) -> Findings:
    """Return the findings on the rules. how_to_look: advice if the client cannot read them."""
    if answers is None:
        text = "this client cannot ask"
        return tuple(Finding(n, _THEME, Verdict.UNKNOWN, text, "", how_to_look) for n in _NAMES)
    return (_versioning(answers), _lock(answers), *_lifecycle(answers))


def _unknown(name: str, refusal: FailedOperation) -> Finding:
    why = {
        Why.ACCESS: "reading the settings is not permitted",
        Why.UNSUPPORTED: "the server does not report them",
    }.get(refusal.why, "the settings could not be read")
    text = f"{why}: {refusal.text}"
    return Finding(name, _THEME, Verdict.UNKNOWN, text, "", refusal.hint)


def _rules(answers: BucketAnswers) -> tuple[Rule, ...]:
    return () if isinstance(answers.lifecycle, FailedOperation) else answers.lifecycle


def _for_us(rule: Rule, prefix: str) -> bool:
    """Whether a rule may apply to keys of the run."""
    return prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)


def _versioning(answers: BucketAnswers) -> Finding:
    name, found = "versioning", answers.versioning
    if isinstance(found, FailedOperation):
        return _unknown(name, found)
    if found is Versioning.OFF:
        return Finding(name, _THEME, Verdict.OK, "off: what is deleted is gone")
    if found is Versioning.SUSPENDED:
        text = "suspended: older versions may still be kept and paid for"
        return Finding(name, _THEME, Verdict.OK, text)
    expiring = [
        r for r in _rules(answers) if r.versions_days is not None and _for_us(r, answers.prefix)
    ]
    if expiring:
        days = min(r.versions_days or 0 for r in expiring)
        text = f"on; noncurrent versions expire after {days:.0f} days"
        return Finding(name, _THEME, Verdict.OK, text)
    return Finding(
        name,
        _THEME,
        Verdict.WARN,
        "on, and no rule expires versions",
        "the bucket keeps, and you pay for, every checkpoint that retention deletes",
        "add a lifecycle rule NoncurrentVersionExpiration, or use a bucket without versions",
    )


def _lock(answers: BucketAnswers) -> Finding:
    name, found = "object-lock", answers.lock
    if isinstance(found, FailedOperation):
        return _unknown(name, found)
    if found is None:
        return Finding(name, _THEME, Verdict.OK, "none")
    if found.days is None:
        return Finding(name, _THEME, Verdict.OK, "possible, and no default retention")
    return Finding(
        name,
        _THEME,
        Verdict.WARN,
        f"everything is locked for {found.days:.0f} days",
        "retention (keep_latest=) and gc cannot delete; their later attempts are reported as "
        "errors",
        "save to a bucket without default retention, or count the days when you size it",
    )


def _lifecycle(answers: BucketAnswers) -> Findings:
    if isinstance(answers.lifecycle, FailedOperation):
        return (_unknown("lifecycle", answers.lifecycle),)
    ours = [rule for rule in _rules(answers) if _for_us(rule, answers.prefix)]
    return (_expiry(ours), _uploads(ours))


def _expiry(ours: list[Rule]) -> Finding:
    name = "lifecycle"
    expiring = [rule for rule in ours if rule.expires_days is not None]
    moving = [rule for rule in ours if rule.moves_to in _SLOW_CLASSES]
    if expiring:
        worst = min(expiring, key=lambda rule: rule.expires_days or 0)
        days = worst.expires_days or 0
        sure = not worst.is_narrow
        return Finding(
            name,
            _THEME,
            Verdict.FAIL if days < _SOON_DAYS and sure else Verdict.WARN,
            f"rule {worst.name!r} deletes objects after {days:.0f} days"
            f"{'' if sure else ' where its further conditions hold'}",
            "checkpoints vanish by themselves, file by file; the run's log too, and with it the run",
            "take this prefix out of the rule; let keep_latest= or `ckptfs rm` delete checkpoints",
            {"days": days, "rule": worst.name},
        )
    if moving:
        return Finding(
            name,
            _THEME,
            Verdict.WARN,
            f"rule {moving[0].name!r} moves objects to {moving[0].moves_to}",
            "an old checkpoint cannot be restored at once: it must be fetched from the archive first",
            "take this prefix out of the rule",
        )
    return Finding(name, _THEME, Verdict.OK, "no rule deletes or archives what is saved here")


def _uploads(ours: list[Rule]) -> Finding:
    name = "lifecycle-uploads"
    aborting = [rule.aborts_days for rule in ours if rule.aborts_days is not None]
    if not aborting:
        return Finding(
            name,
            _THEME,
            Verdict.OK,
            "no rule aborts unfinished uploads",
            "what killed jobs leave behind stays until `ckptfs gc`",
            "a rule AbortIncompleteMultipartUpload after 7 days costs nothing",
        )
    days = min(aborting)
    if days < _SHORT_DAYS:
        meaning = "an upload that is under way may be aborted"
        text = f"unfinished uploads are aborted after {days:.0f} days"
        return Finding(name, _THEME, Verdict.WARN, text, meaning, "leave them at least a day")
    return Finding(
        name, _THEME, Verdict.OK, f"unfinished uploads are aborted after {days:.0f} days"
    )


# -- requests --------------------------------------------------------------------------------


@check(Need.BUCKET)
def data_path(session: Session) -> Findings:
    """Report which library transfers the data, and why; no finding if there is no choice."""
    run = session.run

    def judge(_: Sequence[World], answers: Sequence[str]) -> Findings:
        paths = list(dict.fromkeys(path for path in answers if path))
        slow = any(not path.startswith("obstore") for path in paths)
        meaning = "each file is written and read in one stream, not in parts" if slow else ""
        text = "; ".join(paths)
        return (Finding("data-path", Theme.SPEED, Verdict.OK, text, meaning),) if paths else ()

    return session.step("data-path", Theme.SPEED, lambda: getattr(run, "data_path", ""), judge)


@check(Need.WRITE)
def requests(session: Session) -> Findings:
    """Report features that the server lacks, as the client learnt from all earlier requests."""
    client = session.client
    if client is None:
        return ()

    def judge(_: Sequence[World], answers: Sequence[tuple[str, ...]]) -> Findings:
        lacking = list(dict.fromkeys(text for answer in answers for text in answer))
        if not lacking:
            text = "ranges are read and batches deleted as ckptfs asks"
            return (Finding("requests", Theme.SPEED, Verdict.OK, text),)
        meaning = "it works, with more bytes or more requests than elsewhere"
        advice = "fsspec+ before the URI may read ranges there (docs/stores/s3.md)"
        text = "; ".join(lacking)
        return (Finding("requests", Theme.SPEED, Verdict.WARN, text, meaning, advice),)

    return session.step("requests", Theme.SPEED, lambda: client.lacks, judge)
