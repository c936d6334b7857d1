"""A folder of images, one sub-folder for each class, read by Pillow."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nhgd._path import check_file
from nhgd._progress import Tick
from nhgd.data.csv_file import and_more
from nhgd.errors import InputError, Problems

Array = np.ndarray[Any, Any]
MOST_PIXELS = 2**25  # of one image; an image that unpacks to more is refused before it is unpacked
TOO_LARGE = f"more than {MOST_PIXELS:,} pixels"
MOST_BYTES = 2**32  # of all images
LONGEST_SIDE = 64  # of an image, where no size is given
UNLOOKED = {"thumbs.db", "desktop.ini"}  # files that systems leave in folders of images, besides those with a dot


def read_image_folder(folder: Path, size: int | None, tick: Tick) -> tuple[Array, list[str]]:
    """Images (N, H, W, C) as bytes and their classes. All files that cannot be read are refused together.

    All get one size: (size, size), or the most frequent one, made smaller if a side is longer than 64 pixels. An image
    of another size is scaled until it covers that, and what overhangs on both sides is cut off. They are grey (C = 1)
    if all files are, else in colour (C = 3).

    Args:
        folder: with a folder for each class, named after it, and images in these.
        size: the side of the square in pixels; None: as above.
        tick: the progress bar.
    """
    images = _pillow()
    problems = Problems()
    files = _files(folder, problems)
    wrong: dict[str, list[str]] = {}
    kinds: list[tuple[tuple[int, int], bool]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", images.DecompressionBombWarning)
        for i, (path, _) in enumerate(files):
            if reason := _examined(images, path, kinds):
                wrong.setdefault(reason, []).append(str(path.relative_to(folder)))
            tick(0.3 * (i + 1) / len(files), f"examined {i + 1} of {len(files)}")
        if wrong or problems.sentences:  # nothing will be learnt, but all that is damaged is named
            refused = {name for names in wrong.values() for name in names}
            for path, _ in files:
                if (name := str(path.relative_to(folder))) not in refused and (reason := _damage(images, path)):
                    wrong.setdefault(reason, []).append(name)
        _refuse(folder, wrong, problems)
        width, height = (size, size) if size is not None else _usual_size([kind for kind, _ in kinds])
        channels = 1 if all(grey for _, grey in kinds) else 3
        needed = len(files) * width * height * channels
        if needed > MOST_BYTES:
            raise InputError(
                f"{folder}: {len(files)} images of {width} x {height} pixels take {needed / 2**30:.1f} GiB, more than"
                f" {MOST_BYTES / 2**30:.0f}. Make them smaller with --size."
            )
        found = np.empty((len(files), height, width, channels), dtype=np.uint8)
        for i, (path, _) in enumerate(files):
            try:
                found[i] = _pixels(images, path, (width, height), channels)
            except _broken(images) as error:
                wrong.setdefault(f"damaged ({_said(error)})", []).append(str(path.relative_to(folder)))
            tick(0.3 + 0.7 * (i + 1) / len(files), f"read {i + 1} of {len(files)}")
    _refuse(folder, wrong, problems)
    return found, [label for _, label in files]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("A folder of images needs Pillow: pip install 'nhgd[cli]'. An .npz file does not.") from None
    return Image


def _files(folder: Path, problems: Problems) -> list[tuple[Path, str]]:
    """Every file with its class, sorted; what should not be there is noted."""
    classes, loose = _listed(folder, problems)
    if loose:
        some = and_more([path.name for path in loose])
        problems.add(
            f"{folder}: {some} {'lies' if len(loose) == 1 else 'lie'} outside of the folders of the classes. Move or remove it."
        )
    found = []
    for place in classes:
        deeper, files = _listed(place, problems)
        if deeper:
            names = and_more([path.name for path in deeper])
            problems.add(
                f"{place} is the folder of a class, but has folders inside: {names}. Move their images out of them."
            )
        if not files and not deeper:
            problems.add(f"{place} is the folder of a class, but has no images. Add some, or remove it.")
        found += [(path, place.name) for path in files]
    if not classes:
        problems.add(f"{folder} has no folders. Put the images of each class into a folder of its own, named after it.")
    return found


def _listed(folder: Path, problems: Problems) -> tuple[list[Path], list[Path]]:
    """The folders and the other things in a folder, without hidden ones."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        problems.add(f"{folder} cannot be read: {error.strerror or error}.")
        return [], []
    paths = [folder / name for name in names if not name.startswith(".") and name.lower() not in UNLOOKED]
    folders = [path for path in paths if path.is_dir()]  # a link in a circle is none
    return folders, [path for path in paths if path not in set(folders)]


def _refuse(folder: Path, wrong: dict[str, list[str]], problems: Problems) -> None:
    """Refuse the folder if there are problems, or files for whatever reason."""
    for reason, names in wrong.items():
        if len(names) == 1:
            problems.add(f"{folder}: {names[0]} cannot be used: {reason}. Remove it, or replace it.")
        else:
            some = f"{len(names)} files ({and_more(names)})"
            problems.add(f"{folder}: {some} cannot be used: {reason}. Remove them, or replace them.")
    problems.refuse()


def _examined(images: Any, path: Path, kinds: list[tuple[tuple[int, int], bool]]) -> str:
    """Why a file cannot be used, by its head alone; else nothing, and its size and whether it is grey are noted."""
    try:
        check_file(path)
    except InputError as error:
        return str(error).split(": ", 1)[-1].split(". ")[0].rstrip(".")
    try:
        with images.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                return TOO_LARGE
            kinds.append((image.size, image.mode in ("1", "L", "I", "I;16", "F", "LA")))
    except (images.DecompressionBombError, images.DecompressionBombWarning):
        return TOO_LARGE
    except images.UnidentifiedImageError:
        return "no image of a format that Pillow knows"
    except (OSError, ValueError, SyntaxError) as error:
        return f"damaged ({_said(error)})"
    return ""


def _damage(images: Any, path: Path) -> str:
    """Why a file cannot be unpacked."""
    try:
        with images.open(path) as image:
            image.load()
    except _broken(images) as error:
        return f"damaged ({_said(error)})"
    return ""


def _broken(images: Any) -> tuple[type[BaseException], ...]:
    """What Pillow raises on files that are not whole."""
    return OSError, ValueError, SyntaxError, EOFError, Warning, images.DecompressionBombError


def _usual_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The most frequent size, the smaller one of equals, scaled down to 64 pixels."""
    counts = Counter(sizes)
    width, height = min(counts, key=lambda size: (-counts[size], size))
    factor = min(1.0, LONGEST_SIDE / max(width, height))
    return max(1, round(factor * width)), max(1, round(factor * height))


def _pixels(images: Any, path: Path, size: tuple[int, int], channels: int) -> Array:
    """The pixels of one image, (H, W, C)."""
    from PIL import ImageOps

    with images.open(path) as image:
        if image.mode in ("I", "I;16", "F"):  # more than eight bits, which Pillow would cut off rather than scale
            deep = np.asarray(image, dtype=np.float64)
            low, high = float(deep.min()), float(deep.max())
            image = images.fromarray((255 * (deep - low) / max(high - low, 1e-12)).astype(np.uint8))
        plain = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    if plain.size != size:
        plain = ImageOps.fit(plain, size, method=images.Resampling.BOX)
    return np.asarray(plain, dtype=np.uint8).reshape(size[1], size[0], channels)


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
