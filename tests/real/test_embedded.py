"""The embedded engine on real weights: SmolLM2 with the shipped founders, beside transformers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from marks import long
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.starters import DEMOS
from rookery.tasks.taskset import GeneratedConfig, load_taskset
from rookery.tasks.template import load_template
from rookery.types import SampleRequest, SamplingParams, ScoreRequest, Task
from rookery.weights import read_adapter

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOUNDERS = DEMOS / "founders"
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Count from one to five."]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(EngineConfig(model="smollm2")) as engine:
        yield engine


def _prompts() -> list[tuple[int, ...]]:
    template = load_template(resolve_model("smollm2").path)
    return [template.encode(Task(id=q, prompt=q, reference="")) for q in QUESTIONS]


async def test_answers_are_those_of_transformers_and_peft(engine: EmbeddedEngine) -> None:
    """Base and two adapters in one batch: tokens equal, log-probs to 1e-4. A draw with a seed does
    not depend on what is beside it."""
    names = ("mark-kind", "mark-living")
    refs = [engine.base, *[await engine.load(read_adapter(FOUNDERS / name)) for name in names]]
    greedy = SamplingParams(max_tokens=16, temperature=0)
    prompts = _prompts()
    requests = [SampleRequest(model=r, prompt=p, params=greedy) for r in refs for p in prompts]
    drawn = await engine.sample(requests)
    [[capital]] = drawn[:1]
    assert "Paris" in capital.text and capital.finish_reason == "stop"
    answers = iter(drawn)
    reference = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2").path).eval()
    model = PeftModel.from_pretrained(reference, FOUNDERS / names[0], adapter_name=names[0])
    model.load_adapter(str(FOUNDERS / names[1]), adapter_name=names[1])
    for name in ("__base__", *names):
        for prompt in prompts:
            [completion] = next(answers)
            tokens = torch.tensor([[*prompt, *completion.tokens]])
            with torch.inference_mode():
                logits = model(tokens, adapter_names=[name]).logits[0]
            rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            assert rows.argmax(-1).tolist() == list(completion.tokens)
            expected = rows.max(-1).values.tolist()
            assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=5)
    draws = [SampleRequest(model=engine.base, prompt=prompt, params=params) for prompt in prompts]
    [alone] = await engine.sample(draws[1:2])
    crowd = await engine.sample([*requests[-4:], *draws, *draws])
    assert crowd[5] == crowd[8] == alone


@long
async def test_founders_know_their_own_task_on_unseen_items(engine: EmbeddedEngine) -> None:
    """Each is right far above chance on its own task; layers below it are computed once."""
    template = load_template(resolve_model("smollm2").path)
    names = sorted(folder.name for folder in FOUNDERS.iterdir() if folder.is_dir())
    refs = [await engine.load(read_adapter(FOUNDERS / name)) for name in names]
    for name, ref in zip(names, refs, strict=True):
        tasks = load_taskset(GeneratedConfig(generator=name)).split("report")[:24]
        requests = []
        for task in tasks:
            prompt = template.encode(task)
            labels = tuple(template.encode_choice(task, c)[0][-1] for c in task.choices)
            requests.append(
                ScoreRequest(model=ref, tokens=prompt, start=len(prompt), labels=labels)
            )
        scores = await engine.score(requests)
        right = sum(
            task.choices[max((0, 1), key=score.label_logprobs.__getitem__)] == task.reference
            for task, score in zip(tasks, scores, strict=True)
        )
        assert right >= 17, f"{name}: {right} of 24"
    assert engine.stats.trunk_tokens < engine.stats.requested_tokens
