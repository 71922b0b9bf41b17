"""The metrics of several calls of one step as those of one call over all their data."""

from collections.abc import Mapping, Sequence

__all__ = ["merged_metrics"]

_WEIGHT = "train/weight_sum"


def merged_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums and counts add up, maxima are the largest, all else is a mean by weight.

    Losses 2 and 4 of weights 3 and 1: 2.5. What some calls do not report is of those that do.
    """
    merged = {}
    for key in {key: None for report in reports for key in report}:
        having = [report for report in reports if key in report]
        values = [report[key] for report in having]
        if key.endswith("_sum") or key.startswith("train/num_"):
            merged[key] = sum(values)
        elif key.endswith("_max"):
            merged[key] = max(values)
        else:
            weights = [report[_WEIGHT] for report in having]
            pairs = zip(weights, values, strict=True)
            merged[key] = sum(weight * value for weight, value in pairs) / sum(weights)
    return merged
