"""The other processes of a grpo run under torchrun: they compute gradients and nothing else.

torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml
"""

from rookery.compose.grpo_files import read_files, trainer_place
from rookery.compose.grpo_policy import make_trainer
from rookery.compose.running import Outcome, quiet_libraries
from rookery.errors import TrainError
from rookery.loops.grpo import GrpoConfig
from rookery.reports import GrpoReport
from rookery.slots import load_model
from rookery.train.processes import Processes, join_processes

__all__ = ["end_processes", "help_grpo"]


def help_grpo(config: GrpoConfig) -> Outcome[GrpoReport]:
    """Do the part of this process until the first one has ended; the outcome of that one."""
    quiet_libraries()
    files = read_files(config)
    device, dtype = trainer_place(config)
    model = load_model(files.start, device=device, dtype=dtype, names=files.folder.names)
    processes = join_processes(model.device.type)
    outcome = make_trainer(config, files.start, model=model, processes=processes).help()
    if not isinstance(outcome, Outcome):
        raise TrainError(f"The first process told {type(outcome).__name__} at its end.")
    processes.leave()
    return outcome


def end_processes(processes: Processes, outcome: Outcome[GrpoReport]) -> None:
    """Called by the first process when all is done."""
    processes.tell(outcome)
    processes.leave()
