"""The build backend: hatchling, behind a check of the Python release.

An installer reads `requires-python` of a source tree from the metadata that the backend builds: after it has installed
the build requirements and compiled everything. So the requirements are not listed in pyproject.toml, but returned by
a hook, and this module, which an installer imports first, ends an installation on an older Python within a second.
It must be valid there.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("halog requires Python 3.11 or newer; this is Python {}.{}.{}".format(*sys.version_info))

REQUIREMENTS = ["hatchling>=1.27,<2", "cython>=3.1,<4", "setuptools>=77"]

Settings = dict[str, object] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns what hatchling and hatch_build.py need."""
    return REQUIREMENTS


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Builds an sdist and returns its name."""
    from hatchling.build import build_sdist

    return build_sdist(sdist_directory)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds a wheel and returns its name."""
    from hatchling.build import build_wheel

    return build_wheel(wheel_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel that leads to this source tree, and returns its name."""
    from hatchling.build import build_editable

    return build_editable(wheel_directory)
