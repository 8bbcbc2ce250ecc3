"""Files and folders written by several processes: a reader always gets a complete version of one of them."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dml_core.files import replace_folder
from tasks.files import write_whole

TEXTS = [f"{letter}" * 200_000 for letter in "abcd"]


def _write_often(path: Path, text: str) -> None:
    for _ in range(50):
        write_whole(path, text)


def test_writers_of_one_file_never_mix_and_leave_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "pages" / "page.html"
    write_whole(path, TEXTS[0])
    found: set[str] = set()
    with ProcessPoolExecutor(len(TEXTS)) as pool:
        writers = [pool.submit(_write_often, path, text) for text in TEXTS]
        while not all(writer.done() for writer in writers):
            found.add(path.read_text())
    assert all(writer.result() is None for writer in writers)
    assert found <= set(TEXTS)
    assert list(path.parent.iterdir()) == [path]


def _replace_often(folder: Path, text: str) -> None:
    for number in range(50):
        new = folder.with_name(f"{text}-{number}")
        new.mkdir()
        for name in ("one", "two"):
            (new / name).write_text(text)
        replace_folder(new, folder)


def test_replacers_of_one_folder_never_fail_or_mix_and_leave_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with ProcessPoolExecutor(3) as pool:
        replacers = [pool.submit(_replace_often, folder, text) for text in "abc"]
    assert all(replacer.result() is None for replacer in replacers)
    one, two = ((folder / name).read_text() for name in ("one", "two"))
    assert one == two
    assert list(tmp_path.iterdir()) == [folder]
