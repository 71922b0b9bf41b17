"""Who is asking: the tenant of a key, and the body of a request within its limits."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel

from rookery.app_shell import key_of
from rookery.errors import ConfigError
from rookery.service.config import read_recipient
from rookery.service.keys import Keys
from rookery.service.service import Service, new_id
from rookery.service.state import State
from rookery.service.wire.body import as_json
from rookery.service.work import Command, Form, Refusal, bad

__all__ = ["Body", "RequestContext", "Tenant", "digest_of", "tenant_of"]

ANONYMOUS = "local"
"""The tenant of everybody, where no keys are asked for."""


@dataclass(frozen=True, slots=True)
class Body:
    """What a request holds, and what it costs."""

    data: bytes
    form: Form = "json"
    tokens: int = 1
    base_model: str = ""
    digest: str = ""
    """Of the content, where equal contents may have unequal bytes."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The service, and the keys that open it; None: it asks for none."""

    service: Service
    keys: Keys | None

    @property
    def state(self) -> State:
        return self.service.context.state

    @property
    def body_bytes(self) -> int:
        return int(self.service.context.config.limits.body_mib * 2**20)

    def command(
        self, kind: str, tenant: str, request: BaseModel, *, owner: str, seq: int
    ) -> Command:
        """A JSON request of a model as a command."""
        body = as_json(request)
        return self.work(kind, tenant, Body(body), owner=owner, seq=seq)

    def work(self, kind: str, tenant: str, body: "Body", *, owner: str, seq: int) -> Command:
        """A request of a model or a sampling session as a command."""
        return Command(
            kind=kind,
            id=new_id("req"),
            tenant=tenant,
            time=time.time(),
            body=body.data,
            form=body.form,
            owner=owner,
            base_model=body.base_model or self._base_model(owner),
            seq=seq,
            tokens=body.tokens,
            key=f"{owner}#{seq}",
            digest=body.digest or digest_of(kind.encode() + body.data),
        )

    def now(self) -> float:
        return time.time()

    def number(self, model_id: str, seq_id: int | None) -> int:
        """The number of a request; the next one for clients that do not number them."""
        if seq_id is None:
            return self.service.training.buffer(model_id).free_seq
        if seq_id < 1:
            raise bad(f"seq_id is {seq_id}; the requests of a model are numbered 1, 2, 3, ...")
        return seq_id

    def sample_number(self, seq_id: int | None) -> int:
        """The same for samples, where any number does."""
        return secrets.randbelow(2**62) if seq_id is None else seq_id

    def check_recipients(self, recipients: Sequence[str]) -> None:
        """Refuse age recipients that cannot be read, before anything is written."""
        for recipient in recipients:
            read_recipient(recipient)

    def _base_model(self, owner: str) -> str:
        model = self.service.context.state.models.get(owner)
        return model.base_model if model is not None else ""


def tenant_of(request: Request) -> str:
    """Whose key the request has; 401 when it has none that is known."""
    api: RequestContext = request.app.state.api
    if api.keys is None:
        tenant: str | None = ANONYMOUS
    else:
        key = key_of(request.headers)
        try:
            tenant = api.keys.tenant(key) if key else None
        except ConfigError as error:  # it is being edited: nothing of where it is
            raise Refusal(503, "The keys of this service cannot be read now.") from error
    if tenant is None:
        raise Refusal(
            401, "The key is missing or not known: make one with `rookery keys add NAME`."
        )
    return tenant


Tenant = Annotated[str, Depends(tenant_of)]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
