"""Evolve adapters with every step in sight: two ports, pure search, no loop of ours.

Hardware: 2 CPU cores, about 2 minutes. Three founders, three generations of six children; the best
child by the search split is compared with the best founder on tasks that the search never saw.

    python examples/genome_open.py
"""

import asyncio

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.search.candidate import Fitness
from rookery.search.children import ChildrenConfig, CrossoverConfig, MutationConfig
from rookery.search.population import PopulationConfig, ask, make_population, tell
from rookery.starters import DEMOS
from rookery.tasks.scorers.text import correct_choice
from rookery.tasks.taskset import GeneratedConfig, load_taskset
from rookery.tasks.template import Template, load_template
from rookery.types import Adapter, ScoreRequest, Task
from rookery.weights import read_adapter
from rookery.weights.merge import LinearConfig, merge
from rookery.weights.mutate import GaussianConfig, mutate

FOUNDERS = DEMOS / "founders"
NAMES = ("mark-kind", "mark-language", "mark-living")
SEED = 0
SEARCH = PopulationConfig(
    size=4,
    children=ChildrenConfig(
        count=6,
        operators=(
            CrossoverConfig(name="sum", share=3, weights="free"),
            MutationConfig(name="gaussian", share=1),
        ),
    ),
)


async def accuracies(
    engine: EmbeddedEngine, template: Template, adapters: list[Adapter], tasks: list[Task]
) -> list[float]:
    """The share of right labels of each adapter: all adapters and tasks in one batch."""
    refs = [await engine.load(adapter) for adapter in adapters]
    requests, answers = [], []
    for ref in refs:
        for task in tasks:
            prompt = template.encode(task)
            labels = tuple(template.encode_choice(task, c)[0][-1] for c in task.choices)
            requests.append(
                ScoreRequest(model=ref, tokens=prompt, start=len(prompt), labels=labels)
            )
            answers.append(task.choices.index(correct_choice(task) or ""))
    scores = await engine.score(requests)
    right = [
        score.label_logprobs[answer] == max(score.label_logprobs)
        for score, answer in zip(scores, answers, strict=True)
    ]
    for ref in refs:
        await engine.unload(ref)
    return [
        sum(right[i * len(tasks) : (i + 1) * len(tasks)]) / len(tasks) for i in range(len(refs))
    ]


async def main() -> None:
    tasksets = [load_taskset(GeneratedConfig(generator=name, limit=60)) for name in NAMES]
    search = [task for taskset in tasksets for task in taskset.split("search")]
    report = [task for taskset in tasksets for task in taskset.split("report")]
    template = load_template(resolve_model("smollm2").path)
    pool = {name: read_adapter(FOUNDERS / name) for name in NAMES}

    async with open_engine(EngineConfig(model="smollm2")) as engine:
        scores = await accuracies(engine, template, list(pool.values()), search)
        fitness = {n: Fitness(score=s) for n, s in zip(pool, scores, strict=True)}
        population = make_population(fitness, config=SEARCH, seed=SEED)

        for generation in range(1, 4):
            plans = ask(population, config=SEARCH, seed=SEED)
            for plan in plans:  # carry the plans out: merge, then mutate
                parents = [pool[parent] for parent in plan.parents]
                child = parents[0]
                if plan.merge is not None:
                    method = LinearConfig(normalise=False)
                    child = merge(parents, weights=plan.weights, method=method, rank=8)
                if plan.mutation is not None:
                    key = (plan.seed_key,)
                    change = mutate(child, method=GaussianConfig(), key=key, sigma=plan.sigma)
                    child = change.adapter
                pool[plan.id] = child
            scores = await accuracies(engine, template, [pool[p.id] for p in plans], search)
            told = {p.id: Fitness(score=s) for p, s in zip(plans, scores, strict=True)}
            population = tell(population, told, config=SEARCH, seed=SEED)
            assert population.best is not None
            best = population.best
            print(f"generation {generation}: best {best.fitness.score:.3f} ({best.id})")

        champion = max(NAMES, key=lambda name: fitness[name].score or 0.0)
        ours, theirs = await accuracies(engine, template, [pool[best.id], pool[champion]], report)
    print(f"on {len(report)} tasks never seen: evolved {ours:.3f}, best founder {theirs:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
