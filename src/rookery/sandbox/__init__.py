"""Runs untrusted programs under an evaluator of OpenEvolve, inside a jail.

    async with open_sandbox(SandboxConfig(), EvaluatorConfig(file=path)) as sandbox:
        outcome = await sandbox.evaluate(text)

jail      what is stopped, and how                      outcome       what an evaluation gave
sandbox   one evaluator; which backend works here       box           files that go inside, cgroups
server    the fork server, its output and processes     inside/       what runs in the jail
"""

from rookery.sandbox.jail import BackendName, EvaluatorConfig, SandboxConfig
from rookery.sandbox.outcome import (
    Artifact,
    EvaluationOutcome,
    Failure,
    FailureKind,
    Metric,
    decode_outcome,
    encode_outcome,
)
from rookery.sandbox.sandbox import (
    Probe,
    Sandbox,
    choose_backend,
    open_sandbox,
    probe,
    probe_backend,
)
from rookery.sandbox.server import Program

__all__ = [
    "Artifact",
    "BackendName",
    "EvaluationOutcome",
    "EvaluatorConfig",
    "Failure",
    "FailureKind",
    "Metric",
    "Probe",
    "Program",
    "Sandbox",
    "SandboxConfig",
    "choose_backend",
    "decode_outcome",
    "encode_outcome",
    "open_sandbox",
    "probe",
    "probe_backend",
]
