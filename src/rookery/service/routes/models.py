"""What plain and OpenAI clients may call a model: a base model, an adapter, a tinker:// path."""

from dataclasses import dataclass

from rookery.service.refusals import Refusal
from rookery.service.routes.gate import Gate

__all__ = ["Source", "find_source", "model_names"]


@dataclass(frozen=True, slots=True)
class Source:
    """What is drawn from; without a blob the base model."""

    base_model: str
    blob: str = ""


def find_source(gate: Gate, tenant: str, name: str | None) -> Source:
    """The weights of a name; None: the first base model."""
    desk = gate.service.desk
    if name is None:
        return Source(next(iter(desk.backends)))
    if name in desk.backends:
        return Source(name)
    if name.startswith("tinker://"):
        checkpoint = desk.state.weights(tenant, name, now=gate.now())
        return Source(checkpoint.base_model, checkpoint.blob)
    adapter = desk.state.adapters.get((tenant, name))
    if adapter is None:
        known = ", ".join(model_names(gate, tenant))
        raise Refusal(404, f"There is no model {name!r:.200}. There are: {known:.600}.")
    return Source(adapter.base_model, adapter.blob)


def model_names(gate: Gate, tenant: str) -> list[str]:
    """Base models, then the tenant's adapters and sampler checkpoints."""
    desk = gate.service.desk
    adapters = [name for who, name in desk.state.adapters if who == tenant]
    own = desk.state.own_checkpoints(tenant, now=gate.now())
    paths = [one.path for one in own if one.kind != "external_weights"]
    return [*desk.backends, *adapters, *paths]
