"""The cluster of a kubeconfig, through kr8s: contexts, namespaces, exec plugins, in-cluster.

Questions are asked again when the network or the server falters, with growing pauses, for
:data:`PATIENCE` seconds. What creates is asked again too, since names are ours alone: when the
object is there already, it was made by the request whose answer was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from farandole.core.errors import FarandoleError, MissingExtraError, SetupError
from farandole.launch.kubernetes import naming
from farandole.launch.kubernetes.cluster import Refused, Unreachable
from farandole.launch.kubernetes.kinds import POD, Kind, kind_of
from farandole.launch.kubernetes.submission import Manifest

PATIENCE = 15.0
FIRST_PAUSE = 0.2
QUIET = 300.0
"""Seconds without a line after which a stream is begun anew: after a laptop's sleep the other end
may be long gone, of which nobody tells."""
_NO_WORDS = "These are no words of Kubernetes: perhaps a proxy answered."
_REVIEWS = "authorization.k8s.io/v1"

ResultT = TypeVar("ResultT")


@contextlib.contextmanager
def leaving_no_keys() -> Iterator[None]:
    """Removes the files into which kr8s copies a kubeconfig's keys and certificates."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="farandole-") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


async def connect(context: str | None = None, namespace: str | None = None) -> KubeCluster:
    """The cluster that ``kubectl`` would talk to; ``context`` and ``namespace`` choose others.

    Raises ``MissingExtraError`` without kr8s, and ``SetupError`` when there is no configuration or
    nobody answers.
    """
    try:
        import kr8s.asyncio
        import yaml
    except ImportError:
        raise MissingExtraError(
            "Clusters are reached with the package kr8s, which is not installed: "
            "pip install 'farandole[kubernetes]'"
        ) from None
    try:
        with warnings.catch_warnings():
            # kr8s warns of servers that it was not tested with; we check the version ourselves.
            warnings.simplefilter("ignore", UserWarning)
            api = await _again(
                lambda: kr8s.asyncio.api(context=context, namespace=namespace), "connect"
            )
    except FarandoleError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, yaml.YAMLError) as error:
        # RuntimeError: a plugin that logs in has failed.
        why = " ".join(str(error).split())
        raise SetupError(
            f"There is no cluster to talk to: {why}. `kubectl config get-contexts` shows those "
            "that this machine knows; choose one with --context, or set KUBECONFIG."
        ) from None
    return KubeCluster(api)


class KubeCluster:
    """See :class:`~farandole.launch.kubernetes.cluster.Cluster`."""

    def __init__(self, api: Any) -> None:
        self._api = api

    @property
    def namespace(self) -> str:
        """See :class:`Cluster`."""
        return str(self._api.namespace)

    @property
    def server(self) -> str:
        """See :class:`Cluster`."""
        return str(self._api.auth.server)

    async def version(self) -> tuple[int, int]:
        """See :class:`Cluster`."""
        said = await self._ask("GET", "", base="/version")
        return int(said["major"]), int("".join(c for c in said["minor"] if c.isdigit()))

    async def serves(self, kind: Kind) -> bool:
        """See :class:`Cluster`."""
        try:
            said = await self._ask("GET", "", version=kind.api)
        except Refused as error:
            if error.code == 404:
                return False
            raise
        return any(each["name"] == kind.plural for each in said["resources"])

    async def rules(self) -> list[Manifest]:
        """See :class:`Cluster`."""
        asked = {
            "apiVersion": _REVIEWS,
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": self.namespace},
        }
        said = await self._ask("POST", "selfsubjectrulesreviews", version=_REVIEWS, body=asked)
        return said["status"].get("resourceRules") or []

    async def allowed(self, verb: str, kind: Kind, subresource: str = "") -> bool:
        """See :class:`Cluster`."""
        asked = {
            "apiVersion": _REVIEWS,
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {
                    "namespace": self.namespace,
                    "verb": verb,
                    "group": kind.group,
                    "resource": kind.plural,
                    "subresource": subresource,
                }
            },
        }
        said = await self._ask("POST", "selfsubjectaccessreviews", version=_REVIEWS, body=asked)
        return bool(said["status"]["allowed"])

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """See :class:`Cluster`."""
        kind = kind_of(manifest)
        params = {"fieldValidation": "Strict", "fieldManager": "farandole"}
        if dry_run:
            params["dryRun"] = "All"
        lost: list[Exception] = []
        try:
            return await self._ask(
                "POST", kind.plural, kind=kind, body=manifest, params=params, lost=lost
            )
        except Refused as error:
            found = None
            if error.reason == "AlreadyExists" and lost:
                found = await self.get(kind, manifest["metadata"]["name"])
            ours = manifest["metadata"]["labels"][naming.INSTANCE]
            if found is None or found["metadata"].get("labels", {}).get(naming.INSTANCE) != ours:
                raise
            return found

    async def get(self, kind: Kind, name: str) -> Manifest | None:
        """See :class:`Cluster`."""
        try:
            return await self._ask("GET", f"{kind.plural}/{name}", kind=kind)
        except Refused as error:
            if error.code == 404:
                return None
            raise

    async def find(self, kind: Kind, selector: str = "") -> list[Manifest]:
        """See :class:`Cluster`."""
        found: list[Manifest] = []
        params: dict[str, str] = {"labelSelector": selector, "limit": "500"}
        while True:
            said = await self._ask("GET", kind.plural, kind=kind, params=params)
            found += said["items"]
            more = said["metadata"].get("continue")
            if not more:
                return found
            params["continue"] = more

    async def patch(self, kind: Kind, name: str, change: Manifest) -> Manifest:
        """See :class:`Cluster`."""
        return await self._ask(
            "PATCH",
            f"{kind.plural}/{name}",
            kind=kind,
            body=change,
            params={"fieldManager": "farandole"},
            content_type="application/merge-patch+json",
        )

    async def delete(self, kind: Kind, name: str) -> bool:
        """See :class:`Cluster`."""
        try:
            await self._ask(
                "DELETE",
                f"{kind.plural}/{name}",
                kind=kind,
                # Without it, a Job's pods would stay and train on.
                body={"propagationPolicy": "Background"},
            )
        except Refused as error:
            if error.code == 404:
                return False
            raise
        return True

    async def log(
        self,
        pod: str,
        container: str,
        *,
        since: str | None = None,
        follow: bool = False,
        previous: bool = False,
    ) -> AsyncIterator[tuple[str, bytes]]:
        """See :class:`Cluster`."""
        params = {"container": container, "timestamps": "true"}
        if since:
            params["sinceTime"] = since
        if follow:
            params["follow"] = "true"
        if previous:
            params["previous"] = "true"
        async for line in self._stream(f"pods/{pod}/log", POD, params, whole=True):
            time, _, text = line.partition(" ")
            yield time, text.encode("utf-8", "surrogateescape")

    # ---- how it is asked

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        kind: Kind | None = None,
        version: str = "",
        base: str = "",
        body: Manifest | None = None,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
        lost: list[Exception] | None = None,
    ) -> Manifest:
        async def send(*, log_in: bool) -> Any:
            async with self._api.call_api(
                method,
                version=version if kind is None else kind.api,
                base=base,
                namespace=None if kind is None else self.namespace,
                url=url,
                params=params or {},
                content=None if body is None else json.dumps(body),
                headers={"content-type": content_type},
                raise_for_status=log_in,
            ) as response:
                return response

        async def once() -> Manifest:
            # kr8s would log in anew after a 403 too, and cut off what others ask meanwhile.
            response = await send(log_in=False)
            if response.status_code == 401:
                response = await send(log_in=True)
            if response.is_error:
                raise _of_response(response)
            try:
                said: Manifest = response.json()
            except ValueError:
                raise Refused(_NO_WORDS) from None
            return said

        return await _again(once, f"{method} {url}", lost)

    async def _stream(
        self, url: str, kind: Kind, params: dict[str, str], *, whole: bool = False
    ) -> AsyncIterator[str]:
        """The lines of an answer; ``whole``: raises ``Unreachable`` when that breaks off."""
        import httpx
        import kr8s

        try:
            async with self._api.call_api(
                "GET",
                version=kind.api,
                namespace=self.namespace,
                url=url,
                params=params,
                stream=True,
                timeout=httpx.Timeout(10.0, read=QUIET),
            ) as response:
                async for line in response.aiter_lines():
                    yield line
        except kr8s.ServerError as error:
            refusal = _of_server(error)
            if whole and refusal.code >= 500:  # the server cannot reach the node
                raise Unreachable(refusal.message) from None
            raise refusal from None
        except (httpx.TransportError, kr8s.APITimeoutError) as error:
            if whole:
                raise Unreachable(f"The connection broke off ({type(error).__name__}).") from None
            return  # whoever watches begins anew


async def _again(
    ask: Callable[[], Awaitable[ResultT]], what: str, lost: list[Exception] | None = None
) -> ResultT:
    """Ask until there is an answer; a refusal is one. Notes in ``lost`` what went unanswered."""
    import httpx
    import kr8s

    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    pause = FIRST_PAUSE
    while True:
        try:
            return await ask()
        except (Refused, kr8s.ServerError) as error:
            refusal = error if isinstance(error, Refused) else _of_server(error)
            if refusal.code not in (429, 500, 502, 503, 504) or loop.time() + pause > end:
                raise refusal from None
        except (httpx.TransportError, kr8s.APITimeoutError) as error:
            if lost is not None:
                lost.append(error)
            if loop.time() + pause > end:
                raise Unreachable(
                    f"The cluster does not answer ({what}: {type(error).__name__} {error}). Is "
                    "the network there, and the context right?"
                ) from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, 4.0)


def _of_server(error: Any) -> Refused:
    if error.response is not None:
        return _of_response(error.response)
    return Refused(str(error).partition("\n")[0])


def _of_response(response: Any) -> Refused:
    status: Manifest = {
        "message": f"HTTP {response.status_code} {response.reason_phrase}",
        "code": response.status_code,
    }
    try:
        said = response.json()
    except ValueError:
        said = None
    if isinstance(said, dict) and said.get("kind") == "Status":
        status |= said
    else:
        status["message"] += f": {_NO_WORDS}"
    return _refusal(status)


def _refusal(status: Manifest) -> Refused:
    code, said = int(status.get("code", 0)), status.get("message") or "it gave no reason"
    if code == 401:
        said = f"The cluster does not know you ({said}). Log in again, or choose a --context."
    return Refused(said, code=code, reason=status.get("reason", ""))
