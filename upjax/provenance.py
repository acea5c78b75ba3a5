"""What software a file came from, to write beside it."""

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("upjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def software() -> dict[str, Any]:
    """Returns the versions of upjax and what it computes with, and the commit when it runs from a git checkout."""
    return {
        "commit": _commit(Path(__file__).resolve().parents[1]),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    """Returns the version that is installed; None where there is none, as for upjax run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """Returns the commit checked out at `root`, marked where files differ from it; None where `root` is no checkout."""
    if not (root / ".git").exists():  # an installed upjax may lie within the checkout of something else
        return None
    git = lambda *arguments: subprocess.run(
        ("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("-modified" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):  # no git here, or one that does not trust the directory
        return None
