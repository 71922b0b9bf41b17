"""Games of several turns in the grpo loop: they are learned, counted, and go on after a cut."""

from pathlib import Path

from loops.test_grpo_resume import make_run
from loops.training import Inputs, run_training

from rookery.loops.grpo.batch import decode_batch
from rookery.slots import SlottedModel


async def test_a_guessing_game_is_learned(
    grpo_inputs: Inputs, plain_model: SlottedModel, secret_numbers: Path, tmp_path: Path
) -> None:
    changes = grpo_inputs.game(
        secret_numbers,
        steps=10, groups_per_step=6, group_size=8, save_every=5, learning_rate=2e-2,
        drawing={"max_tokens": 1, "temperature": 0.25},
        lora={"rank": 4, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
    )  # fmt: skip
    with make_run(tmp_path, "x") as run:
        result = await run_training(run, grpo_inputs, model=plain_model, **changes)
        metrics = [event.payload["metrics"] for event in run.events("step")]
    early = sum(step["reward/mean"] for step in metrics[:2]) / 2
    late = sum(step["reward/mean"] for step in metrics[-2:]) / 2
    assert late > early + 0.1
    assert all(step["grpo/logprob_gap"] < 1e-5 for step in metrics)
    assert all("game/is_right" in step for step in metrics)
    trained = result.trained
    assert trained is not None and trained.gain is not None and trained.gain.mean is not None
    assert trained.gain.mean > 0.1
    assert "user: w" in result.steps[0].examples[0].text


async def test_a_step_has_the_turns_of_its_games(
    grpo_inputs: Inputs, plain_model: SlottedModel, secret_numbers: Path, tmp_path: Path
) -> None:
    changes = grpo_inputs.game(secret_numbers, steps=1, keep_rollouts=True)
    with make_run(tmp_path, "x") as run:
        await run_training(run, grpo_inputs, model=plain_model, **changes)
        [event] = run.events("batch")
        batch = decode_batch(run.blobs.read_bytes(str(event.payload["digest"])))
    for group in batch.groups:
        for rollout in group.rollouts:
            [sequence] = rollout.sequences
            first, second = sequence.drawn
            assert second == first + 2  # the hint of the game is between them
            assert sequence.tokens[first + 1] in (4, 5)
            assert len(sequence.tokens) == second + 1
