"""The image recipe on users' own images: read in every layout, decoded, checked, split."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_folders import COLOURS, Image, corrupt, picture, write_images

from multi_gpu_training.data.randomness import SampleRandom
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.image.image_data import Moved
from multi_gpu_training.recipes.recipe import Job, find_recipe

SIDE = 16


def build(folder: Path, seed: int = 0, **options: Any) -> Job:
    recipe = find_recipe("image")
    torch.manual_seed(0)
    chosen = recipe.options(**{"data_dir": str(folder), "image_size": SIDE, **options})
    return recipe.build(recipe.config({"device": "cpu", "seed": seed}, chosen), chosen)


def problem(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(folder, **options)
    return str(caught.value)


def samples(job: Job) -> dict[str, list[tuple[str, int]]]:
    """File name and class number of each sample, by part."""
    return {
        part: sorted(
            ("/".join(Path(ref.path).parts[-2:]), number)
            for ref, number in zip(data.refs, data.labels, strict=True)
        )
        for part, data in (("train", job.dataset), ("val", job.val_dataset))
    }


def said(job: Job) -> str:
    return "\n".join(job.callbacks[0].lines)  # type: ignore[attr-defined]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_images(tmp_path / "photos")


# Layouts


def test_folders_and_every_kind_of_table_give_the_same_samples(tmp_path: Path) -> None:
    """Training and validation images by folder, by tables, and by one table with a split."""
    parts = tmp_path / "parts"
    write_images(parts / "train", 4)
    write_images(parts / "valid", 2, start=10)
    (parts / "train" / "red" / "notes.txt").write_text("not an image")
    (parts / "train" / "red" / "._00.png").write_bytes(b"of macOS")
    expected = samples(build(parts))
    assert [len(expected[part]) for part in ("train", "val")] == [12, 6]
    assert {number for _, number in expected["train"]} == {0, 1, 2}
    rows = {
        part: [
            (file, label)
            for label in COLOURS
            for file in sorted((parts / part / label).glob("[!.]*[gp]"))
        ]
        for part in ("train", "valid")
    }
    both = [(part, file.relative_to(parts), label) for part, r in rows.items() for file, label in r]
    tables = {
        "a.csv": ["path,label,split", *(f"{file},{label},{part}" for part, file, label in both)],
        "b.tsv": ["Class\tFile", *(f"{b}\t{a}" for part, a, b in both if part == "train")],
        "c.jsonl": [
            json.dumps({"split": part, "file_name": str(file), "label": label})
            for part, file, label in both
        ],
    }
    for name, lines in tables.items():
        (parts / name).write_text("\n".join(lines))
        found = samples(build(parts / name))
        if name == "b.tsv":  # without a split, everything is for training, and divided
            assert sorted(found["train"] + found["val"]) == expected["train"]
        else:
            assert found == expected
        (parts / name).unlink()
    # metadata.csv beside the images, as Hugging Face has it; the names of folders mean nothing.
    for part in ("train", "valid"):
        lines = [f"{f.relative_to(parts / part)},{label}" for f, label in rows[part]]
        (parts / part / "metadata.csv").write_text("\n".join(["file_name,label", *lines]))
    assert samples(build(parts)) == expected


def test_images_are_held_out_by_the_seed_of_every_class_alike(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 10)
    first, again, other = (samples(build(folder, seed, val_share=0.2)) for seed in (0, 0, 1))
    assert first == again != other
    assert [number for _, number in sorted(first["val"], key=lambda one: one[1])] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert len({*first["train"], *first["val"]}) == 30
    (tmp_path / "photos" / "single").mkdir()
    picture("red", 0).save(tmp_path / "photos" / "single" / "only.png")
    job = build(folder)
    assert ("single/only.png", 3) in samples(job)["train"]
    assert "not among the validation images: single" in said(job)


def test_test_images_validate_only_where_nothing_else_does(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 2)
    write_images(tmp_path / "test", 2, start=20)
    job = build(tmp_path)
    assert len(job.val_dataset) == 6
    assert "validation with the test images" in said(job)
    write_images(tmp_path / "val", 1, start=40)
    job = build(tmp_path)
    assert len(job.val_dataset) == 3
    assert "6 test images are left alone" in said(job)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_images(tmp_path / "toys", 2)
    (tmp_path / "toys" / "red").rename(tmp_path / "toys" / "train")
    facts = build(tmp_path / "toys").states["images"].state_dict()
    assert facts["classes"] == ["blue", "green", "train"]


def test_numbered_classes_are_ordered_as_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        (tmp_path / str(number)).mkdir()
        for copy in range(2):
            picture("red", copy).save(tmp_path / str(number) / f"{copy}.png")
    assert build(tmp_path).states["images"].state_dict()["classes"] == ["2", "9", "10"]


# Wrong folders and tables


def test_everything_wrong_with_a_folder_is_said_at_once(photos: Path) -> None:
    (photos / "empty").mkdir()
    picture("red", 0).save(photos / "loose.png")
    message = problem(photos)
    assert "empty has no image" in message
    assert "images outside of its class folders (loose.png)" in message


def test_folders_that_are_no_dataset(tmp_path: Path) -> None:
    assert "is not a folder; set it to a folder of images" in problem(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("notes")
    assert "no folder per class and no table (it holds notes.txt)" in problem(tmp_path)
    assert "is not a table" in problem(tmp_path / "notes.txt")
    write_images(tmp_path / "val", 1)
    assert "has val but no folder train" in problem(tmp_path)
    (tmp_path / "val").rename(tmp_path / "train")
    shutil.rmtree(tmp_path / "train" / "red")
    shutil.rmtree(tmp_path / "train" / "blue")
    assert "all training images are of the class 'green'" in problem(tmp_path)
    write_images(tmp_path / "val", 1)
    assert "the part val has the class blue, red, which no training image has" in problem(tmp_path)


def test_everything_wrong_with_a_table_is_said_at_once(photos: Path) -> None:
    table = photos / "labels.csv"
    lines = [
        "path,label,split",
        "red/00.png,red,",
        '"no\nsuch.png",red,',
        "red/01.jpg,,",
        "red/02.webp,a,dev2",
    ]
    table.write_text("\n".join([*lines, "red/00.png,blue,"]))
    message = problem(photos)
    assert "line 3: " in message and "such.png does not exist" in message
    assert "line 5: there is no label" in message
    assert "line 6: split='dev2' is unknown" in message
    assert f"line 7: red/00.png is in {table}, line 2 already" in message
    table.write_text("path,kind\nred/00.png,red\n")
    assert "has the columns path, kind" in problem(photos)
    rows = [
        f"{label}/0{n}{end},{label}" for label in COLOURS for n, end in ((0, ".png"), (1, ".jpg"))
    ]
    table.write_text("\n".join(["path,kind", *rows]))
    assert len(samples(build(photos, label_column="kind"))["train"]) == 3
    table.unlink()
    assert "label_column='kind' is for tables" in problem(photos, label_column="kind")


def test_options_that_would_do_nothing_are_an_error(photos: Path) -> None:
    recipe = find_recipe("image")
    with pytest.raises(ConfigError) as caught:
        recipe.build(recipe.config({}), recipe.options(corrupt="skip", from_scratch=True))
    assert "corrupt=skip is for image files" in str(caught.value)
    assert "from_scratch=True is for a model from elsewhere" in str(caught.value)
    assert "both choose a model" in problem(photos, mode="cnn", model="vit")
    assert "drop check_images=none" in problem(photos, corrupt="skip", check_images="none")
    assert "flip=true does nothing" in problem(photos, augment=False, flip=True)


# Decoding


def write_one(folder: Path, image: Any, name: str, **more: Any) -> torch.Tensor:
    """The pixels that the recipe makes of an image that stands beside two others."""
    if not folder.exists():
        write_images(folder, 2)
    image.save(folder / "red" / name, **more)
    job = build(folder, fit="stretch")
    for data in (job.dataset, job.val_dataset):
        for index, ref in enumerate(data.refs):
            if ref.path.endswith(name):
                return data[index][0]
    raise AssertionError(name)


def test_all_sizes_and_modes_become_bytes_of_one_size(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    colour = Image.new("RGB", (30, 50), (200, 100, 50))
    expected = torch.tensor([200, 100, 50]).view(3, 1, 1).expand(3, SIDE, SIDE)
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff"):
        found = write_one(folder, colour, name)
        assert found.dtype == torch.uint8
        assert int((found.int() - expected).abs().max()) <= 4  # of JPEG and WebP
    grey = Image.new("L", (20, 20), 77)
    assert bool((write_one(folder, grey, "b.png") == 77).all())
    assert bool((write_one(folder, grey.convert("1"), "c.png") >= 0).all())
    # 16 bits: 0x4d00 is 77 of 255, not white.
    deep = Image.fromarray(np.full((20, 20), 0x4D00, dtype=np.uint16))
    assert bool((write_one(folder, deep, "d.png") == 77).all())
    # Transparent pixels are white, whatever colour they hide; with and without a palette.
    clear = Image.new("RGBA", (20, 20), (1, 2, 3, 0))
    assert bool((write_one(folder, clear, "e.png") == 255).all())
    assert bool((write_one(folder, clear.convert("LA"), "f.png") == 255).all())
    assert bool((write_one(folder, grey.convert("P"), "g.png", transparency=77) == 255).all())
    ink = write_one(folder, Image.new("CMYK", (20, 20), (0, 0, 0, 255)), "h.jpg")
    assert int(ink.max()) <= 4


def test_photos_stand_upright(tmp_path: Path) -> None:
    pixels = np.zeros((20, 20, 3), dtype=np.uint8)
    pixels[:, :10] = 255  # left half white; turned by 90 degrees, it is at the top
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6
    found = write_one(tmp_path / "photos", image, "turned.png", exif=exif)
    assert int(found[:, :6].min()) > 200
    assert int(found[:, -6:].max()) < 50


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_fit_crops_pads_or_stretches(tmp_path: Path, fit: str) -> None:
    pixels = np.zeros((20, 60, 3), dtype=np.uint8)
    pixels[:, 20:40] = 255  # a white square in the middle of a black band
    for label in ("one", "two"):
        (tmp_path / label).mkdir()
        for number in range(2):
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    image = build(tmp_path, fit=fit).dataset[0][0]
    assert image.shape == (3, SIDE, SIDE)
    middle = SIDE // 2
    assert int(image[0, middle, middle]) == 255
    assert (int(image[0, middle, 1]) > 200) == (fit == "crop")
    assert (int(image[0, 1, middle]) > 200) == (fit != "pad")


def test_a_pretrained_models_own_processor_gives_the_same_pixels(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_images(tmp_path / "photos", 3)
    processors = {
        "vit": {"size": {"height": 20, "width": 24}, "resample": 2},
        "clip": {
            "size": {"shortest_edge": 30},
            "crop_size": {"height": 24, "width": 24},
            "do_center_crop": True,
        },
        "convnext": {"size": {"shortest_edge": 24}, "crop_pct": 0.8},
    }
    kinds = {
        "vit": "ViTImageProcessor",
        "clip": "CLIPImageProcessor",
        "convnext": "ConvNextImageProcessor",
    }
    from multi_gpu_training.recipes.image.image_classifier import Asked, read_preprocessing
    from multi_gpu_training.recipes.image.image_decoding import decode
    from multi_gpu_training.recipes.image.image_list import ImageRef
    from multi_gpu_training.recipes.image.image_model import NormaliseChannels

    for name, facts in processors.items():
        where = tmp_path / name
        where.mkdir()
        facts = {**facts, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
        facts["image_processor_type"] = kinds[name]
        (where / "preprocessor_config.json").write_text(json.dumps(facts))
        for kind in (f"{kinds[name]}Pil", kinds[name]):
            if hasattr(transformers, kind):
                processor = getattr(transformers, kind).from_pretrained(where)
                break
        to = read_preprocessing(Asked(str(where), {}), None, None)
        file = folder / "red" / "00.png"
        ours = NormaliseChannels(to.mean, to.std)(decode(ImageRef(str(file)), to)[None])
        theirs = processor(Image.open(file).convert("RGB"), return_tensors="np")["pixel_values"]
        assert ours.shape == theirs.shape
        # One step of a byte, by another order of rounding.
        assert float(np.abs(ours.numpy() - theirs).max()) <= 1.01 / 255 / 0.2, name


def test_colour_images_are_moved_as_a_whole() -> None:
    image = torch.arange(3 * 36, dtype=torch.uint8).view(3, 6, 6) + 1
    batch = [image.expand(300, 3, 6, 6), torch.zeros(300)]
    moved = Moved(1, flip=True)(batch, SampleRandom(torch.arange(300), 0))[0]
    grey = [
        Moved(1, flip=True)([batch[0][:, c], batch[1]], SampleRandom(torch.arange(300), 0))[0]
        for c in range(3)
    ]
    assert torch.equal(moved, torch.stack(grey, 1))
    assert len({tuple(one.flatten().tolist()) for one in moved}) == 18


# Corrupt files


def test_all_corrupt_files_are_named_before_training(photos: Path) -> None:
    broken = [corrupt(photos / "red" / "00.png"), corrupt(photos / "blue" / "01.jpg", 0.7)]
    broken.append(corrupt(photos / "green" / "02.webp", 0.6))
    (photos / "red" / "03.png").write_bytes(b"")
    (photos / "red" / "06.png").write_text("<html>404</html>")
    broken += [photos / "red" / "03.png", photos / "red" / "06.png"]
    message = problem(photos)
    assert "5 of 24 images cannot be used" in message
    for path in broken:
        assert f"{path} cannot be decoded" in message
    job = build(photos, corrupt="skip")
    assert len(job.dataset) + len(job.val_dataset) == 19
    left = {name for part in samples(job).values() for name, _ in part}
    assert not left & {"/".join(path.parts[-2:]) for path in broken}
    assert "skipped 5 of 24 images" in said(job)
    for path in broken:
        assert str(path) in said(job)


def test_what_was_checked_is_not_checked_again_until_a_file_changes(photos: Path) -> None:
    assert "24 images, decoded in" in said(build(photos))
    assert "24 images, known from before" in said(build(photos))
    corrupt(photos / "red" / "00.png")
    assert "1 of 24 images cannot be used" in problem(photos)
    picture("red", 0).save(photos / "red" / "00.png")
    assert "24 images, decoded in" in said(build(photos))
    (photos / ".image-check.json").write_text("{")
    assert "24 images, decoded in" in said(build(photos))


def test_an_unchecked_corrupt_file_is_named_when_it_is_met(photos: Path) -> None:
    broken = corrupt(photos / "red" / "00.png")
    job = build(photos, check_images="none")
    assert "24 images are not checked beforehand" in said(job)
    with pytest.raises(DataError, match="set corrupt=skip to leave such images out") as caught:
        for data in (job.dataset, job.val_dataset):
            for index in range(len(data)):
                data[index]
    assert str(broken) in str(caught.value)


def test_a_class_that_is_corrupt_as_a_whole_is_an_error(photos: Path) -> None:
    for file in (photos / "red").iterdir():
        corrupt(file, 0.3)
    assert "no image of the class red can be decoded" in problem(photos, corrupt="skip")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write everything")
def test_a_file_that_may_not_be_read_is_not_skipped_as_corrupt(photos: Path) -> None:
    (photos / "red" / "00.png").chmod(0)
    assert "cannot be read (Permission denied)" in problem(photos, corrupt="skip")


def test_missing_pillow_says_how_to_install_it(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "pip install 'multi-gpu-training[image]'" in problem(photos)


# Datasets of Hugging Face


def test_datasets_of_hugging_face_say_which_extra_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'multi-gpu-training[image-arrow]'" in problem(tmp_path)


def test_arrow_and_parquet_datasets_give_the_samples_of_their_folder(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    folder = write_images(tmp_path / "photos", 4)
    classes = ["red", "green", "blue"]  # not by the alphabet: the dataset says the order
    files = [(file, label) for label in COLOURS for file in sorted((folder / label).iterdir())]
    features = {"img": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": classes}}
    table = arrow.table(
        {
            "img": [{"bytes": file.read_bytes(), "path": file.name} for file, _ in files],
            "kind": [classes.index(label) for _, label in files],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    for name in ("data-0.arrow", "cache-1.arrow"):  # what `datasets` has cached does not count
        with (
            arrow.OSFile(str(saved / name), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(table)
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    pyarrow.parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    plain = build(folder)
    for root in (tmp_path / "saved", tmp_path / "hub"):
        job = build(root)
        assert job.states["images"].state_dict()["classes"] == classes
        assert (len(job.dataset), len(job.val_dataset)) == (9, 3)
        pixels, number = job.dataset[0]
        ref = job.dataset.refs[0]
        file, label = files[ref.row]
        index = [Path(one.path).name + Path(one.path).parent.name for one in plain.dataset.refs]
        assert classes[number] == label
        if file.name + label in index:
            assert torch.equal(pixels, plain.dataset[index.index(file.name + label)][0])
    corrupted = [{"bytes": b"no image", "path": None}, *table.column("img").to_pylist()[1:]]
    broken = table.set_column(0, "img", arrow.array(corrupted, table.schema.field("img").type))
    pyarrow.parquet.write_table(broken, hub / "train-00000-of-00001.parquet")
    assert "train-00000-of-00001.parquet, row 0 cannot be decoded" in problem(tmp_path / "hub")


def test_links_in_a_circle_and_names_that_are_not_utf_8_are_refused(photos: Path) -> None:
    (photos / "red" / "again").symlink_to("../../photos/red")
    assert "leads back to a folder above it" in problem(photos)
    (photos / "red" / "again").unlink()
    (photos / os.fsdecode(b"\xff")).mkdir()
    shutil.copy(next((photos / "red").iterdir()), photos / os.fsdecode(b"\xff"))
    assert "not text in UTF-8; rename" in problem(photos)


def test_a_linked_folder_of_another_disk_is_read(photos: Path, tmp_path: Path) -> None:
    before = samples(build(photos))
    (photos / "red").rename(tmp_path / "elsewhere")
    (photos / "red").symlink_to(tmp_path / "elsewhere")
    assert samples(build(photos)) == before
