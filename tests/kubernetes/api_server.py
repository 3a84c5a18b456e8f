"""An API server that speaks as much of Kubernetes' protocol as a job needs, over real HTTP.

Objects with resource versions; label selectors; watches with bookmarks that can be told 410; strict
validation against the real schemas; merge patches; deletion with what is owned; access reviews by a
Role; logs that follow, and break off when told. Faults are injected by :attr:`ApiServer.faults`.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import schemas
import yaml

from farandole.launch.kubernetes import kinds
from farandole.launch.kubernetes.kinds import Kind
from farandole.launch.kubernetes.pod import merge

Thing = dict[str, Any]
NAMESPACE = "team"
TOKEN = "let-me-in"

CORE = (kinds.JOB, kinds.SERVICE, kinds.CONFIG_MAP, kinds.SECRET, kinds.POD, kinds.EVENT,
        kinds.CLAIM, kinds.QUOTA, kinds.POLICY)  # fmt: skip
CUSTOM = (kinds.JOBSET, kinds.TRAINJOB, kinds.RUNTIME, kinds.MPIJOB, kinds.WORKLOAD, kinds.QUEUE)


class Cut(Exception):
    """The connection breaks without an answer."""


@dataclass
class Fault:
    """What happens to requests that ``fits`` instead of, or after, being carried out."""

    fits: Callable[[str, str], bool]
    """By method and path."""
    code: int = 0
    """The status that is answered; 0: the connection is cut."""
    message: str = "injected"
    times: int = 1_000_000
    after: bool = False
    """Whether the request is carried out first, and only its answer is lost."""


@dataclass
class Log:
    """What a container has printed."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    """Time and text."""
    ended: bool = False


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class ApiServer:
    """The server, on a port of this machine; ``version`` is the minor one that it claims."""

    def __init__(self, version: str = "1.35", operators: bool = True) -> None:
        self.version = version
        self.kinds = [*CORE, *(CUSTOM if operators else ())]
        self.objects: dict[tuple[str, str], Thing] = {}
        self.logs: dict[str, Log] = {}
        self.faults: list[Fault] = []
        self.token = TOKEN
        """What shows that somebody is the user."""
        self.role: Thing | None = None
        """What the user may do; ``None``: everything."""
        self.secretive = False
        """Whether it tells no rules, as where somebody else knows the rights: each is asked for."""
        self.requests: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self.history: list[tuple[int, str, str, Thing]] = []
        """Version, event, plural and object."""
        self.forgotten = 0
        """Watches from versions up to this one are told 410."""
        self.on_change: list[Callable[[str, str, Thing], None]] = []
        """Controllers: event, plural, object. Called in the request's thread, without the lock."""
        self._versions = itertools.count(1)
        self._server = _Http(("127.0.0.1", 0), _handler(self))
        self.closing = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """End all connections."""
        self.closing = True
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path, token: str = TOKEN) -> Path:
        """A configuration by which clients reach it."""
        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [
                        {
                            "name": "x",
                            "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE},
                        }
                    ],
                    "current-context": "x",
                }
            )
        )
        return path

    # ---- for tests and controllers

    def all(self, kind: Kind) -> list[Thing]:
        """Copies of all objects of a kind."""
        with self.changed:
            return [
                copy.deepcopy(each)
                for (plural, _), each in sorted(self.objects.items())
                if plural == kind.plural
            ]

    def get(self, kind: Kind, name: str) -> Thing | None:
        """A copy of one object."""
        with self.changed:
            return copy.deepcopy(self.objects.get((kind.plural, name)))

    def put(self, kind: Kind, thing: Thing) -> Thing:
        """Store an object, new or changed, as a controller does: unchecked."""
        with self.changed:
            name = thing["metadata"]["name"]
            event = "MODIFIED" if (kind.plural, name) in self.objects else "ADDED"
            stored = copy.deepcopy(thing)
            stored["metadata"].setdefault("namespace", NAMESPACE)
            stored["metadata"].setdefault("uid", f"uid-{next(self._versions)}")
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            stored["metadata"].setdefault("creationTimestamp", now)
            stored.setdefault("apiVersion", kind.api)
            stored.setdefault("kind", kind.name)
            self._record(event, kind.plural, stored)
            self.objects[kind.plural, name] = stored
        self._tell(event, kind.plural, stored)
        return copy.deepcopy(stored)

    def change(self, kind: Kind, name: str, patch: Thing) -> Thing | None:
        """Merge ``patch`` into an object; ``None`` when it is gone."""
        thing = self.get(kind, name)
        if thing is None:
            return None
        merged: Thing = merge(thing, patch)
        if merged == thing:
            return thing
        return self.put(kind, merged)

    def remove(self, kind: Kind, name: str) -> bool:
        """Delete an object and, in turn, all that it owns."""
        with self.changed:
            thing = self.objects.pop((kind.plural, name), None)
            if thing is None:
                return False
            self._record("DELETED", kind.plural, thing)
            owned = [
                (plural, each["metadata"]["name"])
                for (plural, _), each in self.objects.items()
                for owner in each["metadata"].get("ownerReferences", [])
                if owner["uid"] == thing["metadata"]["uid"]
            ]
        self._tell("DELETED", kind.plural, thing)
        for plural, each in owned:
            self.remove(next(k for k in self.kinds if k.plural == plural), each)
        return True

    def event(self, about: Thing, reason: str, message: str) -> None:
        """Something has happened to an object."""
        number = next(self._versions)
        self.put(kinds.EVENT, {
            "metadata": {"name": f"event-{number}"},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "involvedObject": {
                "kind": about["kind"],
                "name": about["metadata"]["name"],
                "uid": about["metadata"]["uid"],
            },
        })  # fmt: skip

    def print(self, pod: str, text: str, *, ended: bool = False) -> None:
        """A container prints a line, or, with ``ended``, its output ends."""
        with self.changed:
            log = self.logs.setdefault(pod, Log())
            if text:
                now = time.time_ns()
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
                log.lines.append((f"{stamp}.{now % 10**9:09d}Z", text))
            log.ended = log.ended or ended
            self.changed.notify_all()

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Whether the Role allows it."""
        if self.role is None:
            return True
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.role["rules"]
        )

    def _record(self, event: str, plural: str, thing: Thing) -> None:
        number = next(self._versions)
        thing["metadata"]["resourceVersion"] = str(number)
        self.history.append((number, event, plural, copy.deepcopy(thing)))
        self.changed.notify_all()

    def _tell(self, event: str, plural: str, thing: Thing) -> None:
        for controller in list(self.on_change):
            controller(event, plural, copy.deepcopy(thing))

    @property
    def now(self) -> int:
        """The newest version."""
        return self.history[-1][0] if self.history else 0


class Status(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }
        self.code = code


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are written one after the other: the second would wait 40 ms.
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            """Nothing: tests ask :attr:`ApiServer.requests`."""

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def do_PATCH(self) -> None:
            self._serve("PATCH")

        def do_DELETE(self) -> None:
            self._serve("DELETE")

        def _serve(self, method: str) -> None:
            path, _, query = self.path.partition("?")
            params = {key: value[0] for key, value in urllib.parse.parse_qs(query).items()}
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            server.requests.append((method, path))
            fault = _take_fault(server, method, path)
            try:
                if fault is not None and not fault.after:
                    _fail(fault)
                if self.headers.get("authorization") != f"Bearer {server.token}":
                    raise Status(401, "Unauthorized", "Unauthorized")
                answer = Request(server, method, path, params, body).answer()
                if fault is not None:
                    _fail(fault)
            except Cut:
                self.close_connection = True
                self.connection.close()
                return
            except Status as error:
                self._send(error.code, error.body)
                return
            if isinstance(answer, dict):
                self._send(200, answer)
            else:
                self._stream(answer)

        def _send(self, code: int, answer: Thing) -> None:
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, pieces: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except (OSError, Cut):
                self.close_connection = True
                self.connection.close()

    return Handler


def _take_fault(server: ApiServer, method: str, path: str) -> Fault | None:
    for fault in server.faults:
        if fault.times > 0 and fault.fits(method, path):
            fault.times -= 1
            return fault
    return None


def _fail(fault: Fault) -> None:
    if fault.code == 0:
        raise Cut
    reasons = {403: "Forbidden", 409: "Conflict", 422: "Invalid", 429: "TooManyRequests"}
    raise Status(fault.code, reasons.get(fault.code, "InternalError"), fault.message)


class Request:
    """One request that is understood."""

    def __init__(
        self, server: ApiServer, method: str, path: str, params: dict[str, str], body: Thing
    ) -> None:
        self.server = server
        self.method = method
        self.params = params
        self.body = body
        self.parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]

    def answer(self) -> Thing | Iterator[bytes]:
        """A JSON object, or pieces of a stream."""
        if self.parts == ["version"]:
            major, minor = self.server.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.server.version}.0"}
        core = self.parts[0] == "api"
        api = "v1" if core else "/".join(self.parts[1:3])
        rest = self.parts[2:] if core else self.parts[3:]
        if not [part for part in rest if part]:
            return self._resources(api)
        if rest[0] == "selfsubjectrulesreviews":
            everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
            role = self.server.role
            rules = [] if self.server.secretive else role["rules"] if role else [everything]
            return {"status": {"resourceRules": rules, "incomplete": self.server.secretive}}
        if rest[0] == "selfsubjectaccessreviews":
            asked = self.body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, [asked["resource"], asked.get("subresource")]))
            may = self.server.may(asked["verb"], asked["group"], resource)
            return {"status": {"allowed": may}}
        namespace, plural, *names = rest[1:]
        if namespace != NAMESPACE:
            raise Status(403, "Forbidden", f'namespaces "{namespace}" is forbidden')
        kind = next((k for k in self.server.kinds if (k.api, k.plural) == (api, plural)), None)
        if kind is None:
            raise Status(404, "NotFound", "the server could not find the requested resource")
        return self._of(kind, names)

    def _resources(self, api: str) -> Thing:
        found = [kind for kind in self.server.kinds if kind.api == api]
        if not found:
            raise Status(404, "NotFound", "the server could not find the requested resource")
        return {"kind": "APIResourceList", "resources": [{"name": k.plural} for k in found]}

    def _of(self, kind: Kind, names: list[str]) -> Thing | Iterator[bytes]:
        watching = self.params.get("watch") == "true"
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(
            self.method, "get" if names else "watch" if watching else "list"
        )
        resource = "/".join([kind.plural, *names[1:]])
        if not self.server.may(verb, kind.group, resource):
            raise Status(
                403, "Forbidden",
                f'{resource} is forbidden: User "u" cannot {verb} resource "{resource}"',
            )  # fmt: skip
        if names[1:] == ["log"]:
            return self._log(names[0])
        if verb == "create":
            return self._create(kind)
        if verb == "list":
            return self._list(kind)
        if verb == "watch":
            return self._watch(kind)
        thing = self.server.get(kind, names[0])
        if thing is None:
            raise Status(404, "NotFound", f'{kind.plural} "{names[0]}" not found')
        if verb == "patch":
            if kind is kinds.JOB:
                _check_change(thing, self.body)
            changed = self.server.change(kind, names[0], self.body)
            assert changed is not None
            return changed
        if verb == "delete":
            if kind is kinds.JOB and self.body.get("propagationPolicy") != "Background":
                raise Status(422, "Invalid", "pods would be orphaned")
            self.server.remove(kind, names[0])
        return thing

    def _create(self, kind: Kind) -> Thing:
        name = self.body["metadata"]["name"]
        if self.server.get(kind, name) is not None:
            raise Status(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        if self.params.get("fieldValidation") == "Strict":
            found = schemas.problems(self.body, self.server.version)
            if found:
                raise Status(
                    400, "BadRequest",
                    f'{kind.name} in version "{kind.api.rpartition("/")[2]}" cannot be handled as '
                    f"a {kind.name}: strict decoding error: {found[0]}",
                )  # fmt: skip
        if self.params.get("dryRun") == "All":
            return self.body
        return self.server.put(kind, _as_stored(self.body))

    def _fits(self, thing: Thing) -> bool:
        wanted = self.params.get("labelSelector", "")
        labels = thing["metadata"].get("labels", {})
        for term in filter(None, wanted.split(",")):
            key, equals, value = term.partition("=")
            if (labels.get(key) != value) if equals else (key not in labels):
                return False
        return True

    def _list(self, kind: Kind) -> Thing:
        with self.server.changed:
            items = [each for each in self.server.all(kind) if self._fits(each)]
            version = str(self.server.now)
        return {
            "kind": f"{kind.name}List",
            "metadata": {"resourceVersion": version},
            "items": items,
        }

    def _watch(self, kind: Kind) -> Iterator[bytes]:
        seen = int(self.params.get("resourceVersion") or 0)
        if seen < self.server.forgotten:
            status = {"code": 410, "reason": "Expired", "message": "too old resource version"}
            yield _line({"type": "ERROR", "object": status})
            return
        end = time.monotonic() + float(self.params.get("timeoutSeconds", 300))
        while not self.server.closing and time.monotonic() < end:
            with self.server.changed:
                news = [each for each in self.server.history if each[0] > seen]
                if not news:
                    self.server.changed.wait(0.5)
                    continue
            for number, event, plural, thing in news:
                seen = number
                if plural == kind.plural and self._fits(thing):
                    yield _line({"type": event, "object": thing})
            mark = {"metadata": {"resourceVersion": str(seen)}}
            yield _line({"type": "BOOKMARK", "object": mark})

    def _log(self, pod: str) -> Iterator[bytes]:
        thing = self.server.get(kinds.POD, pod)
        if thing is None:
            raise Status(404, "NotFound", f'pods "{pod}" not found')
        if thing["status"].get("phase") == "Pending" and thing["spec"].get("nodeName"):
            said = f'container "trainer" in pod "{pod}" is waiting to start: ContainerCreating'
            raise Status(400, "BadRequest", said)
        return self._lines(pod)

    def _lines(self, pod: str) -> Iterator[bytes]:
        log = self.server.logs.setdefault(pod, Log())
        since = self.params.get("sinceTime", "")[:19]
        sent = 0
        while True:
            with self.server.changed:
                new, ended = log.lines[sent:], log.ended
            for stamp, text in new:
                sent += 1
                if stamp[:19] >= since:
                    yield f"{stamp} {text}\n".encode()
                if _take_fault(self.server, "LOG", pod) is not None:
                    raise Cut
            if self.params.get("follow") != "true" or ended or self.server.closing:
                return
            with self.server.changed:
                if len(log.lines) == sent and not log.ended:
                    self.server.changed.wait(0.5)


_CHANGEABLE = {"suspend", "parallelism", "completions", "activeDeadlineSeconds", "backoffLimit",
               "ttlSecondsAfterFinished"}  # fmt: skip


def _check_change(job: Thing, patch: Thing) -> None:
    """What a server lets be changed of a Job that was created."""
    name, spec = job["metadata"]["name"], merge(job["spec"], patch.get("spec", {}))
    changed = {field for field in spec if spec[field] != job["spec"].get(field)}
    wrong = dict.fromkeys(changed - _CHANGEABLE, "field is immutable")
    if "completions" in changed and spec["completions"] != spec["parallelism"]:
        wrong["completions"] = "can only be modified in tandem with spec.parallelism"
    if wrong:
        field, why = min(wrong.items())
        raise Status(422, "Invalid", f'Job.batch "{name}" is invalid: spec.{field}: {why}')


def _as_stored(thing: Thing) -> Thing:
    """The strings of a Secret can be written and not read: what is read is their code."""
    if "stringData" not in thing:
        return thing
    coded = {key: base64.b64encode(text.encode()).decode() for key, text in
             thing["stringData"].items()}  # fmt: skip
    kept = {key: value for key, value in thing.items() if key != "stringData"}
    return {**kept, "data": {**thing.get("data", {}), **coded}}


def _line(said: Thing) -> bytes:
    return json.dumps(said).encode() + b"\n"
