"""icm on the embedded engine with a tiny model: exact numbers, exact counts, the command line."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_adapter
from transformers import AutoModelForCausalLM

from rookery.cli.app import app
from rookery.compose.icm import run_icm
from rookery.embedded import EngineConfig, run_engine
from rookery.errors import AdapterError
from rookery.loops.icm import IcmConfig, Labeller, load_encoder, read_items
from rookery.loops.icm.label_scorer import ScoreStore
from rookery.loops.icm.loop import open_problem
from rookery.loops.icm.prompts import BatchPrompts
from rookery.search.labelling import PrefixCache, TreeOrder
from rookery.slots import SlottedModel
from rookery.weights import write_adapter


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> IcmConfig:
    """Eight items of two words in pairs of which exactly one is w90."""
    rows = [{"id": f"i{i}", "pair": i // 2, "a": 4 + i, "b": 40 + 3 * i} for i in range(8)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return IcmConfig.model_validate(
        {
            "engine": {"model": str(tiny_folder)},
            "data": {
                "path": str(path),
                "prompt": "w{{ a }} w{{ b }} w20",
                "separator": "\nw21\n",
                "labels": ["w90", "w91"],
                "group": "pair",
            },
            "constraints": [{"type": "exclusive", "count": "exactly_one"}],
            "search": {"iterations": 40, "num_start": 4},
            "num_chains": 1,
        }
    )


async def test_reads_are_those_of_transformers_and_tokens_those_planned(
    config: IcmConfig, tiny_folder: Path, tiny_model: SlottedModel
) -> None:
    items = read_items(config.data)
    encoder = load_encoder(tiny_folder)
    prompts = BatchPrompts(items, encoder=encoder, data=config.data)
    order = TreeOrder([(i, i + 1) for i in range(0, 8, 2)])
    labels = (0, 1) * 4
    contexts = [prompts.context(labels, i, order=order.of(i)) for i in order.leaves]
    cache = PrefixCache(block_tokens=1)
    planned = sum(cache.add(tokens) for tokens in contexts)
    settings = EngineConfig(model=str(tiny_folder))
    async with run_engine(
        tiny_model, config=settings, detokenize=lambda tokens: str(tokens), name="tiny"
    ) as engine:
        labeller = Labeller(sampler=engine, model=engine.base, encoder=encoder)
        problem = open_problem(config, items, labeller=labeller, store=ScoreStore())
        reads = await problem.scorer.score([(labels, item) for item in range(8)])
        assert engine.stats.prompt_tokens == planned < engine.stats.requested_tokens / 1.7
        assert engine.stats.requested_tokens == sum(map(len, contexts))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    with torch.no_grad():
        for item, read in enumerate(reads):
            tokens = torch.tensor([prompts.context(labels, item, order=order.of(item))])
            logprobs = model(tokens).logits[0, -1].log_softmax(-1)
            expected = [float(logprobs[token]) for token in prompts.label_tokens]
            assert read == pytest.approx(expected, abs=1e-4)


def test_the_command_trains_between_batches(config: IcmConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json(exclude={"iterate"}))
    words = ["icm", "run", str(path), "--name", "a", "--runs-dir", str(tmp_path / "runs")]
    words += ["--batch-size", "4", "--search.iterations", "10", "--baselines.inverted", "false"]
    words += ["--iterate.sft.steps", "3", "--iterate.sft.layers", "2"]
    assert app(words, result_action="return_value", exit_on_error=False) == 0
    rows = (tmp_path / "runs" / "a" / "labels.jsonl").read_text().splitlines()
    models = [json.loads(row)["model"] for row in rows]
    assert models[0] == models[3] != models[4] == models[7]
    assert models[4].startswith("icm@")
    again = ["runs", "resume", str(tmp_path / "runs" / "a")]
    assert app(again, result_action="return_value", exit_on_error=False) == 0
    assert (tmp_path / "runs" / "a" / "labels.jsonl").read_text().splitlines() == rows


def test_training_starts_from_the_adapter_that_the_config_names(
    config: IcmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tiny_adapter("start", seed=1, rank=2), tmp_path / "start")
    write_adapter(tiny_adapter("start", base="someone/llama-9000"), tmp_path / "other")
    search = config.search.model_copy(update={"iterations": 4})
    small = config.model_copy(update={"batch_size": 4, "search": search})

    def models(name: str, **sft: object) -> set[str]:
        iterate = {"sft": {"steps": 1, "layers": 1, "rank": 2, **sft}}
        outcome = run_icm(small, name=name, iterate=iterate, progress=False)
        rows = (outcome.path / "labels.jsonl").read_text().splitlines()
        return {json.loads(row)["model"] for row in rows}

    assert models("new") != models("continued", init_from="start")
    for missing in ("nothing-there", "other"):
        with pytest.raises(AdapterError):
            models("refused", init_from=missing)
    assert not (tmp_path / "runs/refused").exists()
