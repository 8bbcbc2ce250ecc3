"""Views: compared with equivalent Pillow and torchvision operations, and properties of the random ones."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision import transforms as classic

from dml_core.config import ConfigError, parse
from dml_core.data.views import batches as batches_module
from dml_core.data.views import transforms
from tests.one_view import plain_view, train_view

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def picture(height: int = 60, width: int = 80, seed: int = 0) -> Tensor:
    """Return smooth noise, since photographs are smooth."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return torch.from_numpy(np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def config(**options: Any) -> transforms.TransformConfig:
    return parse(transforms.TransformConfig, options, "transform")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_test_view_is_the_usual_pillow_pipeline(interpolation: str) -> None:
    image = picture()
    mode = classic.InterpolationMode(interpolation)
    usual = classic.Compose([classic.Resize(40, mode), classic.CenterCrop(32), classic.ToTensor(), classic.Normalize(MEAN, STD)])
    expected = usual(Image.fromarray(image.permute(1, 2, 0).numpy()))
    view = plain_view(image, config(test_resize=40, crop_size=32, interpolation=interpolation))
    # Pillow and torchvision round resized pixels by different integer arithmetic: they differ by at most one step of 255.
    assert (view - expected).abs().max() <= 1.01 / 255 / STD.min()


def test_fixed_size_ignores_the_aspect_ratio() -> None:
    assert plain_view(picture(), config(test_resize=[20, 20])).shape == (3, 20, 20)
    assert plain_view(picture(), config(test_resize=30)).shape == (3, 30, 40)


def test_scalings_by_hand() -> None:
    pixel = torch.tensor([255, 0, 51], dtype=torch.uint8)[:, None, None]
    expected = {
        "zero-one": [1.0, 0.0, 0.2],
        "minus-one-one": [1.0, -1.0, -0.6],
        "bgr-caffe": [51.0 - 104, 0.0 - 117, 255.0 - 128],
        "bgr-bvlc": [51.0 - 104, 0.0 - 117, 255.0 - 123],
        "rgb-imagenet": [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225],
    }
    for scaling, values in expected.items():
        assert plain_view(pixel, config(scaling=scaling)).flatten().tolist() == pytest.approx(values, abs=1e-5)


CROPS: list[dict[str, Any]] = [
    {"crop": "random"},
    {"crop": "random_exclusive"},
    {"crop": "padded", "padding": 4},
    {"crop": "random_resized", "crop_area": [0.16, 1.0]},
    {"crop": "random", "train_resize": [40, 40], "jitter": {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.1}},
]


@pytest.mark.parametrize("options", [{}, {"train_resize": [40, 40], "interpolation": "lanczos"}, {"flip": True}, *CROPS])
def test_views_of_a_gray_image_kept_as_one_channel_are_those_of_three(options: dict[str, Any]) -> None:
    one = picture()[:1]
    whole, kept, views = one.repeat(3, 1, 1), one.expand(3, 60, 80), config(**({"crop_size": 32} if "crop" in options else {}) | options)
    for index in range(5):
        drawn = [transforms.train_pixels(image, views, 0, 0, index) for image in (whole, kept)]
        assert torch.equal(*drawn)
        assert torch.equal(*(transforms.test_pixels(image, views) for image in (whole, kept)))


@pytest.mark.parametrize(("crop", "last"), [("random", 4), ("random_exclusive", 3)])
def test_a_random_crop_takes_every_offset_and_an_exclusive_one_all_but_the_last(crop: str, last: int) -> None:
    """The released code of heated-up softmax draws offsets 0 to 31, although offset 32 fits too."""
    places = torch.arange(100, dtype=torch.uint8).reshape(1, 10, 10).expand(3, 10, 10)
    views = config(crop=crop, crop_size=6, scaling="zero-one")
    corners = {round(float(train_view(places, views, 0, 0, index)[0, 0, 0]) * 255) for index in range(400)}
    assert corners == {10 * top + left for top in range(last + 1) for left in range(last + 1)}


CONFIGURATIONS: list[dict[str, Any]] = [
    *[{"crop_size": 32, "test_resize": [40, 40], "flip": True, **crop} for crop in CROPS],
    *[{"train_resize": 40, "test_resize": 40, "crop": "random", "crop_size": 32, "interpolation": how} for how in ("bicubic", "lanczos")],
    {"crop_to_box": True},
    {"crop_to_box": True, "crop": "random_resized", "crop_size": 24, "crop_area": [0.16, 1.0], "test_resize": 30, "flip": True},
    {"crop": "random", "crop_size": 40, "jitter": {"contrast": 0.5, "hue": 0.2}, "jitter_first": True, "flip": True},
]


def scaled_as_before(pixels: Tensor, scaling: str) -> Tensor:
    """Scale one image as before loaders gave uint8: multiply and add in place, in float32."""
    mean, std = {
        "rgb-imagenet": (MEAN * 255, STD * 255),
        "bgr-caffe": (torch.tensor([104.0, 117.0, 128.0]), torch.ones(3)),
        "bgr-bvlc": (torch.tensor([104.0, 117.0, 123.0]), torch.ones(3)),
        "zero-one": (torch.zeros(3), torch.full((3,), 255.0)),
        "minus-one-one": (torch.full((3,), 127.5), torch.full((3,), 127.5)),
    }[scaling]
    pixels = pixels.flip(0) if scaling.startswith("bgr") else pixels
    return pixels.float().mul_((1 / std)[:, None, None]).add_((-mean / std)[:, None, None])


@pytest.mark.parametrize("scaling", ["rgb-imagenet", "bgr-caffe", "bgr-bvlc", "zero-one", "minus-one-one"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_of_all_pixels_is_scaled_to_the_bits_of_each_image_alone(scaling: Any, device: str) -> None:
    """Every value in every channel at every position in a vector register."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3 * 2 * 5).reshape(2, 3, 5, 256)
    expected = torch.stack([scaled_as_before(image, scaling) for image in pixels])
    assert torch.equal(transforms.scale(pixels.to(device), scaling).cpu(), expected)


@pytest.mark.parametrize("scaling", ["rgb-imagenet", "bgr-caffe"])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("part", [1, 3 * 10**4, 2**17])
def test_loaded_batches_have_the_bits_of_views_scaled_one_by_one(
    options: dict[str, Any], scaling: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled one image, some images, or the whole batch at a time."""
    monkeypatch.setattr(batches_module, "_PART_PIXELS", part)
    views = config(**options, scaling=scaling)
    images = [picture(seed=seed) for seed in range(3)]

    class Images:
        def image(self, index: int) -> Tensor:
            return images[index]

        def box(self, index: int) -> tuple[float, float, float, float]:
            return (10.5, 5.0, 70.2, 55.0)

        def expect(self, indices: np.ndarray) -> None:
            """They are here."""

    batch = np.array([2, 0, 1, 2])
    copies = [np.array([0, 0, 0, 1])]
    ((trained, _),) = batches_module.Loader(Images()).batches([batch], batches_module.TrainView(views, 1, 2), copies)
    ((tested, _),) = batches_module.Loader(Images()).batches([batch], batches_module.TestView(views))
    for place, (index, copy) in enumerate(zip(batch, copies[0], strict=True)):
        box = Images().box(index)
        pixels = transforms.train_pixels(images[index], views, 1, 2, int(index), box, int(copy))
        assert pixels.dtype == torch.uint8
        assert torch.equal(trained[place], scaled_as_before(pixels, scaling))
        assert torch.equal(tested[place], scaled_as_before(transforms.test_pixels(images[index], views, box), scaling))


def test_box_crop_takes_the_pixels_that_the_box_touches() -> None:
    image = picture()
    view = plain_view(image, config(crop_to_box=True, scaling="zero-one"), box=(10.5, 5.0, 20.2, 100.0))
    assert torch.equal(view, transforms.scale(image[:, 5:60, 10:21], "zero-one"))
    whole = plain_view(image, config(crop_to_box=True, scaling="zero-one"), box=None)
    assert whole.shape == (3, 60, 80)


@given(st.tuples(*[st.floats(-50, 150)] * 4))
def test_any_box_leaves_at_least_a_pixel(box: tuple[float, float, float, float]) -> None:
    view = plain_view(picture(), config(crop_to_box=True), box=box)
    assert min(view.shape) >= 1


@pytest.mark.parametrize("options", CROPS)
def test_view_depends_on_seed_epoch_and_index_alone(options: dict[str, Any]) -> None:
    image, views = picture(), config(crop_size=32, flip=True, **options)
    first = train_view(image, views, 1, 2, 3)
    torch.manual_seed(99)
    np.random.seed(99)
    assert first.shape == (3, 32, 32)
    assert torch.equal(first, train_view(image, views, 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, train_view(image, views, *other))


def test_random_crop_is_a_window_and_all_windows_come() -> None:
    image = torch.arange(36, dtype=torch.uint8).reshape(1, 6, 6).expand(3, 6, 6)
    views = config(crop="random", crop_size=4, scaling="zero-one")
    corners = [round(float(train_view(image, views, 0, 0, index)[0, 0, 0]) * 255) for index in range(400)]
    expected = {row * 6 + column for row in range(3) for column in range(3)}
    assert set(corners) == expected
    assert min(corners.count(corner) for corner in expected) > 20


def test_padded_crop_brings_black_borders_and_pads_small_images() -> None:
    white = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    views = config(crop="padded", padding=4, crop_size=8, scaling="zero-one")
    shares = [float(train_view(white, views, 0, 0, index).mean()) for index in range(200)]
    assert max(shares) == 1.0
    assert min(shares) < 0.5
    assert train_view(white, config(crop="random", crop_size=12), 0, 0, 0).shape == (3, 12, 12)


def test_flip_is_every_other_view() -> None:
    image, views = picture(), config(flip=True, scaling="zero-one")
    plain = transforms.scale(image, "zero-one")
    kept = [torch.equal(train_view(image, views, 0, 0, index), plain) for index in range(400)]
    assert 160 < sum(kept) < 240
    assert torch.equal(train_view(image, views, 0, 0, kept.index(False)), plain.flip(2))


def test_random_resized_parts_have_torchvisions_statistics() -> None:
    views = config(crop="random_resized", crop_size=8, crop_area=[0.08, 1.0])
    ours = np.array([transforms._random_part(60, 80, views, transforms.view_generator(0, 0, index)) for index in range(3000)])
    torch.manual_seed(0)
    theirs = np.array([classic.RandomResizedCrop.get_params(picture(), [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)])
    assert np.allclose(ours.mean(axis=0), theirs.mean(axis=0), atol=1.2)
    assert np.allclose(ours.std(axis=0), theirs.std(axis=0), atol=1.2)


def test_part_that_cannot_fit_is_the_central_one() -> None:
    views = config(crop="random_resized", crop_size=8, crop_area=[1.0, 1.0], crop_ratio=[1.0, 1.0])
    assert transforms._random_part(20, 60, views, transforms.view_generator(0, 0, 0)) == (0, 20, 20, 20)


@pytest.mark.parametrize(("first", "constant"), [(True, False), (False, True)])
def test_contrast_is_of_the_whole_image_or_of_the_part(first: bool, constant: bool) -> None:
    """In an image half black and half white, a part within one half is unchanged by its own contrast, but not by the whole image's."""
    halves = torch.zeros(3, 8, 16, dtype=torch.uint8)
    halves[:, :, 8:] = 255
    views = config(crop="random", crop_size=2, jitter={"contrast": 0.5}, jitter_first=first, scaling="zero-one")
    parts = [train_view(halves, views, 0, 0, index) for index in range(200)]
    levels = {round(float(part[0, 0, 0]), 2) for part in parts if len(part.unique()) == 1}  # parts within one half
    assert (levels == {0.0, 1.0}) == constant


def test_jitter_moves_colours_within_its_strength() -> None:
    grey = torch.full((3, 4, 4), 100, dtype=torch.uint8)
    views = config(jitter={"brightness": 0.2}, scaling="zero-one")
    levels = [float(train_view(grey, views, 0, 0, index)[0, 0, 0]) * 255 for index in range(300)]
    assert 79 <= min(levels) < 85
    assert 115 < max(levels) <= 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "random"}, "needs crop_size"),
        ({"crop": "padded", "crop_size": 4}, "crop 'padded' needs padding above 0"),
        ({"padding": 4}, "crop is 'none', so padding has no place: set it to null"),
        ({"crop_area": [0.5, 0.1]}, "must rise"),
        ({"crop_area": [0.5, 1.5]}, "share of the image"),
        ({"jitter": {"hue": 0.6}}, "less than or equal to 0.5"),
        ({"scalling": "zero-one"}, "did you mean 'scaling'"),
    ],
)
def test_wrong_settings_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)
