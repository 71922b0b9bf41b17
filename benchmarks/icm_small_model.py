"""Labels of a 135-million-parameter model for reviews, claims and solutions, with and without the
search.

    python benchmarks/icm_small_model.py                                   # the shipped examples
    python benchmarks/icm_small_model.py --claims truthfulqa_train.json \\
        --solutions gsm8k/example_model_solutions.jsonl                    # yours

Two CPU cores: ten minutes. Claims: a .json list with question, choice and label (0 or 1), no
constraint. Solutions: GSM8K's example_model_solutions, four solutions to a problem; equal final
answers are right or wrong together. All labels are calibrated: the model's bias that is common to
all items is subtracted. `--items` are labelled without a search, `--searched` of them by the
search, `--batch` at a time; 0 skips either. Larger models need a GPU and `--engine vllm` with the
vLLM of the interpreter ROOKERY_VLLM_PYTHON:

    python benchmarks/icm_small_model.py --engine vllm --parts claims --claims truthfulqa.json \\
        --items 0 --searched 128 --iterations 600
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from icm import embedded, server

from rookery.config import load_config
from rookery.embedded import resolve_model
from rookery.loops.icm import (
    IcmConfig,
    IcmInputs,
    Labeller,
    label,
    load_encoder,
    read_gold,
    read_items,
)
from rookery.loops.icm.baselines import Baselines, BaselinesConfig
from rookery.loops.icm.exports import ExportsConfig
from rookery.loops.icm.label_scorer import ScoreStore
from rookery.loops.icm.loop import open_problem
from rookery.loops.icm.verdict import agree
from rookery.reports import AgreementRecord
from rookery.runs import Run
from rookery.starters import DEMOS
from rookery.ui.loops import ICM_SENTENCES

CONFIGS = Path(__file__).parents[1] / "configs"
CLAIM = "Question: {{ question }}\nClaim: {{ choice }}\nI think this claim is"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claims", type=Path)
    parser.add_argument("--solutions", type=Path)
    parser.add_argument("--items", type=int, default=48, help="labelled without a search")
    parser.add_argument("--searched", type=int, default=12, help="labelled by the search")
    parser.add_argument("--shots", type=int, default=8, help="demonstrations without a search")
    parser.add_argument("--batch", type=int, help="searched together; all, if not given")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=["reviews", "claims", "solutions"])
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(arguments, Path(folder)))


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    made = {
        "reviews": lambda: configure(DEMOS / "icm.yaml"),
        "claims": lambda: claims_config(arguments.claims),
        "solutions": lambda: solutions_config(arguments.solutions, folder),
    }
    model = resolve_model("smollm2").path
    open_model = embedded if arguments.engine == "embedded" else server
    async with open_model(str(model)) as counted:
        labeller = Labeller(
            sampler=counted.sampler,
            model=counted.model,
            encoder=load_encoder(model),
            context_tokens=8192,
        )
        for name in arguments.parts:
            config = made[name]()
            baselines = BaselinesConfig(num_shots=arguments.shots, num_rounds=2, inverted=False)
            config = config.model_copy(update={"baselines": baselines})
            print(f"\n{name}: {config.data.path.name}", flush=True)
            if arguments.items:
                await label_plainly(limited(config, arguments.items), labeller)
            if arguments.searched:
                own = limited(config, arguments.searched, batch=arguments.batch)
                size = {"num_start": min(8, arguments.searched // 3)}
                search = own.search.model_copy(update={"iterations": arguments.iterations, **size})
                own = own.model_copy(update={"search": search, "num_chains": arguments.chains})
                await label_by_search(own, labeller, folder / name)


def configure(file: Path, **data: object) -> IcmConfig:
    config = load_config(IcmConfig, file).from_folder(file.parent)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "objective": config.objective.model_copy(update={"calibrate": True}),
            "exports": ExportsConfig(),
        }
    )


def claims_config(path: Path | None) -> IcmConfig:
    if path is None:
        return configure(CONFIGS / "icm_claims.yaml")
    return configure(CONFIGS / "icm_claims.yaml", path=path, prompt=CLAIM)


def solutions_config(path: Path | None, folder: Path) -> IcmConfig:
    if path is None:
        return configure(CONFIGS / "icm_solutions.yaml")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    items = [
        {"id": f"{number}-{model}", "question": row["question"], **solution(row[model])}
        for number, row in enumerate(rows)
        for model in MODELS
    ]
    (folder / path.name).write_text("".join(json.dumps(item) + "\n" for item in items))
    config = configure(CONFIGS / "icm_solutions.yaml", path=folder / path.name)
    # Some solutions end before their answer.
    [equal] = config.constraints
    return config.model_copy(
        update={"constraints": (equal.model_copy(update={"missing": "free"}),)}
    )


def solution(found: Mapping[str, object]) -> dict[str, object]:
    return {"solution": found["solution"], "label": str(found["is_correct"])}


def limited(config: IcmConfig, num_items: int, *, batch: int | None = None) -> IcmConfig:
    data = config.data.model_copy(update={"limit": num_items})
    return config.model_copy(update={"data": data, "batch_size": batch or max(2, num_items)})


async def label_plainly(config: IcmConfig, labeller: Labeller) -> None:
    """Label without a search: all items after the same few demonstrations."""
    items = read_items(config.data)
    # A request holds few demonstrations, so it fits even if all items together exceed the context.
    unlimited = Labeller(sampler=labeller.sampler, model=labeller.model, encoder=labeller.encoder)
    problem = open_problem(config, items, labeller=unlimited, store=ScoreStore())
    baselines = Baselines(problem, config=config.baselines, seed=config.seed)
    gold = read_gold(config.data, items)
    truth = {place: gold[item.id] for place, item in enumerate(items)}
    found = {
        "zero-shot": await baselines.zero_shot(),
        "random few-shot": await baselines.random_few_shot(),
        "bootstrap": await baselines.bootstrap(),
        "golden few-shot": await baselines.golden_few_shot(truth),
    }
    for name, labels in found.items():
        agreement = agree(dict(enumerate(labels)), truth, clusters=problem.groups)
        assert agreement is not None
        interval = agreement.interval
        record = AgreementRecord(
            accuracy=interval.estimate,
            low=interval.low,
            high=interval.high,
            chance=agreement.chance,
        )
        print_row(name, len(items), record)


async def label_by_search(config: IcmConfig, labeller: Labeller, folder: Path) -> None:
    items = read_items(config.data)
    start = time.perf_counter()
    with Run.create(
        folder, kind="icm", config=config.model_dump(mode="json"), name="search"
    ) as run:
        report = await label(
            IcmInputs(config=config, items=items, gold=lambda: read_gold(config.data, items)),
            engine=labeller,
            run=run,
        )
    for row in report.rows:
        if row.accuracy is not None:
            name = "search" if row.is_winner else row.name
            print_row(name, row.num_labelled, row, utility=row.utility)
    gold = None if report.gold is None else report.gold.utility
    print(f"  search: {report.num_labelled} of {len(items)} labelled, "
          f"{report.num_frustrated} frustrated, {report.balance}, U {report.utility:.1f}, "
          f"of the true labels {float('nan') if gold is None else gold:.1f}; "
          f"iterations {', '.join(str(chain.num_iterations) for chain in report.chains)}, "
          f"accepted {', '.join(str(chain.num_accepted) for chain in report.chains)}; "
          f"{report.tokens.computed:,} tokens of a plain loop's "
          f"{report.tokens.naive:,}, {time.perf_counter() - start:.0f} s")  # fmt: skip
    print(f"  {' '.join([ICM_SENTENCES[report.verdict], *report.warnings])}", flush=True)


def print_row(
    name: str, num_items: int, agreement: AgreementRecord, *, utility: float | None = None
) -> None:
    shown = "" if utility is None else f", U {utility:.1f}"
    print(f"  {name:<16} {num_items:>4} items, true {agreement.accuracy:.2f} "
          f"({agreement.low:.2f} to {agreement.high:.2f}), chance {agreement.chance:.2f}{shown}",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
