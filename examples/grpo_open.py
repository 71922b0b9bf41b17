"""Group-relative policy optimisation with every step in sight, on the ports alone.

Hardware: 1 CPU core, about two minutes. Expect the mean reward to rise from about 0.3 to above 0.4.
The model is made the first time, half trained, in examples/addition.

    python examples/grpo_open.py
"""

import asyncio
import json
from pathlib import Path

from rookery.embedded import EngineConfig, open_engine
from rookery.loops.grpo.batch import group_relative, is_equal
from rookery.seeding import stream, stream_seed
from rookery.slots import load_model
from rookery.starters.addition import make_addition
from rookery.tasks.template import load_template
from rookery.train import (
    AdapterPublisher,
    LoraConfig,
    LoraTrainer,
    TrainerConfig,
    initial_adapter,
)
from rookery.train.losses.loss import averaged
from rookery.types import (
    Completion,
    Datum,
    OptimStep,
    SampleRequest,
    SamplingParams,
    Task,
    TokenIds,
    TrainRequest,
)

FOLDER = Path(__file__).parent / "addition"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS, GROUPS, SIZE, SEED = 40, 16, 8, 0


def rows(prompt: TokenIds, answers: tuple[Completion, ...], advantages: list[float]) -> list[Datum]:
    """Each answer a row; its advantage is that of all its tokens."""
    return [
        Datum(
            tokens=prompt + answer.tokens[:-1],
            positions=tuple(range(len(prompt) - 1, len(prompt) - 1 + len(answer.tokens))),
            targets=answer.tokens,
            weights=(1.0,) * len(answer.tokens),
            sampled_logprobs=answer.logprobs,
            advantages=(advantage,) * len(answer.tokens),
        )
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


async def main() -> None:
    tasks = [
        Task(id=row["id"], prompt=row["prompt"], reference=row["reference"])
        for row in map(json.loads, (FOLDER / "tasks.jsonl").read_text().splitlines())
    ]
    template = load_template(FOLDER / "model")
    model = await asyncio.to_thread(load_model, FOLDER / "model")
    lora = LoraConfig(rank=8, targets=TARGETS)
    start = initial_adapter(model, lora, name="policy", base="", seed=SEED)
    async with open_engine(EngineConfig(model=str(FOLDER / "model"), cache_gib=0.05)) as engine:
        config = TrainerConfig(pass_tokens=8192, trunk_cache_gib=0)
        trainer = LoraTrainer(model, config=config, publisher=AdapterPublisher(engine))
        trainer.add("policy", start)
        policy = await trainer.publish("policy")
        for step in range(STEPS):
            # groups
            places = stream(SEED, "tasks", step).choice(len(tasks), GROUPS, replace=False)
            asked = [tasks[int(place)] for place in places]
            prompts = [template.encode(task) for task in asked]
            seeds = [stream_seed(SEED, "draw", step, place) for place in range(GROUPS)]
            drawn = await engine.sample(
                [
                    SampleRequest(
                        model=policy,
                        prompt=prompt,
                        params=SamplingParams(max_tokens=4, n=SIZE, seed=seed),
                    )
                    for prompt, seed in zip(prompts, seeds, strict=True)
                ]
            )
            # rewards and advantages
            rewards_P_G = [
                [float(answer.text == task.reference) for answer in answers]
                for task, answers in zip(asked, drawn, strict=True)
            ]
            data: list[Datum] = []
            for prompt, answers, rewards in zip(prompts, drawn, rewards_P_G, strict=True):
                if not is_equal(rewards):
                    rng = stream(SEED, "advantages", step)
                    data += rows(prompt, answers, list(group_relative(rewards, rng=rng)))
            # gradients and step
            [weighted] = averaged([data], "sequence")
            [output] = await trainer.forward_backward(
                [TrainRequest(trainee="policy", data=weighted, loss="grpo")]
            )
            await trainer.optim_step([OptimStep(trainee="policy", learning_rate=1e-3)])
            # publish
            policy = await trainer.publish("policy")
            mean = sum(map(sum, rewards_P_G)) / (GROUPS * SIZE)
            print(f"step {step:>2}  reward {mean:.3f}  gap {output.metrics['train/mismatch']:.1e}")


if __name__ == "__main__":
    if not FOLDER.exists():
        make_addition(FOLDER)
    asyncio.run(main())
