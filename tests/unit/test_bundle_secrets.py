"""Secrets in the team's folder are found, named by place and kind, and never printed.

The fakes are put together here, so that this file holds none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chimera_sm.aws.bundle import build_bundle, recipe_file
from chimera_sm.aws.secrets import scan_file, scan_variable
from chimera_sm.errors import ChecksFailed
from chimera_sm.planner.plan import plan
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.schema import CodeConfig

BODY = "Ab1" * 20
FAKES = {
    "AWS access key id": "AK" + "IA" + "Q3EXAMPLEKEY4567",
    "AWS session key id": "AS" + "IA" + "Q3EXAMPLEKEY4567",
    "AWS secret access key": "aws_secret" + '_access_key = "' + BODY[:40] + '"',
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "OpenSSH private key": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "Hugging Face token": "h" + "f_" + BODY[:34],
    "GitHub token": "gh" + "p_" + BODY[:36],
    "GitHub fine-grained": "github" + "_pat_" + BODY[:50],
    "OpenAI key": "s" + "k-" + BODY[:48],
    "OpenAI project key": "s" + "k-proj-" + BODY[:48],
    "W&B key": "WANDB_API" + "_KEY=" + "0123456789abcdef" * 2 + "01234567",
    "Slack token": "xox" + "b-" + "1234567890-abcdefghij",
}


@pytest.mark.parametrize("fake", FAKES.values(), ids=FAKES.keys())
def test_a_secret_in_a_file_is_found_by_line(fake: str) -> None:
    (found,) = {s.where for s in scan_file("conf/a.py", f"x = 1\nkey: {fake}\n".encode())}
    assert found == "conf/a.py:2"


@pytest.mark.parametrize("name", [".env", ".env.local", "a/.netrc", "id_rsa", "deep/kaggle.json"])
def test_files_that_hold_credentials_by_name(name: str) -> None:
    assert [s.where for s in scan_file(name, b"")] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "AKIA is how key ids start",
        "hf_hub_download(repo)",
        "sk-learn and risk-based-approaches-to-something-quite-long-indeed",
        "aws_secret_access_key = os.environ['X']",
        "-----BEGIN CERTIFICATE-----",
        "wandb_api_key: ${oc.env:WANDB}",
        "sha256 = " + "0123456789abcdef" * 4,
    ],
)
def test_harmless_text(text: str) -> None:
    assert scan_file("a.py", text.encode()) == []


def test_harmless_files() -> None:
    assert scan_file(".env.example", b"TOKEN=\n") == []
    assert scan_file("weights.bin", b"\0" + FAKES["GitHub token"].encode()) == []


def test_the_error_says_where_and_what_kind_but_not_the_secret(tmp_path: Path) -> None:
    secret = FAKES["Hugging Face token"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "push.py").write_text(f"import os\n\ntoken = '{secret}'\n")
    with pytest.raises(ChecksFailed) as caught:
        build_bundle(recipe_file(plan(compose(["recipe=tiny"]))), CodeConfig(path=str(tmp_path)))
    message = str(caught.value)
    assert "src/push.py:3: Hugging Face token" in message
    assert ".chimeraignore" in message
    assert secret not in message
    assert secret[:12] not in message


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "anything", True),
        ("WANDB_API_KEY", "anything", True),
        ("DB_PASSWORD", "x", True),
        ("ANYTHING", FAKES["GitHub token"], True),
        ("HF_TOKEN", "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf", False),
        ("HF_TOKEN", "", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("NCCL_DEBUG", "INFO", False),
    ],
)
def test_variables(name: str, value: str, secret: bool) -> None:
    assert bool(scan_variable(name, value)) is secret
