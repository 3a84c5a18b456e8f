"""Strict schemas: what Kubernetes 1.29 to 1.37 and the operators accept, unknown fields refused."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import referencing
import yaml

VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
CRDS = Path(__file__).parents[1] / "data" / "crds"
OLDER = Path(sys.prefix) / "kubernetes-1.34" / "kubernetes_validate"
"""An older release of kubernetes-validate, beside ours: each holds the newest dozen versions."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SEARCHED = (Path(kubernetes_validate.__file__).parent, OLDER)


def problems(manifest: dict[str, Any], version: str) -> list[str]:
    """What Kubernetes ``version``, or the operator of the kind, would refuse; a line each."""
    kind, api = manifest["kind"], manifest["apiVersion"]
    group, _, release = api.rpartition("/")
    custom = custom_schemas(group).get((api, kind))
    if custom is not None:
        validator = jsonschema.Draft202012Validator(custom)
        found = _errors(validator, manifest)
        return found + [
            f"{where}: {problem}"
            for where, template in pod_templates(manifest)
            for problem in _errors(
                core_validator("podtemplate", "v1", version),
                {"apiVersion": "v1", "kind": "PodTemplate", "template": template},
            )
        ]
    name = "-".join(filter(None, [group.partition(".")[0], release]))
    return _errors(core_validator(kind.lower(), name, version), manifest)


def pod_templates(manifest: dict[str, Any]) -> list[tuple[str, Any]]:
    """The pods' templates within a custom resource: its own schema says little about them."""
    spec = manifest["spec"]
    if manifest["kind"] == "MPIJob":
        return [
            (kind, each["template"])
            for kind, each in spec["mpiReplicaSpecs"].items()
            if isinstance(each, dict)
        ]
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [
        (each["name"], each["template"]["spec"]["template"])
        for each in spec.get("replicatedJobs", [])
    ]


def _errors(validator: Any, value: Any) -> list[str]:
    return [
        f"{'.'.join(str(step) for step in error.absolute_path)}: {error.message[:300]}"
        for error in validator.iter_errors(value)
    ]


@functools.cache
def core_validator(kind: str, api: str, version: str) -> Any:
    folder = _folder(version)
    schema = json.loads((folder / f"{kind}-{api}.json").read_text())
    registry: Any = referencing.Registry()
    definitions = json.loads((folder / "_definitions.json").read_text())
    for each in (schema, definitions):
        registry = referencing.Resource.from_contents(each) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _folder(version: str) -> Path:
    for package in SEARCHED:
        folder = package / "kubernetes-json-schema" / f"v{version}.0-local-strict"
        if folder.is_dir():
            return folder
    raise LookupError(
        f"No schemas of Kubernetes {version}. `make test` installs them: pip install --no-deps "
        f"--target {OLDER.parent} kubernetes-validate==1.34.1"
    )


@functools.cache
def custom_schemas(group: str) -> dict[tuple[str, str], Any]:
    """The strict schema of each custom resource of a group, by API version and kind."""
    found = {}
    for path in sorted(CRDS.glob("*.yaml.gz")):
        text = gzip.decompress(path.read_bytes())
        if f"\n  group: {group}\n".encode() not in text:
            continue  # reading all of them takes many seconds
        for document in yaml.load_all(text, _Loader):
            spec = document["spec"]
            for version in spec["versions"]:
                schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                _make_strict(schema)
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def _make_strict(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _make_strict(each)
        return
    if not isinstance(schema, dict):
        return
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
    if "properties" in schema and schema.get("type") == "object":
        lenient = schema.get("x-kubernetes-preserve-unknown-fields", False)
        if not lenient and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
    for each in schema.values():
        _make_strict(each)
