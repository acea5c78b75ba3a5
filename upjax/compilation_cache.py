"""Compiled programs kept between processes, so that a command started again need not compile again."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Keeps what takes over a second to compile in the user's cache directory, or where JAX_COMPILATION_CACHE_DIR says.

    Commands call this; the library leaves the choice to its caller.
    """
    if jax.config.jax_compilation_cache_dir is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "upjax" / "compiled"))
