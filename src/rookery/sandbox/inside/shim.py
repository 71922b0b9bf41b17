"""`openevolve.evaluation_result` for evaluators, where OpenEvolve is not installed."""

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType

__all__ = ["EvaluationResult", "provide_openevolve"]


@dataclass
class EvaluationResult:
    """Metrics, and artifacts beside them, as an evaluator of OpenEvolve returns them."""

    metrics: dict[str, float]
    artifacts: dict[str, str | bytes] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, metrics: dict[str, float]) -> "EvaluationResult":
        return cls(metrics=metrics)

    def to_dict(self) -> dict[str, float]:
        return self.metrics

    def has_artifacts(self) -> bool:
        return bool(self.artifacts)

    def get_artifact_keys(self) -> list[str]:
        return list(self.artifacts)

    def get_artifact_size(self, key: str) -> int:
        value = self.artifacts.get(key, b"")
        return len(value if isinstance(value, bytes) else str(value).encode())

    def get_total_artifact_size(self) -> int:
        return sum(self.get_artifact_size(key) for key in self.artifacts)


def provide_openevolve() -> None:
    """Make the module importable; an installed OpenEvolve is used as it is."""
    if importlib.util.find_spec("openevolve") is not None:
        return
    package, module = ModuleType("openevolve"), ModuleType("openevolve.evaluation_result")
    package.__path__ = []
    for each in (package, module):
        vars(each)["EvaluationResult"] = EvaluationResult
    vars(package)["evaluation_result"] = module
    sys.modules |= {"openevolve": package, "openevolve.evaluation_result": module}
