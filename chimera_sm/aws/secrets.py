"""Finds credentials in what is about to leave this machine. Says where and of what kind, never what."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

# kind → pattern. The prefixes are those that the issuers publish for secret scanners.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("AWS access key id", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    (
        "AWS secret access key",
        re.compile(r"(?i)aws_?secret_?(?:access_?)?key\W{1,6}[A-Za-z0-9/+]{40}(?![\w/+])"),
    ),
    ("AWS session token", re.compile(r"(?i)aws_?session_?token\W{1,6}[A-Za-z0-9/+=]{100,}")),
    ("private key", re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")),
    ("Hugging Face token", re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")),
    ("GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})")),
    ("GitLab token", re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}")),
    ("OpenAI or Anthropic key", re.compile(r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{32,}")),
    ("Weights & Biases key", re.compile(r"(?i)(?:wandb_?(?:api)?_?key\W{1,6}[0-9a-f]{40}\b|\bwandb_v1_\w{40,})")),
    ("Slack token", re.compile(r"\bxox[abeprs]-[A-Za-z0-9-]{20,}")),
    ("Google API key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b")),
)
_HINTS = re.compile(
    r"(?i)AKIA|ASIA|secret|session_?token|PRIVATE KEY|hf_|api_org_|gh[pousr]_|github_pat|glpat|sk-|wandb|xox|AIza"
)
_FILES = re.compile(r"\.env(?:\..+)?|\.netrc|\.pypirc|\.git-credentials|id_(?:rsa|dsa|ecdsa|ed25519)|kaggle\.json")
_HARMLESS_FILES = re.compile(r"\.env\.(?:example|sample|template|dist)")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""UTF-32's little-endian mark begins with UTF-16's, and so comes first."""
_NAMES = re.compile(r"(?i)(?:^|_)(?:token|api_?key|secret|secret_?(?:access_)?key|password|passwd|credentials?)$")


@dataclass(frozen=True)
class Secret:
    where: str
    """`file:line`, or the name of a variable."""
    kind: str


def scan_file(path: str, content: bytes) -> list[Secret]:
    """Secrets of one file: by its name, or line by line if it is text."""
    name = PurePosixPath(path).name
    if _FILES.fullmatch(name) and not _HARMLESS_FILES.fullmatch(name):
        return [Secret(path, "file that holds credentials by its name")]
    text = _text(content)
    if text is None or not _HINTS.search(text):
        return []
    return [
        Secret(f"{path}:{number}", kind)
        for number, line in enumerate(text.splitlines(), 1)
        for kind, pattern in _PATTERNS
        if pattern.search(line)
    ]


def _text(content: bytes) -> str | None:
    """None for what is no text. UTF-16 and UTF-32 are known by their byte order mark, UTF-16 without one by zeros at
    every second byte."""
    head = content[:8192]
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return content.decode(encoding, "replace")
    if b"\0" not in head:
        return content.decode("utf-8", "replace")
    pairs = len(head) // 2
    for odd, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros = head[odd::2].count(0)
        if zeros >= 0.7 * pairs and head[1 - odd :: 2].count(0) <= 0.1 * pairs:
            return content.decode(encoding, "replace")
    return None


def scan_variable(name: str, value: str) -> str | None:
    """The kind of secret that an environment variable holds, or None. A reference (an ARN) is none."""
    if value.startswith("arn:"):
        return None
    for kind, pattern in _PATTERNS:
        if pattern.search(value) or pattern.search(f"{name}={value}"):
            return kind
    if value and _NAMES.search(name):
        return "secret by its name"
    return None
