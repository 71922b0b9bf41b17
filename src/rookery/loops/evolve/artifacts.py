"""What an evaluation printed, as a prompt shows it: without secrets, and not too much of it."""

import re
from collections.abc import Mapping

__all__ = ["hide_secrets", "show_artifacts"]

_ANSI = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_SECRETS = (
    (re.compile(r"sk-[\w-]{20,}"), "<REDACTED_API_KEY>"),
    (re.compile(r"(?i)bearer\s+[\w.~+/=-]{8,}"), "Bearer <REDACTED>"),
    (re.compile(r"[A-Za-z0-9]{32,}"), "<REDACTED_TOKEN>"),
    (re.compile(r"(?i)password[=:]\s*[^\s]+"), "password=<REDACTED>"),
    (re.compile(r"(?i)api[_-]?key[=:]\s*[^\s]+"), "api_key=<REDACTED>"),
    (re.compile(r"(?i)token[=:]\s*[^\s]+"), "token=<REDACTED>"),
)


def hide_secrets(text: str) -> str:
    """Text without terminal colours, keys, passwords, and runs of 32 letters and digits."""
    text = _ANSI.sub("", text)
    for regex, replacement in _SECRETS:
        text = regex.sub(replacement, text)
    return text


def show_artifacts(
    artifacts: Mapping[str, str | bytes], *, title: str, max_chars: int, is_filtered: bool
) -> str:
    """A section of the prompt; empty if there are none."""
    sections = []
    for name, value in artifacts.items():
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        text = hide_secrets(text) if is_filtered else text
        if len(text) > max_chars:
            text = text[:max_chars] + "\n... (truncated)"
        sections.append(f"### {name}\n```\n{text}\n```")
    return "\n\n".join([f"## {title}", *sections]) if sections else ""
