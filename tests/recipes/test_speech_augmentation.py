"""Training utterances in other voices, rooms and noise; features that keep what is said."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions, keep_resumed
from multi_gpu_training.recipes.speech.audio import trimmed
from multi_gpu_training.recipes.speech.augmentation import NOISE_DB, Augmentation
from multi_gpu_training.recipes.speech.ctc import possible
from multi_gpu_training.recipes.speech.dataset import Batch, cropped
from multi_gpu_training.recipes.speech.features import (
    DRAWS,
    LogMel,
    at_pace,
    mel_filters,
    warped_bins,
)
from multi_gpu_training.recipes.speech.speech_model import Recogniser, Size

RATE = 8000
VOICE = (
    "pitch",
    "vocal_tract",
    "noise",
    "reverb",
    "gain",
    "equaliser",
    "contour",
    "compression",
    "rhythm",
)
OFF = dict.fromkeys(VOICE, 0.0)
TINY = Size(16, 2, 4, 6, 12.0, 4, 3, 20, 0.0)


def tones(count: int, size: int = 4000) -> Batch:
    at = torch.arange(size) / RATE
    hertz = torch.linspace(300, 2000, count)[:, None]
    samples = torch.linspace(size // 2, size, count).long()
    sound = (8000 * torch.sin(2 * torch.pi * hertz * at)).to(torch.int16)
    nothing = torch.zeros(count, 1, dtype=torch.int64)
    draws, warps = torch.rand(count, DRAWS), torch.ones(count, 2)
    return Batch(sound, samples, nothing, nothing[:, 0], draws, warps, nothing[:, 0])


def made(batch: Batch, key: int = 1, first: int = 0, **given: float) -> Batch:
    numbers = torch.arange(first, first + len(batch.sound))
    return Augmentation(RATE, **{**OFF, **given})(batch, SampleRandom(numbers, key))


ALL = dict(zip(VOICE, (0.2, 0.2, 0.7, 0.5, 6.0, 6.0, 6.0, 0.3, 0.5), strict=True))


def test_what_an_utterance_becomes_does_not_depend_on_the_batch_around_it() -> None:
    batch = tones(6)
    whole = made(batch, **ALL)
    for start in (0, 4):
        part = Batch(*(field[start : start + 2] for field in batch))
        alone = made(part, first=start, **ALL)
        assert torch.allclose(alone.sound, whole.sound[start : start + 2], rtol=1e-4, atol=0.1)
        assert torch.equal(alone.warps, whole.warps[start : start + 2])
    other = made(batch, key=2, **ALL)
    assert not torch.equal(other.warps, whole.warps)
    assert not torch.allclose(other.sound, whole.sound, atol=10.0)


def test_shares_of_a_batch_are_rounded_as_the_whole_is() -> None:
    """Each variation alone: what a rank makes of its share is equal to the last bit."""
    for size in (3999, 4000, 4837):
        batch = tones(7, size)
        for name, amount in ALL.items():
            whole = made(batch, **{name: amount})
            for start, end in ((0, 3), (3, 5), (5, 7), (4, 7)):
                part = Batch(*(field[start:end] for field in batch))
                alone = made(part, first=start, **{name: amount})
                assert torch.equal(alone.sound, whole.sound[start:end]), (name, size, start)
                assert torch.equal(alone.warps, whole.warps[start:end]), (name, size, start)


def energy(sound: Tensor, samples: Tensor) -> Tensor:
    rows = zip(sound.double(), samples.tolist(), strict=True)
    return torch.stack([row[:count].square().mean() for row, count in rows])


def test_noise_is_as_loud_as_it_says_for_the_share_that_it_says() -> None:
    batch = tones(200)
    heard = made(batch, noise=0.6).sound
    added = energy(heard - batch.sound, batch.samples)
    ratio = 10 * (energy(batch.sound, batch.samples) / added.clamp(min=1e-6)).log10()
    noisy = ratio < 60
    assert 0.5 < float(noisy.float().mean()) < 0.7
    # The noise is measured over all of the row, the voice over its own samples.
    assert NOISE_DB[0] - 6 < float(ratio[noisy].min()) and float(ratio[noisy].max()) < (
        NOISE_DB[1] + 6
    )
    assert float(ratio[noisy].max() - ratio[noisy].min()) > 20


def test_a_room_answers_behind_the_voice_and_never_before_it() -> None:
    batch = tones(40)
    click = torch.zeros_like(batch.sound)
    click[:, 1000] = 20000
    batch = batch._replace(sound=click, samples=torch.full((40,), 4000))
    heard = made(batch, reverb=0.5).sound
    assert float(heard[:, :1000].abs().max()) < 1.0
    assert torch.allclose(heard[:, 1000], torch.tensor(20000.0), atol=1.0)
    tail = heard[:, 1001:3400].square().sum(1) / 20000**2
    echoing = tail > 1e-6
    assert 8 <= int(echoing.sum()) <= 32
    assert float(tail.max()) < 1.01 and float(tail[echoing].min()) > 0.03  # 0 to 15 dB below
    late = heard[:, 2800:3400].square().mean(1)
    early = heard[:, 1001:1601].square().mean(1)
    assert bool((late[echoing] < early[echoing]).all())


def test_gain_makes_all_of_it_quieter_or_louder() -> None:
    batch = tones(100)
    heard = made(batch, gain=6.0).sound
    decibels = 10 * (energy(heard, batch.samples) / energy(batch.sound, batch.samples)).log10()
    assert -6.1 < float(decibels.min()) < -4 and 4 < float(decibels.max()) < 6.1


def test_an_equaliser_colours_each_frequency_smoothly_and_as_far_as_it_says() -> None:
    batch = tones(40)
    noise = torch.randn(batch.sound.shape, generator=torch.Generator().manual_seed(8))
    batch = batch._replace(sound=1000 * noise, samples=torch.full((40,), 4000))
    # As long as what the equaliser transforms, so that nothing wraps around.
    heard = made(batch, equaliser=6.0).sound
    before, after = (torch.fft.rfft(s, n=8192).abs().square() for s in (batch.sound, heard))
    bands = mel_filters(RATE, 8192, 20).float()
    decibels = 10 * (after @ bands / (before @ bands)).log10()
    sum_of_curves = 6.0 * sum(2 / (order + 1) for order in range(1, 7))
    assert 4 < float(decibels.abs().max()) < sum_of_curves
    assert float(decibels.std(0).min()) > 1.0  # every band, and another one each time
    assert float(decibels.diff(dim=1).abs().max()) < 5.0
    assert abs(float(decibels.mean())) < 1.0


def test_moments_become_quieter_and_louder_within_what_is_said() -> None:
    batch = tones(60, 8000)
    batch = batch._replace(samples=torch.full((60,), 8000))
    heard = made(batch, contour=6.0).sound
    before, after = (s.double().view(60, 50, 160).square().mean(2) for s in (batch.sound, heard))
    decibels = 10 * (after / before).log10()
    assert 5 < float(decibels.max()) < 6.1 and -6.1 < float(decibels.min()) < -5
    assert float(decibels.std(1).median()) > 1.5  # within one utterance, too
    assert float(decibels.diff(dim=1).abs().max()) < 4  # and without steps


def test_compression_evens_loudness_out_or_does_the_opposite() -> None:
    batch = tones(60, 8000)
    loud = torch.cat([torch.full((4000,), 1.0), torch.full((4000,), 0.1)])  # 20 dB apart
    sound = (batch.sound * loud).to(torch.int16)
    batch = batch._replace(sound=sound, samples=torch.full((60,), 8000))
    heard = made(batch, compression=0.3).sound
    one, other = heard[:, 500:3500], heard[:, 4500:7500]
    apart = 10 * (one.square().mean(1) / other.square().mean(1)).log10()
    assert 14 <= float(apart.min()) < 15.5 and 24.5 < float(apart.max()) <= 26.1
    silence = batch._replace(sound=torch.zeros_like(sound))
    assert torch.equal(made(silence, compression=0.3).sound, silence.sound.float())


def test_cutting_an_end_off_leaves_enough_for_the_text() -> None:
    sound = torch.arange(1, 1001, dtype=torch.int16)
    assert torch.equal(cropped(sound, 100, [1.0, 0.5], 0), sound[100:])
    assert torch.equal(cropped(sound, 100, [0.4, 0.75], 0), sound[:950])
    assert torch.equal(cropped(sound, 600, [1.0, 1.0], 0), sound[125:-125])
    assert torch.equal(cropped(sound, 100, [1.0, 1.0], 801), sound)
    assert torch.equal(cropped(sound[:3], 100, [1.0, 1.0], 0), sound[:3])


def test_what_is_switched_off_changes_nothing() -> None:
    batch = tones(4)
    same = made(batch)
    assert torch.equal(same.sound, batch.sound) and torch.equal(same.warps, batch.warps)
    louder, both = (made(batch, gain=6.0, pitch=pitch).sound for pitch in (0.0, 0.2))
    assert torch.equal(louder, both)  # one switch moves no other's draws


def test_voices_lie_within_their_shares_and_on_both_sides() -> None:
    pitch, tract = made(tones(300), pitch=0.2, vocal_tract=0.1).warps.T
    assert 1 / 1.2 <= float(pitch.min()) < 0.86 and 1.17 < float(pitch.max()) <= 1.2
    assert 1 / 1.1 <= float(tract.min()) < 0.93 and 1.08 < float(tract.max()) <= 1.1
    assert 0.4 < float((pitch > 1).float().mean()) < 0.6


def test_each_moment_passes_at_its_pace_and_silence_follows_the_last() -> None:
    ramp = torch.arange(40.0).view(1, 40, 1).expand(2, 40, 3)
    lengths = torch.tensor([30, 40])
    same, kept = at_pace(ramp, lengths, torch.ones(2, 4), 10)
    assert kept.tolist() == [30, 40]
    assert torch.equal(same[0, :30], ramp[0, :30]) and not bool(same[0, 30:].any())
    # Ten frames at half the pace, then twice the pace to the end.
    paces = torch.tensor([[0.5, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    moved, kept = at_pace(ramp, lengths, paces, 10)
    assert kept.tolist() == [22, 40]
    wanted = torch.cat([0.5 * torch.arange(10), 4.5 + 2 * torch.arange(1, 13)])
    assert torch.allclose(moved[0, :22, 0], wanted)
    alone, _ = at_pace(ramp[:1], lengths[:1], paces[:1], 10)
    assert torch.equal(alone[0], moved[0])


def test_rhythm_makes_utterances_shorter_and_longer_and_leaves_room_for_their_text() -> None:
    batch = tones(300, 8000)
    sizes = torch.linspace(0, 20, 300).long()
    targets = torch.arange(1, 21).expand(300, 20)
    batch = batch._replace(targets=targets, sizes=sizes)
    torch.manual_seed(0)
    model = Recogniser(TINY, 29, RATE, normalise="tilt").eval()
    before = model.features.lengths(batch.samples)
    warps = made(batch, rhythm=0.5, frame=4 * 80).warps
    level = torch.ones(300, 101, 20)
    _, after = at_pace(level, before, warps[:, 2:], 10)
    share = (after / before)[sizes == 0]  # nothing is said: no text holds them back
    assert 0.4 < float(share.min()) < 0.8 and float((after / before).max()) > 1.2
    # The longest fill their row: they can only pass faster.
    assert bool((after <= 101).all()) and bool((after[-5:] <= before[-5:]).all())
    _, frames = model(batch.sound, batch.samples, warps=warps)
    assert bool(possible(frames, targets, sizes).all())
    assert not bool(torch.equal(frames, model.lengths(batch.samples)))


def test_a_warped_tone_is_heard_where_the_warped_frequency_lies() -> None:
    features = LogMel(RATE, 40, "utterance").double()
    centres = mel_filters(RATE, 256, 40).argmax(0) * RATE / 256
    at = torch.arange(4000) / RATE
    sound = (8000 * torch.sin(2 * torch.pi * 1000 * at)).to(torch.int16)[None]
    power = torch.fft.rfft(sound[0, :200].double() * features.window, n=256).abs().square()
    for pitch, tract in ((1.2, 1.0), (1.0, 0.85), (1.15, 1.2), (1.0, 1.0)):
        filters = features.warped_filters(torch.tensor([[pitch, tract]]))[0]
        assert abs(float(centres[(power @ filters).argmax()]) - 1000 * pitch * tract) <= 60
        assert bool((filters.sum(0)[:30] > 0).all())  # no band falls between two bins
    plain = features.warped_filters(torch.ones(1, 2))[0]
    assert torch.allclose(plain, mel_filters(RATE, 256, 40), atol=1e-4)
    # The vocal tract leaves the highest frequency where it is.
    ends = warped_bins(torch.tensor([0.0, 4000.0]), 4000.0, torch.ones(2, 1), tract_pair())
    assert torch.allclose(ends, torch.tensor([[0.0, 4000.0]] * 2))


def tract_pair() -> Tensor:
    return torch.tensor([[0.8], [1.25]])


# Normalisation


def speechlike(seconds: float = 0.6) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    size = round(seconds * RATE)
    loud = torch.sin(math.pi * torch.arange(size) / 1200).square()
    return (4000 * loud * torch.randn(size, generator=generator)).to(torch.int16)[None]


@pytest.mark.parametrize("normalise", ["tilt", "utterance", "running"])
def test_features_do_not_tell_how_loud_an_utterance_was_recorded(normalise: str) -> None:
    features, sound = LogMel(RATE, 40, normalise).double(), speechlike()
    samples = torch.tensor([sound.shape[1]])
    loud, _ = features(sound, samples)
    quiet, _ = features(sound.double() / 8, samples)
    assert torch.allclose(loud, quiet, atol=1e-3)


def test_features_hardly_tell_how_quiet_the_pauses_are() -> None:
    """Digital silence in a pause, and a hiss 45 dB below the voice."""
    sound = speechlike()
    sound[:, 1500:3000] = 0
    hiss = 8 * torch.randn(sound.shape, generator=torch.Generator().manual_seed(6))
    samples = torch.tensor([sound.shape[1]])

    def apart(normalise: str) -> float:
        features = LogMel(RATE, 40, normalise).double()
        one, other = (features(s, samples)[0] for s in (sound, sound + hiss))
        return float((one - other).abs().mean())

    assert apart("utterance") < 0.25 * apart("bands")


def test_a_microphone_that_tilts_the_spectrum_changes_features_little() -> None:
    sound = 30000 * speechlike().float() / speechlike().abs().max()
    spectrum = torch.fft.rfft(sound)
    decibels = torch.linspace(-12, 12, spectrum.shape[1])
    tilted = torch.fft.irfft(spectrum * 10 ** (decibels / 20), n=sound.shape[1])
    samples = torch.tensor([sound.shape[1]])
    features = LogMel(RATE, 40, "tilt").double()
    one, other = (features(s, samples)[0] for s in (sound, tilted))
    assert float((one - other).abs().mean()) < 0.25  # of 24 dB; pauses stay at their floor
    assert 0.99 < float(one.square().mean()) < 1.01
    # Bands that change less stay smaller: their spread is that of all bands together.
    assert float(one.std(1).max() / one.std(1).min()) > 1.1


def test_running_features_do_not_look_ahead() -> None:
    features, sound = LogMel(RATE, 40, "running").double(), speechlike()
    changed = sound.clone()
    changed[:, 2400:] = 12345
    samples = torch.tensor([sound.shape[1]])
    before = 2400 // 80 - 2  # frames whose window ends before the change
    one, other = (features(s, samples)[0] for s in (sound, changed))
    assert torch.equal(one[:, :before], other[:, :before])
    assert not torch.allclose(one, other, atol=0.1)


@pytest.mark.parametrize("normalise", ["tilt", "utterance", "running"])
def test_padding_and_silence_are_harmless(normalise: str) -> None:
    torch.manual_seed(0)
    model = Recogniser(TINY, 29, RATE, normalise=normalise).double().eval()
    sound = speechlike()
    padded = torch.full((2, 9000), 32000, dtype=torch.int16)
    padded[0, : sound.shape[1]] = sound[0]
    padded[1, :3000] = 0
    together, frames = model(padded, torch.tensor([sound.shape[1], 3000]))
    alone, length = model(sound, torch.tensor([sound.shape[1]]))
    assert int(frames[0]) == int(length)
    assert torch.allclose(together[0, : int(length)], alone[0], atol=1e-9)
    assert bool(together.isfinite().all())


# Options


def test_each_variation_can_be_switched_off_and_all_together() -> None:
    recipe = find_recipe("speech")
    job = recipe.build(recipe.config({}), SpeechOptions())
    assert job.augment is not None and job.loss_fn.warp and job.loss_fn.augment
    assert job.dataset.speed > 0 and job.val_dataset.speed == 0
    assert job.dataset.crop > 0 and job.val_dataset.crop == 0
    still = recipe.build(
        recipe.config({}), SpeechOptions(**OFF, speed=0, crop=0, spec_augment=False)
    )
    assert still.augment is None and not still.loss_fn.warp and not still.loss_fn.augment
    assert still.dataset.speed == still.dataset.crop == 0
    off = recipe.build(recipe.config({}), SpeechOptions(augment=False))
    assert off.augment is None and not off.loss_fn.augment and off.dataset.speed == 0
    lines = off.callbacks[0].lines  # type: ignore[attr-defined]
    assert not any("vary" in line for line in lines)
    with pytest.raises(ConfigError, match=r"noise=0\.5 does nothing with augment=false"):
        recipe.build(recipe.config({}), SpeechOptions(augment=False, noise=0.5))
    for whole in ("tilt", "utterance"):
        with pytest.raises(ConfigError, match=f"normalise={whole} needs the whole utterance"):
            recipe.build(recipe.config({}), SpeechOptions(streaming=True, normalise=whole))
    assert recipe.build(recipe.config({}), SpeechOptions()).model.features.normalise == "tilt"
    streaming = recipe.build(recipe.config({}), SpeechOptions(streaming=True))
    assert streaming.model.features.normalise == "running"


def test_a_run_of_version_01_goes_on_as_it_was() -> None:
    options = SpeechOptions(noise=0.5)
    keep_resumed(options, {"augment": True, "data_dir": None})  # as its checkpoints say
    assert (options.speed, options.pitch, options.reverb) == (0.15, 0.0, 0.0)
    assert (options.split, options.lexicon, options.normalise) == ("official", "none", "bands")
    assert options.noise == 0.5  # what the user asks for now
    assert options.equaliser == options.rhythm == 0.0
    between = SpeechOptions()
    had = {name: v for name, v in between.model_dump().items() if name != "equaliser"}
    keep_resumed(between, had)  # when auto chose otherwise
    assert (between.normalise, between.equaliser, between.noise) == ("utterance", 0.0, 0.7)
    later = SpeechOptions()
    keep_resumed(later, options.model_dump())
    assert later.model_dump() == options.model_dump()


# Silence around the voice


def test_silence_at_both_ends_is_cut_off_and_pauses_stay() -> None:
    voice = speechlike()[0]
    voice[1600:3200] = 0
    hiss = torch.randn(3000, generator=torch.Generator().manual_seed(7)).to(torch.int16)
    sound = torch.cat([hiss, voice, hiss])
    cut = trimmed(sound, RATE, 30.0)
    assert len(voice) - 600 <= len(cut) <= len(voice) + 480
    assert torch.equal(trimmed(cut, RATE, 30.0), cut)
    assert torch.equal(trimmed(sound, RATE, 0.0), sound)
    assert torch.equal(trimmed(sound, RATE, 30.0, shortest=len(sound) - 10), sound)
    silence = torch.zeros(4000, dtype=torch.int16)
    assert torch.equal(trimmed(silence, RATE, 30.0), silence)
    assert torch.equal(trimmed(sound[:50], RATE, 30.0), sound[:50])
