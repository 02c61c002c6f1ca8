"""As PyTorch's setup.py until 2.13: installs what is built in build/ into torch/, and packs that."""

import os
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def run(self):
        build = ["cmake", "--build", "build", "--target", "install", "--", "-j", os.environ["MAX_JOBS"]]
        subprocess.check_call(build)
        super().run()


setup(
    name="torch",
    version="2.99.0",
    packages=["torch"],
    package_data={"torch": ["lib/*.so"]},
    cmdclass={"build_py": BuildPy},
)
