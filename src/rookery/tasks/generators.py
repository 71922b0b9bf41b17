"""Tasksets generated from words and a seed: equal on every machine, with nothing to download.

    arithmetic, letter-reversal, unit-conversion, json-slots     plain skills
    label-*                                                      tasks that interfere
    mark-*                                                       the same, each with its own labels

Each `label-` task labels an item red or blue by its own rule, which the prompt only names:

    Task: size      Item: elephant     -> red     (big)
    Task: living    Item: elephant     -> blue    (an animal)
    Task: alphabet  Item: elephant     -> red     (e is in the first half)

A model trained on one task answers the others wrongly, which makes merging such models hard.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product, zip_longest
from typing import TypeVar

from rookery.errors import TaskError
from rookery.tasks.rows import Row
from rookery.tasks.scorers import (
    ChoiceConfig,
    ExactConfig,
    JsonSchemaConfig,
    NumericConfig,
    ScorerConfig,
)

__all__ = [
    "BIG_ANIMALS",
    "ENGLISH",
    "FRENCH",
    "FRUITS",
    "GENERATORS",
    "LABELS",
    "NAMES",
    "NEGATIVE",
    "OBJECTS",
    "POSITIVE",
    "SMALL_ANIMALS",
    "TOOLS",
    "Generator",
    "generate",
]


# Words for the generated tasksets, in lower case. Every label is decidable: words that fit both
# lists of a pair (bat is an animal and an object, table is English and French) are left out. So are
# words that contain a label (red deer).


def _words(text: str) -> tuple[str, ...]:
    """Split comma-separated items, which may contain spaces."""
    return tuple(" ".join(item.split()) for item in text.split(","))


POSITIVE = _words("""
    admirable, adorable, amazing, amusing, appealing, awesome, beautiful, beloved, blessed,
    blissful, brave, bright, brilliant, calm, caring, charming, cheerful, clever, comforting,
    confident, courageous, cozy, creative, dazzling, delicious, delighted, delightful, divine,
    dreamy, eager, elegant, enchanting, encouraging, enjoyable, enthusiastic, excellent, exciting,
    exquisite, fabulous, faithful, fantastic, flawless, fortunate, friendly, fun, generous, gentle,
    gifted, glad, glorious, glowing, good, gorgeous, graceful, grateful, great, happy, harmonious,
    healthy, heavenly, helpful, heroic, honest, hopeful, ideal, impressive, incredible, inspiring,
    inviting, jolly, joyful, jubilant, kind, laughing, likable, lively, lovely, loving, loyal,
    lucky, magnificent, majestic, marvelous, merry, nice, noble, optimistic, outstanding, peaceful,
    perfect, playful, pleasant, pleased, polite, positive, precious, proud, radiant, refreshing,
    relaxed, remarkable, respected, rewarding, satisfying, sincere, smiling, soothing, sparkling,
    spectacular, splendid, stunning, successful, superb, supportive, sweet, talented, tender,
    terrific, thankful, thoughtful, thrilled, thriving, triumphant, trusted, uplifting, victorious,
    vibrant, warm, welcoming, wise, wonderful, worthy
""")

NEGATIVE = _words("""
    abusive, afraid, aggressive, agonizing, alarming, angry, annoying, anxious, appalling,
    arrogant, ashamed, atrocious, awful, bad, bitter, bleak, boring, broken, brutal, careless,
    clumsy, corrupt, cowardly, creepy, cruel, cursed, damaged, dangerous, deadly, deceitful,
    depressed, depressing, desperate, devastating, dirty, disappointing, disastrous, disgusting,
    dishonest, dismal, dreadful, dreary, embarrassing, evil, failed, faulty, fearful, filthy,
    foolish, foul, frightening, frustrating, furious, ghastly, gloomy, greedy, grim, gross, guilty,
    harmful, harsh, hateful, helpless, hideous, hopeless, horrible, horrid, hostile, hurtful,
    ignorant, ill, infected, inferior, insulting, irritating, jealous, lazy, lonely, lousy, mean,
    menacing, messy, miserable, moldy, nasty, neglected, nervous, obnoxious, offensive, painful,
    pathetic, poisonous, poor, repulsive, resentful, rotten, rude, ruined, ruthless, sad, scary,
    selfish, shameful, sick, sinister, smelly, sour, spiteful, stressful, stupid, terrible,
    terrifying, threatening, tragic, troubled, ugly, unbearable, unfair, unhappy, unpleasant,
    useless, vicious, vile, violent, vulgar, weak, weary, wicked, worried, worthless, wounded,
    wretched
""")

BIG_ANIMALS = _words("""
    african buffalo, alligator, anaconda, arabian camel, asian elephant, bactrian camel,
    basking shark, beluga whale, bengal tiger, bighorn sheep, bison, black bear, black rhinoceros,
    bottlenose dolphin, bowhead whale, brahman bull, brown bear, buffalo, bull, bull shark, camel,
    caribou, clydesdale horse, cow, crocodile, dairy cow, dolphin, donkey, draft horse, dromedary,
    dugong, eland, elephant, elephant seal, elk, fin whale, forest elephant, gaur, giant panda,
    giant squid, giraffe, gorilla, gray whale, great white shark, grizzly bear, hammerhead shark,
    hippo, hippopotamus, horse, humpback whale, indian rhinoceros, jaguar, killer whale,
    kodiak bear, komodo dragon, leatherback turtle, leopard seal, lion, lioness, llama,
    male gorilla, manatee, manta ray, minke whale, moose, mountain gorilla, mule, musk ox, narwhal,
    nile crocodile, okapi, orca, ostrich, ox, panda, percheron horse, pilot whale, polar bear,
    racehorse, reindeer, rhino, rhinoceros, right whale, saltwater crocodile, sea cow, sea lion,
    shire horse, siberian tiger, silverback gorilla, sperm whale, stag, stallion, steer, sturgeon,
    swordfish, tapir, tiger, tiger shark, walrus, water buffalo, whale, whale shark,
    white rhinoceros, wild boar, wildebeest, yak, zebra, zebu
""")

SMALL_ANIMALS = _words("""
    anchovy, ant, aphid, barnacle, bee, bedbug, beetle, blackbird, budgie, bumblebee, butterfly,
    canary, carpenter ant, caterpillar, centipede, chaffinch, chameleon, chickadee, chick,
    chipmunk, cicada, clam, clownfish, cockroach, crayfish, cricket, damselfly, deer mouse,
    dormouse, dragonfly, dung beetle, dwarf hamster, earthworm, earwig, field mouse, finch,
    fire ant, firefly, flea, fly, fruit fly, gecko, gerbil, glowworm, gnat, goldfinch, goldfish,
    grasshopper, guppy, hamster, hermit crab, honeybee, hornet, horsefly, house mouse, housefly,
    hummingbird, jumping spider, katydid, krill, ladybird, ladybug, lark, leech, lizard, locust,
    louse, maggot, mayfly, mealworm, midge, millipede, minnow, mite, mole, mosquito, moth, mouse,
    mussel, neon tetra, newt, nightingale, parakeet, pill bug, pond snail, prawn, pygmy shrew,
    robin, salamander, sandfly, sardine, scorpion, seahorse, shrew, shrimp, silkworm, silverfish,
    skink, slug, snail, sparrow, spider, stick insect, stickleback, swallow, tadpole, tarantula,
    termite, tick, titmouse, tree frog, toad, vole, warbler, wasp, weevil, woodlouse, worm, wren
""")

OBJECTS = _words("""
    alarm clock, apron, armchair, backpack, ballpoint pen, bandage, basket, bathtub, battery, bed,
    belt, bench, bicycle, blanket, blender, book, bookshelf, boot, bottle, bowl, box, bracelet,
    brick, briefcase, broom, bucket, button, cabinet, calculator, camera, candle, carpet,
    ceiling fan, chair, chandelier, clock, coat hanger, coffee mug, coin, computer, couch, cup,
    curtain, cushion, desk, dictionary, dishwasher, door, doorbell, drawer, dress, drum, earring,
    envelope, eraser, flag, flashlight, flute, fork, freezer, frying pan, glove, guitar, hairbrush,
    handbag, hat, headphones, helmet, jacket, kettle, key, keyboard, kite, ladder, lamp, lantern,
    laptop, light bulb, magnet, mailbox, mattress, microphone, mirror, napkin, necklace, newspaper,
    notebook, oven, paintbrush, paper clip, passport, pencil, piano, picture frame, pillow, plate,
    printer, purse, radio, raincoat, refrigerator, ring, rug, scarf, shelf, shirt, shoe, shovel,
    sofa, spoon, stapler, stool, suitcase, sweater, teapot, telephone, telescope, television, tent,
    toaster, toothbrush, towel, trumpet, umbrella, vacuum cleaner, vase, violin, wallet,
    washing machine, watch, wheelbarrow, whistle, window, wooden spoon
""")

FRUITS = _words("""
    acai berry, acerola, apple, apricot, asian pear, avocado, banana, barbados cherry, bilberry,
    bing cherry, black grape, blackberry, blackcurrant, blood orange, boysenberry, breadfruit,
    cantaloupe, cherimoya, cherry, clementine, cloudberry, coconut, concord grape, crab apple,
    cranberry, damson, date, dragon fruit, durian, elderberry, feijoa, fig, fuji apple, gala apple,
    goji berry, golden apple, golden kiwi, gooseberry, granny smith apple, grape, grapefruit,
    green apple, green grape, guava, hackberry, honeydew melon, huckleberry, jackfruit, jujube,
    key lime, kiwi, kumquat, lemon, lime, lingonberry, loganberry, longan, loquat, lychee,
    mandarin, mango, mangosteen, meyer lemon, mulberry, muskmelon, navel orange, nectarine, orange,
    papaya, passion fruit, peach, pear, persimmon, pineapple, pineberry, plantain, plum, pluot,
    pomegranate, pomelo, prickly pear, quince, rambutan, raspberry, salmonberry, sapodilla,
    satsuma, soursop, star fruit, strawberry, sultana grape, sweet cherry, tamarillo, tamarind,
    tangelo, tangerine, ugli fruit, watermelon, white peach, wild strawberry, yellow plum, yuzu
""")

TOOLS = _words("""
    adjustable wrench, allen key, angle grinder, anvil, awl, axe, ball-peen hammer, band saw,
    bench grinder, bench vise, blowtorch, bolt cutter, box cutter, bradawl, caliper,
    carpenter's square, caulking gun, chainsaw, chalk line, chisel, circular saw, clamp,
    claw hammer, cold chisel, coping saw, cordless drill, crowbar, crosscut saw, depth gauge,
    disc sander, drill, drill bit, drill press, electric drill, file, flat file, framing hammer,
    glass cutter, glue gun, grinder, hacksaw, hammer, hand drill, hand plane, handsaw, hatchet,
    heat gun, hex key, hoe, impact driver, jackhammer, jigsaw, lathe, level, lug wrench, machete,
    mallet, measuring tape, micrometer, mitre saw, monkey wrench, multimeter, nail gun,
    nail puller, needle-nose pliers, pickaxe, pipe cutter, pipe wrench, pitchfork, plane, pliers,
    plumb line, pneumatic drill, power drill, pruning shears, pry bar, putty knife, rake, rasp,
    ratchet, rivet gun, rotary hammer, router, rubber mallet, sander, saw, scraper, screwdriver,
    scythe, shears, sickle, sledgehammer, socket wrench, soldering iron, spade, spanner,
    spirit level, spokeshave, staple gun, table saw, tape measure, tin snips, torque wrench,
    trowel, utility knife, vise, voltmeter, welding torch, wire cutter, wire stripper, wood chisel,
    wood plane, wrench
""")

ENGLISH = _words("""
    afternoon, always, arrow, autumn, beach, bedroom, beneath, birthday, blood, bread, breakfast,
    bridge, brother, bubble, butter, castle, chicken, child, church, cloud, daughter, dawn, dream,
    drink, early, earth, eight, evening, everywhere, eyebrow, father, feather, field, fifteen,
    finger, flower, forest, freedom, friend, garden, ghost, glass, grandfather, grass, happiness,
    heart, heavy, hill, holiday, honey, house, hunger, husband, kingdom, kitchen, knife, knight,
    laughter, leather, letter, library, lightning, meadow, milk, money, month, moon, morning,
    mother, mountain, mouth, neighbor, never, night, north, ocean, outside, pepper, picture,
    pocket, quickly, rain, rainbow, sand, school, seven, shadow, shoulder, sister, sleep, smoke,
    snow, spring, stone, storm, strength, street, summer, sunshine, teacher, tears, thirty,
    thought, thunder, tomorrow, tongue, tooth, town, truth, twelve, twenty, uncle, valley, wealth,
    weather, wedding, white, wife, window, winter, wisdom, woman, wood, world, yellow, yesterday,
    youth
""")

FRENCH = _words("""
    abeille, acheter, aimer, ailleurs, ami, amitié, arbre, argent, assiette, aujourd'hui, aussi,
    avec, avoir, beaucoup, beurre, bibliothèque, bientôt, blanc, boire, bois, bonheur, bouche,
    boulangerie, bouteille, cadeau, chambre, chanson, chapeau, château, chaussure, cheval, cheveux,
    chien, ciel, cinq, coeur, colline, coucher, couteau, demain, dimanche, doigt, donner, dormir,
    douze, eau, école, écrire, église, enfant, épaule, escalier, espoir, été, étoile, étudiant,
    faim, femme, fenêtre, fermer, feu, feuille, fille, fleur, fleuve, forêt, frère, froid, fromage,
    fumée, garçon, gâteau, genou, grenouille, guerre, herbe, heureux, hier, hiver, homme, huit,
    jamais, jardin, jaune, jeudi, jeune, joie, jour, jupe, lait, lapin, livre, loin, lumière,
    lundi, lune, maison, maintenant, manger, mardi, matin, meilleur, mer, mère, monde, montagne,
    mouchoir, mourir, neige, nuage, nuit, oiseau, ombre, oncle, oreille, oublier, ouvrir, papillon,
    parapluie, parfois, parler, pêche, père, peur, pierre, plage, pluie, poisson, pomme, pont,
    poulet, printemps, quatre, quinze, rêve, rivière, roi, royaume, samedi, soeur, soir, soleil,
    souris, sucre, tante, temps, terre, tête, toujours, travail, treize, trente, trois, trouver,
    vache, vendredi, vérité, verre, vert, viande, vieux, ville, vingt, visage, vivre, voiture,
    voix, yeux
""")

NAMES = _words("""
    Ada, Ben, Clara, David, Elena, Felix, Grace, Hugo, Ines, Jonas, Kira, Leo, Maya, Nora, Oscar,
    Paula, Quentin, Rosa, Samuel, Tara, Uma, Victor, Wanda, Yusuf, Zoe
""")

CITIES = _words("""
    Athens, Berlin, Cairo, Dublin, Geneva, Hanoi, Istanbul, Jakarta, Kyoto, Lima, Madrid, Nairobi,
    Oslo, Paris, Quito, Rome, Seoul, Tunis, Vienna, Warsaw
""")


LABELS = ("red", "blue")
"""Labels shared by all `label-` tasks."""

Item = TypeVar("Item")
Fields = dict[str, object]

WORDS = tuple(
    dict.fromkeys(
        word
        for words_of in (
            POSITIVE,
            NEGATIVE,
            BIG_ANIMALS,
            SMALL_ANIMALS,
            OBJECTS,
            FRUITS,
            TOOLS,
            ENGLISH,
        )
        for word in words_of
        if word.isascii() and word.isalpha()
    )
)
"""Every English item that is a single word, without repetition."""

UNITS = {
    ("kilometers", "meters"): 1000,
    ("meters", "centimeters"): 100,
    ("kilograms", "grams"): 1000,
    ("liters", "milliliters"): 1000,
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("years", "months"): 12,
    ("feet", "inches"): 12,
    ("yards", "feet"): 3,
    ("pounds", "ounces"): 16,
    ("dollars", "cents"): 100,
}
"""(larger unit, smaller unit) -> smaller units in one larger unit."""

PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Content and scorer of one generated taskset."""

    summary: str
    draw: Callable[[int], Iterator[Fields]]
    """Seed -> the fields of every possible item, each once, in an order fixed by the seed."""
    scorer: ScorerConfig


def generate(name: str, *, size: int, seed: int) -> Iterator[Row]:
    """Yield the first `size` rows of a generator. A larger size begins with the same rows."""
    rows = list(islice(GENERATORS[name].draw(seed), size))
    if len(rows) < size:
        raise TaskError(f"{name} has {len(rows)} different tasks, and size is {size}: lower size.")
    for number, fields in enumerate(rows, start=1):
        yield Row(where=f"generated:{name} row {number}", fields=fields)


def _arithmetic(seed: int) -> Iterator[Fields]:
    # 47 + 38 and 38 + 47 are one task: as two they could fall into different splits.
    pairs = [(a, b) if (a + b) % 2 else (b, a) for a in range(10, 100) for b in range(a, 100)]
    for a, b in _shuffled(pairs, seed=seed):
        prompt = f"What is {a} + {b}? Answer with the number only."
        yield {"id": f"{a}+{b}", "prompt": prompt, "reference": str(a + b)}


def _letter_reversal(seed: int) -> Iterator[Fields]:
    candidates = [word for word in WORDS if 4 <= len(word) <= 8 and word != word[::-1]]
    for word in _shuffled(candidates, seed=seed):
        prompt = f"Write the word {word} backwards. Answer with the letters only."
        yield {"id": word, "prompt": prompt, "reference": word[::-1]}


def _unit_conversion(seed: int) -> Iterator[Fields]:
    for units, amount in _shuffled(list(product(UNITS, range(2, 61))), seed=seed):
        source, target = units
        prompt = f"Convert {amount} {source} to {target}. Answer with the number only."
        reference = str(amount * UNITS[units])
        yield {"id": f"{amount}-{source}-{target}", "prompt": prompt, "reference": reference}


def _json_slots(seed: int) -> Iterator[Fields]:
    people = list(product(NAMES, range(18, 90), CITIES))
    for name, age, city in _shuffled(people, seed=seed):
        prompt = (
            f"{name} is {age} years old and lives in {city}.\n"
            'Write this as a JSON object with the keys "name", "age" and "city".'
        )
        reference = {"name": name, "age": age, "city": city}
        yield {"id": f"{name}-{age}-{city}", "prompt": prompt, "reference": reference}


def _label(
    title: str,
    *,
    red: Sequence[str],
    blue: Sequence[str],
    labels: tuple[str, str] = LABELS,
) -> Generator:
    """Make a labelling task. Items alternate between the labels until one list is exhausted."""

    def draw(seed: int) -> Iterator[Fields]:
        orders = (_shuffled(red, seed=seed), _shuffled(blue, seed=seed))
        for pair in zip_longest(*orders):
            for item, label in zip(pair, labels, strict=True):
                if item is not None:
                    question = f"Is it {labels[0]} or {labels[1]}?"
                    yield {
                        "id": item,
                        "prompt": f"Task: {title}\nItem: {item}\n{question} Answer:",
                        "reference": label,
                        "choices": list(labels),
                    }

    summary = f"{title}: {len(red)} {labels[0]} and {len(blue)} {labels[1]} items"
    return Generator(summary=summary, draw=draw, scorer=ChoiceConfig())


def _shuffled(items: Sequence[Item], *, seed: int) -> Iterator[Item]:
    """Yield all items in an order that depends only on the seed, not on the Python version."""
    yield from sorted(items, key=lambda i: hashlib.blake2b(f"{seed}/{i!r}".encode()).digest())


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(
        summary="addition of two numbers of two digits", draw=_arithmetic, scorer=NumericConfig()
    ),
    "letter-reversal": Generator(
        summary="a word backwards",
        draw=_letter_reversal,
        scorer=ExactConfig(ignore_case=True, ignore_punctuation=True),
    ),
    "unit-conversion": Generator(
        summary="whole amounts to a smaller unit", draw=_unit_conversion, scorer=NumericConfig()
    ),
    "json-slots": Generator(
        summary="the facts of a sentence as a JSON object",
        draw=_json_slots,
        scorer=JsonSchemaConfig.model_validate(
            {"json_schema": PERSON_SCHEMA, "match_reference": True}
        ),
    ),
    "label-alphabet": _label(
        "alphabet",
        red=[word for word in WORDS if word[0] <= "m"],
        blue=[word for word in WORDS if word[0] > "m"],
    ),
    "label-kind": _label("kind", red=FRUITS, blue=TOOLS),
    "label-language": _label("language", red=FRENCH, blue=ENGLISH),
    "label-length": _label(
        "length",
        red=[word for word in WORDS if len(word) <= 5],
        blue=[word for word in WORDS if len(word) >= 8],
    ),
    "label-living": _label("living", red=OBJECTS, blue=BIG_ANIMALS + SMALL_ANIMALS),
    "label-parity": _label(
        "parity",
        red=[str(number) for number in range(1, 1000, 2)],
        blue=[str(number) for number in range(2, 1000, 2)],
    ),
    "label-sentiment": _label("sentiment", red=POSITIVE, blue=NEGATIVE),
    "label-size": _label("size", red=BIG_ANIMALS, blue=SMALL_ANIMALS),
    # The same rules with different labels: adapters for these can be merged without conflict.
    "mark-kind": _label("kind", red=FRUITS, blue=TOOLS, labels=("red", "blue")),
    "mark-language": _label("language", red=FRENCH, blue=ENGLISH, labels=("left", "right")),
    "mark-living": _label(
        "living",
        red=OBJECTS,
        blue=BIG_ANIMALS + SMALL_ANIMALS,
        labels=("up", "down"),
    ),
    "mark-sentiment": _label("sentiment", red=POSITIVE, blue=NEGATIVE, labels=("north", "south")),
}
