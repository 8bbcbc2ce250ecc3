"""`params.yaml` as text: an entry is put into one of its mappings, and every other byte, comments and layout too, stays as it is."""

import yaml

from dml_core.errors import ConfigError


def with_entry(text: str, keys: tuple[str, ...], entry: list[str]) -> str:
    """The file's text with an entry after the last one of a mapping.

    Args:
        text: of a file that was read as YAML before.
        keys: where the mapping is, from the top; it is there and not empty.
        entry: the entry's lines as they stand at the left margin.

    Raises:
        ConfigError: the mapping is written in braces, where no line can be put in.
    """
    mapping = _mapping(yaml.compose(text, Loader=yaml.SafeLoader), keys)
    if mapping.flow_style or not mapping.value:
        raise ConfigError(f"'{'.'.join(keys)}' is written in braces; write each entry on lines of its own, so that one can be added")
    margin = mapping.value[0][0].start_mark.column
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    end = _after_comments(lines, _last_line(mapping) + 1, margin)
    if not lines[end - 1].endswith(newline):
        lines[end - 1] += newline
    return "".join([*lines[:end], *(f"{' ' * margin}{line}{newline}" for line in entry), *lines[end:]])


def _mapping(node: yaml.Node | None, keys: tuple[str, ...]) -> yaml.MappingNode:
    for key in keys:
        assert isinstance(node, yaml.MappingNode)
        node = next(value for name, value in node.value if name.value == key)
    assert isinstance(node, yaml.MappingNode)
    return node


def _last_line(node: yaml.Node) -> int:
    """The line that a value ends on. A block's own end is where the next thing begins, so its last part is asked."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.line - (node.end_mark.column == 0)


def _after_comments(lines: list[str], line: int, margin: int) -> int:
    """Behind the comments below the last entry that belong to it: those that are at least as far in."""
    while line < len(lines) and lines[line].lstrip().startswith("#") and len(lines[line]) - len(lines[line].lstrip()) >= margin:
        line += 1
    return line
