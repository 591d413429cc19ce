"""Compiles every `_NAME.pyx` of the package `ha` (docs/releasing.md) for whoever builds or installs halog.

Where there is no C compiler, or it or Cython fails, or HALOG_PURE is set, all the rest is built and installed as ever,
and halog runs the Python twin of each compiled function; `ha --version` says so.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from Cython.Build import cythonize
from Cython.Compiler.Errors import CompileError
from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension


class CustomBuildHook(BuildHookInterface[BuilderConfig]):
    """Adds the compiled modules to a wheel; of an editable installation, puts them beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, in a folder of its own, so that no file of a build stays among the sources."""
        if self.target_name != "wheel" or os.environ.get("HALOG_PURE"):
            return
        self._folder = TemporaryDirectory()
        root, folder = Path(self.root), Path(self._folder.name)
        for module in compiled(folder):
            name = module.relative_to(folder / "lib")
            if version == "editable":
                # Replaced, never written into: a process that runs has the old one mapped.
                shutil.copy(module, root / f"{name}.new")
                os.replace(root / f"{name}.new", root / name)
            else:
                build_data["force_include"][str(module)] = str(name)
                build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Forget the folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def compiled(folder: Path) -> Iterator[Path]:
    """Compile what is below the current folder, a build's root, and return what came of it, below `folder`/lib.

    Each module knows what it was compiled from (`SOURCE_CRC`): ha/protocol/compiled.py leaves one alone that is of
    another source than the one beside it.
    """
    to_c: Any = cythonize
    modules = []
    for source in sorted(Path("ha").rglob("_*.pyx")):
        copy = folder / source
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes() + b"\n\nSOURCE_CRC = %d\n" % crc32(source.read_bytes()))
        try:
            modules += to_c([Extension(".".join(source.with_suffix("").parts), [str(copy)])], language_level=3)
        except CompileError as error:
            print(f"{source} is not compiled: {error}", file=sys.stderr)
    for module in modules:
        module.optional = True
    command: Any = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
    command.parallel = True
    command.ensure_finalized()
    command.run()
    return (folder / "lib").rglob("*.so")
