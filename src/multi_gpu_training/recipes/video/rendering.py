"""The default videos: rendered, not filmed. An animal doing ten named things, told by motion alone.

The animal is a soft ellipse with a bright head on a textured ground, on a frame whose edges are
joined. Where it is, which way it points and how long it is are drawn alike for every behaviour,
so that a single frame says nothing about the class: only how the frames follow each other does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from multi_gpu_training.recipes.video.annotations import Trial

# Share of each behaviour among the trials, in percent: as uneven as real recordings are.
BEHAVIOURS = {
    "rest": 54,
    "walk": 12,
    "sniff": 9,
    "groom": 7,
    "turn_left": 5,
    "turn_right": 4,
    "rear": 4,
    "scratch": 2,
    "back_up": 2,
    "paw_withdraw": 1,
}
NAMES = list(BEHAVIOURS)
TRIALS_A_VIDEO = 9.8
TRIAL_FRAMES = 24
LABELLED = (8, 15)  # frames of a trial that carry a label; clips overlap its ends
NOISES = 48


def render(videos: int, size: int, seed: int = 0) -> list[tuple[Tensor, list[Trial]]]:
    """Frames of each video as uint8 of (frames, size, size), with its trials.

    The same on every rank and machine but for the last bit of a pixel.
    """
    random = torch.Generator().manual_seed(seed)
    # Dealt over all videos at once, so that rare behaviours occur in a fixed number.
    classes = deal_classes(round(TRIALS_A_VIDEO * videos), random)
    noise = 6.0 * torch.randn(NOISES, size, size, generator=random)
    made = []
    for number in range(videos):
        mine = classes[number::videos]
        poses = torch.cat([act(NAMES[label], random) for label in mine])
        trials = [
            Trial(
                first=start,
                last=start + TRIAL_FRAMES - 1,
                frames=tuple(start + frame for frame in LABELLED),
                labels=(label,) * len(LABELLED),
            )
            for start, label in zip(range(0, len(poses), TRIAL_FRAMES), mine, strict=True)
        ]
        made.append((draw(poses, size, noise, random), trials))
    return made


def deal_classes(trials: int, random: torch.Generator) -> list[int]:
    """A class for each trial, shuffled; shares as in BEHAVIOURS, each at least twice."""
    shares = torch.tensor(list(BEHAVIOURS.values()), dtype=torch.float64) / 100
    counts = (shares * trials).round().long().clamp(min=2)
    counts[0] = max(2, trials - int(counts[1:].sum()))
    dealt = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return dealt[torch.randperm(len(dealt), generator=random)].tolist()


def act(behaviour: str, random: torch.Generator) -> Tensor:
    """Poses of one trial, (frames, 4): place x and y, heading, and stretch of the body."""
    x, y, *angles, pace, side, late, _ = torch.rand(8, generator=random).tolist()
    heading, phase = (2 * math.pi * angle for angle in angles)
    pace = 0.85 + 0.3 * pace
    middle = (TRIAL_FRAMES - 1) / 2
    time = torch.arange(TRIAL_FRAMES) - middle
    along = torch.zeros(TRIAL_FRAMES)
    across, turn, stretch = along.clone(), along.clone(), torch.full_like(along, phase)
    if behaviour == "walk":
        along = 0.03 * pace * time
    elif behaviour == "back_up":
        along = -0.03 * pace * time
    elif behaviour == "turn_left":
        turn = -0.2 * pace * time
    elif behaviour == "turn_right":
        turn = 0.2 * pace * time
    elif behaviour == "sniff":
        along = 0.1 * torch.sin(2 * math.pi / 12 * pace * time + phase)
    elif behaviour == "groom":
        across = 0.08 * torch.sin(2 * math.pi / 6 * pace * time + phase)
    elif behaviour == "scratch":
        turn = 0.7 * torch.sin(2 * math.pi / 4.5 * pace * time + phase)
    elif behaviour == "rear":
        stretch = phase + 2 * math.pi / 14 * pace * time
    elif behaviour == "paw_withdraw":
        moment = 2 * late - 1
        across = (0.2 if side < 0.5 else -0.2) * torch.exp(-((time - moment) / 1.5).square() / 2)
    jitter = 0.003 * torch.randn(2, TRIAL_FRAMES, generator=random)
    ahead, left = (math.cos(heading), math.sin(heading)), (-math.sin(heading), math.cos(heading))
    places = [
        start + along * ahead[axis] + across * left[axis] + jitter[axis]
        for axis, start in enumerate((x, y))
    ]
    return torch.stack([*places, heading + turn, torch.sin(stretch)], 1)


def draw(poses: Tensor, size: int, noise: Tensor, random: torch.Generator) -> Tensor:
    """The frames of `poses` on the ground of one video."""
    half_length = 0.21 + 0.05 * float(torch.rand((), generator=random))
    texture = 12.0 * torch.randn(1, 1, 8, 8, generator=random)
    ground = 60.0 + F.interpolate(texture, (size, size), mode="bicubic")[0, 0]
    picked = torch.randint(NOISES, (len(poses),), generator=random)
    x, y, heading, stretch = (part.view(-1, 1, 1) for part in poses.float().unbind(1))
    ticks = (torch.arange(size) + 0.5) / size
    # The shortest way round: the frame's edges are joined, so that no place is special.
    dx = (ticks.view(1, 1, -1) - x + 0.5).remainder(1) - 0.5
    dy = (ticks.view(1, -1, 1) - y + 0.5).remainder(1) - 0.5
    cosine, sine = heading.cos(), heading.sin()
    length = half_length * (1 + 0.3 * stretch)
    forward = (dx * cosine + dy * sine) / length
    sideways = (dy * cosine - dx * sine) / (0.45 * half_length)
    body = torch.sigmoid(4 * (1 - forward.square() - sideways.square()))
    skin = 180.0 + 70.0 * forward.clamp(-1, 1)
    frames = torch.lerp(ground, skin, body) + noise[picked]
    return frames.clamp_(0, 255).to(torch.uint8)
