"""What a tenant may take: looked at when a request is accepted, not when it is repeated."""

import time

from rookery.service.desk import Desk
from rookery.service.wire.requests import CreateModel, SaveForSampler
from rookery.service.work import Command, Refusal, bad

__all__ = ["Admission"]


MAX_LOSSES = 256
"""Of one tenant: their graphs are kept in memory until their sessions end."""


class Admission:
    """The limits of the config, per tenant."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._limits = desk.config.limits
        self._credit: dict[str, tuple[float, float]] = {}
        """Requests that a tenant may still send, and when that was so."""

    def check(self, command: Command) -> None:
        """Refuse what is too much: 429 when it may be sent again later."""
        num_own = self._desk.pending.count(command.tenant)
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
        pending, most = self._desk.pending, self._limits.waiting_mib * 2**20
        own = pending.num_bytes_of(command.tenant) + len(command.body)
        share = most / max(pending.num_tenants, 1)
        if pending.num_bytes + len(command.body) > most and own > share:
            raise _full(
                f"The requests that wait hold {pending.num_bytes / 2**20:.0f} MiB, of at most "
                f"{self._limits.waiting_mib:g}, and yours more than a tenant's share of it."
            )

    def check_results(self, tenant: str) -> None:
        """Refuse new requests of whom does not fetch the results of earlier ones."""
        futures, most_mib = self._desk.futures, self._limits.results_mib
        num, mib = futures.num_unfetched(tenant), futures.bytes_unfetched(tenant) / 2**20
        if num >= self._limits.results or mib > most_mib:
            raise _full(
                f"{num} results of yours, {mib:.0f} MiB, were not fetched; at most "
                f"{self._limits.results} and {most_mib:g} MiB are kept: fetch them."
            )

    def check_losses(self, tenant: str) -> None:
        self.check_results(tenant)
        num = sum(loss.tenant == tenant for loss in self._desk.state.losses.values())
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
        sessions = self._desk.state.sessions.values()
        num_open = sum(one.tenant == tenant and not one.is_over for one in sessions)
        if num_open >= self._limits.sessions:
            raise _full(
                f"You have {num_open} open sessions; at most {self._limits.sessions} may be."
            )

    def check_samplers(self, tenant: str, sampler_id: str = "") -> None:
        """Refuse a new sampling session; one that is known may be sent again."""
        samplers = self._desk.state.samplers
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
        state = self._desk.state
        num = sum(found.tenant == tenant for found in state.checkpoints.values())
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
        most = min(self._limits.rank, self._desk.backend(request.base_model).engine.max_rank)
        if rank > most:
            raise bad(f"rank is {rank}; this service trains ranks 1 to {most}.")
        live = [
            model
            for model in self._desk.state.models.values()
            if model.tenant == command.tenant and model.is_live
        ]
        if len(live) >= self._limits.models:
            raise bad(
                f"You have {len(live)} models in training, and at most {self._limits.models} may "
                "be: close the clients of those you do not need."
            )


def _full(sentence: str) -> Refusal:
    return Refusal(429, f"{sentence} Send it again later.")
