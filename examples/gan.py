"""A DCGAN that draws digits: two models, two optimizers and your own backward.

    python examples/gan.py                                     # all GPUs, or the CPU
    mgt run --num-gpus 2 examples/gan.py --steps 500
    mgt run --num-gpus 2 examples/gan.py --tiny

Every 200 steps, `gan-samples/` gets a picture of 8 x 8 generated digits (needs Pillow). The noise
comes from `augment`: with `torch.randn` every rank would draw the same.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

NOISE = 32


def build_generator(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (NOISE, 1, 1)), nn.ConvTranspose2d(NOISE, 4 * width, 2, bias=False)),
        *(nn.BatchNorm2d(4 * width), nn.ReLU()),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),
        *(nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1), nn.Tanh()),
    )


def build_critic(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(16 * width, 1)),
    )


@torch.no_grad()
def save_samples(generator: nn.Module, noise: Tensor, path: Path) -> None:
    generator.eval()  # with sync_bn, a call in train mode would wait for the other ranks
    rows = generator(noise).view(8, 8, 8, 8).transpose(1, 2).reshape(64, 64)
    generator.train()
    path.parent.mkdir(exist_ok=True)
    pixels = ((rows.clamp(-1, 1) + 1) * 127).byte().cpu().numpy()
    Image.fromarray(pixels).resize((512, 512), Image.Resampling.NEAREST).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on digits.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64, help="over all GPUs")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--tiny", action="store_true", help="eight steps of a narrow model")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.width = 8, 4

    config = MultiGPUConfig(global_batch_size=args.batch_size, max_steps=args.steps, sync_bn=True)
    manager = MultiGPUTrainingManager(config)
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1

    torch.manual_seed(0)
    generator, critic = build_generator(args.width), build_critic(args.width)
    opt_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    opt_c = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.999))
    shown = torch.randn(64, NOISE).to(manager.placement.device)  # the same in every picture

    trainer = manager.prepare(
        *(generator, critic, opt_g, opt_c),
        dataset=TensorDataset(digits),
        augment=lambda batch, random: (*batch, random.normal(NOISE)),
    )
    while not manager.should_stop:
        for batch in manager.train_loader:
            with trainer.step(batch) as (real, noise):
                fake = generator(noise)
                loss_real = F.softplus(-critic(real)).mean()
                loss_fake = F.softplus(critic(fake.detach())).mean()
                trainer.backward(loss_real, optimizer=opt_c, name="real")
                trainer.backward(loss_fake, optimizer=opt_c, name="fake")
                opt_c.step()  # now: the generator must face the improved critic
                # The loss of this name is the one on the console; all three are logged.
                trainer.backward(F.softplus(-critic(fake)).mean(), optimizer=opt_g, name="loss")
            if manager.placement.is_main and (manager.step % 200 == 0 or manager.should_stop):
                save_samples(generator, shown, Path(f"gan-samples/{manager.step:06d}.png"))
            if manager.should_stop:
                break
    manager.save_checkpoint()
    manager.finish()


if __name__ == "__main__":
    main()
