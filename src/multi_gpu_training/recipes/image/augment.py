"""Images moved a little and mirrored, a whole batch at a time, where the batch is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.data.randomness import SampleRandom


class Moved:
    """Shifts every image by up to `shift` pixels and, with `flip`, mirrors half of them.

    What happens to an image depends on (seed, epoch, sample), not on the rank that holds it.
    """

    def __init__(self, shift: int, flip: bool) -> None:
        self.shift = shift
        self.flip = flip

    def __call__(self, batch: list[Tensor], random: SampleRandom) -> list[Tensor]:
        images, labels = batch
        return [self.move(images, random), labels]

    def move(self, images: Tensor, random: SampleRandom) -> Tensor:
        """(batch, height, width), each image cut from itself with a border of background."""
        count, height, width = images.shape
        padded = F.pad(images, [self.shift] * 4)
        draws = random.uniform(3)
        offsets = (draws[:, :2] * (2 * self.shift + 1)).long()
        rows = torch.arange(height, device=images.device) + offsets[:, :1]
        columns = torch.arange(width, device=images.device)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, width - 1 - columns, columns)
        columns = columns + offsets[:, 1:]
        places = rows.unsqueeze(2) * padded.shape[2] + columns.unsqueeze(1)
        flat = padded.view(count, -1)
        return flat.gather(1, places.view(count, -1)).view(count, height, width)
