"""Lists of images: values of a row without a box."""

from pathlib import Path

from tasks.models.sources import find_images


def test_a_row_without_a_box_is_the_whole_image_and_the_others_keep_theirs(tmp_path: Path) -> None:
    rows = ["path,left,top,right,bottom", "a.png,1,2,3,4", "b.png,,,,", "c.png,5,6,7,"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    assert find_images(str(tmp_path / "list.csv")).boxes == [(1.0, 2.0, 3.0, 4.0), None, None]
