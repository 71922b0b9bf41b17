"""API keys: which tenant a key belongs to. Only hashes are stored.

    key = add_key(path, name="ada")           # printed once, `tml-...`
    keys = Keys(path)
    keys.tenant(key)                          # "ada", also when it was added a moment ago

A key has 256 random bits, so a plain SHA-256 cannot be searched back.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from rookery.errors import ConfigError
from rookery.service.context import ServiceContext
from rookery.service.wire.requests import CreateModel, SaveForSampler
from rookery.service.work import Command, Refusal, bad

__all__ = [
    "Admission",
    "Keys",
    "add_key",
    "default_key_file",
    "list_keys",
    "remove_key",
]

PREFIX = "tml-"
"""The SDK refuses keys that do not begin so."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyRecord(TypedDict):
    """One key of a tenant."""

    name: str
    sha256: str
    created: str


_FIELDS = ("name", "sha256", "created")


def default_key_file() -> Path:
    """`$ROOKERY_KEYS`, else `rookery/keys.json` under the user's config folder."""
    path = os.environ.get("ROOKERY_KEYS")
    if path:
        return Path(path).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "rookery" / "keys.json"


def add_key(path: Path, *, name: str) -> str:
    """Make a key for a tenant and return it; a tenant may have several."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"Got the name {name!r}: letters, digits, `.`, `_` and `-`, at most 64, such as ada."
        )
    key = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with _alone(path):
        _write(path, [*list_keys(path), KeyRecord(name=name, sha256=_hash(key), created=created)])
    return key


def remove_key(path: Path, *, name: str) -> int:
    """Forget all keys of a tenant; how many there were."""
    with _alone(path):
        records = list_keys(path)
        kept = [record for record in records if record["name"] != name]
        if len(kept) == len(records):
            known = ", ".join(sorted({record["name"] for record in records})) or "none"
            raise ConfigError(f"There is no key of {name!r} in {path}. Keys: {known}.")
        _write(path, kept)
    return len(records) - len(kept)


def list_keys(path: Path) -> list[KeyRecord]:
    """What is stored of the keys, in order of their making."""
    try:
        document = json.loads(path.read_text())
        return [KeyRecord(**{key: str(row[key]) for key in _FIELDS}) for row in document]  # type: ignore[typeddict-item]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"The key file {path} cannot be read: {error}") from error


class Keys:
    """The keys of a file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._tenants: dict[str, str] = {}

    def tenant(self, key: str) -> str | None:
        """Whose key it is; None when it is nobody's."""
        self._refresh()
        return self._tenants.get(_hash(key))

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._tenants = None, {}
            return
        except OSError as error:
            raise ConfigError(f"The key file {self._path} cannot be read: {error}") from error
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tenants = {record["sha256"]: record["name"] for record in list_keys(self._path)}
            self._stamp = stamp


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process changes the file inside the block: it would lose what this one adds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, records: list[KeyRecord]) -> None:
    """Replace the file whole, readable by its owner alone."""
    try:
        handle, scratch = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(records, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error


# What a tenant may take: looked at when a request is accepted, not when it is repeated.


MAX_LOSSES = 256
"""Of one tenant: their graphs are kept in memory until their sessions end."""


class Admission:
    """The limits of the config, per tenant."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._limits = context.config.limits
        self._credit: dict[str, tuple[float, float]] = {}
        """Requests that a tenant may still send, and when that was so."""

    def check(self, command: Command) -> None:
        """Refuse what is too much: 429 when it may be sent again later."""
        num_own = self._context.pending.count(command.tenant)
        if num_own >= self._limits.waiting:
            raise _full(
                f"{num_own} of your requests are waiting; at most {self._limits.waiting} may."
            )
        self._check_bytes(command)
        self.check_results(command.tenant)
        if command.kind == "create_model":
            self._check_model(command)
        if command.kind == "save_weights_for_sampler":
            self._check_save(command)

    def _check_bytes(self, command: Command) -> None:
        """Whoever has less than a tenant's share is not refused because others have more."""
        pending, most = self._context.pending, self._limits.waiting_mib * 2**20
        num_bytes = pending.num_bytes_of(command.tenant) + len(command.body)
        share = most / max(pending.num_tenants, 1)
        if pending.num_bytes + len(command.body) > most and num_bytes > share:
            raise _full(
                f"The requests that wait hold {pending.num_bytes / 2**20:.0f} MiB, of at most "
                f"{self._limits.waiting_mib:g}, and yours more than a tenant's share of it."
            )

    def check_results(self, tenant: str) -> None:
        """Refuse new requests of whom does not fetch the results of earlier ones."""
        futures, most_mib = self._context.futures, self._limits.results_mib
        num_bytes = futures.bytes_unfetched(tenant) + self._context.answers[tenant]
        num, mib = futures.num_unfetched(tenant), num_bytes / 2**20
        if num >= self._limits.results or mib > most_mib:
            raise _full(
                f"{num} results of yours, {mib:.0f} MiB, were not fetched; at most "
                f"{self._limits.results} and {most_mib:g} MiB are kept: fetch them."
            )

    def check_answers(self, tenant: str) -> None:
        """Refuse to write another answer for whom does not read the earlier ones."""
        mib = self._context.answers[tenant] / 2**20
        if mib > self._limits.results_mib:
            raise _full(
                f"Answers to you of {mib:.0f} MiB are on their way, of at most "
                f"{self._limits.results_mib:g}: read them."
            )

    def check_losses(self, tenant: str) -> None:
        self.check_results(tenant)
        num = sum(loss.tenant == tenant for loss in self._context.state.losses.values())
        if num >= MAX_LOSSES:
            raise bad(f"You have {num} custom losses, the most there may be: end their sessions.")

    def check_rate(self, tenant: str) -> None:
        """Count a request; refuse it when too many came within a second."""
        rate, now = self._limits.requests_per_s, time.monotonic()
        most = max(rate, 1.0)
        credit, then = self._credit.get(tenant, (most, now))
        credit = min(most, credit + (now - then) * rate)
        if credit < 1:
            raise _full(f"You sent more than {rate:g} requests per second.")
        self._credit[tenant] = (credit - 1, now)

    def check_draws(self, num_waiting: int, *, num: int) -> None:
        """Count draws that are answered at once, beside those that wait."""
        if num_waiting and num_waiting + num > self._limits.waiting:
            raise _full(
                f"{num_waiting} of your samples are waiting; at most {self._limits.waiting} may."
            )

    def check_sessions(self, tenant: str) -> None:
        sessions = self._context.state.sessions.values()
        num_open = sum(one.tenant == tenant and not one.is_over for one in sessions)
        if num_open >= self._limits.sessions:
            raise _full(
                f"You have {num_open} open sessions; at most {self._limits.sessions} may be."
            )

    def check_samplers(self, tenant: str, sampler_id: str = "") -> None:
        """Refuse a new sampling session; one that is known may be sent again."""
        samplers = self._context.state.samplers
        num = sum(one.tenant == tenant for one in samplers.values())
        if num >= self._limits.samplers and sampler_id not in samplers:
            raise _full(
                f"You have {num} sampling sessions; at most {self._limits.samplers} may be: end "
                "sessions, or delete samplers that you do not need."
            )

    def check_samples(self, num: int) -> None:
        """Of one request, its prompts together."""
        if num > self._limits.samples:
            raise bad(f"The request asks for {num} samples; at most {self._limits.samples} may be.")

    def check_checkpoints(self, tenant: str) -> None:
        state = self._context.state
        num = sum(checkpoint.tenant == tenant for checkpoint in state.checkpoints.values())
        num += sum(who == tenant for who, _ in state.adapters)
        if num >= self._limits.checkpoints:
            raise bad(f"You have {num} checkpoints and adapters: delete some, or set a ttl.")

    def _check_save(self, command: Command) -> None:
        """Weights that are saved without a name are a sampling session."""
        if SaveForSampler.model_validate_json(command.body).path is None:
            self.check_samplers(command.tenant)

    def _check_model(self, command: Command) -> None:
        request = CreateModel.model_validate_json(command.body)
        rank = request.lora_config.rank
        most = min(self._limits.rank, self._context.backend(request.base_model).engine.max_rank)
        if rank > most:
            raise bad(f"rank is {rank}; this service trains ranks 1 to {most}.")
        live = [
            model
            for model in self._context.state.models.values()
            if model.tenant == command.tenant and model.is_live
        ]
        if len(live) >= self._limits.models:
            raise bad(
                f"You have {len(live)} models in training, and at most {self._limits.models} may "
                "be: close the clients of those you do not need."
            )


def _full(sentence: str) -> Refusal:
    return Refusal(429, f"{sentence} Send it again later.")
