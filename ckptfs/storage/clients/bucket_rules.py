"""The rules by which a bucket treats objects by itself: versions, locks, expiry. Pure.

    of_s3(...)    GetBucketVersioning, GetObjectLockConfiguration, GetBucketLifecycleConfiguration
    of_gcs(...)   the bucket's own description

These functions parse the answers. Each of the three requests may be refused separately: its result then is the
error, which is not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from ckptfs.errors import CkptfsError, NotFoundError

__all__ = ["BucketRules", "Lock", "Rule", "Versioning", "of_gcs", "of_s3"]

T = TypeVar("T")
_DAY_S = 86400


class Versioning(Enum):
    """Whether an overwritten or deleted object stays as a version."""

    OFF = "off"
    ON = "on"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Lock:
    """How many days a new object cannot be deleted. None: only if the writer asks for it."""

    days: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One enabled lifecycle rule. If a number of days is None, the rule does not do that.

    prefix: The prefix of the keys that it applies to. is_narrow: It also depends on tags, sizes,
    classes or versions. moves_to: The storage class that objects move to.
    """

    name: str
    prefix: str
    is_narrow: bool = False
    expires_days: float | None = None
    aborts_days: float | None = None
    versions_days: float | None = None
    moves_to: str = ""


@dataclass(frozen=True, slots=True)
class BucketRules:
    """The rules of one bucket, with an error in place of an answer that was refused."""

    versioning: Versioning | CkptfsError
    lock: Lock | CkptfsError | None
    lifecycle: tuple[Rule, ...] | CkptfsError


def of_s3(ask: Callable[[str], Mapping[str, Any]]) -> BucketRules:
    """Return the rules of an S3 bucket, by three requests.

    ask: Returns the answer to an operation on the bucket. NotFoundError: nothing is set.
    """
    return BucketRules(
        _answer_or(lambda: _s3_versioning(ask("GetBucketVersioning")), Versioning.OFF),
        _answer_or(lambda: _s3_lock(ask("GetObjectLockConfiguration")), None),
        _answer_or(lambda: _s3_rules(ask("GetBucketLifecycleConfiguration")), ()),
    )


def _answer_or(ask: Callable[[], T], nothing: T) -> T | CkptfsError:
    try:
        return ask()
    except NotFoundError:
        return nothing
    except CkptfsError as error:
        return error


def _s3_versioning(answer: Mapping[str, Any]) -> Versioning:
    states = {"Enabled": Versioning.ON, "Suspended": Versioning.SUSPENDED}
    return states.get(answer.get("Status", ""), Versioning.OFF)


def _s3_lock(answer: Mapping[str, Any]) -> Lock | None:
    found = answer.get("ObjectLockConfiguration", {})
    if found.get("ObjectLockEnabled") != "Enabled":
        return None
    retention = found.get("Rule", {}).get("DefaultRetention", {})
    days = retention.get("Days") or (retention["Years"] * 365 if "Years" in retention else None)
    return Lock(None if days is None else float(days))


def _s3_rules(answer: Mapping[str, Any]) -> tuple[Rule, ...]:
    return tuple(_s3_rule(r) for r in answer.get("Rules", ()) if r.get("Status") == "Enabled")


def _s3_rule(rule: Mapping[str, Any]) -> Rule:
    narrowed = rule.get("Filter", {})
    both = narrowed.get("And", narrowed)
    expires = rule.get("Expiration", {})
    # A date at which all objects expire counts as today, because new objects expire too.
    days = 0 if "Date" in expires else expires.get("Days")
    moves = [move.get("StorageClass", "") for move in rule.get("Transitions", ())]
    return Rule(
        str(rule.get("ID", "")),
        str(both.get("Prefix", rule.get("Prefix", "")) or ""),
        is_narrow=bool(set(both) - {"Prefix"}),
        expires_days=_days(days),
        aborts_days=_days(
            rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        ),
        versions_days=_days(rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays")),
        moves_to=next((name for name in moves if name), ""),
    )


def _days(value: Any) -> float | None:
    return None if value is None else float(value)


def of_gcs(ask: Callable[[], Mapping[str, Any]]) -> BucketRules:
    """Return the rules of a GCS bucket, by one request.

    ask: Returns the bucket as the JSON API describes it.
    """
    try:
        bucket = ask()
    except CkptfsError as error:
        return BucketRules(error, error, error)
    retention_s = bucket.get("retentionPolicy", {}).get("retentionPeriod")
    rules = bucket.get("lifecycle", {}).get("rule", ())
    on = bucket.get("versioning", {}).get("enabled")
    return BucketRules(
        Versioning.ON if on else Versioning.OFF,
        None if retention_s is None else Lock(float(retention_s) / _DAY_S),
        tuple(_gcs_rule(number, rule) for number, rule in enumerate(rules)),
    )


def _gcs_rule(number: int, rule: Mapping[str, Any]) -> Rule:
    action, when = rule.get("action", {}), rule.get("condition", {})
    kind, age = action.get("type", ""), _days(when.get("age"))
    prefixes = when.get("matchesPrefix", ())
    old_versions = when.get("isLive") is False or "numNewerVersions" in when
    deletes = kind == "Delete"
    return Rule(
        f"rule {number}",
        prefixes[0] if len(prefixes) == 1 else "",
        is_narrow=bool(set(when) - {"age", "matchesPrefix", "isLive", "numNewerVersions"})
        or len(prefixes) > 1,
        expires_days=(0.0 if age is None else age) if deletes and not old_versions else None,
        aborts_days=age if kind == "AbortIncompleteMultipartUpload" else None,
        versions_days=(0.0 if age is None else age) if deletes and old_versions else None,
        moves_to=action.get("storageClass", "") if kind == "SetStorageClass" else "",
    )
