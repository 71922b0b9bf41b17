"""Serve one model on megatron-core: torchrun --nproc-per-node 2 -m rookery.megatron --model FOLDER

Each process is a tensor-parallel rank; the first one listens.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from contextlib import suppress

import torch
import uvicorn

from rookery.config import is_loopback
from rookery.embedded import resolve_model
from rookery.embedded.folders import driven
from rookery.errors import ConfigError, RookeryError
from rookery.megatron.engine import Ranks, RanksEngine, RanksTrainer, follow, join_ranks
from rookery.megatron.model import load_parallel_model
from rookery.megatron.server import Hosted, make_app
from rookery.model_names import model_names
from rookery.tasks.template import load_template
from rookery.train import TrainerConfig

logger = logging.getLogger("rookery.megatron")
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed while it is reused."""
_PDEATHSIG = 1
"""Linux's option for the signal that a process gets when its parent ends."""
GRACE_S = 3
"""Seconds for requests in flight when the server ends."""


def main() -> None:
    _end_with_torchrun()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    arguments = _arguments()
    try:
        key = _key(arguments.host)
        ranks = join_ranks(_device())
        listener = _listen(arguments) if ranks.is_first else None
        with suppress(KeyboardInterrupt):
            asyncio.run(_run(arguments, ranks, listener, key=key))
    except RookeryError as error:
        sys.exit(f"rookery.megatron: {error}")


def _end_with_torchrun() -> None:
    """End this process with torchrun, even if torchrun is killed and cannot end its ranks."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchrun -m rookery.megatron", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a Hugging Face id, or smollm2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--pass-tokens", type=int, default=1024, help="tokens of one pass")
    return parser.parse_args()


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    return device


def _key(host: str) -> str:
    key = os.environ.get("MEGATRON_SERVER_KEY", "")
    if not (key or is_loopback(host)):
        raise ConfigError(
            f"Everybody who reaches {host} could use this server: set MEGATRON_SERVER_KEY here and "
            "where the client runs, or listen on 127.0.0.1."
        )
    return key


def _listen(arguments: argparse.Namespace) -> socket.socket:
    """Bind the port before the model is loaded."""
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        listener = socket.create_server((arguments.host, arguments.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"{arguments.host}:{arguments.port} cannot be used: {error.strerror}. Give another "
            "--port, and name it in MEGATRON_SERVER_URL."
        ) from error
    # See `compose/http_server.py`: without it every answer takes 40 ms longer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _run(
    arguments: argparse.Namespace, ranks: Ranks, listener: socket.socket | None, *, key: str
) -> None:
    folder = resolve_model(arguments.model)
    template = load_template(folder.path, chat=False)
    model = load_parallel_model(folder.path, ranks=ranks, device=_device(), names=folder.names)
    config = TrainerConfig(pass_tokens=arguments.pass_tokens)
    trainer = RanksTrainer(model, config=config, processes=ranks)
    engine = RanksEngine(
        model,
        ranks=ranks,
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name=folder.name,
        thread=trainer.thread,
    )
    if listener is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler waits for the call
        follow(trainer, engine)
        return
    names = model_names(folder.name, str(folder.path), *folder.names)
    hosted = Hosted(
        model=model, trainer=trainer, engine=engine, names=names, ranks=ranks.size, key=key
    )
    settings = uvicorn.Config(
        make_app(hosted),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    host, port = listener.getsockname()[:2]
    logger.info("%s on %d ranks at http://%s:%d", folder.name, ranks.size, host, port)
    async with driven(engine):
        await uvicorn.Server(settings).serve(sockets=[listener])


if __name__ == "__main__":
    main()
