"""What is frozen and what stays in eval mode, at the start of a run and now.

A callback may unfreeze layers in the middle of a run. A resumed run starts from what the script
says and then continues from what the callback did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from multi_gpu_training.state_dicts import plain_name


class ModelModes:
    """The modes of one model, which `begin` is given. Saved with the run."""

    def __init__(self) -> None:
        self._model: nn.Module
        self._in_eval: list[nn.Module] = []  # modules that are not trained in train mode
        self._frozen_at_start: list[str] = []
        self._in_eval_at_start: list[str] = []

    def begin(self, model: nn.Module) -> None:
        """Take the model as the script set it up."""
        self._model = model
        self._frozen_at_start = self._frozen()
        self._in_eval_at_start = self.names_in_eval()

    def enter_training(self) -> None:
        """Put the model into its training mode: each module in the mode the user left it in. If
        all are in eval mode, use the modes of the previous call; the first time, use train mode,
        because `from_pretrained` and others return models in eval mode."""
        modules = list(self._model.modules())
        in_eval = [module for module in modules if not module.training]
        all_in_eval = len(in_eval) == len(modules)
        # The user's own train() may keep some layers in eval mode: every plain loop calls it.
        if all_in_eval or any(type(module).train is not nn.Module.train for module in modules):
            self._model.train()
            for module in self._in_eval if all_in_eval else in_eval:
                module.training = False  # not its children, unlike `eval()`
        self._in_eval = [module for module in modules if not module.training]

    def names_in_eval(self) -> list[str]:
        """The modules that stay in eval mode while the model is trained."""
        named = [(plain_name(name), module) for name, module in self._model.named_modules()]
        found = [name for name, module in named if not module.training]
        if len(found) == len(named):  # for example during a validation
            kept = {id(module) for module in self._in_eval}
            found = [name for name, module in named if id(module) in kept]
        return found

    def _frozen(self) -> list[str]:
        named = self._model.named_parameters()
        return [plain_name(name) for name, p in named if not p.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        return {
            "frozen": {"at_start": self._frozen_at_start, "now": self._frozen()},
            "in_eval": {"at_start": self._in_eval_at_start, "now": self.names_in_eval()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what callbacks changed during the run, unless the script itself now sets up the
        model differently: it knows best. Older checkpoints say nothing of either."""
        frozen, in_eval = saved.get("frozen"), saved.get("in_eval")
        if frozen is not None and frozen["at_start"] == self._frozen_at_start:
            kept = set(frozen["now"])
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad == (plain_name(name) in kept):
                    parameter.requires_grad_(not parameter.requires_grad)
        if in_eval is not None and in_eval["at_start"] == self._in_eval_at_start:
            kept = set(in_eval["now"])
            for name, module in self._model.named_modules():
                module.training = plain_name(name) not in kept
