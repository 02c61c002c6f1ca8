"""Low precision on a card with a library of some version: what the check says of it, with a fix, from recorded facts."""

import json
from pathlib import Path

import pytest
from rows import with_rows
from test_verdicts import HOSTS, changed

from paceline.check import ready
from paceline.check.ready import check_config, find_findings, machine_of
from paceline.check.verdicts.rules import Intent
from paceline.config import Config

WHEEL = "pip install --force-reinstall torch -i https://download.pytorch.org/whl/"
ENGINE = "pip install --upgrade --no-build-isolation 'transformer_engine[pytorch]>=2.20'"
UPGRADE = "pip install --upgrade 'torch>=2.11'"
DRIVER = "a driver 570 or later: https://www.nvidia.com/drivers"
ADA, BLACKWELL, GB10 = ({f"gpus.{index}.capability": pair for index in (0, 1)} for pair in ([8, 9], [10, 0], [12, 1]))
CU126, CU128 = ({"torch.version": f"2.13.0+cu{cuda.replace('.', '')}", "torch.cuda": cuda} for cuda in ("12.6", "12.8"))
NEW_DRIVER = {"driver.version": "580.95.05"}
SUBJECTS = ("fp4-false-support", "mxfp8-not-on-sm120", "precision-library-old", "precision-unsupported")


def package(**versions):
    return {f"packages.{name.replace('_', '-')}": version for name, version in versions.items()}


# the workstation has two RTX 5090, driver 575.64.03, torch 2.13.0+cu128 and cuBLAS 12.8.4.1; what is changed there, the products of
# the config, and of each finding: id, severity, what it says, the fix
LIBRARIES = [
    # a library that is merely installed: a warning, since a script may use it
    (package(transformer_engine="2.17.0"), None, [
        ("fp4-false-support", "warn", "2.17.0 offers NVFP4 there, and makes gradients that are all zeros", ENGINE),
        ("mxfp8-not-on-sm120", "warn", "transformer-engine 2.17.0 refuses MXFP8 there", "Float8CurrentScaling()")]),
    (package(transformer_engine="2.8.0"), None, [
        ("fp4-false-support", "warn", "compute capability 12.0", ENGINE), ("mxfp8-not-on-sm120", "warn", "2.8.0", "bf16")]),
    (package(transformer_engine="2.20.2"), None, [("mxfp8-not-on-sm120", "warn", "2.20.2 refuses", "Float8CurrentScaling()")]),
    (package(transformer_engine="2.7.0"), None, [("mxfp8-not-on-sm120", "warn", "2.7.0 refuses", "Float8CurrentScaling()")]),
    (package(transformer_engine="2.17.0") | GB10, None, [
        ("fp4-false-support", "warn", "compute capability 12.1", ENGINE), ("mxfp8-not-on-sm120", "warn", "12.1", "bf16")]),
    (package(torchao="0.18.0"), None, [
        ("fp4-false-support", "warn", "torchao 0.18.0 offers NVFP4 there", "convert_to_float8_training"),
        ("mxfp8-not-on-sm120", "warn", "nvidia-cublas-cu12 12.8.4.1 has one of three layouts", "convert_to_float8_training")]),
    (package(torchao="0.14.1"), None, [("mxfp8-not-on-sm120", "warn", "torchao uses all", "convert_to_float8_training")]),
    (package(torchao="0.18.0", torchtitan="0.3.0"), None, [
        ("fp4-false-support", "warn", "torchao 0.18.0", "bf16"), ("fp4-false-support", "warn", "torchtitan 0.3.0", "bf16"),
        ("mxfp8-not-on-sm120", "warn", "torchao and torchtitan use all", "bf16")]),
    ({**package(torchao="0.20.0", nvidia_cublas="13.0.2.14"), "torch.cuda": "13.0", **NEW_DRIVER}, None, [
        ("mxfp8-not-on-sm120", "warn", "nvidia-cublas 13.0.2.14 has one", "convert_to_float8_training")]),
    # what has it, or does not claim to have it
    ({**package(torchao="0.20.0", nvidia_cublas="13.6.0.2"), "torch.cuda": "13.3", **NEW_DRIVER}, None, []),
    (package(transformer_engine="2.17.0", torchao="0.18.0", torchtitan="0.3.0") | BLACKWELL, None, []),
    (package(transformer_engine="2.17.0", torchao="0.18.0", torchtitan="0.3.0") | ADA, None, []),
    ({}, "nvfp4", []), ({}, "mxfp8", []), ({}, "fp8", []), (ADA | CU126, "fp8", []),
    # what the config's own products need
    (CU126, "nvfp4", [("precision-library-old", "stop", "cu126 is for CUDA 12.6, nvfp4 products need the cuBLAS of CUDA 12.8",
                       f"{WHEEL}cu128")]),
    (CU126 | NEW_DRIVER, "mxfp8", [("precision-library-old", "stop", "the cuBLAS of CUDA 12.8", f"{WHEEL}cu130")]),
    (BLACKWELL | CU126, "nvfp4", [("precision-library-old", "stop", "nvfp4 products need", f"{WHEEL}cu128")]),
    ({"torch.version": "2.9.1+cu126", "torch.cuda": "12.6"}, "nvfp4", [
        ("precision-library-old", "stop", "torch 2.9.1+cu126 has no torch.nn.functional.scaled_mm", UPGRADE),
        ("precision-library-old", "stop", "is for CUDA 12.6", f"{WHEEL}cu128")]),
    (ADA | {"torch.version": "2.7.1+cu118", "torch.cuda": "11.8"}, "fp8", [
        ("precision-library-old", "stop", "no torch.nn.functional.scaled_mm", UPGRADE),
        ("precision-library-old", "stop", "fp8 products need the cuBLAS of CUDA 12.0", f"{WHEEL}cu126")]),
    (package(nvidia_cublas_cu12="12.6.4.1"), "nvfp4", [
        ("precision-library-old", "stop", "nvidia-cublas-cu12 is 12.6.4.1, nvfp4 products need the cuBLAS of", f"{WHEEL}cu128")]),
    ({"driver.version": "565.57.01"}, "mxfp8", [
        ("precision-library-old", "stop", "driver 565.57.01, mxfp8 products need 570, which came with CUDA 12.8", DRIVER)]),
    ({"driver.version": "565.57.01"} | CU126, "nvfp4", [
        ("precision-library-old", "stop", "cuBLAS of CUDA 12.8", f"{WHEEL}cu128"),
        ("precision-library-old", "stop", "driver 565.57.01", DRIVER)]),
    # the second card is an older one than that of the plan
    ({"gpus.1.capability": [8, 6]}, "fp8", [
        ("precision-unsupported", "stop", "has capability 8.6, fp8 needs 8.9", "--precision auto")]),
    ({"gpus.1.capability": [9, 0]}, "nvfp4", [
        ("precision-unsupported", "stop", "has capability 9.0, nvfp4 needs 10.0", "--precision auto")]),
]  # fmt: skip


@with_rows("case", LIBRARIES)
def test_each_version_of_a_library_on_a_card_has_its_verdict_and_its_fix(case):
    changes, low, expected = case
    facts = changed(HOSTS["workstation"], changes)
    findings = [f for f in find_findings([facts], Intent(low_precision=low)) if f.id in SUBJECTS]
    assert [(finding.id, finding.severity) for finding in findings] == [row[:2] for row in expected]
    for finding, (_, _, says, fix) in zip(findings, expected, strict=True):
        assert says in finding.what and fix in finding.fix


def test_the_trainer_of_paceline_uses_none_of_these_libraries():
    facts = changed(HOSTS["workstation"], package(transformer_engine="2.17.0", torchao="0.18.0"))
    findings = find_findings([facts], Intent(command="train", device="cuda"))
    assert {finding.id: finding.severity for finding in findings if finding.id in SUBJECTS} == {
        "fp4-false-support": "note", "mxfp8-not-on-sm120": "note",
    }  # fmt: skip


@pytest.mark.parametrize(("keys", "ids"), [
    ({"precision": "nvfp4"}, ["precision-library-old"]),
    ({"precision": "nvfp4", "emulate": True}, []),
    ({"precision": "mxfp4"}, ["plan-refused"]),
    ({"precision": "bf16"}, []),
])  # fmt: skip
def test_a_config_reaches_the_verdict_on_its_precision(keys, ids, monkeypatch, tmp_path):
    facts = changed(HOSTS["workstation"], CU126)
    monkeypatch.setattr(ready, "gather_facts", lambda **request: facts)
    config = Config(**keys, runs_dir=str(tmp_path), cache_dir=str(tmp_path))
    checked = check_config(config, machine_of(facts), set_keys=frozenset(keys), port=None, on_probe=lambda name: None)
    stops = [finding for finding in checked.findings if finding.severity == "stop"]
    assert [finding.id for finding in stops] == ids
    assert all(finding.what and finding.fix for finding in stops)


def test_what_is_not_known_of_a_library_is_no_finding():
    facts = json.loads(Path(__file__).with_name("hosts").joinpath("workstation.json").read_text())
    for blank in ({"torch": None}, {"packages": None}, {"driver": None}, {"gpus": None}):
        assert not [f for f in find_findings([{**facts, **blank}], Intent(low_precision="nvfp4")) if f.id in SUBJECTS]
