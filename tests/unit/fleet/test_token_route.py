"""The route inside vLLM's API processes, against stand-ins of what it meets there."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rookery.fleet.http.wire import (
    Fields,
    encode_tokens,
    read_choices,
    read_completion,
    read_completions,
    read_reading,
)
from rookery.fleet.vllm_plugin.slots import TokenIndex, install_token_index
from rookery.fleet.vllm_plugin.token_route import ADAPTER_REFUSED, FORMAT, PATH, TokenRoute
from rookery.types import ModelRef, SampleRequest

BASE = ModelRef(name="base", version="tiny")
EOS = 2


class VLLMClientError(Exception):
    """As in newer vLLM: no ValueError."""


class VLLMValidationError(VLLMClientError):
    pass


class EngineGenerateError(Exception):
    pass


ERRORS: dict[int, Exception] = {
    90: VLLMValidationError("90 is out of vocabulary"),
    91: TypeError("91 is no text"),
    92: RuntimeError("the engine is dead"),
    93: EngineGenerateError("of the engine's own making"),
}


class Flat:
    """vLLM's flat log-probabilities: per position the drawn token, then the likeliest."""

    def __init__(self, rows: list[list[tuple[int, float]]]) -> None:
        self.token_ids = [token for row in rows for token, _ in row]
        self.logprobs = [value for row in rows for _, value in row]
        ends = [sum(map(len, rows[: i + 1])) for i in range(len(rows))]
        self.start_indices, self.end_indices = [0, *ends[:-1]], ends

    def __len__(self) -> int:
        return len(self.start_indices)


class Params:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update({"n": 1, **given})


class Tokenizer:
    """Words of one letter; 200 and above are the two halves of a letter."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        text, half = "", False
        for token in tokens:
            if token >= 200:
                text, half = text + ("é" if half else ""), not half
            elif token != EOS:
                text += chr(97 + token % 26)
        return text + ("\ufffd" if half else "")


class Engine:
    """Repeats the prompt's last token; ends with the end token where it is allowed to."""

    def __init__(self) -> None:
        self.params: list[Any] = []
        self.loras: list[Any] = []
        self.num_stopped = 0
        self.hold: asyncio.Event | None = None
        self.loading: asyncio.Event | None = None
        self.is_asked = asyncio.Event()
        self.num_loads = 0
        self.called: list[str] = []
        self.versions: list[Any] | None = None
        """Which weights drew which tokens, in vLLM that tells."""

    async def collective_rpc(self, method: str) -> None:
        self.called.append(method)

    async def add_lora(self, lora: Any) -> None:
        assert self.called, "the workers must know buffers before they meet one"
        self.num_loads += 1
        if self.loading is not None:
            await self.loading.wait()
        if lora.lora_path == "broken":
            raise RuntimeError("rank 99")

    async def generate(
        self, prompt: dict[str, Any], params: Any, _name: str, *, lora_request: Any
    ) -> AsyncIterator[Any]:
        self.params.append(params)
        self.loras.append(lora_request)
        self.is_asked.set()
        tokens = prompt["prompt_token_ids"]
        if tokens[0] == 99:
            raise ValueError("99 is no token")
        if tokens[0] in ERRORS:
            raise ERRORS[tokens[0]]
        if tokens[0] > 2**63:
            raise EngineGenerateError from OverflowError("too large")
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.num_stopped += 1
                raise
        ends = not getattr(params, "ignore_eos", False)
        drawn = [tokens[-1]] * (params.max_tokens - ends) + [EOS] * ends
        rows = [[(t, -0.5), (t, -0.5), (7, float("-inf"))] for t in drawn]
        if not params.logprobs:
            rows = [row[:1] for row in rows]
        outputs = [
            SimpleNamespace(index=i, token_ids=tuple(drawn), text="watched", logprobs=Flat(rows),
                            finish_reason="stop" if ends else "length",
                            weight_versions=self.versions)
            for i in range(params.n)
        ]  # fmt: skip
        yield SimpleNamespace(
            prompt_token_ids=tokens,
            outputs=outputs,
            prompt_logprobs=Flat([[], *[[(t, -1.0)] for t in tokens[1:]]]),
        )


class Models:
    def __init__(self) -> None:
        numbers = count(1)
        self.lora_requests: dict[str, Any] = {}
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.lora_id_counter = SimpleNamespace(inc=lambda _by: next(numbers))
        self.renderer = SimpleNamespace(tokenizer=Tokenizer())


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    found: dict[str, dict[str, object]] = {
        "vllm": {"SamplingParams": Params},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": SimpleNamespace},
    }
    for name, content in found.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


class Server:
    def __init__(self) -> None:
        self.engine, self.models = Engine(), Models()
        self.passed: list[str] = []
        self.is_gone = asyncio.Event()
        state = SimpleNamespace(engine_client=self.engine, openai_serving_models=self.models)
        self._app = SimpleNamespace(state=state)
        self._route = TokenRoute(self._pass)

    async def _pass(self, scope: Any, _receive: object, _send: object) -> None:
        self.passed.append(scope["path"])

    async def ask(
        self, body: bytes = b"", *, method: str = "POST", path: str = PATH
    ) -> tuple[int, Any]:
        parts = [body[:10], body[10:]]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await self.is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method, "app": self._app}
        await self._route(scope, receive, send)
        if not sent:
            return 0, None
        assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % len(sent[1]["body"])
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    ("told", "version", "spans"),
    [
        (None, "tiny", []),
        ([("default", 0, 3)], "tiny", []),
        ([("step-2", 0, 3)], "step-2", []),
        ([("step-1", 0, 2), ("step-2", 2, 3)], "step-2", [("step-1", 0, 2), ("step-2", 2, 3)]),
    ],
)
async def test_completions_carry_the_versions_that_drew_them(
    told: list[tuple[str, int, int]] | None, version: str, spans: list[tuple[str, int, int]]
) -> None:
    server = Server()
    server.engine.versions = told and [
        SimpleNamespace(version=name, start=start, end=end) for name, start, end in told
    ]
    fields = Fields(max_tokens=3, temperature=1.0, seed=5)
    _, answer = await server.ask(encode_tokens("tiny", fields, [(1, 3)], path=None))
    [choices] = read_choices(answer, num_prompts=1, n=1)
    request = SampleRequest(model=BASE, prompt=(1, 3))
    [untold] = read_completions(request, choices)
    assert untold.model == BASE and not untold.version_spans
    [completion] = read_completions(request, choices, has_versions=True)
    assert completion.model == ModelRef(name="base", version=version)
    assert [(s.version, s.start, s.stop) for s in completion.version_spans] == spans


async def test_answers_are_read_as_those_of_completions() -> None:
    server = Server()
    fields = Fields(max_tokens=3, top=2, n=2, temperature=1.0, seed=5)
    body = encode_tokens("tiny", fields, [(1, 3), (4,)], path=None)
    status, answer = await server.ask(body)
    assert status == 200
    for token, choices in zip((3, 4), read_choices(answer, num_prompts=2, n=2), strict=True):
        for choice in choices:
            completion = read_completion(choice, model=BASE, num_top=2)
            assert completion.tokens == (token, token, EOS)
            assert completion.logprobs == (-0.5,) * 3
            assert completion.finish_reason == "stop"
            assert completion.text == chr(97 + token) * 2, "without the token that stops"
            assert completion.top_logprobs[0] == ((token, -0.5), (7, float("-inf")))
    [params, _] = server.engine.params
    assert (params.seed, params.temperature, params.detokenize) == (5, 1.0, False)


async def test_scores_and_prompts_are_read() -> None:
    body = encode_tokens("tiny", Fields(ids=(7,), prompt_top=0), [(1, 3)], path=None)
    _, answer = await Server().ask(body)
    [[choice]] = read_choices(answer, num_prompts=1, n=1)
    reading = read_reading(choice)
    assert reading.after == {EOS: -0.5, 7: float("-inf")}
    assert reading.prompt == (None, {3: -1.0})


@pytest.mark.parametrize(
    ("prompt", "text"), [((200,), "é"), ((1, 200, 200), ""), ((1, 2, 3, 4, 5, 6, 3), "d")]
)
async def test_text_continues_the_prompt_s_and_ends_with_whole_letters(
    prompt: tuple[int, ...], text: str
) -> None:
    fields = Fields(max_tokens=1, ignore_eos=True)
    _, answer = await Server().ask(encode_tokens("tiny", fields, [prompt], path=None))
    assert answer["choices"][0]["text"] == text


async def test_stop_strings_leave_the_text_to_vllm() -> None:
    server = Server()
    fields = Fields(max_tokens=2, stop=("x",))
    _, answer = await server.ask(encode_tokens("tiny", fields, [(1,)], path=None))
    assert server.engine.params[0].detokenize and answer["choices"][0]["text"] == "watched"


async def test_an_adapter_is_loaded_with_its_first_request_and_once() -> None:
    server = Server()
    server.engine.loading = asyncio.Event()
    body = encode_tokens("poet@1", Fields(), [(1,)], path="/buffer")
    asked = [asyncio.create_task(server.ask(body)) for _ in range(2)]
    await server.engine.is_asked.wait()  # before the adapter is there
    assert not server.models.lora_requests
    server.engine.loading.set()
    assert [(await one)[0] for one in asked] == [200, 200]
    assert (await server.ask(body))[0] == 200
    assert server.engine.num_loads == 1 and server.engine.called == ["rookery_attach"]
    assert {lora.lora_path for lora in server.engine.loras} == {"/buffer"}
    assert len({lora.lora_int_id for lora in server.engine.loras}) == 1


async def test_a_broken_adapter_is_refused_and_its_request_stopped() -> None:
    server = Server()
    server.engine.hold = server.engine.loading = asyncio.Event()
    body = encode_tokens("bad@1", Fields(), [(1,)], path="broken")
    asked = asyncio.create_task(server.ask(body))
    await server.engine.is_asked.wait()
    server.engine.hold = None
    server.engine.loading.set()
    status, answer = await asked
    assert status == ADAPTER_REFUSED and answer["error"]["message"].endswith("loaded: rank 99")
    assert not server.models.lora_requests


async def test_one_bad_prompt_stops_the_others() -> None:
    server = Server()
    server.engine.hold = asyncio.Event()
    status, answer = await server.ask(encode_tokens("tiny", Fields(), [(1,), (99,)], path=None))
    assert status == 400 and answer["error"]["message"] == "99 is no token"
    await asyncio.sleep(0)
    assert server.engine.num_stopped == 1


async def test_a_client_that_goes_away_stops_its_work() -> None:
    server = Server()
    server.engine.hold = asyncio.Event()
    server.is_gone.set()
    assert await server.ask(encode_tokens("tiny", Fields(), [(1,)], path=None)) == (0, None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert server.engine.num_stopped == 1


async def test_it_says_what_it_is_and_passes_the_rest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    assert await server.ask(method="GET") == (200, {"format": FORMAT})
    await server.ask(path="/v1/completions")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    keyed = Server()
    await keyed.ask(method="GET")
    assert server.passed == ["/v1/completions"] and keyed.passed == [PATH]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "a request is an object"),
        (b"null", "a request is an object"),
        (b"{", "Expecting"),
        (b'{"model": "tiny", "path": null, "prompts": [[1]]}', "a request is an object"),
        (b'{"model": "tiny", "prompts": [[1]], "params": {}}', "KeyError: 'path'"),
        (b'{"model": "tiny", "path": null, "prompts": 3, "params": {}}', "TypeError"),
        (encode_tokens("tiny", Fields(), [(90,)], path=None), "90 is out of vocabulary"),
        (encode_tokens("tiny", Fields(), [(91,)], path=None), "TypeError: 91 is no text"),
        (encode_tokens("tiny", Fields(), [(2**70,)], path=None), "OverflowError: too large"),
    ],
)
async def test_bad_requests_are_answered_here(body: bytes, said: str) -> None:
    status, answer = await Server().ask(body)
    assert status == 400 and answer["error"]["message"].startswith(said)


@pytest.mark.parametrize("token", [92, 93])
async def test_errors_of_the_server_are_left_to_vllm(token: int) -> None:
    with pytest.raises(type(ERRORS[token]), match="engine"):
        await Server().ask(encode_tokens("tiny", Fields(), [(token,)], path=None))


# The tables of tokens' adapters, against a stand-in of vLLM's that is written the same way.


SLOTS, TOKENS = 3, 8
CPU = torch.device("cpu")


class Meta:
    """A part of the tables with tensors of its own, one of which stays in ordinary memory."""

    def __init__(self) -> None:
        self.sorted = torch.zeros(TOKENS, dtype=torch.int32)
        self.counts = torch.zeros(SLOTS + 1, dtype=torch.int32)


class Table:
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._indices = torch.zeros(2, TOKENS, dtype=torch.long)
        self.meta = Meta()
        self.lengths: list[int | None] = [None]
        self.is_prefill = False
        self.config = SimpleNamespace(max_loras=SLOTS)
        self.fault = 0

    def update_metadata(
        self, mapping: Any, slots: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        found = [slots.index(i) if i else -1 for i in mapping.index_mapping]
        rows = torch.tensor([found, [vocab_size * f for f in found]], device=self.device)
        self._indices[:, : len(found)].copy_(rows)
        self.meta.counts.zero_()
        order = torch.sort(rows[0], stable=True).indices
        self.meta.sorted[: len(found)].copy_(order)
        values, counts = torch.unique(rows[0], return_counts=True)
        self.meta.counts[: len(values)].copy_(counts + self.fault)
        self.lengths[:] = [len(found)]
        self.is_prefill = mapping.is_prefill
        assert max_loras == SLOTS + 1


def manager(*tables: Table) -> SimpleNamespace:
    return SimpleNamespace(
        lora_slots=SLOTS,
        vocab_size=100,
        punica_wrapper_mapping=dict(enumerate(tables)),
        _last_mapping="a batch",
    )


def mapping(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(index_mapping=ids, prompt_mapping=ids[:1], is_prefill=True)


def test_the_tables_hold_what_vllm_writes_itself() -> None:
    table, stock = Table(), Table()
    index = TokenIndex(table, CPU)
    places = [tensor.data_ptr() for tensor in (table._indices, table.meta.sorted)]
    for ids in ((7, 0, 7, 9), (9, 9), (0, 0, 0)):
        index.update(mapping(*ids), [9, 7, None], SLOTS + 1, 100)
        stock.update_metadata(mapping(*ids), [9, 7, None], SLOTS + 1, 100)
        assert torch.equal(table._indices, stock._indices)
        assert torch.equal(table.meta.sorted, stock.meta.sorted)
        assert torch.equal(table.meta.counts, stock.meta.counts)
        assert table.lengths == stock.lengths and table.is_prefill
    # Captured graphs read the tensors where they were.
    assert places == [tensor.data_ptr() for tensor in (table._indices, table.meta.sorted)]


def test_a_twin_is_used_only_when_it_gives_the_same_numbers() -> None:
    table = Table()
    assert TokenIndex(table, CPU).agrees(manager(table))
    table.fault = 1
    index = TokenIndex(table, CPU)
    table.fault = 0
    assert not index.agrees(manager(table))


def test_only_devices_with_memory_of_their_own_have_a_twin() -> None:
    table = Table()
    inner = manager(table)
    assert not install_token_index(inner, CPU)
    assert "update_metadata" not in vars(table) and inner._last_mapping == "a batch"


def test_what_another_version_keeps_there_stays(caplog: pytest.LogCaptureFixture) -> None:
    odd = SimpleNamespace(update_metadata=None)
    inner = manager(odd)  # type: ignore[arg-type]
    assert not install_token_index(inner, torch.device("cuda:0"))
    assert odd.update_metadata is None and inner._last_mapping is None
    assert "stay on the device" in caplog.text
