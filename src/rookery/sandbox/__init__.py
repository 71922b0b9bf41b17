"""Runs untrusted programs under an evaluator of OpenEvolve, inside a jail.

    async with open_sandbox(SandboxConfig(), EvaluatorConfig(file=path)) as sandbox:
        outcome = await sandbox.evaluate(text)

config    what is stopped and what is let through       outcome       what an evaluation gave
sandbox   one evaluator, one candidate at a time        probe         which backend works here
server    the fork server, seen from outside            inside/       what runs in the jail
backends/ bubblewrap, sandlock, unsafe                  box           files that go inside, cgroups
process_tree   results and output with limits, memory and processes of a jail
"""

from rookery.sandbox.backends import REMEDIES
from rookery.sandbox.config import BackendName, EvaluatorConfig, SandboxConfig
from rookery.sandbox.outcome import (
    Artifact,
    Failure,
    FailureKind,
    Metric,
    Outcome,
    decode_outcome,
    encode_outcome,
)
from rookery.sandbox.probe import Probe, choose_backend, open_sandbox, probe, probe_backend
from rookery.sandbox.sandbox import Sandbox
from rookery.sandbox.server import Program

__all__ = [
    "REMEDIES",
    "Artifact",
    "BackendName",
    "EvaluatorConfig",
    "Failure",
    "FailureKind",
    "Metric",
    "Outcome",
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
