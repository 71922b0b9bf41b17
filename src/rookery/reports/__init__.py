"""One typed report per loop: what loops write, what the page and the terminal read."""

from rookery.reports.evaluation import EvaluationReport, ModelRow, parse_evaluation_report
from rookery.reports.genome import GenomeReport, ReportRow, parse_genome_report
from rookery.reports.grpo import GrpoReport, parse_grpo_report
from rookery.reports.icm import IcmReport, IcmRow, parse_icm_report
from rookery.reports.record import Estimate, Measured, Record, Text

__all__ = [
    "Estimate",
    "EvaluationReport",
    "GenomeReport",
    "GrpoReport",
    "IcmReport",
    "IcmRow",
    "Measured",
    "ModelRow",
    "Record",
    "ReportRow",
    "Text",
    "parse_evaluation_report",
    "parse_genome_report",
    "parse_grpo_report",
    "parse_icm_report",
]
