"""The fleet on real vLLM servers on the CPU, against the embedded engine. Minutes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.real.peers import needs_vllm, served_on_cpu
from transformers import AutoModelForCausalLM, AutoTokenizer

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.errors import AdapterError, FleetError
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.admin import status, verify
from rookery.fleet.bridges.reload import update_weights
from rookery.fleet.http.capabilities import read_shapes
from rookery.fleet.http.client import ServerRefusal
from rookery.fleet.http.probe import read_metrics
from rookery.fleet.http.wire import Fields, encode_tokens
from rookery.fleet.perturbed import PerturbedFactors, StepPopulation
from rookery.fleet.vllm_plugin.shared_memory import MANIFEST
from rookery.types import (
    Adapter,
    LoraFactors,
    ModelRef,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from rookery.weights import make_adapter, read_adapter, write_adapter

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]
TEXTS = ("The capital of France is", "Once upon a time there was a", "2 + 2 =", "def add(a, b):")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, top_logprobs=2)
GENOME = """
engine: {engine}
tokenizer: smollm2
init: {{type: file, path: founders}}
tasksets:
  - {{type: generated, generator: mark-kind, limit: 24,
      splits: {{search: 0.25, select: 0.25, report: 0.5}}}}
stages:
  - {{type: ga, generations: 1, population: {{size: 2, children: {{count: 3}}}}}}
race: {{enabled: false}}
finals: {{num_finalists: 2, num_voters: 2}}
"""
CLOSE = 2e-3
"""Nats: float32 on both sides, sums in another order."""


def _adapter(name: str, *, seed: int, rank: int, targets: tuple[str, ...]) -> Adapter:
    """Random factors, strong enough to change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer, (size_in, size_out) in read_shapes(resolve_model("smollm2").path).items():
        if layer.endswith(targets):
            factors[layer] = LoraFactors(
                a=torch.randn(rank, size_in, generator=generator) * size_in**-0.5,
                b=torch.randn(size_out, rank, generator=generator) * 0.1,
                scale=1.5,
            )
    return make_adapter(name, base="smollm2", factors=factors)


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapters() -> list[Adapter]:
    return [
        _adapter("wide", seed=1, rank=8, targets=ALL),
        _adapter("attention", seed=2, rank=3, targets=("q_proj", "v_proj")),
        _adapter("mlp", seed=3, rank=16, targets=("down_proj",)),
    ]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2").path)
    return [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(EngineConfig(model="smollm2", dtype="float32")) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    config = FleetConfig(
        name="smollm2",
        launch=LaunchConfig(
            **served_on_cpu(replicas=2, max_model_len=2048, max_loras=4, max_cpu_loras=8)
        ),
    )
    async with open_fleet(config) as fleet:
        yield fleet


async def test_tokens_come_with_what_they_were_drawn_from(
    fleet: Fleet, engine: EmbeddedEngine, prompts: list[tuple[int, ...]]
) -> None:
    """Log-probabilities are those of the embedded engine, tempered and normalised over them."""
    params = SamplingParams(
        max_tokens=12, temperature=0.7, top_k=8, top_p=0.9, return_kept=True, ignore_eos=True
    )
    drawn = await fleet.sample(
        [SampleRequest(model=fleet.base, prompt=prompt, params=params) for prompt in prompts]
    )
    sizes = set()
    for prompt, [completion] in zip(prompts, drawn, strict=True):
        tokens = prompt + completion.tokens
        [score] = await engine.score(
            [ScoreRequest(model=engine.base, tokens=tokens, start=len(prompt), top_logprobs=20)]
        )
        for place, (token, kept) in enumerate(zip(completion.tokens, completion.kept, strict=True)):
            likeliest = dict(score.top_logprobs[place])
            tempered = torch.tensor([likeliest[one] / 0.7 for one in kept])
            expected = torch.log_softmax(tempered, dim=-1)[kept.index(token)]
            assert completion.logprobs[place] == pytest.approx(float(expected), abs=CLOSE)
            sizes.add(len(kept))
    assert sizes > {1} and max(sizes) <= 8


async def test_adapters_say_what_the_embedded_engine_says(
    fleet: Fleet, engine: EmbeddedEngine, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    assert fleet.base == engine.base
    assert {replica.route for replica in fleet.pool.replicas} == {"extension"}
    assert all(replica.has_token_route for replica in fleet.pool.replicas)
    refs = [engine.base, *[await engine.load(adapter) for adapter in adapters]]
    assert [fleet.base, *[await fleet.load(adapter) for adapter in adapters]] == refs
    wanted = [SampleRequest(model=r, prompt=p, params=GREEDY) for r in refs for p in prompts]
    expected = await engine.sample(wanted)
    answers = await fleet.sample(wanted)
    for [ours], [theirs] in zip(answers, expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.text == theirs.text
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
        assert ours.model == theirs.model and ours.finish_reason == theirs.finish_reason
        for mine, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
            assert [v for _, v in mine] == pytest.approx([v for _, v in other], abs=CLOSE)
    assert len({c.tokens for [c] in answers}) > 3 * len(prompts), "the adapters make a difference"


async def test_the_output_layer_of_tied_embeddings_is_adapted(
    fleet: Fleet, engine: EmbeddedEngine, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    """For those who ask for it: beside it the base model and other adapters keep their own."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(4, 576, generator=generator) * 576**-0.5
    heads = [
        LoraFactors(a=a, b=torch.randn(49152, 4, generator=generator) * 0.3, scale=1.5)
        for _ in range(4)
    ]
    made = [
        make_adapter(f"head{i}", base="smollm2", factors={**adapters[1].factors, "lm_head": head})
        for i, head in enumerate(heads)
    ]
    for adapter in (*made, adapters[1]):
        assert await fleet.load(adapter) == await engine.load(adapter)
    refs = [ModelRef(name=one.name, version=one.version) for one in (*made, adapters[1])]
    refs.append(fleet.base)
    draws = [SampleRequest(model=r, prompt=p, params=GREEDY) for r in refs for p in prompts]
    reads = [ScoreRequest(model=r, tokens=p, start=1) for r in refs for p in prompts]
    for _ in range(2):  # the second time all slots of the servers are filled
        for [ours], [theirs] in zip(
            await fleet.sample(draws), await engine.sample(draws), strict=True
        ):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
        for mine, other in zip(await fleet.score(reads), await engine.score(reads), strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=CLOSE)
    for ref in refs[:4]:
        await fleet.unload(ref)
        await engine.unload(ref)


async def test_the_base_model_is_itself_beside_adapters(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    """Whatever is in the servers' last slot: four adapters have filled all of them."""
    made = [_adapter(f"full{i}", seed=40 + i, rank=8, targets=ALL) for i in range(4)]
    refs = [await fleet.load(adapter) for adapter in made]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def ask(ref: ModelRef) -> list[SampleRequest]:
        return [SampleRequest(model=ref, prompt=prompt, params=params) for prompt in prompts]

    alone = await fleet.sample(ask(fleet.base) * 2)
    for _ in range(2):
        everything = [r for own in zip(*map(ask, [fleet.base, *refs]), strict=True) for r in own]
        mixed = await fleet.sample(everything)
        for i, [completion] in enumerate(mixed[:: 1 + len(refs)]):
            assert completion.tokens == alone[i][0].tokens
            assert completion.logprobs == pytest.approx(alone[i][0].logprobs, abs=1e-4)
    for ref in refs:
        await fleet.unload(ref)


async def test_answers_meet_others_that_report_more_likely_tokens(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    """A step of vLLM has as many columns as the request in it that asks for most."""
    plain = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    alone = await fleet.sample(
        [SampleRequest(model=fleet.base, prompt=prompt, params=plain) for prompt in prompts]
    )
    tops = (0, 2, 20)
    mixed = await fleet.sample(
        [
            SampleRequest(
                model=fleet.base,
                prompt=prompt,
                params=replace(plain, max_tokens=48 - 2 * top, top_logprobs=top),
            )
            for prompt in prompts
            for top in tops
        ]
    )
    for i, [completion] in enumerate(mixed):
        [whole], top = alone[i // len(tops)], tops[i % len(tops)]
        num = len(completion.tokens)
        assert num == 48 - 2 * top and completion.tokens == whole.tokens[:num]
        assert completion.logprobs == pytest.approx(whole.logprobs[:num], abs=1e-4)
        assert all(len(likely) == top for likely in completion.top_logprobs)


async def test_scores_equal_the_embedded_engine_s(
    fleet: Fleet, engine: EmbeddedEngine, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    refs = [engine.base, *[await engine.load(adapter) for adapter in adapters]]
    for adapter in adapters:
        await fleet.load(adapter)
    long = (prompts[1] * 60)[:400]
    wanted = [
        request
        for ref in refs
        for request in (
            ScoreRequest(model=ref, tokens=prompts[0], start=len(prompts[0]), labels=(260, 7042)),
            ScoreRequest(model=ref, tokens=prompts[1], start=1, labels=(5,)),
            ScoreRequest(model=ref, tokens=prompts[2], start=2, top_logprobs=3),
            ScoreRequest(model=ref, tokens=long, start=399, labels=(11, 12)),
            ScoreRequest(model=ref, tokens=long[:140], start=132),
        )
    ]
    for ours, theirs in zip(await fleet.score(wanted), await engine.score(wanted), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
        assert ours.label_logprobs == pytest.approx(theirs.label_logprobs, abs=CLOSE)
        for mine, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
            assert [t for t, _ in mine] == [t for t, _ in other]


async def test_the_extension_and_plain_http_load_the_same_adapter(
    fleet: Fleet, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    config = FleetConfig(name="smollm2", urls=(fleet.pool.replicas[0].url,))
    async with open_fleet(config) as plain:
        assert plain.pool.replicas[0].route == "http"
        for adapter in adapters:
            ref = await fleet.load(adapter)
            # Another name for the same weights: the servers must read them again.
            copy = await plain.load(
                Adapter(name=f"{adapter.name}-http", base=adapter.base, factors=adapter.factors,
                        version=adapter.version)
            )  # fmt: skip
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            [[one]] = await fleet.sample(
                [SampleRequest(model=ref, prompt=prompts[0], params=params)]
            )
            [[two]] = await plain.sample(
                [SampleRequest(model=copy, prompt=prompts[0], params=params)]
            )
            assert one.tokens == two.tokens
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


async def test_members_made_from_seeds_say_what_they_say_as_peft_folders(
    fleet: Fleet, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    """More members than a server has slots, all asked together."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    population = StepPopulation.around(adapters[0], like=adapters[0], rank=1)
    members = [
        population.member(f"member{i}", seed=10**12 + i // 2, amount=0.02 * (-1) ** i)
        for i in range(10)
    ]
    refs = [await fleet.load(member) for member in members]
    asked = [SampleRequest(model=r, prompt=p, params=params) for r in refs for p in prompts]
    drawn = await fleet.sample(asked)
    assert all(isinstance(m.factors, PerturbedFactors) and not m.factors.is_made for m in members)
    config = FleetConfig(name="smollm2", urls=(fleet.pool.replicas[0].url,))
    async with open_fleet(config) as plain:
        for i, member in enumerate(members):
            copy = await plain.load(replace(member, name=f"peft{i}", factors=dict(member.factors)))
            again = [SampleRequest(model=copy, prompt=p, params=params) for p in prompts]
            for [one], [two] in zip(drawn[i * 4 : i * 4 + 4], await plain.sample(again),
                                    strict=True):  # fmt: skip
                assert one.tokens == two.tokens
                assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
            await plain.unload(copy)
    assert len({completion.logprobs for [completion] in drawn}) == len(drawn)
    for ref in refs:
        await fleet.unload(ref)


async def test_label_scores_read_the_prefix_cache(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    long = (prompts[3] * 200)[:1000]
    for turn in range(3):
        await fleet.score(
            [ScoreRequest(model=fleet.base, tokens=(*long, 20 + turn), start=1001, labels=(5, 6))]
        )
    hits = [m.prefix_hits for r in fleet.pool.replicas if (m := await read_metrics(r.client))]
    assert max(hits) >= 2 * 896, "all whole blocks of the prefix but the last, twice"


async def test_seeds_make_draws_repeatable_and_different(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    def draw(seed: int, n: int) -> SampleRequest:
        params = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=seed, n=n)
        return SampleRequest(model=fleet.base, prompt=prompts[1], params=params)

    one, again, other = await fleet.sample([draw(1, 4), draw(1, 4), draw(2, 4)])
    assert [c.tokens for c in one] == [c.tokens for c in again]
    assert len({c.tokens for c in (*one, *other)}) > 4


async def test_more_prompts_than_a_step_takes_are_drawn_with_their_seeds(fleet: Fleet) -> None:
    requests = [
        SampleRequest(
            model=fleet.base,
            prompt=tuple(range(100 + place, 180 + place)),
            params=SamplingParams(max_tokens=4, seed=place),
        )
        for place in range(160)
    ]
    answers = await fleet.sample(requests)
    assert [len(own) for own in answers] == [1] * len(requests)


async def test_what_does_not_fit_is_refused_and_unloading_forgets(
    fleet: Fleet, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    with pytest.raises(AdapterError, match="rank 17, the servers take at most 16"):
        await fleet.load(_adapter("tall", seed=1, rank=17, targets=("q_proj",)))
    head = LoraFactors(a=torch.zeros(2, 576), b=torch.zeros(4915, 2), scale=1.0)
    with pytest.raises(AdapterError, match="lm_head maps 576 to 4915; this model's maps 576 to"):
        await fleet.load(make_adapter("head", base="smollm2", factors={"lm_head": head}))
    await _refuse_a_broken_buffer(fleet, prompts[0])
    ref = await fleet.load(_adapter("gone", seed=9, rank=2, targets=("v_proj",)))
    await fleet.sample([SampleRequest(model=ref, prompt=prompts[0], params=GREEDY)])
    await fleet.unload(ref)
    for replica in fleet.pool.replicas:
        models = await replica.client.get("/v1/models")
        assert fleet.wire_name(ref) not in [model["id"] for model in models["data"]]


async def _refuse_a_broken_buffer(fleet: Fleet, prompt: tuple[int, ...]) -> None:
    """Written for another version of the workers: its request is refused, the server lives on."""
    replica = fleet.pool.replicas[0]
    adapter = _adapter("odd", seed=8, rank=2, targets=("v_proj",))
    ref = ModelRef(name=adapter.name, version=adapter.version)
    folder = replica.staging.buffer_folder(ref, adapter, dtype="float32")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))
    body = encode_tokens(fleet.wire_name(ref), Fields(), [prompt], path=str(folder))
    for _ in range(2):
        with pytest.raises(ServerRefusal, match="buffer format 0"):
            await replica.client.generate(body)
    await fleet.sample([SampleRequest(model=fleet.base, prompt=prompt, params=GREEDY)] * 2)
    assert replica.load.is_open


async def test_verifying_a_real_server(fleet: Fleet) -> None:
    checks = {check.name: check for check in await verify(fleet.pool.replicas[0].url)}
    assert all(check.is_fine is not False for check in checks.values()), checks
    for name in ("completion", "log-probs", "label log-probs", "adapters", "prefix cache"):
        assert checks[name].is_fine, checks[name]
    urls = {replica.url for replica in fleet.pool.replicas}
    [one, two] = [server for server in await status() if server.url in urls]
    assert one.is_up and two.is_up and one.version and one.hit_rate is not None


async def test_a_killed_server_loses_no_request_and_comes_back(
    fleet: Fleet, adapters: list[Adapter], prompts: list[tuple[int, ...]]
) -> None:
    refs = [fleet.base, await fleet.load(adapters[0])]
    wanted = [
        SampleRequest(
            model=refs[i % 2],
            prompt=(*prompts[i % 4], 30 + i % 17),
            params=SamplingParams(max_tokens=4, temperature=1.0, seed=i, ignore_eos=True),
        )
        for i in range(200)
    ]
    victim = fleet.pool.replicas[0]
    assert victim.local is not None
    process_id = victim.local.pid

    async def kill() -> None:
        while victim.load.num_sequences < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(process_id, signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(fleet.sample(wanted))
        group.create_task(kill())
    answers = call.result()
    assert len(answers) == 200 and all(len(answer) == 1 for answer in answers)
    assert all(len(c.tokens) == 4 and c.model == r.model
               for r, [c] in zip(wanted, answers, strict=True))  # fmt: skip
    assert fleet.pool.num_resent > 0
    async with asyncio.timeout(600):
        while not victim.load.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert victim.local.num_restarts == 1
    again = await fleet.sample(wanted[:40])
    assert [c.tokens for [c] in again] == [c.tokens for [c] in answers[:40]]
    assert victim.load.has_measured


async def test_genome_finds_the_same_winner_as_embedded(fleet: Fleet, tmp_path: Path) -> None:
    """`rookery genome run` on these servers and in this process: the same report, in float32."""
    for seed in range(3):
        founder = _adapter(f"f{seed}", seed=40 + seed, rank=4, targets=("q_proj", "v_proj"))
        write_adapter(founder, tmp_path / "founders" / founder.name)
    urls = ", ".join(replica.url for replica in fleet.pool.replicas)
    engines = {
        "embedded": "{type: embedded, model: smollm2, dtype: float32, max_rank: 16}",
        "fleet": f"{{type: fleet, name: smollm2, urls: [{urls}], max_loras: 4, max_lora_rank: 16}}",
    }
    found = {}
    for name, engine in engines.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(GENOME.format(engine=engine))
        words = ["genome", "run", str(path), "--name", name, "--runs-dir", str(tmp_path / "runs")]
        code = await asyncio.to_thread(
            subprocess.call, [sys.executable, "-m", "rookery", *words], stdout=sys.stderr
        )
        assert code == 0
        folder = tmp_path / "runs" / name
        report = json.loads((folder / "report.json").read_text())
        rows = [(row["name"], row["mean"]) for row in report["rows"]]
        found[name] = report["winner_id"], rows, read_adapter(folder / "winner").version
    assert found["fleet"] == found["embedded"]


async def test_new_base_weights_arrive_or_are_reported_not_to(
    fleet: Fleet, prompts: list[tuple[int, ...]]
) -> None:
    """vLLM on the CPU keeps the old output layer of tied models: the canary must say so. The last
    test of these servers: one that is started again has its first weights, and stays out."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2").path)
    first = fleet.base
    assert await update_weights(fleet, model) < CLOSE
    assert fleet.base.version.startswith("smollm2+")
    with pytest.raises(FleetError, match="base@smollm2 is not loaded"):
        await fleet.sample([SampleRequest(model=first, prompt=prompts[0], params=GREEDY)])
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.05)
    with pytest.raises(FleetError, match=r"no server takes requests.*computes with others"):
        await update_weights(fleet, model)
    assert not any(replica.load.is_open for replica in fleet.pool.replicas)
    with torch.no_grad():
        model.model.embed_tokens.weight.div_(1.05)
    assert await update_weights(fleet, model) < CLOSE
    request = SampleRequest(model=fleet.base, prompt=prompts[0], params=GREEDY)
    [[before]] = await fleet.sample([request])
    victim = fleet.pool.replicas[0]
    assert victim.local is not None
    os.kill(victim.local.pid, signal.SIGKILL)
    async with asyncio.timeout(600):
        while not victim.excluded:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert not victim.load.is_open
    assert (await fleet.sample([request] * 4))[3][0].tokens == before.tokens
