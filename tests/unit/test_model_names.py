"""One model, several names."""

import pytest

from rookery.model_names import canonical_model, loadable_model


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
