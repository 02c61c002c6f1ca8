"""Hosts with NVIDIA cards that are not there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_driver import Answers, FakeDriver, build_driver


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-ins for NVML and nvidia-smi."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def host(programs: Path, tmp_path: Path) -> Callable[..., FakeDriver]:
    """Makes a host with these cards and a driver of a version; its commands run in tmp_path."""

    def made(*cards: Answers, version: str = "580.95.05", cuda: int = 13000) -> FakeDriver:
        return FakeDriver(programs, tmp_path, *cards, version=version, cuda=cuda)

    return made
