"""The demo's winners beside its founders, on words that no part of the demo has seen.

    rookery genome run configs/demo.yaml --name demo-0          # and other seeds
    python benchmarks/genome_fresh.py runs/demo-0 [RUN ...]

The demo's founders and crossovers were chosen while looking at the demo's report tasks. These
words were written down afterwards: 40 for each label of the three tasks, in none of the word lists.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np

from rookery.embedded import EngineConfig, open_engine, resolve_model
from rookery.rollout import TasksetEvaluator
from rookery.search.statistics import Strata, paired_difference
from rookery.tasks import wordlists
from rookery.tasks.taskset import JsonlConfig, Taskset, load_taskset
from rookery.tasks.template import load_template
from rookery.types import Evaluation
from rookery.weights import read_adapter

FOUNDERS = Path(__file__).parents[1] / "examples" / "founders"

FRESH = {
    ("mark-kind", "kind", "red"): """
        ackee, ambarella, bartlett pear, bosc pear, braeburn apple, canary melon, casaba melon,
        cempedak, chokeberry, conference pear, custard apple, dewberry, finger lime, galia melon,
        greengage, honeycrisp apple, horned melon, jabuticaba, langsat, marionberry, medlar,
        mirabelle plum, miracle fruit, morello cherry, pawpaw, physalis, salak, santol,
        sea buckthorn, seville orange, sloe, sour cherry, strawberry guava, sugar apple, tayberry,
        valencia orange, white currant, white grape, winter melon, youngberry""",
    ("mark-kind", "kind", "blue"): """
        adze, auger, belt sander, bench plane, brad nailer, breaker bar, cable cutter,
        center punch, chain hoist, combination square, compass saw, crimping tool, dial gauge,
        dovetail saw, drywall saw, flaring tool, fretsaw, garden fork, grease gun, hole saw,
        jack plane, keyhole saw, laser level, locking pliers, loppers, marking gauge, mattock,
        mortise chisel, paint scraper, pipe bender, plunge router, reciprocating saw, scroll saw,
        speed square, splitting maul, strap wrench, tack hammer, tile cutter, try square,
        wire brush""",
    ("mark-language", "language", "left"): """
        acier, aiguille, allumette, amande, anneau, appeler, apprendre, armoire, ascenseur,
        attendre, autrefois, avion, bateau, berger, besoin, boîte, bougie, brouillard, bruit,
        canard, ceinture, cerise, chaise, chaud, chemin, chercher, chèvre, choisir, cloche, clou,
        cochon, comprendre, coquillage, courir, déjeuner, échelle, écureuil, entendre, épée,
        fauteuil""",
    ("mark-language", "language", "right"): """
        above, already, ankle, answer, awake, baker, barn, beard, behind, believe, belly, between,
        borrow, bottom, breath, cheese, chimney, clothes, crowd, darkness, deep, dinner, dust,
        eleven, empty, enough, faith, farmer, feeling, forget, forward, gather, gift, girl, guess,
        harvest, health, heaven, hope, journey""",
    ("mark-living", "living", "up"): """
        accordion, air conditioner, ashtray, balloon, barrel, beach ball, bell, binoculars,
        bookmark, bow tie, cash register, cello, chessboard, chopsticks, clarinet, compass,
        corkscrew, crib, cutting board, deck chair, doormat, dustpan, easel, fire extinguisher,
        fountain pen, funnel, hammock, harmonica, hourglass, lampshade, lipstick, lunchbox,
        metronome, padlock, parachute, postcard, rocking chair, saucepan, skateboard, typewriter""",
    ("mark-living", "living", "down"): """
        aardvark, albatross, alpaca, anteater, antelope, armadillo, baboon, badger, beaver, bobcat,
        capybara, catfish, cheetah, chimpanzee, cobra, cormorant, coyote, crow, cuckoo, deer,
        eagle, eel, falcon, ferret, flamingo, fox, gazelle, hare, hedgehog, heron, hyena, iguana,
        kangaroo, koala, lemur, lobster, lynx, meerkat, otter, penguin""",
}
"""(generator, title, label) -> items"""

LABELS = {"mark-kind": ("red", "blue"), "mark-language": ("left", "right")}
LABELS["mark-living"] = ("up", "down")


def fresh_tasksets(folder: Path) -> list[Taskset]:
    """One taskset for each of the demo's, asked in the same words."""
    known = {word for name in wordlists.__all__ for word in getattr(wordlists, name)}
    rows: dict[str, list[dict[str, object]]] = {}
    for (name, title, label), text in FRESH.items():
        first, second = LABELS[name]
        for item in (" ".join(part.split()) for part in text.split(",")):
            assert item not in known, item
            prompt = f"Task: {title}\nItem: {item}\nIs it {first} or {second}? Answer:"
            row: dict[str, object] = {
                "id": item,
                "prompt": prompt,
                "reference": label,
                "choices": [first, second],
            }
            rows.setdefault(name, []).append(row)
    return [_taskset(folder / f"{name}.jsonl", found) for name, found in rows.items()]


def _taskset(path: Path, rows: list[dict[str, object]]) -> Taskset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_taskset(JsonlConfig.model_validate({"path": path, "scorer": {"type": "choice"}}))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    runs: list[Path] = parser.parse_args().runs
    folders = [*sorted(FOUNDERS.iterdir()), *(run / "winner" for run in runs)]
    names = [*(path.name for path in sorted(FOUNDERS.iterdir())), *(str(run) for run in runs)]
    with tempfile.TemporaryDirectory() as scratch:
        tasksets = fresh_tasksets(Path(scratch))
        tasks = [task for taskset in tasksets for task in taskset.tasks]
        template = load_template(resolve_model("smollm2").path)
        async with open_engine(EngineConfig(model="smollm2")) as engine:
            refs = [await engine.load(read_adapter(folder)) for folder in folders]
            evaluator = TasksetEvaluator(engine, template=template, tasksets=tasksets)
            found = await evaluator.evaluate(refs, tasks)
    report(names, found, sources=[task.source for task in tasks], num_founders=3)


def report(
    names: list[str], found: list[Evaluation], *, sources: list[str], num_founders: int
) -> None:
    """Accuracy of all, and the winners' gains over the founder that is best here."""
    rewards = [list(evaluation.rewards.values()) for evaluation in found]
    best = max(range(num_founders), key=lambda i: sum(rewards[i]))
    print(f"{len(sources)} fresh tasks; best founder: {names[best]}")
    for index, name in enumerate(names):
        line = f"{name:<28}{sum(rewards[index]) / len(rewards[index]):>7.3f}"
        if index >= num_founders:
            gain = paired_difference(
                rewards[index],
                rewards[best],
                rng=np.random.default_rng(0),
                strata=Strata(names=tuple(sources)),
            )
            line += f"   gain {gain.estimate:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        print(line)


if __name__ == "__main__":
    asyncio.run(main())
