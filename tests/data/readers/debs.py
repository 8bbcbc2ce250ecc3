"""Debian packages made for a test, in the cache of a home folder, so that no network is needed."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


def put_deb(home: Path, package: str, files: Mapping[str, bytes], links: Mapping[str, str] | None = None, version: str = "1:2-1") -> Path:
    """Build a package and put it where the reader of a user with that home looks first.

    Args:
        home: the user's home folder.
        package: its name.
        files: path in the package -> content; Debian's copyright file is added.
        links: path in the package -> target of a symbolic link.
        version: Debian's version.
    """
    cache, tree = home / ".cache/dml-repro", home / f"{package}.tree"
    cache.mkdir(parents=True, exist_ok=True)
    (tree / "DEBIAN").mkdir(parents=True)
    control = f"Package: {package}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.invalid>\nDescription: t\n"
    (tree / "DEBIAN/control").write_text(control)
    for name, content in {f"usr/share/doc/{package}/copyright": f"licence of {package}".encode(), **files}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    for name, target in (links or {}).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).symlink_to(target)
    path = cache / f"{package}_{version.replace(':', '%3a')}_all.deb"
    subprocess.run(["dpkg-deb", "-Zgzip", "--build", "--root-owner-group", tree, path], check=True, capture_output=True)
    return path
