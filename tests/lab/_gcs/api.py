"""From a request to the function that answers it, through the rules: who may, and what goes wrong.

note -> burst before -> token, permission -> the work -> burst after (the answer is lost)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

from tests.lab._gcs import json_api, json_uploads, xml_api, xml_uploads
from tests.lab._gcs.rules import Burst, Rules
from tests.lab._gcs.store import RefusedError, Store, UnchangedError, Why
from tests.lab._gcs.wire import Request, Response, answer_json

__all__ = ["FakeGcs"]

_Work = Callable[[Store, Request, str, str], Response]
_PATIENCE_S = 60.0
_JSON = ("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/", "/batch/storage/v1")


@dataclass(frozen=True)
class _Route:
    """Who answers, what IAM calls the permission for it, and where it applies."""

    permission: str
    work: _Work
    bucket: str = ""
    key: str = ""
    writes: bool = False

    @property
    def where(self) -> str:
        return "object" if self.key else "bucket"


class FakeGcs:
    """The whole service: one store, one set of rules, both APIs."""

    def __init__(self) -> None:
        self.store = Store()
        self.rules = Rules()

    def answer(self, request: Request) -> Response:
        """One answer, always."""
        is_json = request.path.startswith(_JSON)
        error = json_api.error if is_json else xml_api.error
        try:
            if request.path == "/token":
                self.rules.note("token", request)
                if burst := self.rules.burst("token", after=False):
                    return _failed(burst)
                return answer_json(self.rules.issue())
            if request.path.rstrip("/") == "/batch/storage/v1":
                return self._batch(request)
            return self._answer(self._json(request) if is_json else self._xml(request), request)
        except RefusedError as refused:
            return error(refused)
        except UnchangedError:
            return Response(304)
        except (KeyError, ValueError, SyntaxError) as wrong:
            return error(RefusedError(Why.BAD, f"{type(wrong).__name__}: {wrong}"))

    def _answer(self, route: _Route, request: Request) -> Response:
        self.rules.note(route.permission, request)
        self.rules.gate.wait(_PATIENCE_S)
        if burst := self.rules.burst(route.permission, after=False):
            return _failed(burst)
        self.rules.admit(request, route.permission, route.where)
        if route.writes and route.key in self.store.bucket(route.bucket).live:
            # To overwrite is to delete, in the eyes of IAM.
            self.rules.admit(request, "storage.objects.delete", "object")
        answer = route.work(self.store, request, route.bucket, route.key)
        if burst := self.rules.burst(route.permission, after=True):
            return _failed(burst)
        return answer

    def _batch(self, request: Request) -> Response:
        self.rules.note("batch", request)
        if burst := self.rules.burst("batch", after=False):
            return _failed(burst)
        answer = json_api.batch(request, self.answer, leave_out=self.rules.short_batches)
        if burst := self.rules.burst("batch", after=True):
            return _failed(burst)
        return answer

    def _json(self, request: Request) -> _Route:
        area = next(area for area in _JSON if request.path.startswith(area))
        match request.path.removeprefix(area).split("/"), request.method:
            case ["b"], "POST":
                return _Route("storage.buckets.create", json_api.bucket_call)
            case ["b", bucket], "GET":
                return _Route("storage.buckets.get", json_api.bucket_call, unquote(bucket))
            case ["b", bucket, "o"], "GET" if area == "/storage/v1/":
                return _Route("storage.objects.list", json_api.list_objects, unquote(bucket))
            case ["b", bucket, "o"], "POST" | "PUT" | "DELETE" if "upload_id" in request.query:
                return _Route("storage.objects.create", json_uploads.session, unquote(bucket))
            case ["b", bucket, "o"], "POST" if area == "/upload/storage/v1/":
                key = json_uploads.name_of(request)
                create = "storage.objects.create"
                return _Route(create, json_uploads.insert, unquote(bucket), key, writes=True)
            case ["b", bucket, "o", *rest], "POST" if rest[-1:] == ["compose"]:
                key = unquote("/".join(rest[:-1]))
                create = "storage.objects.create"
                return _Route(create, json_api.compose, unquote(bucket), key, writes=True)
            case ["b", bucket, "o", *rest], "GET" | "DELETE" if rest:
                reading = request.method == "GET"
                permission = "storage.objects.get" if reading else "storage.objects.delete"
                work = json_api.get if reading else json_api.delete
                return _Route(permission, work, unquote(bucket), unquote("/".join(rest)))
        raise RefusedError(Why.NO_API, "Not Found")

    def _xml(self, request: Request) -> _Route:
        first, _, rest = request.path.lstrip("/").partition("/")
        bucket, key, asked = unquote(first), unquote(rest), request.query
        uploads = "storage.multipartUploads"
        match request.method, bool(key):
            case "GET", False if "uploads" in asked:
                return _Route(f"{uploads}.list", xml_uploads.list_uploads, bucket)
            case "GET", False if asked.get("list-type") == "2":
                return _Route("storage.objects.list", xml_api.list_objects, bucket)
            case "POST", True if "uploads" in asked:
                return _Route(f"{uploads}.create", xml_uploads.begin, bucket, key)
            case "PUT", True if "uploadId" in asked:
                return _Route(f"{uploads}.create", xml_uploads.put_part, bucket, key)
            case "POST", True if "uploadId" in asked:
                complete = partial(xml_uploads.complete, self.rules)
                return _Route(f"{uploads}.create", complete, bucket, key, writes=True)
            case "DELETE", True if "uploadId" in asked:
                return _Route(f"{uploads}.abort", xml_uploads.abort, bucket, key)
            case "GET", True if "uploadId" in asked:
                return _Route(f"{uploads}.listParts", xml_uploads.list_parts, bucket, key)
            case "GET" | "HEAD", True:
                return _Route("storage.objects.get", xml_api.get, bucket, key)
            case "PUT", True:
                return _Route("storage.objects.create", xml_api.put, bucket, key, writes=True)
            case "DELETE", True:
                return _Route("storage.objects.delete", xml_api.delete, bucket, key)
        raise RefusedError(Why.NO_API, "Not Found")


def _failed(burst: Burst) -> Response:
    """The answer of a planned failure: an error without a telling body, or no answer."""
    if burst.why is None:
        return Response(drop=True)
    status, reason, _ = burst.why.value
    return answer_json({"error": {"code": status, "message": reason}}, status)
