"""Real videos: decoded once, cached, cut into clips within their trial; wrong input is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Said, mgt_here
from ranks import run_ranks

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.video import frames as frames_module
from multi_gpu_training.recipes.video.annotations import Trial, read_annotation
from multi_gpu_training.recipes.video.clips import (
    Clips,
    Video,
    VideoData,
    class_weights,
    frames_around,
    split_by_video,
)
from multi_gpu_training.recipes.video.folder import load_folder
from multi_gpu_training.recipes.video.frames import FrameFile, load_frames

av = pytest.importorskip("av", reason="PyAV is not installed")

SIZE, LENGTH = 32, 30
CLASSES = ["rest", "walk", "rear"]


def pictures(seed: int, count: int = LENGTH, size: int = SIZE) -> np.ndarray[Any, Any]:
    """Frames that differ in brightness, so that each can be told after compression."""
    blobs = np.random.default_rng(seed).integers(-20, 20, (1, size // 8, size // 8))
    ramp = 30 + 6 * np.arange(count).reshape(-1, 1, 1)
    return np.kron(ramp + blobs, np.ones((1, 8, 8))).clip(0, 255).astype(np.uint8)


def write_video(path: Path, frames: np.ndarray[Any, Any], codec: str = "mpeg4") -> None:
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames.shape[1:]
        stream.pix_fmt = "gray" if codec == "ffv1" else "yuv420p"
        stream.bit_rate = 2_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
        container.mux(stream.encode())


def write_annotation(path: Path, rows: list[tuple[Any, ...]], header: str = "frame,class") -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four short videos with every class in each, and a list of classes."""
    root = tmp_path / "recordings"
    (root / "Videos").mkdir(parents=True)
    (root / "Annotations").mkdir()
    (root / "classes.txt").write_text("\n".join(CLASSES))
    for number in range(4):
        write_video(root / "Videos" / f"mouse{number}.mp4", pictures(number))
        rows = [(frame, CLASSES[frame // 10]) for frame in range(0, LENGTH, 2)]
        write_annotation(root / "Annotations" / f"mouse{number}.csv", rows)
    return root


def load(folder: Path, **changes: Any) -> VideoData:
    settings = {"size": SIZE, "resize": False, "strict": False, "threads": 2, **changes}
    return load_folder(folder, **settings)


def problem(folder: Path, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **changes)
    return str(caught.value)


# Decoding and the cache


def test_frames_come_out_as_they_went_in(tmp_path: Path) -> None:
    there = pictures(5)
    write_video(tmp_path / "a.mkv", there, "ffv1")  # lossless
    found = load_frames([tmp_path / "a.mkv"], SIZE, tmp_path / "cache").frames
    assert np.array_equal(found[tmp_path / "a.mkv"][:], there)


def test_a_video_is_decoded_once_and_again_when_it_changes(folder: Path) -> None:
    first = load(folder)
    assert first.notes[0].startswith("frames: 4 videos decoded and 0 found in")
    again = load(folder)
    assert again.notes[0].startswith("frames: 0 videos decoded and 4 found in")
    for one, two in zip(first.videos, again.videos, strict=True):
        assert np.array_equal(one.frames[:], two.frames[:])
    write_video(folder / "Videos" / "mouse2.mp4", pictures(99))
    changed = load(folder)
    assert changed.notes[0].startswith("frames: 1 videos decoded and 3 found in")
    assert not np.array_equal(changed.videos[2].frames[:], first.videos[2].frames[:])


def test_a_damaged_cache_is_made_anew(folder: Path) -> None:
    before = [video.frames[:].copy() for video in load(folder).videos]
    files = sorted((folder / "FrameCache").glob("*.frames"))
    os.truncate(files[0], 100)
    sorted((folder / "FrameCache").glob("*.json"))[1].write_text("{")
    after = load(folder)
    assert after.notes[0].startswith("frames: 2 videos decoded")
    for frames, video in zip(before, after.videos, strict=True):
        assert np.array_equal(frames, video.frames[:])


def decode_together(folder: Path) -> tuple[int, list[Any]]:
    videos = sorted((folder / "Videos").iterdir())
    decoded = load_frames(videos, SIZE, folder / "shared-cache", threads=2)
    return decoded.decoded, [int(found[:].astype(int).sum()) for found in decoded.frames.values()]


def test_ranks_that_start_together_decode_each_video_once(folder: Path) -> None:
    answers = run_ranks(3, decode_together, folder)
    assert sum(decoded for decoded, _ in answers) == 4
    assert answers[0][1] == answers[1][1] == answers[2][1]
    assert len(answers[0][1]) == 4


def test_a_cached_video_travels_to_a_worker_as_a_name_not_as_bytes(folder: Path) -> None:
    import pickle

    frames = load(folder).videos[0].frames
    assert isinstance(frames, FrameFile)
    assert frames[0].shape == (SIZE, SIZE)
    assert len(pickle.dumps(frames)) < 1000
    assert np.array_equal(pickle.loads(pickle.dumps(frames))[3], frames[3])


def test_a_full_disk_is_said_before_decoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(frames_module.shutil, "disk_usage", lambda _: usage)
    message = problem(folder)
    assert "the frames of 4 videos take 0.0 GiB as 32x32 bytes" in message
    assert "set cache_dir to a larger disk, or frame_size lower" in message


# Clips


def test_a_clip_repeats_the_last_frame_of_its_trial_beyond_its_ends() -> None:
    trial = Trial(first=10, last=20, frames=(10, 15, 20), labels=(0, 0, 0))
    assert frames_around(15, trial, 5).tolist() == [13, 14, 15, 16, 17]
    assert frames_around(10, trial, 5).tolist() == [10, 10, 10, 11, 12]
    assert frames_around(20, trial, 7).tolist() == [17, 18, 19, 20, 20, 20, 20]


def test_clips_are_bytes_and_the_same_in_memory_and_from_disk(folder: Path) -> None:
    data = load(folder)
    clips = Clips(data.videos, 17)
    assert len(clips) == 4 * 15
    clip, label = clips[7]
    assert clip.dtype == torch.uint8
    assert clip.shape == (17, SIZE, SIZE)
    assert label == data.classes.index("walk")
    # Frame 14 of the first video, in the middle.
    assert torch.equal(clip[8], torch.tensor(data.videos[0].frames[14]))
    held, labels = clips.in_memory().tensors
    assert held.dtype == torch.uint8
    for index in (0, 7, 59):
        assert torch.equal(held[index], clips[index][0])
        assert int(labels[index]) == clips[index][1]


def test_trials_are_read_and_no_clip_leaves_its_trial(folder: Path) -> None:
    rows = [(f, "rest", 1) for f in range(4, 9)] + [(f, "walk", 2) for f in range(9, 25)]
    write_annotation(folder / "Annotations" / "mouse1.csv", rows, "frame,class,trial")
    data = load(folder)
    assert [(t.first, t.last) for t in data.videos[1].trials] == [(4, 8), (9, 24)]
    assert [(t.first, t.last) for t in data.videos[0].trials] == [(0, LENGTH - 1)]
    [clip] = [c for c, place in zip(*_clips_and_places(data), strict=True) if place == (1, 8)]
    assert torch.equal(clip[8], clip[16])  # all that follows frame 8 is frame 8


def _clips_and_places(data: VideoData) -> tuple[Iterator[Any], list[tuple[int, int]]]:
    clips = Clips(data.videos, 17)
    places = [(number, centre) for number, _, centre, _ in clips.places]
    return (clips[index][0] for index in range(len(clips))), places


def split_data(counts: list[list[int]]) -> VideoData:
    videos = []
    for number, row in enumerate(counts):
        labels = tuple(label for label, count in enumerate(row) for _ in range(count))
        trial = Trial(0, len(labels), tuple(range(len(labels))), labels)
        videos.append(Video(f"v{number}", None, [trial]))
    return VideoData(videos, CLASSES)


def test_the_split_is_by_video_and_keeps_rare_classes_in_both_parts() -> None:
    rare = [[50, 10, 1 if number in (3, 11) else 0] for number in range(20)]
    data = split_data(rare)
    for seed in range(5):
        parts = split_by_video(data, 0.2, seed)
        train, val = ({video.name for video in part} for part in (parts.train, parts.val))
        assert len(val) == 4
        assert not train & val
        assert len(train | val) == 20
        for part in (parts.train, parts.val):
            assert sum(video.class_counts(3)[2] for video in part) == 1
        assert parts == split_by_video(data, 0.2, seed)


def test_weights_are_those_of_the_guide_and_capped() -> None:
    counts = torch.tensor([5432, 101, 4467])
    weights = class_weights(counts, CLASSES, cap=10.0)
    assert weights.tolist() == pytest.approx([10000 / (3 * 5432), 10.0, 10000 / (3 * 4467)])


# Wrong input: the message says what was asked, what was found and what to do


def test_folder_without_videos(tmp_path: Path) -> None:
    assert "has no folder Videos; put Videos/*.mp4 there" in problem(tmp_path)
    (tmp_path / "Videos").mkdir()
    assert "holds no video; put files there that end in .mp4" in problem(tmp_path)


def test_halves_of_pairs_are_all_named_at_once(folder: Path) -> None:
    (folder / "Annotations" / "mouse0.csv").unlink()
    (folder / "Videos" / "mouse3.mp4").unlink()
    message = problem(folder)
    assert "mouse0.mp4 has no annotation" in message
    assert "mouse3.csv has no video" in message


def test_unknown_class_comes_with_the_one_that_was_meant(folder: Path) -> None:
    write_annotation(folder / "Annotations" / "mouse1.csv", [(0, "rest"), (5, "wlak")])
    message = problem(folder)
    assert "mouse1.csv, line 3: unknown class 'wlak'; did you mean 'walk'?" in message


def test_without_a_list_every_name_is_a_class_in_order(folder: Path) -> None:
    (folder / "classes.txt").unlink()
    assert load(folder).classes == ["rear", "rest", "walk"]
    for path in (folder / "Annotations").iterdir():
        write_annotation(path, [(0, 10), (1, 9), (2, 0)])
    assert load(folder).classes == ["0", "9", "10"]


def test_frame_past_the_end(folder: Path) -> None:
    write_annotation(folder / "Annotations" / "mouse1.csv", [(0, "rest"), (LENGTH, "walk")])
    message = problem(folder)
    assert "mouse1.csv, line 3: frame 30, but" in message
    assert "mouse1.mp4 has 30 frames, 0 to 29" in message


def test_wrong_frame_size_and_the_way_out(folder: Path) -> None:
    write_video(folder / "Videos" / "mouse1.mp4", pictures(1, size=64)[:, :48])
    message = problem(folder)
    assert "mouse1.mp4 has frames of 64x48, not 32x32; set resize=true" in message
    data = load(folder, resize=True)
    assert data.videos[1].frames.shape == (LENGTH, SIZE, SIZE)
    message = problem(folder, size=16)
    assert "has frames of 32x32, not 16x16; set frame_size=32, resize=true" in message


@pytest.fixture
def damaged(folder: Path) -> Path:
    (folder / "Videos" / "mouse0.mp4").write_text("not a video")
    whole = (folder / "Videos" / "mouse2.mp4").read_bytes()
    (folder / "Videos" / "mouse2.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    return folder


def test_what_is_no_video_and_what_is_cut_short_is_skipped_and_counted(damaged: Path) -> None:
    for _ in range(2):  # once decoded, once from the cache
        data = load(damaged)
        assert [video.name for video in data.videos] == ["mouse1", "mouse3"]
        assert "skipped 2 of 4 videos:" in data.notes
        text = "\n".join(data.notes)
        assert "mouse0.mp4 is no video that can be read" in text
        assert "mouse2.mp4 is cut short" in text or "mouse2.mp4 breaks off" in text
        assert "replace it, or move it away with its annotation" in text


def test_strict_makes_such_videos_an_error(damaged: Path) -> None:
    assert "mouse0.mp4 is no video that can be read" in problem(damaged, strict=True)


def test_nothing_left_is_an_error(folder: Path) -> None:
    for path in (folder / "Videos").iterdir():
        path.write_bytes(b"")
    assert problem(folder).count("is no video that can be read") == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with 'nothing'; its first line must name the columns frame,class"),
        ("time,class\n1,a", "begins with 'time,class'; its first line must name"),
        ("frame,class\n", "labels no frame; add rows"),
        ("frame,class\n-1,rest", "line 2: frame '-1' with class 'rest'; give a whole number"),
        ("frame,class\n1,", "line 2: frame '1' with class ''; give a whole number from 0 on"),
        ("frame,class\n1,rest,9", "line 2: 3 cells, but 2 columns"),
        ("frame,class\n1,rest\n1,walk", "frame 1 is labelled on lines 2 and 3; keep one"),
        (
            "frame,class,trial\n1,rest,a\n5,rest,a\n3,walk,b",
            "trial 'b' begins at frame 3, before trial 'a' ends at 5",
        ),
    ],
)
def test_annotation_that_makes_no_sense(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_annotation(path)
    assert says in str(caught.value)


def test_annotation_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00frame")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_annotation(tmp_path / "a.csv")


def test_class_that_no_training_video_shows_is_named() -> None:
    with pytest.raises(DataError, match="no training clip shows rear; annotate it in more videos"):
        class_weights(torch.tensor([3, 4, 0]), CLASSES, 10.0)


def test_one_video_cannot_be_split() -> None:
    with pytest.raises(DataError, match="1 video cannot be split"):
        split_by_video(split_data([[5, 5, 5]]), 0.2, 0)


# The whole way


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    call: Callable[..., Said] = lambda *words: mgt_here(monkeypatch, capsys, *words)  # noqa: E731
    return call


def test_training_on_a_folder_says_what_it_found_and_leaves_the_tables(
    folder: Path, mgt: Any, tmp_path: Path
) -> None:
    settings = ["--frame-size", SIZE, "--epochs", 1, "--num-workers", 0, "--num-gpus", 1]
    said = mgt("train", "video", "--data-dir", folder, *settings, "--batch-size", 16)
    assert said.code == 0, said.err
    assert "Found 4 unique videos with 4 total trials" in said.out
    assert "Train trials: 3, Val trials: 1 (3 and 1 videos)" in said.out
    assert "Class 0 (rest           ):     15 samples (33.33%) -> weight: 1.0000" in said.out
    assert "best f1" in said.out
    [run] = (tmp_path / "runs" / "video").iterdir()
    rows = (run / "classes.csv").read_text().splitlines()
    assert rows[0] == "class,precision,recall,f1,clips"
    assert [row.split(",")[0] for row in rows[1:]] == CLASSES
    counts = np.loadtxt(run / "confusion.csv", delimiter=",", skiprows=1, usecols=(1, 2, 3))
    assert counts.sum() == 15
    assert (run / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_folder_ends_with_code_2_before_anything_starts(tmp_path: Path, mgt: Any) -> None:
    (tmp_path / "notes.txt").write_text("no videos here")
    said = mgt("train", "video", "--data-dir", tmp_path, "--num-gpus", 1)
    assert said.code == 2
    assert "has no folder Videos" in said.err
