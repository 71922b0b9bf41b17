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
from rookery.reports.icm import (
    AgreementRecord,
    ChainRecord,
    GoldRecord,
    IcmReport,
    IcmRow,
    ItemRecord,
    StepRecord,
    TokensRecord,
    TransferRecord,
    parse_icm_report,
)
from rookery.reports.record import Estimate, Measured, Record, Text

__all__ = [
    "AgreementRecord",
    "CandidateRecord",
    "ChainRecord",
    "Estimate",
    "EvaluationReport",
    "EvolveReport",
    "GenerationRecord",
    "GenomeReport",
    "GoldRecord",
    "IcmReport",
    "IcmRow",
    "ItemRecord",
    "LineageRecord",
    "Measured",
    "ModelRow",
    "Record",
    "ReportRow",
    "StepRecord",
    "TasksetRecord",
    "Text",
    "TokensRecord",
    "TransferRecord",
    "parse_evaluation_report",
    "parse_evolve_report",
    "parse_genome_report",
    "parse_icm_report",
]
