"""Builds the C code of mpicomm.native; without a C compiler, the package is installed without it."""

import importlib.util
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("mpicomm/native")
LIBRARY = ["slots.c", "crash.c", "source_crc.c"]
"""The sources that need no headers of Python, and are used by ctypes."""


class BuildLibrary(build_ext):
    """Builds a file that depends neither on the version of Python nor on its kind; one without a GIL only loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the file."""
        return fullname.replace(".", "/") + ".abi3.so"


class Wheel(bdist_wheel):
    """A wheel for any version of Python 3 on this architecture."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel."""
        return "py3", "none", super().get_tag()[2]


def sources() -> list[str]:
    """Return the sources to compile; those of the extension module need the headers of a Python with a GIL."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    has_lock = not sysconfig.get_config_var("Py_GIL_DISABLED")
    names = sorted(path.name for path in FOLDER.glob("*.c")) if has_headers and has_lock else LIBRARY
    return [str(FOLDER / name) for name in names]


def source_crc() -> int:
    """Return the CRC with which the built file is recognised."""
    spec = importlib.util.spec_from_file_location("extension", FOLDER / "extension.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_crc(FOLDER)


setup(
    ext_modules=[
        Extension(
            "mpicomm.native.hot_path",
            sources(),
            depends=[str(path) for path in FOLDER.glob("*.h")],
            define_macros=[("SOURCE_CRC", f"{source_crc()}u")],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            libraries=["dl"],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
