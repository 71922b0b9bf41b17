"""An environment of real atroposlib: answers with even tokens are worth more.

Runs in the interpreter that has atroposlib: ATROPOS_MODEL, ATROPOS_ENGINE and ATROPOS_GATEWAY say
what it plays with.
"""

import os
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

MODEL = os.environ["ATROPOS_MODEL"]


class EvenTokens(BaseEnv):  # type: ignore[misc]
    """Four answers of six tokens to each prompt."""

    name = "even"
    number = 0

    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]:
        config = BaseEnvConfig(
            tokenizer_name=MODEL, group_size=4, use_wandb=False, max_token_length=64,
            rollout_server_url=os.environ["ATROPOS_GATEWAY"], total_steps=1000,
            steps_per_eval=10**6, wandb_name="even", max_num_workers=4,
        )  # fmt: skip
        server = APIServerConfig(
            model_name=MODEL, base_url=os.environ["ATROPOS_ENGINE"], api_key="x",
            server_type="vllm", num_requests_for_eval=1,
        )  # fmt: skip
        return config, [server]

    async def setup(self) -> None:
        """Nothing to load."""

    async def evaluate(self, *args: Any, **named: Any) -> None:
        """Nothing to measure."""

    async def get_next_item(self) -> str:
        self.number += 1
        return f"w{5 + self.number % 40} w6"

    async def collect_trajectories(self, item: str) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item, n=4, max_tokens=6, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        group: dict[str, Any] = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [
                sum(m != -100 and m % 2 == 0 for m in node.masked_tokens) / 6 for node in nodes
            ],
        }
        return group, []


if __name__ == "__main__":
    EvenTokens.cli()
