"""The fields of a job file that matter on a cluster: nodes, devices, image, code, volumes, queues.

They stand in the same file as the others (:mod:`farandole.launch.spec`), since it is the same job:
``farandole run`` leaves them unread, ``farandole submit`` needs a few of them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_QUANTITY = re.compile(r"\d+(\.\d+)?([EPTGMk]i?|m|Ki)?")
_NODES = re.compile(r"([1-9]\d*):([1-9]\d*)")
_CLAIM = re.compile(r"claim:([a-z0-9]([-a-z0-9.]*[a-z0-9])?)(/.*)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_DNS = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def read_duration(value: Any) -> Any:
    """Seconds, from a number of them or a text such as ``90s``, ``30m``, ``12h`` or ``7d``."""
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip())
    if not found:
        raise ValueError("a number of seconds, or a text such as 90s, 30m, 12h or 7d, is needed")
    return float(found[1]) * _SECONDS[found[2]]


def _a_quantity(value: str) -> str:
    if not _QUANTITY.fullmatch(value):
        raise ValueError("an amount as Kubernetes writes it is needed, such as 64Gi, 500m or 32")
    return value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _nodes(value: Any) -> Any:
    if isinstance(value, str):
        found = _NODES.fullmatch(value.strip())
        if not found or int(found[1]) > int(found[2]):
            raise ValueError("a number, or the least and the most as in 2:4, is needed")
    if isinstance(value, int) and value < 1:
        raise ValueError("at least one node is needed")
    return value


def _place(value: str) -> str:
    if not value.startswith("/") and not _CLAIM.fullmatch(value):
        raise ValueError(
            "an absolute path in the container, or a volume claim as in claim:NAME or "
            "claim:NAME/FOLDER, is needed"
        )
    return value


def _job_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            "at most 30 lower-case letters, digits and dashes are needed, beginning with a letter"
        )
    return value


def _object_name(value: str) -> str:
    if not _DNS.fullmatch(value) or len(value) > 253:
        raise ValueError(
            "the name of an object of Kubernetes is needed: lower-case letters, digits and dashes"
        )
    return value


Duration = Annotated[
    float,
    BeforeValidator(read_duration),
    Field(gt=0, strict=False),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0},
                   {"type": "string", "pattern": f"^{_DURATION.pattern}$"}]}
    ),
]  # fmt: skip
Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_a_quantity),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": f"^{_QUANTITY.pattern}$"}]}
    ),
]
Nodes = Annotated[int | str, BeforeValidator(_nodes)]
Place = Annotated[str, AfterValidator(_place)]
ObjectName = Annotated[str, AfterValidator(_object_name)]


class SecretKey(BaseModel):
    """One value of a Secret that is in the cluster."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    secret: ObjectName
    """The Secret's name."""
    key: Annotated[str, Field(min_length=1)]
    """Which of its values."""


class Mount(BaseModel):
    """A volume claim that the job's pods see."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    claim: ObjectName
    """The claim's name. More than one node needs one that many nodes may mount (ReadWriteMany)."""
    path: Annotated[str, Field(pattern=r"^/.+")]
    """Where the pods see it."""
    folder: str | None = None
    """The folder of the volume that they see. Default: all of it."""
    read_only: bool = False
    """Whether they may only read."""


class ClusterFields(BaseModel):
    """What a job file says about a cluster. Amounts are those of one node, which is one pod."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    name: Annotated[str | None, AfterValidator(lambda v: v and _job_name(v))] = None
    """The beginning of the job's name. Default: the program's file name."""
    backend: Literal["job", "jobset", "trainjob", "mpijob"] = "job"
    """What runs the job: ``job`` needs nothing installed; the others need their operator."""
    nodes: Annotated[Nodes, Field()] = 1
    """Number of nodes, or the least and the most of an elastic job: ``2:4``."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each node. Default: none."""
    ranks_per_node: Annotated[int | None, Field(ge=1, le=256)] = None
    """Ranks of each node. Default: one for each GPU, or 1."""
    gpu_product: str | None = None
    """The kind of GPU, as the label ``nvidia.com/gpu.product`` of the nodes says it."""
    mig: Annotated[str | None, Field(pattern=r"^\d+g\.\d+gb(\.me)?$")] = None
    """The profile of MIG instances to take instead of whole GPUs, as in ``1g.10gb``."""
    gpu_resource: str | None = None
    """The resource by which GPUs are asked for. Default: ``nvidia.com/gpu``, or that of ``mig``."""
    cpu: Quantity | None = None
    """Cores of each node. Default: what the namespace's limits say."""
    memory: Quantity | None = None
    """Memory of each node, asked for and at most. Default: what the namespace's limits say."""
    shm: Quantity | None = None
    """The size of ``/dev/shm``. Default: a quarter of the memory, 64Gi at most."""
    resources: dict[str, Quantity] = Field(default_factory=dict)
    """Other resources of each node, as in ``vpc.amazonaws.com/efa: 4``."""
    rdma: str | None = None
    """The resource of RDMA devices, as in ``rdma/hca``: one is taken and memory may be locked."""
    image: Annotated[str | None, Field(min_length=1)] = None
    """The container image; any with Python and torch. ``submit`` needs it."""
    image_pull_secrets: list[ObjectName] = Field(default_factory=list)
    """Secrets for the registry that holds the image."""
    code: Annotated[str, Field(pattern=r"^(archive|image|claim:.+|git:.+)$")] = "archive"
    """Where the program is: ``archive``: this folder travels with the job; ``image``: in the image;
    ``claim:NAME/FOLDER``: on a volume; ``git:URL@REVISION``: fetched by each node."""
    workdir: Annotated[str | None, Field(pattern=r"^/.*")] = None
    """The folder in which the program starts. Default: where the code is."""
    secrets: list[ObjectName] = Field(default_factory=list)
    """Secrets in the cluster whose values become environment variables of the same names."""
    secret_env: dict[str, SecretKey] = Field(default_factory=dict)
    """Environment variables, each from one value of a Secret in the cluster."""
    datasets: Place | None = None
    """Where the data is: a path in the container, or a claim, which is mounted at ``/data``."""
    checkpoints: Place | None = None
    """Where checkpoints go: a path, or a claim, which is mounted at ``/checkpoints``."""
    logs: Place | None = None
    """Where each rank's output is kept too: a path, or a claim, which is mounted at ``/logs``."""
    mounts: list[Mount] = Field(default_factory=list)
    """Other volume claims."""
    queue: ObjectName | None = None
    """The queue: Kueue's LocalQueue, or Volcano's. Default: none."""
    gang: Literal["kueue", "volcano", "native", "none"] | None = None
    """Who sees to it that all nodes start together. Default: Kueue if there is a queue."""
    priority: ObjectName | None = None
    """The priority class of the pods."""
    topology: str | None = None
    """A label of nodes, as ``topology.kubernetes.io/zone``: nodes with one value are preferred."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the nodes must have."""
    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    """Taints of nodes that do not matter, as Kubernetes writes them."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How many times a node's pod is replaced when it fails; lost machines do not count."""
    time_limit: Duration | None = None
    """After so long a run the job saves and ends. Default: none."""
    keep: Duration = 86400.0
    """How long a finished job stays to be looked at. Default: a day."""
    network_policy: bool = True
    """Whether only the job's own pods may reach its pods."""
    restricted: bool = False
    """Whether the pods run as an ordinary user (1000), without any capability."""
    pod_patch: dict[str, Any] = Field(default_factory=dict)
    """What else the pods' template needs: merged into it (a JSON merge patch; RFC 7396)."""

    @model_validator(mode="after")
    def _fit_together(self) -> ClusterFields:
        if self.mig and not self.gpus:
            raise ValueError("mig says the kind of GPU: say how many with gpus")
        if self.gpu_product and not self.gpus:
            raise ValueError("gpu_product says the kind of GPU: say how many with gpus")
        if self.mig and self.gpus > 1 and self.ranks_per_node not in (None, 1):
            raise ValueError("a process sees one MIG device only: leave ranks_per_node at 1")
        if self.gang == "kueue" and not self.queue:
            raise ValueError("gang: kueue needs the name of a LocalQueue in queue")
        if self.elastic and self.backend != "job":
            raise ValueError(
                f"nodes: {self.nodes} (elastic) needs backend: job; {self.backend} cannot scale"
            )
        for name in ("datasets", "checkpoints", "logs"):
            place = getattr(self, name)
            if place is not None and any(
                each.path == f"/{mounted_at(name)}" for each in self.mounts
            ):
                raise ValueError(f"mounts has something at /{mounted_at(name)}, as has {name}")
        return self

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return isinstance(self.nodes, str)

    @property
    def least_nodes(self) -> int:
        """With how many nodes training begins."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def most_nodes(self) -> int:
        """How many nodes there are when all are there."""
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def local_size(self) -> int:
        """Ranks of each node."""
        return self.ranks_per_node or (1 if self.mig else self.gpus) or 1


def mounted_at(field: str) -> str:
    """The folder at which the claim of ``datasets``, ``checkpoints`` or ``logs`` is mounted."""
    return {"datasets": "data", "checkpoints": "checkpoints", "logs": "logs"}[field]


def claim_of(place: str) -> tuple[str, str] | None:
    """The claim and the folder in it that a place names; ``None`` when it is a plain path.

    Example::

        claim_of("claim:ckpt/run7")   # ("ckpt", "run7")
        claim_of("/ckpt")             # None
    """
    found = _CLAIM.fullmatch(place)
    return (found[1], (found[3] or "").strip("/")) if found else None
