"""Drawn creatures: the pictures of the embedded dataset.

A species is a body of five ellipses (tail, body, wing, head, beak) with its own hues, patterns and proportions. It appears in one of
several modes (poses, shared by all species, each with its plumage rule) and with nuisances: position, size, rotation, mirroring, light,
tint, background and clutter. Species differ in the arrangement of hues, patterns and proportions, so what is learned from some species
transfers to others.

Lengths are shares of the picture's side, angles radians, colours RGB in [0, 1]. H = W = side of the canvas in pixels.
"""

import colorsys
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Colour = tuple[float, float, float]
PATTERNS = ("plain", "bars", "streaks", "spots", "checks")
_OVERSAMPLING = 2


@dataclass(frozen=True)
class Plumage:
    """Two colours (hue, saturation, value) and their pattern on a part."""

    base: Colour
    second: Colour
    pattern: str
    frequency: float


@dataclass(frozen=True)
class Species:
    """Traits shared by all pictures of a class."""

    body: Plumage
    wing: Plumage
    head: Plumage
    tail: Plumage
    beak: Plumage
    body_width: float
    head_size: float
    tail_length: float
    wing_length: float


@dataclass(frozen=True)
class Pose:
    """Changes made by a mode, the same for every species."""

    wing_angle: float
    wing_lift: float
    tail_angle: float
    head_angle: float
    body_stretch: float
    hue_shift: float
    fade: float


@dataclass(frozen=True)
class Part:
    """One ellipse in the creature's coordinate frame (unit lengths, nose to the right)."""

    x: float
    y: float
    length: float
    width: float
    angle: float
    plumage: Plumage


def draw_species(rng: np.random.Generator) -> Species:
    """Draw a new species; every trait is drawn independently."""
    return Species(
        body=_draw_plumage(rng),
        wing=_draw_plumage(rng),
        head=_draw_plumage(rng),
        tail=_draw_plumage(rng),
        beak=Plumage((rng.uniform(0.0, 0.15), 0.9, 0.9), (0.1, 0.9, 0.5), "plain", 1.0),
        body_width=rng.uniform(0.45, 0.8),
        head_size=rng.uniform(0.3, 0.5),
        tail_length=rng.uniform(0.4, 0.9),
        wing_length=rng.uniform(0.5, 0.9),
    )


def draw_pose(rng: np.random.Generator) -> Pose:
    """Draw a new mode."""
    return Pose(
        wing_angle=rng.uniform(-1.2, 1.2),
        wing_lift=rng.uniform(-0.25, 0.35),
        tail_angle=rng.uniform(-0.7, 0.7),
        head_angle=rng.uniform(-0.6, 0.9),
        body_stretch=rng.uniform(0.75, 1.25),
        hue_shift=rng.uniform(-0.06, 0.06),
        fade=rng.uniform(0.55, 1.0),
    )


def draw_picture(species: Species, pose: Pose, size: int, difficulty: float, rng: np.random.Generator) -> tuple[Array, tuple[int, ...]]:
    """Return a picture, uint8 (size, size, 3), and the creature's tight box (left, top, right, bottom), right and bottom exclusive.

    Args:
        difficulty: 0 to 1, strength of every nuisance.
    """
    side = size * _OVERSAMPLING
    canvas_HW3 = _background(side, difficulty, rng)
    reach = rng.uniform(0.30 - 0.08 * difficulty, 0.32)
    angle = difficulty * rng.uniform(-0.7, 0.7)
    centre = 0.5 + difficulty * rng.uniform(-0.16, 0.16, size=2)
    mirror = -1.0 if rng.random() < 0.5 else 1.0
    x_HW, y_HW = _grid(side)
    frame = _rotated((x_HW - centre[0]) * mirror / reach, (y_HW - centre[1]) / reach, angle)
    covered_HW = np.zeros((side, side), dtype=bool)
    for part in _parts(species, pose):
        covered_HW |= _paint(canvas_HW3, frame, part, pose)
    canvas_HW3 = _light(canvas_HW3, difficulty, rng)
    pixels = canvas_HW3.reshape(size, _OVERSAMPLING, size, _OVERSAMPLING, 3).mean(axis=(1, 3))
    pixels += rng.normal(0.0, 0.04 * difficulty, pixels.shape)
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8), _tight_box(covered_HW)


def _draw_plumage(rng: np.random.Generator) -> Plumage:
    base = (rng.random(), rng.uniform(0.4, 1.0), rng.uniform(0.35, 1.0))
    second = (rng.random(), rng.uniform(0.4, 1.0), rng.uniform(0.1, 1.0))
    return Plumage(base, second, str(rng.choice(PATTERNS)), rng.uniform(2.0, 4.5))


def _parts(species: Species, pose: Pose) -> list[Part]:
    """Return the parts from back to front."""
    length = 0.95 * pose.body_stretch
    tail_x, tail_y = -length - 0.35 * np.cos(pose.tail_angle), 0.35 * np.sin(pose.tail_angle)
    head_x, head_y = length * 0.95, -0.35 - 0.4 * np.sin(pose.head_angle)
    head = species.head_size
    beak_x, beak_y = head_x + (head + 0.12) * np.cos(pose.head_angle), head_y - (head + 0.12) * np.sin(pose.head_angle)
    return [
        Part(tail_x, tail_y, species.tail_length, 0.2, pose.tail_angle, species.tail),
        Part(0.0, 0.0, length, species.body_width, 0.0, species.body),
        Part(beak_x, beak_y, 0.25, 0.1, pose.head_angle, species.beak),
        Part(head_x, head_y, head, head * 0.9, pose.head_angle, species.head),
        Part(-0.1, -pose.wing_lift, species.wing_length, 0.32, pose.wing_angle, species.wing),
    ]


def _paint(canvas_HW3: Array, frame: tuple[Array, Array], part: Part, pose: Pose) -> Array:
    """Paint one part in place and return its mask (H, W)."""
    along, across = _rotated(frame[0] - part.x, frame[1] - part.y, part.angle)
    along, across = along / part.length, across / part.width
    mask_HW: Array = along**2 + across**2 < 1.0
    second = _pattern(part.plumage, along[mask_HW], across[mask_HW])
    canvas_HW3[mask_HW] = np.where(second[:, None], _rgb(part.plumage.second, pose), _rgb(part.plumage.base, pose))
    return mask_HW


def _pattern(plumage: Plumage, along: Array, across: Array) -> Array:
    """Return a mask of the pixels that show the second colour."""
    turns = 2 * plumage.frequency
    bars, streaks = np.sin(along * turns) > 0, np.sin(across * turns) > 0
    if plumage.pattern == "bars":
        return bars
    if plumage.pattern == "streaks":
        return streaks
    if plumage.pattern == "checks":
        return bars ^ streaks
    if plumage.pattern == "spots":
        return np.sin(along * turns) * np.sin(across * turns) > 0.4
    return np.zeros(along.shape, dtype=bool)


def _rgb(colour: Colour, pose: Pose) -> Array:
    """Return the colour in the mode: hue shifted, saturation faded."""
    return np.array(colorsys.hsv_to_rgb((colour[0] + pose.hue_shift) % 1.0, colour[1] * pose.fade, colour[2]), dtype=np.float32)


def _background(side: int, difficulty: float, rng: np.random.Generator) -> Array:
    """Return a two-coloured gradient with clutter: ellipses in random colours and patterns."""
    x_HW, y_HW = _grid(side)
    corners = rng.uniform(0.2, 0.9, size=(2, 3)).astype(np.float32)
    slope_HW = np.cos(turn := rng.uniform(0, 2 * np.pi)) * (x_HW - 0.5) + np.sin(turn) * (y_HW - 0.5) + 0.5
    canvas_HW3: Array = corners[0] + slope_HW[..., None] * (corners[1] - corners[0])
    still = Pose(0, 0, 0, 0, 1, 0, rng.uniform(0.3, 1.0))
    for _ in range(rng.integers(0, 1 + round(8 * difficulty))):
        x, y = rng.uniform(0, 1, size=2)
        clutter = Part(x, y, rng.uniform(0.04, 0.2), rng.uniform(0.03, 0.12), rng.uniform(0, np.pi), _draw_plumage(rng))
        _paint(canvas_HW3, (x_HW, y_HW), clutter, still)
    return canvas_HW3


def _light(canvas_HW3: Array, difficulty: float, rng: np.random.Generator) -> Array:
    """Apply random brightness, contrast and tint."""
    tint = 1.0 + difficulty * rng.uniform(-0.2, 0.2, size=3)
    brightness = difficulty * rng.uniform(-0.15, 0.15)
    contrast = 1.0 + difficulty * rng.uniform(-0.4, 0.2)
    lit: Array = ((canvas_HW3 - 0.5) * contrast + 0.5 + brightness) * tint.astype(np.float32)
    return lit


def _grid(side: int) -> tuple[Array, Array]:
    """Return x and y of the pixel centres, each (H, W)."""
    ticks: Array = (np.arange(side, dtype=np.float32) + 0.5) / side
    return np.broadcast_to(ticks, (side, side)), np.broadcast_to(ticks[:, None], (side, side))


def _rotated(x: Array, y: Array, angle: float) -> tuple[Array, Array]:
    """Return coordinates in a frame rotated by `angle` against the y axis (which points down)."""
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return x * cos - y * sin, x * sin + y * cos


def _tight_box(covered_HW: Array) -> tuple[int, ...]:
    """Return the box of the covered pixels, in pixels of the final picture, rounded outwards."""
    columns, rows = np.flatnonzero(covered_HW.any(axis=0)), np.flatnonzero(covered_HW.any(axis=1))
    left, top = int(columns[0]) // _OVERSAMPLING, int(rows[0]) // _OVERSAMPLING
    return left, top, int(columns[-1]) // _OVERSAMPLING + 1, int(rows[-1]) // _OVERSAMPLING + 1
