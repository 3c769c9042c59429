"""Builds the extension modules; all else about the package stands in pyproject.toml.

Switches are read from the environment (make rebuilds everything when one of them changes):

REDLOCK_DEBUG=1        no optimisation, debug symbols, C assertions, and the C macro REDLOCK_DEBUG
REDLOCK_TRACE=1        line tracing for coverage. A traced line takes the GIL, in nogil code too, so
                       code that holds a C mutex must be marked @cython.linetrace(False)
REDLOCK_SANITIZE=LIST  what gcc's -fsanitize takes, such as address,undefined
REDLOCK_PROFILE=generate  counts how often each line runs, until
REDLOCK_PROFILE=use       lays the code out by those counts: see bench/train.py and `make optimised`
"""

import os
import sys
from pathlib import PurePath

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("REDLOCK_DEBUG", "0") == "1"
TRACE = os.environ.get("REDLOCK_TRACE", "0") == "1"
SANITIZE = os.environ.get("REDLOCK_SANITIZE", "")
PROFILE = os.environ.get("REDLOCK_PROFILE", "")

SOURCES = [
    "redlock_fast/rules.py",  # the .py files are importable as they are, too
    "redlock_fast/arguments.py",
    "redlock_fast/resolve.py",
    "redlock_fast/plan.py",
    "redlock_fast/holds.py",
    "redlock_fast/drive_sync.pyx",
    "redlock_fast/drive_aio.pyx",
    "redlock_fast/client.py",
    "redlock_fast/asyncio.py",
    "redlock_fast/_core/wire.pyx",
    "redlock_fast/_core/op.pyx",
    "redlock_fast/_core/seal.pyx",
    "redlock_fast/_core/link.pyx",
    "redlock_fast/_core/fleet.pyx",
    "redlock_fast/_core/io.pyx",
    "redlock_fast/_core/pump.pyx",
]

Options.closure_freelist_size = 1024  # as many coroutines of one kind may well be under way

DIRECTIVES = {
    "language_level": 3,
    "embedsignature": True,
    "annotation_typing": False,  # annotations are for type checkers; C types stand in the .pxd
    "linetrace": TRACE,
}  # bounds, wrap-around and initialisation checks stay at Cython's defaults: on

# These come after the interpreter's own flags and so override them.
compile_args = ["-pthread", "-O2", "-g0"]
link_args = ["-pthread"]
macros = []
if DEBUG:
    compile_args += ["-O0", "-g", "-UNDEBUG"]
    macros += [("REDLOCK_DEBUG", "1")]
if TRACE:
    # From 3.13 on Cython would report to sys.monitoring, where coverage's plugins hear nothing.
    compile_args += ["-O0"]
    macros += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]
if SANITIZE:
    compile_args += ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"]
    link_args += [f"-fsanitize={SANITIZE}"]
if PROFILE:
    # The counts lie beside the objects, in build/temp.*. Several threads count at once.
    compile_args += [
        f"-fprofile-{PROFILE}",
        "-fprofile-update=prefer-atomic",
        "-Wno-missing-profile",
    ]
    link_args += [f"-fprofile-{PROFILE}"]


class BuildExt(build_ext):
    """Runs Cython when building only, so that an sdist lists sources and nothing generated."""

    def finalize_options(self):
        """Let in-place builds by make and by pip share a folder, so that nothing is built twice."""
        super().finalize_options()
        if self.inplace:
            self.build_lib = f"build/inplace/{sys.implementation.cache_tag}"

    def run(self):
        """Generate C out of the source tree, or beside the sources, where Cython.Coverage looks."""
        build_dir = None if TRACE else "build/cython"
        # Counts are good for the very C files that were counted.
        force = self.force and PROFILE != "use"
        generated = cythonize(
            self.extensions, build_dir=build_dir, force=force, compiler_directives=DIRECTIVES
        )
        for extension, result in zip(self.extensions, generated, strict=True):
            extension.sources = result.sources
        super().run()


setup(
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=[
        Extension(
            ".".join(PurePath(source).with_suffix("").parts),
            [f"src/{source}"],
            define_macros=macros,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
        for source in SOURCES
    ],
)
