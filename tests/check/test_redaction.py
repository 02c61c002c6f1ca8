import json

import pytest

from paceline.check.redaction import redact, shown_env


def test_variables_that_matter_are_shown_sorted_and_others_are_not():
    env = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/home/ada",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RANK": "3",
        "RANKING": "7",
        "LS_COLORS": "x",
    }
    assert shown_env(env) == {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "RANK": "3"}


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "SLURM_JWT",
        "NCCL_SECRET",
        "CUDA_PASSWORD",
        "HF_SOMETHING",
    ],
)
def test_a_secret_is_never_shown(name):
    secret = "0123456789abcdef0123456789abcdef01234567"
    assert secret not in json.dumps(shown_env({name: secret}))


def test_that_a_key_is_set_is_shown():
    assert shown_env({"WANDB_API_KEY": "a" * 40, "HF_TOKEN": "x"}) == {"HF_TOKEN": "set", "WANDB_API_KEY": "set"}


def test_tokenizers_parallelism_is_no_token():
    assert shown_env({"TOKENIZERS_PARALLELISM": "false"}) == {"TOKENIZERS_PARALLELISM": "false"}


def test_a_bare_key_under_a_harmless_name_is_hidden():
    assert shown_env({"WANDB_NOTES": "0123456789abcdef0123456789abcdef01234567"}) == {"WANDB_NOTES": "set"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ada:hunter2@example.org/x", "https://set@example.org/x"),
        (
            "git clone https://ghp_0123456789012345678901234567890123456@example.org",
            "git clone https://set@example.org",
        ),
        ("failed with hf_abcdefghijklmnopqrstuvwx", "failed with set"),
        ("python train.py --api_key=sesame --lr 1", "python train.py --api_key=set --lr 1"),
        ("/usr/lib:/opt/cuda/lib64", "/usr/lib:/opt/cuda/lib64"),
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
    ],
)
def test_logins_and_keys_are_taken_out_of_any_text(text, shown):
    assert redact({"a": [text]}) == {"a": [shown]}
    assert redact({"a": ({"b": text},)}) == {"a": [{"b": shown}]}  # a dataclass as a dict keeps its tuples


def test_what_is_no_text_stays_as_it_is():
    assert redact({"a": [1, 2.5, None, True]}) == {"a": [1, 2.5, None, True]}
