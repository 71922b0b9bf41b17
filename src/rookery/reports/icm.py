"""The report of a labelling: what `report.json` of an icm run holds."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rookery.reports.record import Measured, Record, Report, Text, parse_record
from rookery.types import Json

__all__ = [
    "AgreementRecord",
    "ChainRecord",
    "GoldRecord",
    "IcmReport",
    "IcmRow",
    "ItemRecord",
    "StepRecord",
    "SupportRecord",
    "TokensRecord",
    "TransferRecord",
    "parse_icm_report",
]


class AgreementRecord(Record):
    """How far labels agree with others, and how far they would by chance."""

    accuracy: Measured = None
    """Share of labels that are the same; in a row, as the true ones, where these were given."""
    low: Measured = None
    high: Measured = None
    chance: Measured = None


class GoldRecord(AgreementRecord):
    """The result beside the true labels."""

    utility: Measured = None
    """Of the true labels themselves, where all are known."""


class TransferRecord(AgreementRecord):
    """The labels of a batch beside those that the first batch's predict."""

    batch: int = 0


class SupportRecord(Record):
    """How far the labels support one another, beside the best labels of random models."""

    strength: Measured = None
    """0 to 1: 1 when all that labels do to one another goes along with these."""
    gain: Measured = None
    """How far they raise one another's log-odds, in standard deviations of what random ones do."""
    random_gain: Measured = None
    """Of the best labels of a random model of as many questions."""
    p: Measured = None
    """Part of random models whose best labels gain as much."""


class IcmRow(AgreementRecord):
    """One way to label the items."""

    name: Text = ""
    is_winner: bool = False
    note: Text = ""
    num_labelled: int = 0
    balance: dict[Text, int] = Field(default_factory=dict)
    num_violated: int = 0
    """Pairs that break a constraint."""
    utility: Measured = None
    agreement: Measured = None
    """Share of labels that are the same as the search's."""


class StepRecord(Record):
    """Where a chain stood after one decision."""

    iteration: int = 0
    utility: Measured = None
    best: Measured = None
    temperature: Measured = None
    num_labelled: int = 0
    num_frustrated: int = 0
    counts: tuple[int, ...] = ()


class ChainRecord(Record):
    """One search of one batch."""

    batch: int = 0
    chain: int = 0
    is_best: bool = False
    origin: Text = ""
    """What it began with; without iterations, what made the labels."""
    num_iterations: int = 0
    num_accepted: int = 0
    num_labelled: int = 0
    num_frustrated: int = 0
    is_settled: bool = False
    utility: Measured = None
    steps: tuple[StepRecord, ...] = ()


class ItemRecord(Record):
    """One item and its label."""

    id: Text = ""
    text: Text = ""
    label: Text | None = None
    """None when it has none."""
    margin: Measured = None


class TokensRecord(Record):
    """Prompt tokens of the search."""

    naive: int = 0
    requested: int = 0
    computed: int = 0
    baselines: int = 0
    """Computed for the rows that need no search."""
    num_requests: int = 0


class IcmReport(Report):
    """Everything the page and the table show."""

    kind: Literal["icm"] = "icm"
    run: Text = ""
    model: Text = ""
    data: Text = ""
    seed: int | None = None
    labels: tuple[Text, ...] = ()
    num_items: int = 0
    num_labelled: int = 0
    num_groups: int = 0
    """Questions: of items of one group, or that constraints tie together."""
    verdict: Text = ""
    support: SupportRecord | None = None
    utility: Measured = None
    num_frustrated: int = 0
    num_violated: int = 0
    mass: Measured = None
    """Mean probability that the model gives to the labels, of all that could follow."""
    balance: dict[Text, int] = Field(default_factory=dict)
    gold: GoldRecord | None = None
    """None when no true labels were given."""
    transfers: tuple[TransferRecord, ...] = ()
    num_unanswered: int = 0
    """Contexts that the engine could not answer."""
    rows: tuple[IcmRow, ...] = ()
    chains: tuple[ChainRecord, ...] = ()
    items: tuple[ItemRecord, ...] = ()
    tokens: TokensRecord = TokensRecord()
    seconds: Measured = None

    @property
    def label_by_id(self) -> dict[str, str | None]:
        """The label of every item; None where it has none."""
        return {item.id: item.label for item in self.items}


def parse_icm_report(document: Mapping[str, Json]) -> IcmReport:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    return parse_record(IcmReport, document, kind="an icm")
