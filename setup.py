"""Builds the C library of mpicomm.native; without a C compiler, the package is installed without it."""

import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = ["mpicomm/native/slots.c", "mpicomm/native/crash.c"]


class BuildLibrary(build_ext):
    """Builds a library that does not depend on the version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library, without a suffix for the version of Python."""
        return fullname.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """A wheel for any version of Python 3 on this architecture."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "mpicomm.native.libnative",
            SOURCES,
            # mpicomm.native.c_library refuses a library of other sources.
            define_macros=[("SOURCE_CRC", f"{zlib.crc32(b''.join(Path(each).read_bytes() for each in SOURCES))}u")],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
