"""Compiles every `_NAME.pyx` of the package `ha` when halog is built or installed (docs/releasing.md).

Without a C compiler, if it or Cython fails, or if HALOG_PURE is set, halog is installed without compiled modules and
runs the Python function of each twin; `ha --version` shows how many twins are in use.
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

LAYOUT = "ha/protocol/_layout.pxd"
"""Included by all of these modules"""


class CustomBuildHook(BuildHookInterface[BuilderConfig]):
    """Adds the compiled modules to a wheel; for an editable installation, puts them next to their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in a temporary folder, so that no build files remain among the sources."""
        if self.target_name != "wheel" or os.environ.get("HALOG_PURE"):
            return
        self._folder = TemporaryDirectory()
        root, folder = Path(self.root), Path(self._folder.name)
        for module in compiled(folder):
            name = module.relative_to(folder / "lib")
            if version == "editable":
                # Replaced rather than overwritten: running processes have the old file mapped.
                shutil.copy(module, root / f"{name}.new")
                os.replace(root / f"{name}.new", root / name)
            else:
                build_data["force_include"][str(module)] = str(name)
                build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def compiled(folder: Path) -> Iterator[Path]:
    """Compile the package in the current folder and return the compiled modules, which are written to `folder`/lib.

    Each module holds the CRC of its sources (`SOURCE_CRC`): ha/protocol/compiled.py ignores a module whose sources have
    changed since.
    """
    to_c: Any = cythonize
    modules = []
    layout = (Path(__file__).parent / LAYOUT).read_bytes()
    (folder / LAYOUT).parent.mkdir(parents=True)
    (folder / LAYOUT).write_bytes(layout)
    for source in sorted(Path("ha").rglob("_*.pyx")):
        copy = folder / source
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(source.read_bytes() + b"\n\nSOURCE_CRC = %d\n" % crc32(source.read_bytes() + layout))
        try:
            extension = Extension(".".join(source.with_suffix("").parts), [str(copy)])
            modules += to_c([extension], language_level=3, include_path=[str(folder)])
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
