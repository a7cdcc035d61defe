"""Compiled programs kept on disk between processes: JAX's own compilation cache, for our programs alone."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import os
import tempfile
import threading
from collections.abc import Generator, Mapping

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.validate import check_path

_LOCK = threading.RLock()


class CompileCache:
    """A directory for compiled programs, or none.

    JAX's cache is a setting of the whole process. Here it is set for one compilation at a time and then put back, so
    that neither the user's other programs nor a cache of their own take part.

    Programs of several CPU devices are compiled anew, also where JAX is set to a cache: what XLA:CPU (jaxlib 0.10.2)
    reads back has lost the order of its collectives, and devices that begin with different ones wait forever.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, mesh: Mesh) -> None:
        self.directory = None if directory is None else check_path("compile_cache", directory).absolute()
        self._is_off = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise ValueError(
                f"{caller()}: compile_cache={str(directory)!r} must be a directory that can be written to: {error}. "
                "Name another, or leave compile_cache out."
            ) from error

    @contextlib.contextmanager
    def active(self) -> Generator[None, None, None]:
        """Take what is compiled within from the directory, or write it there however small it is."""
        settings = self._settings()
        if not settings:
            yield
            return
        with _LOCK:
            before = {name: getattr(jax.config, name) for name in settings}
            _configure(settings)
            try:
                yield
            finally:
                _configure(before)

    def _settings(self) -> dict[str, object]:
        if self._is_off:
            return {"jax_enable_compilation_cache": False} if jax.config.values["jax_compilation_cache_dir"] else {}
        if self.directory is None:
            return {}
        return {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(self.directory),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
            # XLA's caches for GPUs would put the directory's path into the key: moved or mounted elsewhere, no hits.
            "jax_persistent_cache_enable_xla_caches": "none",
        }


def _configure(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX reads the directory once; from now on, at the next compilation
