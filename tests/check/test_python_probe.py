import importlib.metadata
import platform
import sys

from paceline.check.python_probe import probe_packages, probe_python


def test_the_python_is_the_one_that_runs():
    python = probe_python({})["python"]
    assert (python["version"], python["executable"]) == (platform.python_version(), sys.executable)
    assert python["venv"] == (sys.prefix != sys.base_prefix)


def test_versions_are_those_of_the_metadata_and_none_for_what_is_not_there():
    packages = probe_packages()
    assert packages["numpy"] == importlib.metadata.version("numpy")
    assert packages["nvidia-ml-py"] == importlib.metadata.version("nvidia-ml-py")
    assert packages["deepspeed"] is None
    assert "nvidia-nccl-cu13" in packages


def test_the_first_on_the_path_counts_and_wheels_of_cuda_are_listed(tmp_path, monkeypatch):
    for name, version in (("numpy", "0.1"), ("nvidia_cublas_cu12", "12.8.4.1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = probe_packages()
    assert (packages["numpy"], packages["nvidia-cublas-cu12"]) == ("0.1", "12.8.4.1")
