"""Farandole as it is installed here, as a wheel, and the versions of what its command line needs.

An image is to hold the Farandole that made it, of whatever branch, and a registry of packages may
be out of reach. So the wheel is made from the files that run.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from importlib import metadata

from farandole.core.errors import SetupError
from farandole.launch.kubernetes import archive

_NAME = "farandole"
_FRAMEWORK = "torch"
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip file can hold: the same files are the same wheel."""
_TAGS = "Wheel-Version: 1.0\nGenerator: farandole\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def file_name() -> str:
    """The name under which pip takes :func:`make` for what it is."""
    return f"{_NAME}-{_distribution().version}-py3-none-any.whl"


def make() -> bytes:
    """The wheel. Raises ``SetupError`` where Farandole runs without being installed."""
    found = _distribution()
    info = f"{_NAME}-{found.version}.dist-info"
    files = {f"{_NAME}/{name}": content for name, content in archive.package()}
    files[f"{info}/METADATA"] = _metadata(found).encode()
    files[f"{info}/WHEEL"] = _TAGS.encode()
    files[f"{info}/entry_points.txt"] = (found.read_text("entry_points.txt") or "").encode()
    record = "".join(f"{name},{_hash(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _FIRST_DATE), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def pins() -> list[str]:
    """What Farandole needs except torch, and what that needs: lines as ``click==8.1.8``."""
    found: dict[str, str] = {}
    waiting = [_NAME]
    while waiting:
        for needed in metadata.requires(waiting.pop()) or ():
            name = re.split(r"[^\w.-]", needed, maxsplit=1)[0]
            if name in found or name == _FRAMEWORK or "extra ==" in needed:
                continue
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue  # needed with another Python, or on another system
            waiting.append(name)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        raise SetupError(
            "Farandole runs here without being installed, so it is not known what an image needs: "
            "pip install farandole."
        ) from None


def _metadata(found: metadata.Distribution) -> str:
    python = found.metadata["Requires-Python"]
    needed = [each for each in found.requires or () if "extra ==" not in each]
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {_NAME}",
        f"Version: {found.version}",
        f"Requires-Python: {python}",
        *(f"Requires-Dist: {each}" for each in needed),
    ]
    return "\n".join([*lines, ""])


def _hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.decode().rstrip('=')}"
