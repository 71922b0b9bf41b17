"""One model under all its names, for the embedded engine and the fleet alike."""

from pathlib import Path

import pytest
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, serve
from tiny import tiny_adapter, write_tiny_model

from rookery.errors import AdapterError
from rookery.fleet import FleetConfig, open_fleet
from rookery.model_names import canonical_model, is_named, loadable_model, model_names
from rookery.slots import load_model

SAME = (
    "smollm2",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "/home/me/.cache/rookery/models/SmolLM2-135M-Instruct/",
    "/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/12fd25f7",
)


@pytest.mark.parametrize("given", SAME)
def test_every_name_of_a_model_stands_for_the_others(given: str) -> None:
    names = model_names(given, "")
    assert len(names) == 1 and all(is_named(name, names) for name in SAME)
    assert not is_named("HuggingFaceTB/SmolLM2-360M-Instruct", names)


@pytest.mark.parametrize(
    ("names", "canonical"),
    [
        (
            [
                "smollm2",
                "SmolLM2",
                "SmolLM2-135M-Instruct",
                "HuggingFaceTB/SmolLM2-135M-Instruct",
                "/home/me/.cache/rookery/models/SmolLM2-135M-Instruct/",
                "models/smollm2-135m-instruct",
                "/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/12fd25f77366fa6b",
                "models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/main/",
            ],
            "smollm2-135m-instruct",
        ),
        (["gpt2", "openai-community/gpt2", "/hub/models--gpt2/snapshots/607a30d7"], "gpt2"),
        (["", "/"], ""),
    ],
)
def test_all_names_of_a_model_have_one_canonical_name(names: list[str], canonical: str) -> None:
    assert {canonical_model(name) for name in names} == {canonical}


def test_different_models_differ() -> None:
    names = ["smollm2", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "/models/mine", "smollm2-1.7b"]
    assert len({canonical_model(name) for name in names}) == len(names)


def test_only_names_of_our_own_are_translated_for_others() -> None:
    assert loadable_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name in ("Qwen/Qwen3-8B", "/models/smollm2", ""):
        assert loadable_model(name) == name


async def test_a_fleet_given_a_folder_takes_adapters_made_for_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "SmolLM2-135M-Instruct")
    link = tmp_path / "served"
    link.symlink_to(folder)
    for root in (folder, link):
        stub = Stub(root=str(root))
        async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            for made_for in SAME:
                await fleet.load(make_small("a", base=made_for))
            with pytest.raises(AdapterError, match="made for 'llama'"):
                await fleet.load(make_small("b", base="llama"))


def test_so_does_the_embedded_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "SmolLM2-135M-Instruct")
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        bank = load_model(path).bank
        for made_for in SAME:
            bank.check(tiny_adapter("a", base=made_for), max_rank=8)
        with pytest.raises(AdapterError, match="made for 'llama'"):
            bank.check(tiny_adapter("b", base="llama"), max_rank=8)
