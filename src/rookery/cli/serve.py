"""`rookery serve`: sampling and training over HTTP."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rookery.cli.terminal import check_flags, console, log_warnings
from rookery.config import load_config

__all__ = ["serve"]


def serve(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Serve sampling and training to clients of the tinker SDK, to OpenAI clients and plain HTTP.

    Any value of the config is a flag with a dotted name. Ctrl-C ends it; started again, it goes on
    with everything its clients had sent.

        rookery keys add ada
        rookery serve configs/serve.yaml
        rookery serve configs/serve.yaml --anonymous --port 8001

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it.
    """
    from rookery.compose.serve import ServeConfig
    from rookery.compose.serve import serve as run_service

    log_warnings()
    check_flags(overrides, fields=ServeConfig.model_fields, own=())
    loaded = load_config(ServeConfig, config, overrides=overrides)
    loaded = loaded.from_folder(config.parent)

    def ready(url: str) -> None:
        lines = [
            f"{url}   models: {', '.join(loaded.models)}",
            f"  export TINKER_BASE_URL={url} TINKER_API_KEY="
            + ("tml-any" if loaded.anonymous else "tml-..."),
            f"  {url}/status shows queues and tenants, to this machine alone",
            "Ctrl-C ends it; started again, it goes on where it was.",
        ]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stopping(num_pending: int, limit_s: float) -> None:
        console.print(
            f"Stopping, within {limit_s:g} s: {num_pending} requests are not done, and go on when "
            "it is started again. Ctrl-C again stops now.",
            highlight=False,
            soft_wrap=True,
        )

    run_service(loaded, on_ready=ready, on_stop=stopping)
    return 0
