"""No file is lost: outputs that are inputs, other outputs or no files are refused before anything is computed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from command_line import case_in, said_by
from PIL import Image
from said import one_error, refused

from models import conv_net, feed_for
from onnxcalib import OutputError, Recipe, quantize, write_report
from onnxcalib.model.io import write_model
from onnxcalib.recipe import RangeMethod

QUICK = Recipe(ranges=RangeMethod.MINMAX)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model with external data, calibration and test data, a recipe, a cost table and a target."""
    case_in(tmp_path, 8, 8)
    outside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 64}
    onnx.save(conv_net(), tmp_path / "large.onnx", **outside)
    (tmp_path / "recipe.toml").write_text('ranges = "minmax"\n')
    (tmp_path / "target.toml").write_text('like = "ort"\n')
    (tmp_path / "costs.csv").write_text("layer,precision,cost\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


QUANTIZE = ("quantize", "model.onnx", "-c", "data.npz")
MIX = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--compression", "0.6")
REFUSED = {
    "the model": ((*QUANTIZE, "-o", "model.onnx"), "model.onnx"),
    "the data": ((*QUANTIZE, "-o", "data.npz"), "data.npz"),
    "external data": (("quantize", "large.onnx", "-c", "data.npz", "-o", "weights.bin"), "weights.bin"),
    "the recipe": ((*QUANTIZE, "-o", "recipe.toml", "--recipe", "recipe.toml"), "recipe.toml"),
    "a target": ((*QUANTIZE, "-o", "target.toml", "--target", "target.toml"), "target.toml"),
    "a cost table": ((*QUANTIZE, *MIX, "--cost", "ms=costs.csv", "-o", "costs.csv"), "costs.csv"),
    "test data": ((*QUANTIZE, "-o", "test.npz", "--report", "x.html", "--test-data", "test.npz"), "test.npz"),
    "the report's numbers": ((*QUANTIZE, "-o", "x.json", "--report", "x.html"), "x.json"),
    "the report itself": ((*QUANTIZE, "-o", "x.html", "--report", "x.html"), "x.html"),
    "a figure": ((*QUANTIZE, "-o", "x_figures", "--report", "x.html"), "x_figures"),
    "the run directory": ((*QUANTIZE, "-o", "x.onnx", "--run-dir", "x.onnx"), "x.onnx"),
    "a folder": ((*QUANTIZE, "-o", "."), "."),
    "nothing": ((*QUANTIZE, "-o", ""), "folder"),
    "a device": ((*QUANTIZE, "-o", os.devnull), os.devnull),
    "too long a name": ((*QUANTIZE, "-o", "a" * 300), "long"),
    "a curve on its model": (("curve", "model.onnx", "-c", "data.npz", "--bits", "w4a4,w8a8", "-o", "m.csv"), "m.csv"),
    "a curve and its plot": (
        ("curve", "model.onnx", "-c", "data.npz", "--bits", "w4a4,w8a8", "-o", "l.csv", "--plot", "l.png"), "l.csv",
    ),
    "sensitivities": (("sensitivity", "model.onnx", "-c", "data.npz", "--bits", "w4a4,w8a8", "-o", "m.csv"), "m.csv"),
    "an assignment": (("allocate", "costs.csv", "--compression", "0.5", "-o", "costs.csv"), "costs.csv"),
    "a comparison": (("compare", "model.onnx", "large.onnx", "-d", "data.npz", "--csv", "m.csv"), "m.csv"),
    "a new recipe": (("recipe", "init", "target.toml"), "target.toml"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_output_in_the_way_is_refused(what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, named = REFUSED[what]
    (folder / "m.csv").symlink_to("model.onnx")  # which commands that write tables would otherwise not take
    (folder / "l.png").symlink_to("l.csv")
    before = contents(folder)
    code, _, err = said_by(capsys, *command)
    assert code == 6, err
    one_error(err, named)
    assert contents(folder) == before


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("name", ["model.onnx", "data.npz"])
def test_an_input_by_another_name_is_refused(link: Callable[[Path, Path], None], name: str, folder: Path) -> None:
    link(folder / name, folder / "other.onnx")
    before = contents(folder)
    with refused(OutputError, "other.onnx", name):
        quantize("model.onnx", "data.npz", QUICK, output="other.onnx")
    assert contents(folder) == before


def test_pipes_and_sockets_are_left_alone(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with refused(OutputError, "pipe"):
        quantize("model.onnx", "data.npz", QUICK, output="pipe")
    with refused(OutputError, "pipe"):
        write_model(conv_net(), "pipe")
    assert (folder / "pipe").is_fifo()


def test_an_image_of_the_calibration_folder_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "images" / "cats").mkdir(parents=True)
    Image.new("RGB", (12, 12)).save(folder / "images" / "cats" / "1.png")
    shutil.copy("model.onnx", folder / "images" / "cats" / "old.onnx")
    command = ("curve", "model.onnx", "-c", "images", "--bits", "w4a4,w8a8", "-o", "c.csv", "--plot")
    before = contents(folder)
    code, _, err = said_by(capsys, *command, "images/cats/1.png")
    assert code == 6
    one_error(err, "images/cats/1.png")
    assert contents(folder) == before
    # What lies there and is no data may be written again.
    quantize("model.onnx", feed_for(conv_net(), 8), QUICK, output="images/cats/old.onnx")


def test_a_result_is_not_saved_over_what_it_was_made_from(folder: Path) -> None:
    result = quantize("large.onnx", "data.npz", QUICK)
    before = contents(folder)
    for name in ("large.onnx", "weights.bin", "data.npz"):
        with refused(OutputError, name):
            result.save(name)
    with refused(OutputError, "data.json"):
        (folder / "data.json").symlink_to("data.npz")
        write_report(result, "large.onnx", "data.npz", "data.html")
    (folder / "data.json").unlink()
    assert contents(folder) == before
    result.save("small.onnx")
    result.save("small.onnx")  # its own output may be written again
    assert onnx.load(folder / "small.onnx") == result.model


def test_a_link_gives_way_and_what_it_points_to_stays(folder: Path) -> None:
    (folder / "precious").write_text("precious")
    (folder / "small.onnx").symlink_to("precious")
    quantize("model.onnx", "data.npz", QUICK, output="small.onnx")
    assert (folder / "precious").read_text() == "precious"
    assert not (folder / "small.onnx").is_symlink()
    onnx.checker.check_model(str(folder / "small.onnx"))


def test_a_file_and_its_weights_are_of_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies between the two renames leaves no old model beside new weights."""
    write_model(conv_net(), folder / "small.onnx", limit=0)
    rename = Path.replace

    def dies(self: Path, target: Path) -> Path:
        if target.name == "small.onnx":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        write_model(conv_net(), folder / "small.onnx", limit=0)
    assert not (folder / "small.onnx").exists()
    assert not list(folder.glob("*.part"))


def test_a_name_of_the_longest_length_is_written(folder: Path) -> None:
    longest = folder / f"{'a' * 250}.onnx"
    write_model(conv_net(), longest)
    assert onnx.load(longest) == conv_net()
