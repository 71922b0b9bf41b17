"""OpenEvolve's config files: read as it reads them, and nothing in them ignored silently."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, SecretStr

from rookery.compat.openevolve import Flags, LoadedConfig, read_config
from rookery.compat.openevolve.config_files import NOT_BUILT
from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, ModelConfig

OpenEvolve = Callable[[str, Any], Any]

THEIR_CONFIGS = """
import os
from dataclasses import asdict
from openevolve.config import load_config
def one(path):
    os.environ.pop("OPENAI_API_BASE", None)
    try:
        config = asdict(load_config(path))
    except Exception as error:
        return repr(error)
    config["database"].pop("novelty_llm")
    return config
answer([one(path) for path in DATA])
"""

DOCUMENTS: dict[str, Any] = {
    "empty": {"max_iterations": 5},
    "primary": {"llm": {"primary_model": "a", "secondary_model": "b"}},
    "weights": {
        "llm": {
            "primary_model": "a",
            "primary_model_weight": 0.5,
            "secondary_model": "b",
            "secondary_model_weight": 0.0,
        }
    },
    "models": {
        "llm": {
            "api_base": "http://127.0.0.1:1/v1",
            "temperature": 1,
            "top_p": None,
            "max_tokens": 7,
            "models": [{"name": "a", "temperature": 0.1, "weight": 3}, {"name": "b"}],
            "evaluator_models": [{"name": "c", "api_base": "http://127.0.0.1:2/v1"}],
            "reasoning_effort": "low",
        }
    },
    "both": {"llm": {"models": [{"name": "a"}], "primary_model": "b"}},
    "sections": {
        "random_seed": 7,
        "prompt": {"template_variations": {"tone": ["Be brief.", "Be kind."]}},
        "database": {"feature_dimensions": ["speed"], "feature_bins": {"speed": 4}},
        "evaluator": {"cascade_thresholds": [1, 2], "timeout": 10},
        "evolution_trace": {"enabled": True, "format": "json"},
    },
}
ASKED = ("name", "weight", "api_base", "temperature", "top_p", "max_tokens", "timeout", "retries")


def _write(path: Path, document: object) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


def _read(path: Path, **environment: str) -> LoadedConfig:
    return read_config(path, environment=environment)


def _plain(value: Any) -> Any:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case tuple() | list():
            return [_plain(inner) for inner in value]
        case Path():
            return str(value)
        case _:
            return value


def _assert_same(config: EvolveConfig, theirs: dict[str, Any]) -> None:
    ours = _plain(config.model_dump())
    for key, value in theirs.items():
        if key == "llm":
            continue
        if isinstance(value, dict):
            assert {inner: ours[key][inner] for inner in value} == value, key
        else:
            assert ours[key] == value, key
    for mine, other in (
        (config.llm.ensemble, theirs["llm"]["models"]),
        (config.llm.judges, theirs["llm"]["evaluator_models"]),
    ):
        asked = [{key: getattr(model, key) for key in ASKED} for model in mine]
        assert asked == [{key: model[key] for key in ASKED} for model in other]


def test_files_are_read_as_openevolve_reads_them(openevolve: OpenEvolve, tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"{name}.yaml", document) for name, document in DOCUMENTS.items()]
    theirs = openevolve(THEIR_CONFIGS, [str(path) for path in paths])
    for path, other in zip(paths, theirs, strict=True):
        _assert_same(_read(path).config, other)


def _keys(model: type[EvolveConfig]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield name, ""
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, key) for key in kind.model_fields)


def test_every_key_of_openevolve_is_a_key_of_ours(openevolve: OpenEvolve) -> None:
    theirs = openevolve(
        """
from dataclasses import asdict
from openevolve.config import Config, LLMModelConfig
answer([asdict(Config()), list(asdict(LLMModelConfig()))])
""",
        None,
    )
    whole, model_keys = theirs
    ours_keys = set(_keys(EvolveConfig))
    keys = {(section, "") for section in whole}
    for section, value in whole.items():
        keys |= {(section, key) for key in value} if isinstance(value, dict) else set()
    private = {("llm", "_manual_queue_dir")}
    assert keys - ours_keys == private
    own = {key for key in ours_keys - keys if key[0] != "rookery"}
    assert own == {("database", "strategy")}
    assert set(model_keys) - set(ModelConfig.model_fields) == {"_manual_queue_dir"}


def test_the_examples_of_a_checkout_are_read_as_there(openevolve: OpenEvolve) -> None:
    folder = os.environ.get("OPENEVOLVE_EXAMPLES", "")
    if not folder:
        pytest.skip("OPENEVOLVE_EXAMPLES names no checkout of OpenEvolve")
    paths = sorted(Path(folder).rglob("*config*.yaml"))
    theirs = openevolve(THEIR_CONFIGS, [str(path) for path in paths])
    num_same = 0
    for path, other in zip(paths, theirs, strict=True):
        if isinstance(other, str):  # a variable that is not set, or null for a model's name
            continue
        try:
            config = _read(path).config
        except ConfigError as error:
            assert "llm.provider" in str(error), path
            continue
        _assert_same(config, other)
        num_same += 1
    assert num_same > 30


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"max_iterations": "100"}, r'max_iterations is "100"; it should be a valid integer'),
        ({"max_iterations": True}, "max_iterations is true"),
        ({"llm": {"temperature": "hot"}}, 'llm.temperature is "hot"'),
        ({"llm": {"models": [{"name": 3}]}}, "llm.models.0.name is 3"),
        ({"llm": {"models": {"name": "a"}}}, "llm.models is .* should be a list"),
        ({"database": 5}, "database is 5; it should be a section"),
        ({"database": {"feature_bins": "4"}}, 'database.feature_bins is "4"'),
        ({"database": {"feature_bins": 10**9}}, "feature_bins is 1000000000; .* 1 to 1000 bins"),
        ({"database": {"feature_bins": {"complexity": 0}}}, "feature_bins is .* 1 to 1000 bins"),
        ({"database": {"exploration_ratio": 0.6}}, "exploitation_ratio is 0.7; .* at most 1"),
        ({"max_iterations": 0}, "max_iterations is 0; it should be greater than or equal to 1"),
        ({"evaluator": {"memory_limit_mb": 8}}, "evaluator.memory_limit_mb is 8; .* equal to 16"),
        ({"rookery": {"sandbox": {"memory_mb": 1}}}, "sandbox.memory_mb is 1; .* equal to 16"),
        (
            {"llm": {"models": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}},
            "llm.models names 'a' twice",
        ),
        (
            {"llm": {"primary_model": "a", "api_base": "gpu1:8000/v1"}},
            "api_base of the model 'a' is 'gpu1:8000/v1', .* write http://gpu1:8000/v1",
        ),
        ({"llm": {"primary_model": "a", "api_base": "not a url"}}, "write http://host:8000"),
        ({"database": {"embedding_api_base": "x:1"}}, "database.embedding_api_base is 'x:1'"),
        ({"diff_pattern": "(a"}, "diff_pattern: .* is not a regular expression"),
        ({"diff_pattern": "(a)b"}, "diff_pattern: .* has 1 groups; it needs two"),
        ({"evolution_trace": {"format": "xml"}}, "evolution_trace.format"),
        ({"rookery": {"in_fligth": 3}}, "rookery.in_fligth is not a key. Did you mean in_flight"),
        ({"rookery": {"executor": "dask"}}, "rookery.executor"),
        ({"llm": {"models": [{"weight": 1}]}}, "has no name"),
        ({"llm": {"primary_model": "a", "provider": "copilot_cli"}}, "llm.provider"),
        ({"llm": {"primary_model": "a", "manual_mode": True}}, "manual_mode"),
        (
            {"diff_based_evolution": False, "prompt": {"programs_as_changes_description": True}},
            "needs diff_based_evolution: true",
        ),
        (
            {"prompt": {"template_dir": "nowhere"}},
            "template_dir is nowhere, and there is no folder .*/nowhere nor .*/nowhere",
        ),
        ({"llm": {"primary_model": "a", "api_key": "${NO_SUCH}"}}, "NO_SUCH is not set"),
    ],
)
def test_bad_values_get_a_sentence(tmp_path: Path, document: object, words: str) -> None:
    path = _write(tmp_path / "config.yaml", document)
    with pytest.raises(ConfigError, match=words):
        _read(path)


def test_what_has_no_effect_is_named(tmp_path: Path) -> None:
    document = {
        "parallel_evaluations": 4,
        "databse": {},
        "llm": {"model": "x", "models": [{"name": "a", "max_ai_credits": 1.0, "typo": 1}]},
        "database": {"db_path": "here", "in_memory": True, "feature_binz": 3},
        "evaluator": {"cpu_limit": 1.0},
        "algotune": {"anything": 1},
    }
    warnings = _read(_write(tmp_path / "config.yaml", document)).warnings
    assert sorted(warning.partition(" ")[0] for warning in warnings) == [
        "algotune",
        "database.db_path",
        "database.feature_binz",
        "databse",
        "evaluator.cpu_limit",
        "llm.model",
        "llm.models.0.max_ai_credits",
        "llm.models.0.typo",
        "parallel_evaluations",
    ]
    text = "\n".join(warnings)
    assert "write evaluator.parallel_evaluations" in text
    assert "did you mean database.feature_bins?" in text
    assert "did you mean database?" in text


def test_every_unbuilt_key_warns_when_it_is_set(tmp_path: Path) -> None:
    defaults = EvolveConfig().model_dump()
    document: dict[str, Any] = {}
    for dotted in NOT_BUILT:
        *sections, name = dotted.split(".")
        here, default = document, defaults
        for section in sections:
            here, default = here.setdefault(section, {}), default[section]
        match default[name]:
            case bool() as value:
                here[name] = not value
            case int() | float() as value:
                here[name] = value + 1
            case _:
                here[name] = "other"
    document["max_tasks_per_child"] = 3
    document["llm"] |= {"allow_all_tools": True, "max_ai_credits": 1.0, "max_budget_usd": 1.0}
    document["evaluator"] = {"cpu_limit": 2.0}
    warnings = _read(_write(tmp_path / "config.yaml", document)).warnings
    assert {warning.partition(" ")[0] for warning in warnings} == set(NOT_BUILT)


def test_a_config_of_defaults_warns_of_nothing(tmp_path: Path) -> None:
    document = _plain(EvolveConfig().model_dump(exclude={"rookery"}))
    assert _read(_write(tmp_path / "config.yaml", document)).warnings == ()


def test_the_environment_is_below_the_file_and_flags_are_above_it(tmp_path: Path) -> None:
    environment = {"OPENAI_API_KEY": "env-key", "OPENAI_API_BASE": "http://env/v1"}
    bare = _write(tmp_path / "bare.yaml", {"llm": {"primary_model": "a"}})
    model = read_config(bare, environment=environment).config.llm.ensemble[0]
    assert model.api_key and model.api_key.get_secret_value() == "env-key"
    assert model.api_base == "http://env/v1"
    document = {
        "llm": {
            "models": [{"name": "x", "api_base": "http://own/v1", "api_key": "${OWN}"}],
            "api_base": "http://file/v1",
            "secondary_model": "s",
        }
    }
    full = _write(tmp_path / "full.yaml", document)
    environment |= {"OWN": "own-key"}
    models = read_config(full, environment=environment).config.llm.ensemble
    assert [m.api_base for m in models] == ["http://own/v1", "http://file/v1"]
    assert models[0].api_key and models[0].api_key.get_secret_value() == "own-key"
    flags = Flags(api_base="http://flag/v1", primary_model="p", iterations=3, log_level="DEBUG")
    config = read_config(full, environment=environment, flags=flags).config
    assert [(m.name, m.api_base) for m in config.llm.ensemble] == [
        ("p", "http://flag/v1"),
        ("s", "http://flag/v1"),
    ]
    assert (config.max_iterations, config.log_level) == (3, "DEBUG")
    alone = read_config(full, environment=environment, flags=Flags(api_base="http://flag/v1"))
    assert {m.api_base for m in alone.config.llm.ensemble} == {"http://flag/v1"}


def test_models_by_flags_are_those_of_openevolve(openevolve: OpenEvolve, tmp_path: Path) -> None:
    document = {"llm": {"models": [{"name": "m"}], "secondary_model": "s", "max_tokens": 9}}
    path = _write(tmp_path / "config.yaml", document)
    theirs = openevolve(
        """
from openevolve.config import load_config
config = load_config(DATA)
config.llm.primary_model = "p"
config.llm.rebuild_models()
answer([[m.name, m.weight, m.max_tokens] for m in config.llm.models])
""",
        str(path),
    )
    config = read_config(path, environment={}, flags=Flags(primary_model="p")).config
    assert [[m.name, m.weight, m.max_tokens] for m in config.llm.ensemble] == theirs


def test_an_api_base_by_flag_makes_another_provider_usable(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.yaml", {"llm": {"provider": "claude_code", "primary_model": "a"}})
    flags = Flags(api_base="http://127.0.0.1:1/v1")
    assert read_config(path, environment={}, flags=flags).config.llm.ensemble[0].provider is None


def test_variables_that_switch_things(tmp_path: Path) -> None:
    path = _write(tmp_path / "config.yaml", {})
    environment = {"ENABLE_ARTIFACTS": "False", "OPENAI_EMBEDDING_BASE_URL": "http://e/v1"}
    config = read_config(path, environment=environment).config
    assert not config.evaluator.enable_artifacts
    assert config.database.embedding_api_base == "http://e/v1"
    assert read_config(path, environment={"ENABLE_ARTIFACTS": "TRUE"}).config.evaluator == (
        EvolveConfig().evaluator
    )


def test_keys_of_models_are_not_written_with_the_config(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.yaml", {"llm": {"primary_model": "a", "api_key": "secret-1"}})
    config = _read(path, OPENAI_API_KEY="secret-2").config
    written = EvolveConfig.model_validate_json(config.model_dump_json())
    assert written.llm.api_key is None and written.llm.primary_model == "a"
    assert "secret" not in config.model_dump_json() + repr(config) + repr(config.llm.ensemble)


def test_dotted_flags_and_their_mistakes(tmp_path: Path) -> None:
    path = _write(tmp_path / "config.yaml", {"rookery": {"in_flight": 4}})
    flags = Flags(
        overrides=["--database.num-islands", "2", "--rookery.mode", "deterministic"],
        target_score=1.5,
    )
    config = read_config(path, environment={}, flags=flags).config
    assert config.database.num_islands == 2 and config.rookery.target_score == 1.5
    assert (config.rookery.mode, config.lag, config.workers) == ("deterministic", 4, 1)
    with pytest.raises(ConfigError, match=r"--database.num_island is not a key.*num_islands"):
        read_config(path, environment={}, flags=Flags(overrides=["--database.num_island", "2"]))


def test_a_target_over_a_wrong_section_gets_a_sentence(tmp_path: Path) -> None:
    path = _write(tmp_path / "config.yaml", {"rookery": 5})
    with pytest.raises(ConfigError, match="rookery is 5; it should be a section"):
        read_config(path, environment={}, flags=Flags(target_score=1.0))


def test_distributed_is_ray(tmp_path: Path) -> None:
    path = _write(tmp_path / "config.yaml", {"evaluator": {"distributed": True}})
    assert _read(path).config.executor == "ray"
    assert EvolveConfig().executor == "local"


def test_templates_are_beside_the_config_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "mine").mkdir(parents=True)
    monkeypatch.chdir(here)
    path = _write(there / "config.yaml", {"prompt": {"template_dir": "mine"}})
    assert _read(path).config.prompt.template_dir == (there / "mine").resolve()
    (there / "mine").rmdir()
    assert _read(path).config.prompt.template_dir == (here / "mine").resolve()
