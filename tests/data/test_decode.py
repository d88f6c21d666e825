"""Compressed images to pixels: odd kinds, windows decoded no further than needed, files that do harm."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Augment, CorruptExample
from jaxmpi.data.decode import _without_rows_below as without_rows_below
from jaxmpi.data.decode import decoded, encoded_again, opened, stretched, window

GREY = (np.arange(24 * 32).reshape(24, 32) // 3).astype(np.uint8)
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)
PALETTE = Image.fromarray(COLOUR).quantize(16)
PALETTE_PIXELS = np.asarray(PALETTE.convert("RGB"))


def blob(image: Image.Image, form: str, **kwargs) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **kwargs)
    return file.getvalue()


def photograph(**kwargs) -> bytes:
    """A JPEG of 90 x 120 px that is smooth, with three colours that differ."""
    rows, columns = np.mgrid[0:90, 0:120]
    pixels = np.stack([rows * 2, columns * 2, 128 + 100 * np.sin(rows / 9) * np.cos(columns / 7)], axis=-1)
    return blob(Image.fromarray(pixels.astype(np.uint8)), "JPEG", quality=90, **kwargs)


FRAMES = {"save_all": True, "append_images": [Image.fromarray(255 - GREY)]}
ODD = {
    "grey jpeg": (Image.fromarray(GREY), "JPEG", {"quality": 95}, GREY),
    "grey png": (Image.fromarray(GREY), "PNG", {}, GREY),
    "16-bit png": (Image.fromarray(GREY.astype(np.uint16) * 256 + 7), "PNG", {}, GREY),
    "cmyk jpeg": (Image.fromarray(COLOUR).convert("CMYK"), "JPEG", {"quality": 95}, COLOUR),
    "rgba png": (Image.fromarray(COLOUR).convert("RGBA"), "PNG", {}, COLOUR),
    "grey with alpha": (Image.fromarray(GREY).convert("LA"), "PNG", {}, GREY),
    "palette": (PALETTE, "PNG", {}, PALETTE_PIXELS),
    "palette, alpha": (PALETTE, "PNG", {"transparency": bytes(range(16))}, PALETTE_PIXELS),
    "1-bit": (Image.fromarray(GREY > 99), "PNG", {}, (GREY > 99) * np.uint8(255)),
    "animated": (Image.fromarray(GREY), "PNG", FRAMES, GREY),
}


class TestDecoded:
    @pytest.mark.parametrize("kind", ODD)
    def test_odd_images_become_three_channels(self, kind):
        made, form, options, expected = ODD[kind]
        image = decoded(blob(made, form, **options), channels=3, resize=0)
        assert (image.shape, image.dtype) == ((24, 32, 3), np.uint8)
        expected = np.broadcast_to(expected.reshape(24, 32, -1), image.shape).astype(int)
        assert np.abs(image.astype(int) - expected).mean() <= 6  # JPEG is lossy

    @pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I;16B", "TIFF"), ("I;16", "PPM")])
    def test_of_16_bits_a_pixel_the_highest_8_are_taken(self, mode, kind):
        pixels = (GREY.astype(np.uint16) * 256 + 7).astype(">u2" if mode == "I;16B" else "<u2")
        image = Image.frombytes(mode, (32, 24), pixels.tobytes())
        np.testing.assert_array_equal(decoded(blob(image, kind), 1, 0)[..., 0], GREY)

    @pytest.mark.parametrize("pixels", [GREY / np.float32(255), GREY.astype(np.int32) * 1000], ids=["F", "I"])
    @pytest.mark.parametrize("way", [lambda found: decoded(found, 3, 0), lambda found: encoded_again(found, 8, 90)])
    def test_an_image_of_32_bits_a_pixel_is_refused_by_its_mode(self, pixels, way):
        image = Image.fromarray(pixels)
        with pytest.raises(UsageError, match=f"mode {image.mode} "):
            way(blob(image, "TIFF"))

    @pytest.mark.parametrize("form", ["PNG", "JPEG"])
    def test_an_extreme_aspect_is_not_scaled_whatever_it_takes(self, form):
        line, augment = Image.new("RGB", (30000, 1)), Augment(Data(resize=256, crop=224), True, 0)
        with pytest.raises(CorruptExample, match=r"line\.png \(example 7\) .*1 x 30000 px"):
            augment.encoded(blob(line, form), 0, 7, "line.png")
        with pytest.raises(UsageError, match="1 x 30000 px"):  # as when packed
            encoded_again(blob(line, form), 256, 90)
        with pytest.raises(UsageError, match=r"array\[7\]: got 1 x 30000 px"):
            augment(np.asarray(line), 0, 7, "array[7]")
        assert decoded(blob(line, form), 3, resize=4).shape == (4, 120000, 3)


class TestWindow:
    """A window is decoded no larger, and no further down, than it needs."""

    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
    @pytest.mark.parametrize("extra", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
    def test_rows_that_are_not_decoded_change_no_others(self, subsampling, extra):
        picture = opened(photograph(subsampling=subsampling, **extra), channels=3)
        whole = picture.pixels(90, 120)
        for bottom in (1, 8, 40, 70, 90):
            cut = without_rows_below(picture, bottom)
            fewer = 0 if "progressive" in extra else 90 - min(-(-bottom // 16) * 16, 90)
            assert bottom <= cut.height <= 90 - fewer
            assert np.array_equal(cut.pixels(cut.height, 120)[:bottom], whole[:bottom])
        assert np.array_equal(window(picture, 10, 20, 40, 50, 32), stretched(whole[10:50, 20:70], 32))

    @pytest.mark.parametrize("broken", [b"", photograph()[:1200], photograph()[:-40]], ids=["empty", "half", "no end"])
    @pytest.mark.parametrize("area", [(), (0.1, 0.3)])
    def test_damage_is_seen_wherever_the_window_is(self, broken, area):
        for index in range(4):
            with pytest.raises(CorruptExample, match=r"odd\.jpg \(example \d\) is corrupt"):
                Augment(Data(crop=12, crop_area=area), True, 0).encoded(broken, 0, index, "odd.jpg")

    @pytest.mark.parametrize("train", [True, False])
    def test_encoded_and_decoded_images_give_the_same_crops(self, train):
        whole = photograph()
        for data in (Data(crop=40, mirror=True), Data(resize=60, crop=40), Data(crop=60, crop_area=(0.5, 1.0))):
            augment = Augment(data, train, 0)
            pixels = decoded(whole, 3, data.resize if not (train and data.crop_area) else 0)
            for index in range(3):
                expected = augment(pixels, 0, index, "x")
                for content in (whole, whole + b"xx"):  # bytes after the end are no damage
                    assert np.array_equal(augment.encoded(content, 0, index, "x"), expected)


def test_an_eps_file_starts_no_ghostscript(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(UsageError, match="EPS"):
        decoded(eps, 3, 0)
    assert not (tmp_path / "ran").exists()


def test_a_jpeg_of_thousands_of_scans_is_refused():
    """Each takes a few bytes and goes over all pixels; a scan of a sequential file needs bits for all of them."""
    for progressive in (False, True):
        whole = photograph(progressive=progressive)
        many = whole[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00" * 1000 + b"\xff\xd9"
        assert decoded(whole, 3, 0).ndim == 3
        if progressive:
            with pytest.raises(UsageError, match=r"got a JPEG of 10\d\d scans; expected at most 500"):
                opened(many, 3)
        else:
            assert opened(many, 3).height == 90
