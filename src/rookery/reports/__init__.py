"""One typed report per loop: what loops write, what the page and the terminal read."""

from rookery.reports.evaluation import EvaluationReport, ModelRow, parse_evaluation_report
from rookery.reports.evolve import EvolveReport, parse_evolve_report
from rookery.reports.genome import (
    CandidateRecord,
    GenerationRecord,
    GenomeReport,
    LineageRecord,
    ReportRow,
    TasksetRecord,
    parse_genome_report,
)
from rookery.reports.grpo import (
    CheckpointRecord,
    ExampleRecord,
    GrpoReport,
    TrainStepRecord,
    parse_grpo_report,
)
from rookery.reports.icm import (
    AgreementRecord,
    ChainRecord,
    GoldRecord,
    IcmReport,
    IcmRow,
    ItemRecord,
    StepRecord,
    SupportRecord,
    TokensRecord,
    TransferRecord,
    parse_icm_report,
)
from rookery.reports.record import (
    AnswerRecord,
    Estimate,
    Measured,
    Record,
    TaskRecord,
    Text,
    describe_task,
)
from rookery.reports.service import QueueStatus, ServiceStatus, TenantStatus

__all__ = [
    "AgreementRecord",
    "AnswerRecord",
    "CandidateRecord",
    "ChainRecord",
    "CheckpointRecord",
    "Estimate",
    "EvaluationReport",
    "EvolveReport",
    "ExampleRecord",
    "GenerationRecord",
    "GenomeReport",
    "GoldRecord",
    "GrpoReport",
    "IcmReport",
    "IcmRow",
    "ItemRecord",
    "LineageRecord",
    "Measured",
    "ModelRow",
    "QueueStatus",
    "Record",
    "ReportRow",
    "ServiceStatus",
    "StepRecord",
    "SupportRecord",
    "TaskRecord",
    "TasksetRecord",
    "TenantStatus",
    "Text",
    "TokensRecord",
    "TrainStepRecord",
    "TransferRecord",
    "describe_task",
    "parse_evaluation_report",
    "parse_evolve_report",
    "parse_genome_report",
    "parse_grpo_report",
    "parse_icm_report",
]
