"""Runs untrusted programs under an OpenEvolve evaluator, inside a jail.

    async with open_sandbox(SandboxConfig(), EvaluatorConfig(file=path)) as sandbox:
        outcome = await sandbox.evaluate(text)

jail      limits and jail backends                      outcome       result of one evaluation
sandbox   one evaluator; choice of the backend          box           files copied inside, cgroups
server    client of the fork server; its watchdog       inside/       code that runs in the jail
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
    read_variants,
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
    "read_variants",
]
