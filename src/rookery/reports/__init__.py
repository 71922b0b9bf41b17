"""One typed report per loop: what loops write, what the page and the terminal read."""

from rookery.reports.evaluation import EvaluationReport, ModelRow, parse_evaluation_report
from rookery.reports.evolve import EvolveReport, parse_evolve_report
from rookery.reports.genome import GenomeReport, ReportRow, parse_genome_report
from rookery.reports.icm import IcmReport, IcmRow, parse_icm_report
from rookery.reports.record import Estimate, Measured, Record, Text

__all__ = [
    "Estimate",
    "EvaluationReport",
    "EvolveReport",
    "GenomeReport",
    "IcmReport",
    "IcmRow",
    "Measured",
    "ModelRow",
    "Record",
    "ReportRow",
    "Text",
    "parse_evaluation_report",
    "parse_evolve_report",
    "parse_genome_report",
    "parse_icm_report",
]
