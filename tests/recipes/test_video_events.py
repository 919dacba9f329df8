"""Videos with one table of events, by hand or from BORIS: seconds mean what the clock says."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multi_gpu_training.checkpoint.integrity import digest, manifest_text
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.video import VideoOptions, build
from multi_gpu_training.recipes.video.clips import VideoData
from multi_gpu_training.recipes.video.event_tables import Selection
from multi_gpu_training.recipes.video.folder import Labelling, load_folder

av = pytest.importorskip("av", reason="PyAV is not installed")

SIZE, LENGTH = 32, 40
# A camera that drops to a third of its rate after frame 15: 40 ms, then 120 ms.
STEPS = [0, *([40] * 15), *([120] * 24)]
TIMES = np.cumsum(STEPS) / 1000


def write_video(
    path: Path, seed: int = 0, height: int = SIZE, width: int = SIZE, begin: int = 0
) -> None:
    """A lossless video whose frames are shown at TIMES, each of its own brightness."""
    ground = np.random.default_rng(seed).integers(0, 40, (height, width))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.height, stream.width, stream.pix_fmt = height, width, "gray"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(np.cumsum(STEPS)):
            picture = (ground + 5 * number).clip(0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="gray")
            frame.pts, frame.time_base = int(time) + begin, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two videos of a frame rate that varies; the second one's clock begins at 5 s."""
    for number in range(2):
        write_video(tmp_path / f"mouse{number}.mkv", number, begin=5000 * number)
    return tmp_path


def load(folder: Path, letterbox: bool = True, resize: bool = False, **how: Any) -> VideoData:
    chosen = {k: how.pop(k) for k in ("unit", "subject", "ignore") if k in how}
    labelling = Labelling(selection=Selection(**chosen), **how)
    return load_folder(folder, SIZE, resize, False, letterbox=letterbox, labelling=labelling)


def problems(folder: Path, **how: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **how)
    return str(caught.value)


def table(folder: Path, text: str, name: str = "labels.csv") -> None:
    (folder / name).write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")


def labelled(data: VideoData) -> list[list[tuple[int, str]]]:
    return [
        [
            (frame, data.classes[label])
            for trial in video.trials
            for frame, label in zip(trial.frames, trial.labels, strict=True)
        ]
        for video in data.videos
    ]


def span(first: int, last: int, name: str) -> list[tuple[int, str]]:
    return [(frame, name) for frame in range(first, last + 1)]


SECONDS = """
    file,start_s,end_s,label
    mouse0.mkv,0.2,0.6,rest
    mouse0.mkv,0.60,1.32,walk
    mouse1.mkv,0.561,1.56,walk
    mouse1.mkv,2.0,2.03,rest
"""


def clips(folder: Path, text: str, **options: Any) -> Any:
    """The training and validation clips as the recipe makes them from a table."""
    table(folder, text)
    config = find_recipe("video").config({"num_workers": 0})
    chosen = {"data_dir": str(folder), "frame_size": SIZE, "width": 4, **options}
    job = build(config, VideoOptions(**chosen))
    return [part.tensors for part in (job.dataset, job.val_dataset)]


def test_seconds_with_a_varying_frame_rate_give_the_clips_of_frame_numbers_by_hand(
    folder: Path,
) -> None:
    # Frames 0-15 are shown at 0, 40, ... 600 ms, those from 16 on at 720, 840, ...
    by_hand = """
        file,start_frame,end_frame,label
        mouse0.mkv,5,14,rest
        mouse0.mkv,15,20,walk
        mouse1.mkv,15,22,walk
        mouse1.mkv,26,26,rest
    """
    from_seconds, from_frames = clips(folder, SECONDS), clips(folder, by_hand)
    for ours, theirs in zip(from_seconds, from_frames, strict=True):
        assert len(ours[0]) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    # At a constant 25 frames per second 1.32 s would be frame 33.
    table(folder, SECONDS)
    assert labelled(load(folder))[0] == span(5, 14, "rest") + span(15, 20, "walk")


def test_times_rounded_to_milliseconds_and_moments_label_the_frame_on_the_screen(
    folder: Path,
) -> None:
    table(
        folder,
        """
        video,start (s),stop (s),behaviour
        mouse0,0.0405,0.0795,rest
        mouse0,0:00:00.65,0:00:00.65,walk
        mouse1,0,99:00,rest
        """.replace("99:00", "0:04"),
    )
    found = labelled(load(folder))
    # 40.5 ms is frame 1 after rounding; 650 ms lies between frames 15 and 16.
    assert found[0] == [(1, "rest"), (15, "walk")]
    assert found[1] == span(0, LENGTH - 1, "rest")
    assert labelled(load(folder, stride=20))[1] == [(0, "rest"), (20, "rest")]


def test_a_unit_is_never_guessed(folder: Path) -> None:
    plain = "file,start,end,label\nmouse0.mkv,1,2,rest\nmouse1.mkv,1,2,walk"
    table(folder, plain)
    assert "set time_unit=seconds or time_unit=frames" in problems(folder)
    assert labelled(load(folder, unit="frames"))[0] == span(1, 2, "rest")
    # 1.080 is frame 19.
    assert labelled(load(folder, unit="seconds"))[0] == span(19, 26, "rest")
    table(folder, plain.replace("start,end", "start_s,end_s"))
    assert "time_unit=frames was asked for" in problems(folder, unit="frames")
    table(folder, plain.replace("start,end", "start_s,end_frame"))
    assert "counts frames and seconds" in problems(folder)


def test_everything_wrong_with_a_folder_is_said_in_one_round(folder: Path) -> None:
    write_video(folder / "mouse2.mkv")
    write_video(folder / "mouse3.mkv", height=48, width=64)
    (folder / "classes.txt").write_text("rest\nwalk\n")
    table(
        folder,
        """
        file,start_s,end_s,label
        mouse0.mkv,0,1,rest
        mouse0.mkv,0.5,2,walk
        mouse1.mkv,1,90,walk
        mouse1.mkv,3,1,walk
        mouse3.mkv,0,1,wlak
        mouse9.mkv,0,1,walk
        mouse1.mkv,soon,1,walk
        """,
    )
    said = problems(folder)
    for part in (
        "line 3: 'walk' in mouse0 begins at 0.5, before 'rest' of line 2 ends at 1",
        "line 4: ends at 90 s, but",
        "line 5: from '3' to '1'",
        "line 6: unknown class 'wlak'; did you mean 'walk'?",
        "line 7: no video called mouse9",
        "line 8: from 'soon'",
        "mouse2.mkv has no row in",
        "mouse3.mkv has frames of 64x48, not 32x32",
    ):
        assert part in said


@pytest.mark.parametrize("how", ["skip", "background"])
def test_videos_without_annotation_are_left_out_or_background_by_choice(
    folder: Path, how: Any
) -> None:
    write_video(folder / "mouse2.mkv")
    table(folder, SECONDS)
    assert "unlabelled=skip or unlabelled=background" in problems(folder)
    data = load(folder, unlabelled=how)
    assert any("1 videos without annotation" in note and how in note for note in data.notes)
    if how == "skip":
        assert [video.name for video in data.videos] == ["mouse0", "mouse1"]
        assert data.classes == ["rest", "walk"]
    else:
        assert data.classes == ["background", "rest", "walk"]
        # Clips of 17 frames, one beside the other.
        assert labelled(data)[2] == [(8, "background"), (25, "background")]
        (folder / "classes.txt").write_text("rest\nwalk\n")
        assert "lacks the class 'background'" in problems(folder, unlabelled=how)


# BORIS

AGGREGATED = (
    "Observation id\tObservation date\tDescription\tMedia file\tTotal length\tFPS\tSubject\t"
    "Behavior\tBehavioral category\tModifiers\tBehavior type\tStart (s)\tStop (s)\tDuration (s)\t"
    "Comment start\tComment stop"
)
WIDE = AGGREGATED.replace("Media file", "Observation type\tSource")
TABULAR = "Time\tMedia file path\tTotal length\tFPS\tSubject\tBehavior\tComment\tStatus"


def aggregated(number: int, name: str, kind: str, start: float, stop: float, who: str = "m") -> str:
    cells = [f"obs{number}", "2024", "", rf"C:\videos\mouse{number}.avi", "3.480", "25", who]
    cells += [name, "", "", kind, f"{start:.3f}", f"{stop:.3f}", "NA", "", ""]
    return "\t".join(cells)


EVENTS = [
    aggregated(0, "rest", "STATE", 0.2, 0.6),
    aggregated(0, "walk", "STATE", 0.6, 1.32),
    aggregated(1, "walk", "STATE", 0.561, 1.56),
    aggregated(1, "rest", "POINT", 2.0, 2.0),
]


def test_exports_of_boris_give_the_clips_of_a_table_by_hand(folder: Path) -> None:
    table(folder, SECONDS)
    wanted = labelled(load(folder))
    (folder / "labels.csv").unlink()
    (folder / "boris.tsv").write_text("\n".join([AGGREGATED, *EVENTS]))
    assert labelled(load(folder)) == wanted
    # Newer versions name the player in a column Source, and may be exported as CSV.
    newer = "\n".join([WIDE, *EVENTS]).replace(r"C:\videos" + "\\", "MEDIA\tplayer #1:/v/")
    (folder / "boris.tsv").write_text(newer)
    assert labelled(load(folder)) == wanted
    (folder / "boris.tsv").unlink()
    (folder / "boris.csv").write_text(newer.replace("\t", ","))
    assert labelled(load(folder)) == wanted
    (folder / "boris.csv").unlink()
    # Tabular events: a file per observation, with facts about it above its header.
    (folder / "Annotations").mkdir()
    for number in range(2):
        rows = []
        for event in EVENTS[2 * number : 2 * number + 2]:
            _, _, _, file, total, fps, who, name, _, _, kind, start, stop, *_ = event.split("\t")
            for time, status in [(start, "START"), (stop, "STOP")]:
                status = "POINT" if kind == "POINT" else status
                rows.append("\t".join([time, file, total, fps, who, name, "", status]))
        rows = list(dict.fromkeys(rows))
        facts = ["Observation id\tobs", "", "Time offset (s)\t0.0", "", TABULAR]
        path = folder / "Annotations" / f"mouse{number}.tsv"
        path.write_text("\n".join([*facts, *rows]))
    assert labelled(load(folder)) == wanted


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*EVENTS, aggregated(0, "sniff", "POINT", 0.3, 0.3)], "ignore=NAME"),
        ([*EVENTS, aggregated(0, "rest", "STATE", 0.3, 1.4, "other")], "subject=NAME"),
        ([e.replace("3.480", "9.000") for e in EVENTS], "one observation per video"),
        ([e.replace("mouse0.avi", "mouse0.avi;x.avi") for e in EVENTS], "several media files"),
    ],
    ids=["point within a state", "two subjects", "several media", "media in a list"],
)
def test_what_a_boris_export_leaves_open_is_refused(
    folder: Path, rows: list[str], words: str
) -> None:
    (folder / "boris.tsv").write_text("\n".join([AGGREGATED, *rows]))
    assert words in problems(folder)


def test_a_subject_is_chosen_and_a_behaviour_left_out(folder: Path) -> None:
    more = [
        aggregated(0, "sniff", "POINT", 0.3, 0.3),
        aggregated(0, "rest", "STATE", 0.3, 1.4, "other"),
    ]
    (folder / "boris.tsv").write_text("\n".join([AGGREGATED, *EVENTS, *more]))
    found = labelled(load(folder, subject="m", ignore=("sniff",)))
    assert found[0] == span(5, 14, "rest") + span(15, 20, "walk")
    assert "subject=nobody: it has m, other" in problems(folder, subject="nobody")


def test_an_unpaired_state_and_a_time_offset_are_refused(folder: Path) -> None:
    rows = [
        "1.0\tmouse0.mkv\t3.48\t25\tm\trest\t\tSTART",
        "0.5\tmouse1.mkv\t3.48\t25\tm\tx\t\tSTOP",
    ]
    text = "\n".join(["Observation id\to", "Time offset (s)\t5.0", TABULAR, *rows])
    (folder / "boris.tsv").write_text(text)
    said = problems(folder)
    assert "line 4: 'rest' has no STOP" in said
    assert "line 5: STOP of 'x', which has not begun" in said
    assert "a time offset of 5.0 s" in said


# Scaling


def test_a_wide_video_keeps_its_shape_between_bars(tmp_path: Path) -> None:
    for number in range(2):
        write_video(tmp_path / f"mouse{number}.mkv", height=32, width=64)
    table(tmp_path, SECONDS)
    boxed = load(tmp_path, resize=True)
    assert any(note.startswith("letterboxed: 2 videos") for note in boxed.notes)
    frames = boxed.videos[0].frames[:]
    assert frames.shape == (LENGTH, SIZE, SIZE)
    assert (frames[:, :8] == 128).all() and (frames[:, 24:] == 128).all()
    assert not (frames[:, 8:24] == 128).all((1, 2)).any()
    stretched = load(tmp_path, resize=True, letterbox=False).videos[0].frames[:]
    assert not (stretched[:, :8] == 128).all()


def test_a_run_that_stretched_its_videos_goes_on_stretching_and_a_new_one_does_not(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2):
        write_video(data / f"mouse{number}.mkv", number, height=32, width=64)
    table(data, SECONDS)
    recipe = find_recipe("video")
    quiet = {"device": "cpu", "progress": "off", "tensorboard": False, "num_workers": 0}
    quiet |= {"save_dir": str(tmp_path / "runs"), "run_name": "r", "batch_size": 32}

    def train(epochs: int, resume: str | None = None, **options: Any) -> str:
        config = recipe.config({**quiet, "epochs": epochs, "resume": resume})
        chosen = {"data_dir": str(data), "frame_size": SIZE, "width": 4, "resize": True}
        recipe.train(config, recipe.options(**chosen, **options))
        saved = tmp_path / "runs" / "video" / "r" / "checkpoints"
        manifests = sorted(saved.glob("*/manifest.json"))
        return str(json.loads(manifests[-1].read_text())["options"]["scaling"])

    assert train(1, scaling="stretch") == "stretch"
    # Checkpoints of version 0.1 know nothing of the option.
    for path in tmp_path.glob("runs/video/r/checkpoints/step-*/manifest.json"):
        facts = json.loads(path.read_text())
        del facts["options"]["scaling"]
        path.write_text(manifest_text({**facts, "sha256": digest(facts)}))
    assert train(2, resume="auto") == "stretch"
    assert train(3, resume="auto") == "stretch"
    config = recipe.config({**quiet, "run_name": "new"})
    options = VideoOptions(data_dir=str(data), frame_size=SIZE, width=4, resize=True)
    build(config, options)
    assert options.scaling == "letterbox"


def test_options_of_folders_are_refused_for_rendered_videos() -> None:
    with pytest.raises(ConfigError, match="unlabelled=skip means nothing for rendered videos"):
        build(find_recipe("video").config({}), VideoOptions(videos=10, unlabelled="skip"))


# A real video


MOUSE = Path(__file__).parents[3] / "shared" / "data" / "mouse-video" / "open-field.mp4"


@pytest.mark.skipif(not MOUSE.is_file(), reason=f"{MOUSE} is not on this machine")
def test_a_filmed_mouse_is_labelled_by_the_clock(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"mouse{number}.mp4").symlink_to(MOUSE)
    rows = [f"mouse{n}.mp4,{start},{start + 1},part{n}" for n in range(2) for start in (2, 10)]
    table(tmp_path, "\n".join(["file,start_s,end_s,label", *rows]))
    data = load(tmp_path, resize=True, stride=5)
    with av.open(str(MOUSE)) as container:
        times = [round(frame.time, 3) for frame in container.decode(video=0)]  # 1.99998 and such
    inside = [n for n, time in enumerate(times) if 2 <= time < 3] + [
        n for n, time in enumerate(times) if 10 <= time < 11
    ]
    found = [frame for frame, _ in labelled(data)[0]]
    assert found == [*inside[: len(inside) // 2 : 5], *inside[len(inside) // 2 :: 5]]
    assert (data.videos[0].frames[0][:4] == 128).all()  # 640x480 between bars
