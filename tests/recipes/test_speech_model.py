"""The recogniser: sizes, features, lengths; and padding that changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.recipes.speech.augmentation import Augmentation
from multi_gpu_training.recipes.speech.ctc import ctc_loss, possible
from multi_gpu_training.recipes.speech.dataset import Batch
from multi_gpu_training.recipes.speech.features import (
    DRAWS,
    LogMel,
    mel_filters,
    normalise,
    spec_augment,
)
from multi_gpu_training.recipes.speech.objective import Objective
from multi_gpu_training.recipes.speech.speech_data import Timing
from multi_gpu_training.recipes.speech.speech_model import SIZES, Block, Recogniser, Size

TINY = Size(16, 2, 4, 6, 12.0, 4, 3, 20, 0.0)


def noise(*shape: int, seed: int = 0) -> Tensor:
    sound = 3000 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return sound.to(torch.int16)


def model(size: Size = TINY) -> Recogniser:
    torch.manual_seed(0)
    return Recogniser(size, 29, 8000).double().eval()


def test_the_base_model_has_the_guides_size_and_the_small_one_less_than_half_a_million() -> None:
    counts = {
        name: sum(p.numel() for p in Recogniser(size, 29, 16000).parameters())
        for name, size in SIZES.items()
    }
    assert counts["base"] == pytest.approx(7.16e6, rel=0.005)
    assert counts["small"] <= 500_000


# Features


def test_features_are_those_of_torchs_spectrogram() -> None:
    features = LogMel(8000, 40).double()
    sound = noise(1, 4000)
    found, lengths = features(sound, torch.tensor([4000]))
    wave = torch.nn.functional.pad(sound.double() / 32768, (128, 128))
    # torch centres a short window in its longer frame; ours begins with the frame.
    spectrum = torch.stft(
        torch.nn.functional.pad(wave, (0, 56)),
        n_fft=256,
        hop_length=80,
        win_length=200,
        window=torch.hann_window(200, dtype=torch.float64),
        center=False,
        return_complex=True,
    )
    power = spectrum.abs().square().transpose(1, 2) @ mel_filters(8000, 256, 40)
    expected = normalise(power.clamp(min=1e-6).log()[:, :51], lengths)
    assert lengths.tolist() == [51]
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_tone_lights_up_its_band() -> None:
    centres = mel_filters(8000, 256, 40).argmax(0) * 8000 / 256
    time = torch.arange(8000) / 8000
    for hertz in (300.0, 1000.0, 2500.0):
        wave = torch.sin(2 * torch.pi * hertz * time)
        power = torch.fft.rfft(wave[:200] * torch.hann_window(200), n=256).abs().square()
        band = int((power.double() @ mel_filters(8000, 256, 40)).argmax())
        assert abs(float(centres[band]) - hertz) <= 100


def test_every_band_hears_something() -> None:
    for rate, points, mels in ((8000, 256, 40), (16000, 512, 80)):
        assert (mel_filters(rate, points, mels).sum(0) > 0).all()


def test_features_of_each_utterance_have_mean_0_and_spread_1() -> None:
    sound, samples = noise(2, 8000), torch.tensor([8000, 3000])
    found, lengths = LogMel(8000, 40)(sound, samples)
    for row, length in zip(found, lengths.tolist(), strict=True):
        assert float(row[:length].mean(0).abs().max()) < 1e-5
        assert row[:length].std(0, correction=0).sub(1).abs().max() < 0.05
        assert not row[length:].any()


def test_silence_is_no_nan() -> None:
    found, _ = LogMel(8000, 40)(torch.zeros(1, 800, dtype=torch.int16), torch.tensor([0]))
    assert found.isfinite().all()


def test_masks_stay_within_their_shares_and_inside_the_utterance() -> None:
    features = torch.ones(64, 100, 40)
    lengths = torch.full((64,), 60)
    draws = torch.rand(64, DRAWS, generator=torch.Generator().manual_seed(1))
    hidden = spec_augment(features, lengths, draws, 0.25, 0.15) == 0
    bands, frames = hidden.all(1).sum(1), hidden.all(2).sum(1)
    assert 0 < bands.max() <= 2 * 0.25 * 40 + 2  # a mask may begin within a band
    assert 0 < frames.max() <= 2 * 0.15 * 60 + 2
    assert not hidden.all(2)[:, 60:].any()
    nothing = spec_augment(features, lengths, torch.zeros(64, DRAWS), 0.25, 0.15)
    assert torch.equal(nothing, features)


# Lengths and padding


@pytest.mark.parametrize("subsampling", [2, 4])
@pytest.mark.parametrize("kernel", [3, 5])
def test_output_lengths_are_right(subsampling: int, kernel: int) -> None:
    recogniser = model(dataclasses.replace(TINY, subsampling=subsampling, kernel=kernel))
    for samples in (1, 79, 80, 81, 400, 799, 1234):
        logits, lengths = recogniser(noise(1, samples), torch.tensor([samples]))
        assert logits.shape[1] == int(lengths) == int(recogniser.lengths(torch.tensor(samples)))


def test_padding_changes_nothing() -> None:
    recogniser = model()
    lengths = [1000, 2345, 4000]
    sounds = [noise(n, seed=n) for n in lengths]
    padded = 32000 * torch.ones(3, 5000, dtype=torch.int16)  # loud, so that a leak is seen
    for row, sound in zip(padded, sounds, strict=True):
        row[: len(sound)] = sound
    together, frames = recogniser(padded, torch.tensor(lengths))
    for i, sound in enumerate(sounds):
        alone, length = recogniser(sound[None], torch.tensor([len(sound)]))
        assert int(length) == int(frames[i])
        assert torch.allclose(together[i, : int(length)], alone[0], atol=1e-10)


@pytest.mark.parametrize("subsampling", [2, 4])
def test_clips_are_called_too_short_exactly_where_ctc_is_impossible(subsampling: int) -> None:
    recogniser = model(dataclasses.replace(TINY, subsampling=subsampling))
    timing = Timing(80, subsampling)
    for labels in ([1], [1, 2, 3], [4, 4], [5, 5, 5, 1, 1]):
        shortest = timing.shortest(labels)
        targets, sizes = torch.tensor([labels]), torch.tensor([len(labels)])
        for samples in (shortest - 1, shortest):
            frames = recogniser.lengths(torch.tensor([samples]))
            assert bool(possible(frames, targets, sizes)) == (samples >= shortest)


def test_the_loss_reads_no_value_on_the_host() -> None:
    """So that a step can be captured as one graph; fake tensors raise where a value is read."""
    recogniser = Recogniser(TINY, 29, 8000)
    recogniser(noise(2, 4000), torch.tensor([4000, 1000]))  # what is kept for each length
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        batch = Batch(
            noise(2, 4000),
            torch.tensor([4000, 1000]),
            torch.tensor([[1, 2], [3, 0]]),
            torch.tensor([2, 1]),
            torch.rand(2, DRAWS),
            torch.ones(2, 2),
            torch.zeros(2, dtype=torch.int64),
        )
        faked = Batch(*(fake.from_tensor(t) for t in batch))
        augmentation = Augmentation(8000, 0.2, 0.2, noise=0.7, reverb=0.5, gain=6.0, rhythm=0.5)
        numbers = fake.from_tensor(torch.tensor([5, 2]))
        faked = augmentation(faked, SampleRandom(numbers, 3))
        mean, weight = Objective(augment=True, warp=True)(recogniser, faked)
        mean.backward()
        assert weight.shape == ()


def test_a_streaming_block_can_run_step_by_step() -> None:
    torch.manual_seed(0)
    block = Block(TINY, streaming=True).double()
    x = torch.randn(2, 20, TINY.width, dtype=torch.float64)
    whole = block(x, torch.ones(2, 20, dtype=torch.bool))
    memory = None
    for t in range(20):
        heard, memory = block.lmu.step(block.norm_memory(x[:, t]), memory)
        y = x[:, t] + heard
        y = y + block.forward_part(block.norm_forward(y))
        assert torch.allclose(y, whole[:, t], atol=1e-12)


def test_mixed_precision_leaves_features_memory_and_loss_in_float32() -> None:
    recogniser = Recogniser(TINY, 29, 8000).eval()
    sound, samples = noise(2, 8000), torch.tensor([8000, 5000])
    targets, sizes = torch.tensor([[1, 2, 3], [3, 4, 0]]), torch.tensor([3, 2])
    exact = ctc_loss(*recogniser(sound, samples), targets, sizes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, lengths = recogniser(sound, samples)
        assert logits.dtype == torch.bfloat16
        loss = ctc_loss(logits, lengths, targets, sizes)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, exact, rtol=0.02)  # bf16 keeps two to three digits
