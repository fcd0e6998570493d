"""Builds without what an earlier build left behind, which would be installed again."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class FreshBuild(build_py):
    """Copies modules into a folder that holds no others."""

    def run(self) -> None:
        """As setuptools does, after the packages of an earlier build are gone."""
        if not self.editable_mode:
            for name in ("dsv4_jax", "pallas_kernels"):
                shutil.rmtree(pathlib.Path(self.build_lib) / name, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": FreshBuild})
